"""Global batch = micro batch × accumulation × world size.

`global_batch_size` is the setting; how it is spread over devices and time follows from the machine, so one experiment
means the same on 1, 2, 4 or 16 devices. Imports no PyTorch: the launcher checks the batch before it submits.
"""

import math
from dataclasses import dataclass

from src.engine.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is spread: `micro_batch_size` samples per device and forward pass."""

    micro_batch_size: int
    accumulation: int
    world_size: int

    @property
    def global_batch_size(self) -> int:
        """Return the samples per optimizer step, over all devices."""
        return self.share * self.world_size

    @property
    def share(self) -> int:
        """Return the samples per optimizer step on one device."""
        return self.micro_batch_size * self.accumulation

    def __str__(self) -> str:
        return (
            f"{self.global_batch_size} = {self.micro_batch_size} micro × {self.accumulation} accumulation "
            f"× {self.world_size} device{'s' if self.world_size > 1 else ''}"
        )


def plan_batches(
    world_size: int,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
) -> BatchPlan | None:
    """Derive the settings that are None; return None if neither batch size is given."""
    given = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "trainer.accumulate_grad_batches": accumulation,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if global_batch_size is None:
        return None if micro_batch_size is None else BatchPlan(micro_batch_size, accumulation or 1, world_size)
    if micro_batch_size is None:
        micro_batch_size = _share(global_batch_size, world_size, accumulation or 1)
    derived = _accumulation(global_batch_size, micro_batch_size, world_size)
    if accumulation is not None and accumulation != derived:
        meant = micro_batch_size * accumulation * world_size
        raise UserError(
            f"global_batch_size {global_batch_size} contradicts micro_batch_size {micro_batch_size} × "
            f"trainer.accumulate_grad_batches {accumulation} × {world_size} devices = {meant}: "
            f"set --global_batch_size {meant} if you mean that, or leave one of them out"
        )
    return BatchPlan(micro_batch_size, derived, world_size)


def _share(global_batch_size: int, world_size: int, accumulation: int) -> int:
    parts = world_size * accumulation
    if global_batch_size % parts:
        below, above = global_batch_size // parts * parts, math.ceil(global_batch_size / parts) * parts
        fits = " or ".join(str(size) for size in (below, above) if size)
        times = f" × {accumulation} accumulation" if accumulation > 1 else ""
        raise UserError(
            f"global_batch_size {global_batch_size} cannot be shared by {world_size} devices{times}: "
            f"use --global_batch_size {fits}"
        )
    return global_batch_size // parts


def _accumulation(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    per_pass = micro_batch_size * world_size
    if global_batch_size % per_pass == 0:
        return global_batch_size // per_pass
    below, above = global_batch_size // per_pass * per_pass, math.ceil(global_batch_size / per_pass) * per_pass
    fits = " or ".join(str(size) for size in (below, above) if size)
    message = (
        f"global_batch_size {global_batch_size} is no multiple of micro_batch_size {micro_batch_size} × "
        f"{world_size} devices = {per_pass}: use --global_batch_size {fits}"
    )
    if global_batch_size % world_size == 0:
        share = global_batch_size // world_size
        micros = ", ".join(map(str, divisors(share)))
        message += f", or --micro_batch_size from {micros}"
    raise UserError(message)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]
