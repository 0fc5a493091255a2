"""What is said when a command runs out of memory: the facts and the settings for the configuration it had."""

import os
import sys
import traceback
from typing import Any

from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from src import exit_codes
from src.callbacks.out_of_memory import OutOfMemory, announced, say_it_is_said, wait_until_said
from src.errors import UserError
from src.hardware import local_cards
from src.memory import AS_CLASS, Setup, Sharding, is_out_of_memory, report
from src.precision import resolve_precision
from src.resolution import Resolution
from src.start import with_options
from src.strategies import DDP, FSDP
from src.strategies.wrapping import find_blocks


def explain(
    error: BaseException,
    memory: OutOfMemory,
    trainer: Trainer,
    model: LightningModule,
    here: Resolution,
    settings: Namespace,
    again: str,
) -> int | None:
    """Say all there is to say on the first rank that ran out of memory, and one line on those that it takes along.

    Returns the exit code; None where memory was not the reason.
    """
    rank, first = trainer.global_rank, announced()
    if is_out_of_memory(error) and memory.first:
        traceback.print_exception(error)
        lines = report(setup_of(trainer, model, here, settings), memory.usage, rank, with_options(again))
        print("\n".join(lines), file=sys.stderr, flush=True)
        say_it_is_said()
        return exit_codes.OUT_OF_MEMORY
    if first is None:
        return None
    what = "out of memory too" if is_out_of_memory(error) else "ends with it"
    print(f"rank {first} is out of memory; rank {rank} {what}", file=sys.stderr, flush=True)
    wait_until_said()
    return exit_codes.OUT_OF_MEMORY


def setup_of(trainer: Trainer, model: LightningModule, here: Resolution, settings: Namespace) -> Setup:
    """What of all that decides about memory."""
    plan, sharding = here.plan, sharding_of(trainer.strategy)
    data: Any = (settings.data or {}).get("init_args") or {}
    fsdp = trainer.strategy if isinstance(trainer.strategy, FSDP) else None
    node = fsdp and fsdp.ranks_per_shard
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "").split(",")
    training = trainer.state.fn in (None, TrainerFn.FITTING)
    return Setup(
        on_gpu=here.shape.accelerator == "gpu",
        training=training,
        world_size=here.shape.world_size,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        precision=here.precision.value,
        auto_precision=resolve_precision("auto", local_cards(here.shape)).value,
        micro_batch_size=plan.micro_batch_size if plan else None,
        smaller_batch=tuple(here.smaller_batch) if model.automatic_optimization or not training else (),
        global_batch_size=plan.global_batch_size if plan else None,
        has_blocks=_has_blocks(model),
        compiled=settings.compile,
        recomputes=settings.activation_checkpointing,
        sharding=sharding,
        sharded_over=here.shape.devices if node == "node" else node or here.shape.world_size,
        in_front=in_front(fsdp, settings.trainer.strategy) if fsdp else None,
        reduced=fsdp.reduce_dtype.itemsize if fsdp else 4,
        accumulates=training and trainer.accumulate_grad_batches > 1,
        reduces_each=fsdp is not None and fsdp.sync_every_micro_batch,
        allocator=tuple(part for part in allocator if part and not part.startswith("pinned_")),  # those are set anew
        takes_workers="num_workers" in data,
    )


def _has_blocks(model: LightningModule) -> bool:
    try:
        return bool(find_blocks(model))
    except UserError:  # nothing has asked for them so far, and memory is what this is about
        return False


def sharding_of(strategy: object) -> Sharding:
    """What each rank holds a part of."""
    if isinstance(strategy, FSDP):
        return "offload" if strategy.cpu_offload else "full" if strategy.reshard_after_forward else "grad_op"
    return "none" if isinstance(strategy, DDP | SingleDeviceStrategy) else "other"


def in_front(strategy: FSDP, given: object) -> str:
    """What has to stand in front of a further setting of this strategy: its class, where it was given by name."""
    if not isinstance(given, str):
        return ""
    # One that somebody has registered under a name of theirs has a class of theirs, too.
    theirs = f"--trainer.strategy {type(strategy).__module__}.{type(strategy).__qualname__}"
    named = [AS_CLASS if type(strategy) is FSDP else theirs]
    named += [] if strategy.reshard_after_forward else ["--trainer.strategy.reshard_after_forward false"]
    named += [f"--trainer.strategy.ranks_per_shard {strategy.ranks_per_shard}"] if strategy.ranks_per_shard else []
    return " ".join(named)
