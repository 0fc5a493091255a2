"""Save the newest state of a run, so that a resumed run ends as if it had never been stopped."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from src.engine import stopped
from src.engine.checkpoint.before_training import (
    note_manual_optimization,
    refuse_callbacks,
    refuse_writers,
)
from src.engine.checkpoint.boundary import (
    as_boundary,
    at_step_boundaries,
    before_epoch,
    before_validations,
    in_batches_of,
    resume_data,
    validate_first,
    weight_versions,
)
from src.engine.checkpoint.contents import AVERAGE, refuse_unsafe
from src.engine.checkpoint.files import PENDING, bytes_of, prune
from src.engine.checkpoint.rank_state import Keeper, every_runs_keepers
from src.engine.checkpoint.schedule import CheckpointSettings, Schedule
from src.engine.checkpoint.write import WholeFiles, back_up, linked_or_said, save_in_front, saved_or_said
from src.engine.distributed import gather_objects
from src.engine.errors import NotSavedError, Stopped

Best = tuple[Path, Callable[[], None]]


@dataclass
class Save:
    """One save, and what the thread that writes must know of its moment: training changes all else meanwhile."""

    path: Path
    step: int
    begun: float  # seconds, monotonic
    due: bool  # else only the best state is wanted
    last: bool
    best: Best | None
    bad_since: int | None
    waited: float | None = None  # seconds that training waited; None: to the end


class SaveNewest(Callback):
    """Save `step=<steps done>.ckpt`, and delete the oldest only when a newer one is there and whole.

    A run that is resumed from such a file ends in exactly the weights, the optimizer state and the logged rows of a run
    that was never stopped. Lightning's own "last" is written only beside a top-k file, its name goes stale
    (`last-v1.ckpt`), and it restores neither random numbers nor an epoch's sums of metrics.

    Args:
        folder: where the files go
        settings: when, and how many to keep
        keepers: others that have a state of their own on every rank, by name
        after_save: called when training continues after a save, which clocks may want to leave out
        limit: seconds of training after which this start saves and stops; None: none
        bad_since: returns the first step of what may prove the run broken, None where nothing does: the newest state
            from before it stays. Collective

    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        keepers: dict[str, Keeper] | None = None,
        after_save: Callable[[], None] = lambda: None,
        limit: float | None = None,
        bad_since: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.folder, self.settings, self.schedule = folder, settings, Schedule(settings, limit)
        self.keepers, self.after_save, self.bad_since = dict(keepers or {}), after_save, bad_since
        self._loaded: list[dict[str, Any]] | None = None
        self._best: Best | None = None
        self._rounding: dict[str, Any] = {}
        self._ended = self._checked = False
        self._before_validation: dict[str, Any] | None = None  # this rank's state, while a validation runs
        self._versions: list[int] = []  # of the weights, then
        self._left_validation = False  # for a signal: what is saved is the state before it
        self.first_save_seconds: float | None = None  # of this start, from the copy to the disk

    # --- when ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_callbacks(trainer)
            refuse_writers(trainer)
            at_step_boundaries(trainer, lambda: self._at_boundary(trainer))
            before_validations(trainer, lambda: self._before(trainer))
            self._left_validation, self._before_validation = False, None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        resume_data(trainer)
        note_manual_optimization(pl_module)
        self.schedule.begin(trainer)
        self._ended, self._rounding = False, rounding(trainer)
        self.keepers |= every_runs_keepers(trainer, pl_module)

    def _at_boundary(self, trainer: Trainer) -> None:
        self._restore(trainer)
        if not self._checked:
            self._checked = True
            refuse_unsafe(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        due = self.schedule.due(trainer)
        if due or self._best:
            self._save(trainer, due, last=bool(self.schedule.stop))
        if self.schedule.stop:
            # Here, and not by `should_stop`, which first validates and ends the epoch: rows that a run which is not
            # stopped does not have.
            self._mark(trainer)
            raise Stopped(self.schedule.stop)

    def _before(self, trainer: Trainer) -> None:
        """Keep what a validation changes of the state: random numbers and sums of metrics."""
        self._before_validation, self._versions = self._own_states(), weight_versions(trainer)
        self.schedule.begin_validation(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Leave a validation for a signal: it may take longer than the machine waits. The next start runs it."""
        if self._before_validation is None or not self.schedule.signal_in_validation(trainer):
            return
        # Weights that a module or a callback has exchanged for the validation would be saved; our EMA restores them.
        restored = any(callback.state_key == AVERAGE for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if restored or weight_versions(trainer) == self._versions:
            self._left_validation = True
            raise Stopped(self.schedule.stop)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before_validation = None

    def _mark(self, trainer: Trainer) -> None:
        """Say to the batch script that the state is saved, where a signal asked for it."""
        if trainer.is_global_zero and self.schedule.stop not in (None, "max_time"):
            try:
                stopped.mark(self.folder.parent, trainer.global_step, str(self.schedule.stop))
            except OSError as error:
                print(f"warning: {self.folder.parent / stopped.MARKER} cannot be written ({error})", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ended = True
        due = trainer.global_step > self.schedule.step
        if due or self._best:
            self._save(trainer, due, last=True)
        if isinstance(trainer.strategy.checkpoint_io, WholeFiles):
            trainer.strategy.checkpoint_io.wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state before a validation that was left, and wait for what is being written."""
        if self._left_validation:
            if trainer.global_step > self.schedule.step:
                self._save(trainer, due=True, last=True)
            self._mark(trainer)
        if isinstance(trainer.strategy.checkpoint_io, WholeFiles):
            trainer.strategy.checkpoint_io.wait()

    def as_best(self, path: Path, then: Callable[[], None]) -> None:
        """Save the state before the next batch as `path`, and call `then` when it is there.

        A state that is due at that moment anyway is written once and has two names.
        """
        self._best = path, then

    # --- what ---

    def state_dict(self) -> dict[str, Any]:
        """Return what every rank alone knows. Collective, as saving is."""
        own = self._before_validation if self._left_validation else self._own_states()
        return {"ranks": gather_objects(own), "rounding": self._rounding}

    def _own_states(self) -> dict[str, Any]:
        return {name: keeper.rank_state() for name, keeper in self.keepers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["ranks"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._left_validation:
            checkpoint[PENDING] = True
        if self._ended:
            as_boundary(checkpoint, trainer)
        else:
            before_epoch(checkpoint)
        # Where a Timer has run out, it is this start that is to stop.
        checkpoint["should_stop"] = trainer.should_stop and not _out_of_time(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lightning counts micro batches, of which a step may have had another number, and forgets `should_stop`."""
        # A callback may ask for the end before `min_steps`, and does not ask again.
        trainer.should_stop = trainer.should_stop or checkpoint.get("should_stop", False)
        if checkpoint.get(PENDING):
            validate_first(trainer, lambda: self._restore_before_validation(trainer))
        before, now = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("rounding", {}), rounding(trainer)
        if trainer.is_global_zero and (changed := [name for name in before if before[name] != now.get(name)]):
            was = ", ".join(f"{name} {before[name]} (now {now.get(name)})" for name in changed)
            print(f"note: the checkpoint is of {was}: the run continues up to rounding, not bit for bit")
        if before:
            in_batches_of(checkpoint, before["micro batches"], now["micro batches"])

    def _restore_before_validation(self, trainer: Trainer) -> None:
        self._restore(trainer)
        self.schedule.step -= 1  # with the validation it becomes another state, to be saved again

    def _restore(self, trainer: Trainer) -> None:
        states, self._loaded = self._loaded, None
        if states is None:
            return
        if len(states) != trainer.world_size and trainer.is_global_zero:
            print(
                f"note: the checkpoint is of {len(states)} process(es) and continues with {trainer.world_size}: the "
                "same samples in the same order, but other random numbers and rounding: not bit for bit. This epoch's "
                "means are of its remaining steps"
            )
        for name, keeper in self.keepers.items():
            of_ranks = [state[name] for state in states if name in state]
            if len(of_ranks) == trainer.world_size:
                keeper.load_rank_state(of_ranks[trainer.global_rank])
            elif of_ranks and (merged := keeper.merge(of_ranks, trainer.global_rank)) is not None:
                keeper.load_rank_state(merged)

    # --- how ---

    def _save(self, trainer: Trainer, due: bool, last: bool) -> None:
        best, self._best = self._best, None
        newest = self.folder / f"step={trainer.global_step:08d}.ckpt"
        path = best[0] if best and not due else newest
        _flush(trainer)
        save = Save(path, trainer.global_step, time.monotonic(), due, last, best, self.bad_since())
        # Collective: every rank takes part, whichever of them writes.
        if self.settings.asynchronous and not last and isinstance(trainer.strategy.checkpoint_io, WholeFiles):
            trainer.save_checkpoint(path, storage_options=lambda error: self._written(save, error))
            save.waited = time.monotonic() - save.begun
        else:
            error = save_in_front(trainer, path)
            whole = not trainer.is_global_zero or self._written(save, error)
            if last and due and not whole:
                raise NotSavedError(f"the end of this start, step {save.step}, is not saved; make room and continue")
        if due:
            self.schedule.saved(trainer)
        self.after_save()

    def _written(self, save: Save, error: Exception | None) -> bool:
        """Check a save, name the best and delete what is older; return whether it is whole. Where it was written."""
        if not saved_or_said(save.path, save.step, error):
            return False
        try:
            if save.best and (save.path == save.best[0] or linked_or_said(save.path, save.best[0])):
                save.best[1]()
            for_good = self.settings.keep_every_n_steps
            prune(self.folder, save.step, self.settings.keep, for_good, save.bad_since)
            if self.first_save_seconds is None and not save.last:
                self._print_time(save)
        except OSError as refused:  # the state is there, and the other ranks know nothing of this
            print(f"warning: step {save.step} is saved, but older files were not put in order ({refused})", flush=True)
        if save.due and save.bad_since is None and self.settings.backup:
            try:
                back_up(save.path, Path(self.settings.backup) / self.folder.parent.name)
            except Exception as refused:
                print(
                    f"warning: step {save.step} is saved, but not copied to checkpoint.backup ({refused})", flush=True
                )
        return True

    def _print_time(self, save: Save) -> None:
        self.first_save_seconds = seconds = time.monotonic() - save.begun
        waited = seconds if save.waited is None else save.waited
        print(
            f"note: the first save (step {save.step}, {bytes_of(save.path) / 2**20:.1f} MiB) took {seconds:.2f} s, "
            f"training waited {waited:.2f} s of it",
            flush=True,
        )


def rounding(trainer: Trainer) -> dict[str, Any]:
    """Return what the last bits of a step depend on, beside the number of processes."""
    return {
        "micro batches": trainer.accumulate_grad_batches,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "device": trainer.strategy.root_device.type,
    }


def _out_of_time(trainer: Trainer) -> bool:
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)


def _flush(trainer: Trainer) -> None:
    """Write what loggers hold back: a run that is resumed from this state logs nothing before it again."""
    for logger in trainer.loggers:
        flush = getattr(logger, "flush", None) or getattr(getattr(logger, "experiment", None), "flush", None)
        if callable(flush):
            flush()  # TensorBoard keeps two minutes of events to itself
