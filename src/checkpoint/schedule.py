"""When the newest state is saved: every N steps, every T minutes, at the end of an epoch; on all ranks alike."""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from lightning import Trainer

from src.errors import UserError

AGREE_SECONDS = 5.0  # how often the ranks ask rank 0 for the time: a small broadcast, and a wait for the device
MOST_AHEAD = 1000  # steps


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
            have; null: sharded where that is so. Either goes on under every strategy, on any number of processes
        hours_between_interruptions: how often this machine is taken away, to say which interval would lose least
        monitor: the validation metric that decides which state is the best
        mode: whether a smaller (min) or a larger (max) value of it is better

    """

    every_n_steps: int = 500
    every_n_minutes: float | None = 15.0
    every_epoch: bool = False
    keep: int = 2
    keep_every_n_steps: int | None = None
    asynchronous: bool = True
    format: Literal["file", "sharded"] | None = None
    hours_between_interruptions: float = 8.0
    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "keep", "keep_every_n_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{name} is {value}; it must be at least 1")
        for name in ("every_n_minutes", "hours_between_interruptions"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"checkpoint.{name} is {value}; it must be more than 0")

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
    """Says when a save is due, and when this start has had its time. Rank 0's clock, which all learn every few seconds.

    Args:
        settings: when to save
        limit: seconds of training after which this start stops, with its state saved; None: none

    """

    def __init__(self, settings: CheckpointSettings, limit: float | None = None) -> None:
        self._every = [n for n in (settings.every_n_steps, settings.keep_every_n_steps) if n]
        self._every_epoch = settings.every_epoch
        self._between = math.inf if settings.every_n_minutes is None else settings.every_n_minutes * 60
        self._limit = math.inf if limit is None else limit
        self.over = False

    def begin(self, trainer: Trainer) -> None:
        """Training starts, with the state that it has."""
        self._begun, self.over = time.monotonic(), False
        self.saved(trainer)

    def saved(self, trainer: Trainer) -> None:
        """The state of now is on disk, or it is the one that training begins with."""
        self.step, self._epoch = trainer.global_step, trainer.current_epoch
        self._clock = self._asked = time.monotonic()
        self._asked_at, self._ask_at, self._up = self.step, self.step + 1, False

    def due(self, trainer: Trainer) -> bool:
        """Whether the state between two steps is to be saved. Collective at the steps that all have agreed on."""
        step = trainer.global_step
        if step <= self.step:
            return False
        if min(self._between, self._limit) < math.inf and step >= self._ask_at:
            self._ask(trainer)
        new_epoch = self._every_epoch and trainer.current_epoch > self._epoch
        return self._up or self.over or new_epoch or any(step // n > self.step // n for n in self._every)

    def _ask(self, trainer: Trainer) -> None:
        step, now = trainer.global_step, time.monotonic()
        per_step = (now - self._asked) / (step - self._asked_at)
        ahead = int(min(AGREE_SECONDS, self._between / 10, self._limit / 10) / max(per_step, 1e-6))
        up, over = now - self._clock >= self._between, now - self._begun >= self._limit
        answer = torch.tensor([up, over, max(1, min(ahead, MOST_AHEAD))])
        if trainer.world_size > 1:
            answer = answer.to(trainer.strategy.root_device)
            torch.distributed.broadcast(answer, 0)
        up, over, ahead = answer.tolist()
        self._up, self.over = bool(up), bool(over)
        self._asked, self._asked_at, self._ask_at = now, step, step + int(ahead)


def best_interval(cost: float, between: float) -> float:
    """Seconds between saves that lose the least time, saving and repeating work taken together.

    Young, "A first order approximation to the optimum checkpoint interval" (Communications of the ACM 17, 1974).

    Args:
        cost: seconds that training stands still for a save
        between: mean seconds between interruptions

    """
    return (2 * cost * between) ** 0.5
