"""Find the point between two optimizer steps where a run can stop and resume exactly."""

import math
from collections.abc import Callable
from typing import Any

from lightning import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher


def at_step_boundaries(trainer: Trainer, act: Callable[[], None]) -> None:
    """Call `act` before each batch is fetched, and let a run that is resumed from there begin at just that moment.

    Where a step has just ended, all that follows from it is done (validation, schedules, metrics, the end of an epoch),
    and nothing of the next one is begun: no batch is drawn from the loader, and no random number. Lightning has no hook
    there: `on_train_batch_end` comes before the validation that belongs to the step, `on_train_batch_start` after
    the next batch has been drawn.

    Lightning resumes from whatever hook a state was saved in, and to that end skips a validation or leaves schedules
    out; a state from a boundary needs none of that, so the loops are told that they are not restarting.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    reset, before_fetch = type(loop).reset, type(loop)._on_before_fetch

    def reset_without_restart() -> None:
        resumed = loop.restarting
        reset(loop)  # progress of this epoch comes from the checkpoint, or from zero
        if resumed:
            for each in (fit, loop, loop.val_loop):
                each._restarting = False  # the property's setter says yes to itself where max_steps is set
            loop.val_loop.batch_progress.reset_on_run()

    def act_before_fetch() -> None:
        act()
        before_fetch(loop)

    loop.reset = reset_without_restart  # type: ignore[method-assign]
    loop._on_before_fetch = act_before_fetch  # type: ignore[method-assign]


def before_validations(trainer: Trainer, act: Callable[[], None]) -> None:
    """Call `act` before each validation that follows a step, when all else that the step does is done.

    Lightning's first hook of a validation comes after its loader has drawn a random number. The sanity check and a
    validation between two micro batches of a step, from where no run can be resumed, are left out.
    """
    loop = trainer.fit_loop.epoch_loop
    run = type(loop.val_loop).run

    def act_and_run() -> Any:
        if not trainer.sanity_checking and not loop._should_accumulate():
            act()
        return run(loop.val_loop)

    loop.val_loop.run = act_and_run  # type: ignore[method-assign]


def weight_versions(trainer: Trainer) -> list[int]:
    """Return how often each trained weight has been written to."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [parameter._version for group in groups for parameter in group["params"]]


def validate_first(trainer: Trainer, restore: Callable[[], None]) -> None:
    """Let a resumed training begin with the validation after the checkpoint's last step, after calling `restore`."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    run, on_run_start = fit.run, loop.on_run_start
    limits: dict[str, Any] = {}

    def run_without_limits() -> None:
        # After the last step Lightning would leave before the epoch's loop.
        limits.update(max_steps=loop.max_steps, should_stop=trainer.should_stop)
        loop.max_steps, trainer.should_stop = -1, False
        fit.run = run  # type: ignore[method-assign]
        run()

    def start_with_validation(data_fetcher: _DataFetcher) -> None:
        loop.on_run_start = on_run_start  # type: ignore[method-assign]
        on_run_start(data_fetcher)
        loop.max_steps, trainer.should_stop = limits["max_steps"], limits["should_stop"]
        trainer._last_val_time = -math.inf  # type: ignore[attr-defined]  # of a val_check_interval in time
        restore()
        loop.on_advance_end(data_fetcher)

    fit.run = run_without_limits  # type: ignore[method-assign]
    loop.on_run_start = start_with_validation  # type: ignore[method-assign]


def resume_data(trainer: Trainer) -> None:
    """Restore the loaders' positions where Lightning has not.

    It restores them when it makes the loaders, but a `configure_optimizers` that asks for
    `trainer.estimated_stepping_batches`, as many schedules do, has them made before the checkpoint is read (Lightning
    2.6.6, issue 20550): the epoch would begin again with samples that it has had already.
    """
    loop = trainer.fit_loop
    # Not restarting, Lightning withholds them on purpose: the state is of an epoch that has ended.
    if loop.restarting and loop._combined_loader_states_to_load and loop._combined_loader is not None:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
        assert loop._data_fetcher is not None
        iter(loop._data_fetcher)  # its iterators began at the beginning


def as_boundary(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Make a checkpoint that is saved when training has ended look as if training were about to continue.

    The end of training counts the epoch as done, also where `max_steps` ended it in the middle. And after a full epoch
    Lightning would go through one more, without a batch, if only steps limit the training.
    """
    progress = checkpoint["loops"]["fit_loop"]
    epoch, batches = progress["epoch_progress"], progress["epoch_loop.batch_progress"]
    if batches["current"]["completed"] < trainer.num_training_batches and not batches["is_last_batch"]:
        for count in (epoch["total"], epoch["current"]):
            count["processed"] = count["completed"] = count["completed"] - 1
        checkpoint["epoch"] = epoch["current"]["processed"]
    else:
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


def before_epoch(checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint of an epoch's first boundary be of the moment before that epoch begins.

    It has begun there, and Lightning would not call `on_train_epoch_start` again, where modules and callbacks set up
    what they need in the epoch.
    """
    progress = checkpoint["loops"]["fit_loop"]
    if progress["epoch_loop.batch_progress"]["current"]["ready"] == 0:
        for count in progress["epoch_progress"].values():
            count["ready"] = count["started"] = count["completed"]


def in_batches_of(checkpoint: dict[str, Any], before: int, now: int) -> None:
    """Count progress in the micro batches of now, of which `now` make a step; they were `before`."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name, count in counts.items():
            counts[name] = count * now // before
