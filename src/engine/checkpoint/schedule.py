"""Decide on all ranks when the newest state is saved: every N steps or T minutes, at an epoch's end, at a signal."""

import math
import sys
import time
from dataclasses import dataclass
from typing import Literal

from lightning import Trainer

from src.engine import signals
from src.engine.errors import UserError
from src.engine.poll import Poll, largest

AGREE_SECONDS = 2.0  # between two questions of the ranks, each of a millisecond on slow CPUs (benchmarks/measured.md)


@dataclass
class CheckpointSettings:
    """What to save, and when. A killed run loses what came after the last save.

    Args:
        every_n_steps: optimizer steps between saves of the newest state
        every_n_minutes: or this much time, whichever comes first; null: steps alone
        every_epoch: save at each epoch's end too
        keep: how many of the newest to keep
        keep_every_n_steps: save at each multiple of this many steps too, and never delete these; null: none
        asynchronous: training waits only for the copy into the host's memory (as large as a checkpoint), not for the
            disk
        format: file: one file, which rank 0 writes; sharded: every rank writes its part, which only the fsdp strategies
            have; null: sharded where that is so. Either is resumed under every strategy, on any number of processes
        monitor: the validation metric that decides which state is the best
        mode: whether a smaller (min) or a larger (max) value of it is better
        backup: a second folder, best on another disk, for a copy of the newest healthy state, DIR/<run>/; null: none

    """

    every_n_steps: int = 500
    every_n_minutes: float | None = 10.0
    every_epoch: bool = False
    keep: int = 2
    keep_every_n_steps: int | None = None
    asynchronous: bool = True
    format: Literal["file", "sharded"] | None = None
    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"
    backup: str | None = None

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "keep", "keep_every_n_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{name} is {value}; it must be at least 1")
        if self.every_n_minutes is not None and not self.every_n_minutes > 0:
            raise UserError(f"checkpoint.every_n_minutes is {self.every_n_minutes}; it must be more than 0")

    def __str__(self) -> str:
        minutes = "" if self.every_n_minutes is None else f" or {self.every_n_minutes:g} min, whichever comes first"
        behind = ", and what is trained while a state is being written" if self.asynchronous else ""
        epoch = ", at the end of each epoch too" if self.every_epoch else ""
        kept = "" if self.keep_every_n_steps is None else f", every {self.keep_every_n_steps} steps for good"
        return (
            f"every {self.every_n_steps} steps{minutes} (the most that a kill can lose{behind}){epoch}; "
            f"the last {self.keep} stay{kept}"
        )


class Schedule:
    """Decide when a save is due, and when this start must stop: its time is over, or a signal has come to any rank.

    The clock is rank 0's. All ranks learn of it, and of signals, about every two seconds (`Poll`). After `limit`
    seconds of training this start stops, with its state saved.
    """

    def __init__(self, settings: CheckpointSettings, limit: float | None = None) -> None:
        self._every = [n for n in (settings.every_n_steps, settings.keep_every_n_steps) if n]
        self._every_epoch = settings.every_epoch
        self._between = math.inf if settings.every_n_minutes is None else settings.every_n_minutes * 60
        self._limit = math.inf if limit is None else limit
        self._poll = Poll(min(AGREE_SECONDS, self._between / 10, self._limit / 10))
        self._validation_poll = Poll(AGREE_SECONDS)
        self._batch = self._common_batches = 0  # of a validation
        self.stop: str | None = None  # max_time, or the signal's name

    def begin(self, trainer: Trainer) -> None:
        """Start the clocks; the state that training begins with needs no save."""
        self._begun, self.stop, self._seen = time.monotonic(), None, -1
        self.saved(trainer)
        self._poll.begin(trainer.global_step)

    def saved(self, trainer: Trainer) -> None:
        """Note that the state of this step is saved."""
        self.step, self._epoch, self._up = trainer.global_step, trainer.current_epoch, False
        self._clock = time.monotonic()
        self._poll.begin(self.step, later=1)

    def due(self, trainer: Trainer) -> bool:
        """Return whether to save the state between two steps. Collective at the steps that all have agreed on."""
        step = trainer.global_step
        if step == self._seen:  # within a step, of which a batch may be a part only
            return False
        self._seen = step
        if self._poll.due(trainer, step):
            self._ask(trainer, self._poll, step)
        if step <= self.step:
            return False
        new_epoch = self._every_epoch and trainer.current_epoch > self._epoch
        return self._up or bool(self.stop) or new_epoch or any(step // n > self.step // n for n in self._every)

    def begin_validation(self, trainer: Trainer) -> None:
        """Count a validation's batches, as far as every rank has them: one that has none left would not answer."""
        count = sum(trainer.num_val_batches)
        unknown = sys.maxsize if trainer.world_size == 1 else 0  # each rank may have another number
        self._common_batches = -largest([-int(count) if math.isfinite(count) else -unknown], trainer)[0]
        self._batch = 0
        self._validation_poll.begin(0)

    def signal_in_validation(self, trainer: Trainer) -> bool:
        """Return whether a signal asks to stop before this batch. Collective at the batches that all have agreed on."""
        batch, self._batch = self._batch, self._batch + 1
        if batch >= self._common_batches or not self._validation_poll.due(trainer, batch):
            return False
        self._ask(trainer, self._validation_poll, batch)
        return self.stop not in (None, "max_time")

    def _ask(self, trainer: Trainer, poll: Poll, count: int) -> None:
        """Learn what rank 0's clock says and what signals have come. Collective."""
        now = time.monotonic()
        clock = [int(now - self._clock >= self._between), int(now - self._begun >= self._limit)]
        up, over, signal = poll.ask(trainer, count, [*(clock if trainer.is_global_zero else [0, 0]), signals.pending()])
        self._up = bool(up)
        self.stop = signals.name(signal) if signal else "max_time" if over else None
