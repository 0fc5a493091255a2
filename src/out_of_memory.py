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
from src.hardware import local_cards
from src.memory import Setup, Sharding, is_out_of_memory, report
from src.precision import resolve_precision
from src.resolution import Resolution
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
        lines = report(setup_of(trainer, model, here, settings), memory.usage, rank, again)
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
    node = isinstance(trainer.strategy, FSDP) and trainer.strategy.ranks_per_shard
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").split(",")
    return Setup(
        on_gpu=here.shape.accelerator == "gpu",
        training=trainer.state.fn in (None, TrainerFn.FITTING),
        world_size=here.shape.world_size,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        precision=here.precision.value,
        auto_precision=resolve_precision("auto", local_cards(here.shape)).value,
        micro_batch_size=plan.micro_batch_size if plan else None,
        smaller_batch=tuple(here.smaller_batch),
        global_batch_size=plan.global_batch_size if plan else None,
        has_blocks=bool(find_blocks(model)),
        compiled=settings.compile,
        recomputes=settings.activation_checkpointing,
        sharding=sharding,
        sharded_over=here.shape.devices if node == "node" else node or here.shape.world_size,
        allocator=tuple(part for part in allocator if part and not part.startswith("pinned_")),  # those are set anew
        takes_workers="num_workers" in data,
    )


def sharding_of(strategy: object) -> Sharding:
    """What each rank holds a part of."""
    if isinstance(strategy, FSDP):
        return "offload" if strategy.cpu_offload else "full" if strategy.reshard_after_forward else "grad_op"
    return "none" if isinstance(strategy, DDP | SingleDeviceStrategy) else "other"
