"""When a row is due, and writing it: the same for every callback that logs."""

from typing import Protocol, runtime_checkable

from lightning import Trainer


@runtime_checkable
class Listener(Protocol):
    """A callback that wants to know what other callbacks log, which Lightning's `callback_metrics` does not hold."""

    def hear_row(self, values: dict[str, float]) -> None:
        """Take note of a row, on every rank."""


def row_is_due(trainer: Trainer, since: int) -> bool:
    """Whether the step that just ended closes a log interval; `since` is the step of the last row.

    Under accumulation the passes of one step end several times, with the same step number; a row is due once.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by Lightning's logger connector
    return every > 0 and trainer.global_step > since and trainer.global_step % every == 0


def write_row(trainer: Trainer, values: dict[str, float]) -> None:
    """Log at the index of the step that just ended, from 0, as Lightning counts."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step - 1)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Listener):
            callback.hear_row(values)


def steps_in_all(trainer: Trainer) -> float:
    """Optimizer steps until the end of training, infinite where nothing ends it.

    Lightning says -1 for a stream without a length.
    """
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else float("inf")
