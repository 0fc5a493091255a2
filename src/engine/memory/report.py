"""Explain an out-of-memory error: who held the memory, and the settings that help this configuration."""

import os
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from src.engine.errors import UserError
from src.engine.memory.usage import Usage, gib
from src.engine.resolve.resolution import Resolution
from src.engine.run.start_block import with_options
from src.engine.sharding.wrapping import find_blocks

AS_CLASS = "--trainer.strategy src.strategies.FSDP"  # a strategy given by name takes no settings
EACH = "--trainer.strategy.sync_every_micro_batch true"
WORTH_A_SETTING = 0.05  # share of the device that fragmentation must take
FIRST_SECONDS = 1  # for the rank that explains the error to do so, before a launcher ends it with the others


def explain(
    error: BaseException,
    usage: Usage | None,
    trainer: Trainer,
    model: LightningModule,
    resolved: Resolution,
    settings: Namespace,
    resume_command: str,
) -> None:
    """Print an out-of-memory error, who held the memory and what helps; once, where several ranks run out of it."""
    rank, world_size = trainer.global_rank, resolved.shape.world_size
    if not _is_first(rank):
        print(f"rank {rank} is out of memory too", file=sys.stderr, flush=True)
        time.sleep(FIRST_SECONDS)
        return
    title = f"out of memory on rank {rank} of {world_size}" if world_size > 1 else "out of memory"
    lines = [f"{title}: {usage.device} has {gib(usage.total)}", *usage.lines()] if usage else [title]
    kept = f"; each keeps the global batch of {resolved.plan.global_batch_size}" if resolved.plan else ""
    lines += [f"Try one of these, cheapest in speed first{kept}. Add it to", f"  {with_options(resume_command)}"]
    for paste, effect in advice(trainer, model, resolved, settings, usage):
        lines += [f"  {paste}", f"      {effect}"] if paste else [f"  {effect}"]
    print("".join(traceback.format_exception(error)) + "\n".join(lines), file=sys.stderr, flush=True)


def _is_first(rank: int) -> bool:
    """Return whether this rank explains the error for all; each does that cannot ask, since rank 0 has gone."""
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):
            store = torch.distributed.distributed_c10d._get_default_store()
            return store.compare_set("out_of_memory", "", str(rank)) == str(rank).encode()
    return True


def advice(
    trainer: Trainer, model: LightningModule, resolved: Resolution, settings: Namespace, usage: Usage | None
) -> list[tuple[str, str]]:
    """List what to paste, which may be nothing, and what it does; not what is on already or cannot work here."""
    on_gpu, several = resolved.shape.accelerator == "gpu", resolved.shape.world_size > 1
    if on_gpu and usage is not None and usage.on_host:
        return [("", "fewer loader processes (--data.num_workers), or more memory of the host (Slurm: --mem)")]
    training = trainer.state.fn in (None, TrainerFn.FITTING)
    fsdp: Any = trainer.strategy if hasattr(trainer.strategy, "ranks_per_shard") else None  # FSDP's own setting
    divisible = several and resolved.can_shard and not (fsdp and fsdp.cpu_offload)
    divided = fsdp is not None and fsdp.reshard_after_forward and fsdp.ranks_per_shard is None
    by_class = "--trainer.strategy.reshard_after_forward true --trainer.strategy.ranks_per_shard null"
    given_by_class = fsdp is not None and not isinstance(settings.trainer.strategy, str)
    full_shard = by_class if given_by_class else "--trainer.strategy fsdp_full_shard"
    as_class = "" if given_by_class else f"{AS_CLASS} "
    keeps_gradients = fsdp is not None and training and not fsdp.sync_every_micro_batch
    blocks, compiled, recomputes = _has_blocks(model), settings.compile, settings.activation_checkpointing
    batch = " ".join(resolved.smaller_batch if model.automatic_optimization or not training else [])
    fits = usage is None or usage.state <= usage.total  # else nothing helps that leaves the state whole
    rows: list[tuple[Any, str, str]] = [
        (fits and blocks and not compiled, "--compile true", "keeps less for the backward pass, and is faster"),
        (
            usage and _is_fragmented(usage),
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
            "in front of the command: makes most of the fragmentation usable",
        ),
        (
            on_gpu and resolved.precision.value in ("32-true", "64-true"),
            "--trainer.precision auto",
            "activations of 16 bits: faster, rounds differently",
        ),
        (fits and batch, batch, "fewer samples at once, so fewer activations; in training accumulation follows"),
        (fits and resolved.plan is None, "", "the data brings its own batches: make them smaller, and accumulate more"),
        (
            keeps_gradients and (batch or trainer.accumulate_grad_batches > 1),
            as_class + EACH,
            "fsdp keeps whole gradients while a step accumulates; this divides them after each micro batch",
        ),
        (
            divisible and not divided,
            full_shard,
            f"divides parameters, gradients and optimizer state by {resolved.shape.world_size}; costs communication",
        ),
        (
            fits and training and blocks and not recomputes,
            "--activation_checkpointing true",
            "computes the inside of each block again in the backward pass: about a fifth slower",
        ),
        (
            divisible and on_gpu and training,
            f"{as_class}--trainer.strategy.cpu_offload true {EACH}",
            "parameters, gradients and optimizer state in the host's memory: many times slower",
        ),
        (True, "", "more or larger cards: under fsdp each holds a part" if on_gpu else "more memory (Slurm: --mem)"),
    ]
    return [(paste, effect) for applies, paste, effect in rows if applies]


def _has_blocks(model: LightningModule) -> bool:
    with suppress(UserError):  # nothing has asked for them so far, and memory is what this is about
        return bool(find_blocks(model))
    return False


def _is_fragmented(usage: Usage) -> bool:
    much = (usage.fragmented or 0) > WORTH_A_SETTING * usage.total
    return much and "expandable_segments" not in os.environ.get("PYTORCH_ALLOC_CONF", "")
