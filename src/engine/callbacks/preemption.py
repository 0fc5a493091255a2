"""Stop between two steps, saved, when a signal asks for the machine."""

import os
import time
from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch.utils.data._utils import signal_handling

from src.engine import signals, stopped
from src.engine.errors import UserError

# Between the signal and the end, where no batch script says: what clouds give at least, and Slurm's usual KillWait.
LEAD_SECONDS = 30.0
MEASURED = 3  # steps, after the first, which may compile


class Preemption(Callback):
    """Replaces Lightning's answer to signals, and warns where a signal would come too late to save.

    With more than one process Lightning broadcasts a flag and waits for it in *every* step, and broadcasts again inside
    the signal handler, where ranks that were signalled at different moments wait for each other forever. In the end it
    exits with 0, which a scheduler takes for success.

    Args:
        save_seconds: what the first save of this start took; None so far
        saves: whether a state is saved; else, as in an evaluation, a signal ends the command at once

    """

    def __init__(self, save_seconds: Callable[[], float | None] = lambda: None, *, saves: bool = False) -> None:
        self.save_seconds, self.saves = save_seconds, saves
        lead = os.environ.get(stopped.LEAD, str(LEAD_SECONDS))
        try:
            self.lead = float(lead)
        except ValueError as error:
            raise UserError(f"{stopped.LEAD}={lead}: expected a number of seconds, such as 120") from error
        self._step_seconds: list[float] = []
        self._step, self._clock, self._warned = -1, 0.0, False
        self._listens = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        keep_workers_alive()
        signals.listen()
        if not self.saves:
            signals.exit_on_signal()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_seconds, self._step, self._clock = [], trainer.global_step, time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self._listens:  # the module and others may have set handlers of their own when training started
            signals.listen(self.saves)
            self._listens = True

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self._step or self._warned or not self.saves or not trainer.is_global_zero:
            return
        now = time.monotonic()
        if len(self._step_seconds) <= MEASURED:
            self._step_seconds.append(now - self._clock)
        self._step, self._clock = trainer.global_step, now
        if len(self._step_seconds) > MEASURED:
            self._warn_if_late(min(self._step_seconds[1:]), self.save_seconds())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = time.monotonic()

    def _warn_if_late(self, step: float, save: float | None) -> None:
        if step + (save or 0) <= self.lead:
            return
        self._warned = True
        saving = "" if save is None else f" and a save {save:.1f} s"
        print(
            f"warning: a step takes {step:.1f} s{saving}, more than the {self.lead:.0f} s from a signal to the end: "
            "the work since the last save may be lost; --checkpoint.every_n_minutes limits it",
            flush=True,
        )


def keep_workers_alive() -> None:
    """Let loaders' processes outlive the signals that a scheduler sends to every process of a job."""
    set_handlers = signal_handling._set_worker_signal_handlers
    set_theirs = getattr(set_handlers, "theirs", set_handlers)  # PyTorch's own, if this was called before

    def set_both() -> None:
        set_theirs()
        signals.ignore_unless_from_parent()

    set_both.theirs = set_theirs  # type: ignore[attr-defined]
    signal_handling._set_worker_signal_handlers = set_both
