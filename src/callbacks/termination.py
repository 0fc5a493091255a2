"""SIGTERM ends the command at once, with a summary and an exit code that says so."""

import signal
import threading
from types import FrameType

from lightning import Callback, LightningModule, Trainer

EXIT_TERMINATED = 128 + signal.SIGTERM


class Termination(Callback):
    """Replaces Lightning's answer to SIGTERM.

    With more than one process Lightning broadcasts a flag and waits for it in *every* step, and broadcasts again inside
    the signal handler, where ranks that were signalled at different moments wait for each other forever. In the end it
    exits with 0, which a scheduler takes for success.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        _take_over()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """By itself, or before training, to see whether it works."""
        _take_over()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        _take_over()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        _take_over()


def _take_over() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # Lightning has set its own, and restores the old one when it is done


def _terminate(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the summary
    raise SystemExit(EXIT_TERMINATED)
