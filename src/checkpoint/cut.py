"""A validation that a signal cuts off: what is saved is the state before it, and the next start makes it.

A validation may take longer than a scheduler waits. Nothing that training goes on with is changed by one but random
numbers and metrics that are being added up, which are kept when it begins. Weights that somebody has exchanged for it
(EMA) are put back before the state is saved.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

from lightning import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher

from src.callbacks.ema import EMA
from src.checkpoint.files import PENDING
from src.checkpoint.schedule import AGREE_SECONDS
from src.errors import Stopped
from src.pace import Pace, largest


class CutOff(Stopped):
    """Raised in the middle of a validation. The state is saved by whoever hears of it, after those who put it right."""


class Validations:
    """Those of a training.

    Args:
        states: what every rank alone knows, as it is now
        ask: all ranks learn whether a signal has come; returns its name, None: go on. Collective
        restore: bring back what every rank alone knows, where a checkpoint has been read

    """

    def __init__(
        self, states: Callable[[], Any], ask: Callable[[Pace, int], str | None], restore: Callable[[], None]
    ) -> None:
        self._states, self._ask, self._restore = states, ask, restore
        self._before: Any = None  # while one runs: the states of before
        self.cut: Any = None  # the same, of one that was cut off
        self.pending = False  # the checkpoint that was read is of the moment before one
        self._pace, self._batch, self._common = Pace(AGREE_SECONDS), 0, 0
        self._versions: list[int] = []

    def watch(self, trainer: Trainer) -> None:
        """Be there when one begins."""
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        run, on_run_start, on_advance_end = fit.run, loop.on_run_start, loop.on_advance_end
        ends: dict[str, Any] = {}

        def run_to_pending() -> None:
            if self.pending:  # after the last step, training would count as done before it has begun
                ends.update(max_steps=loop.max_steps, should_stop=trainer.should_stop)
                loop.max_steps, trainer.should_stop = -1, False
            run()

        def start(data_fetcher: _DataFetcher) -> None:
            on_run_start(data_fetcher)
            if self.pending:
                self.pending = False
                loop.max_steps, trainer.should_stop = ends["max_steps"], ends["should_stop"]
                trainer._last_val_time = -math.inf  # type: ignore[attr-defined]  # of a val_check_interval in time
                self._restore()
                loop.on_advance_end(data_fetcher)

        def validate(data_fetcher: _DataFetcher) -> None:
            if loop._should_check_val_fx(data_fetcher) and not loop._should_accumulate():
                self._begin(trainer)
            on_advance_end(data_fetcher)
            self._before = None

        fit.run = run_to_pending  # type: ignore[method-assign]
        loop.on_run_start = start  # type: ignore[method-assign]
        loop.on_advance_end = validate  # type: ignore[method-assign]

    def _begin(self, trainer: Trainer) -> None:
        self._before = self._states()
        self._versions = versions(trainer)
        # Only as many batches as every rank has: who had none left would not answer.
        count = sum(trainer.num_val_batches)
        unknown = sys.maxsize if trainer.world_size == 1 else 0  # each rank may have another number
        self._common = -largest([-int(count) if math.isfinite(count) else -unknown], trainer)[0]
        self._batch = 0
        self._pace.begin(0)

    def batch_begins(self, trainer: Trainer) -> None:
        """Stop here where all ranks have learned to.

        Raises:
            CutOff: on every rank.

        """
        if self._before is None:
            return
        count, self._batch = self._batch, self._batch + 1
        if count >= self._common or not self._pace.due(trainer, count):
            return
        reason = self._ask(self._pace, count)
        averaged = any(isinstance(call, EMA) for call in trainer.callbacks)  # type: ignore[attr-defined]
        # Weights that somebody else has exchanged cannot be had back from here: the validation goes to its end.
        if reason and (averaged or versions(trainer) == self._versions):
            self.cut = self._before
            raise CutOff(reason)

    def into(self, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint say that the validation that was cut off is still to be made."""
        if self.cut is not None:
            checkpoint[PENDING] = True


def versions(trainer: Trainer) -> list[int]:
    """How often each weight has been written to."""
    parameters = (
        part for optimizer in trainer.optimizers for group in optimizer.param_groups for part in group["params"]
    )
    return [part._version for part in parameters]
