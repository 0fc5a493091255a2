"""Agree across ranks every few seconds, at a step that all know in advance."""

import time

import torch
from lightning import Trainer

from src.engine import signals

MOST_AHEAD = 100  # counts: how far a rank that becomes slow can put off the next question


def largest(values: list[int], trainer: Trainer) -> list[int]:
    """Return the largest value of each position over all ranks. Collective.

    Under this project's strategies it goes from one host's memory to the other's, and waits for no GPU.
    """
    if trainer.world_size == 1:
        return values
    on_host = "cpu:" in torch.distributed.get_backend_config()
    held = torch.tensor(values, device="cpu" if on_host else trainer.strategy.root_device)
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX)
    return held.tolist()


class Poll:
    """Counts (of steps, of batches) at which the ranks ask, by rank 0's clock: each answer says when the next is."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begin(0)

    def begin(self, count: int, later: int = 0) -> None:
        """Ask at this count, or so many later."""
        self._clock, self._from, self.next = time.monotonic(), count, count + later

    def due(self, trainer: Trainer, count: int) -> bool:
        """Return whether the ranks ask at this count; a single process also asks when a signal has come."""
        return count >= self.next or (trainer.world_size == 1 and signals.pending() > 0)

    def ask(self, trainer: Trainer, count: int, values: list[int]) -> list[int]:
        """Return the largest values over all ranks. Collective: every rank is at this `count`."""
        now, done = time.monotonic(), count - self._from
        each = max((now - self._clock) / done, 1e-6) if done else self.seconds  # nothing is known yet: soon again
        ahead = max(1, min(int(self.seconds / each), MOST_AHEAD)) if trainer.is_global_zero else 0
        *values, ahead = largest([*values, ahead], trainer)
        self._clock, self._from, self.next = now, count, count + ahead
        return values
