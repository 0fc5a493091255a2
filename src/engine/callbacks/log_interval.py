"""Decide when a row of metrics is due, and write it: the same for every callback that logs."""

import torch
from lightning import Trainer


def row_index(trainer: Trainer) -> int:
    """Return the index of the current optimizer step, from 0; it changes when all callbacks have seen the step's end.

    Lightning's own rows carry it. A step is one of the optimizer (`global_step`), but under manual optimization a
    batch, however many steps of however many optimizers the module makes in it.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def row_is_due(trainer: Trainer) -> bool:
    """Return whether the batch that just ended is the last of a step, and the step the last of a log interval."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by Lightning's logger connector
    return every > 0 and (row_index(trainer) + 1) % every == 0 and not trainer.fit_loop._should_accumulate()


def write_row(trainer: Trainer, values: dict[str, float]) -> None:
    """Log for the step that just ended, and let `trainer.logged_metrics` hold it as it holds what modules log."""
    rows = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    trainer._logger_connector._logged_metrics.update(rows)
    for logger in trainer.loggers:
        logger.log_metrics(values, step=row_index(trainer))


def steps_in_all(trainer: Trainer) -> float:
    """Return how many steps `row_index` will have counted when training ends, infinite where nothing ends it.

    Lightning says -1 for a stream without a length. Under manual optimization `max_steps` is of optimizers' steps, and
    nobody knows how many a batch takes.
    """
    steps = trainer.estimated_stepping_batches
    if trainer.max_steps > 0 and not trainer.lightning_module.automatic_optimization:
        return float("inf")
    return steps if steps >= 0 else float("inf")
