"""Saves the newest state of a run, so that a run that goes on from it ends as if it had never been stopped."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from src import stopped
from src.checkpoint.before_training import refuse_callbacks, refuse_state, refuse_writers
from src.checkpoint.boundary import (
    as_boundary,
    at_step_boundaries,
    before_epoch,
    in_batches_of,
    resume_data,
)
from src.checkpoint.cut import CutOff, Validations
from src.checkpoint.files import PENDING, bytes_of, fault, ours, step_in_name
from src.checkpoint.rank_state import CallbackMetrics, EpochMetrics, Keeper, RandomNumbers
from src.checkpoint.schedule import CheckpointSettings, Schedule
from src.checkpoint.shards import sweep
from src.checkpoint.write import IN_FRONT, WholeFiles, back_up, give_name
from src.errors import NotSavedError, Stopped
from src.pace import Pace
from src.ranks import gather_objects

Best = tuple[Path, Callable[[], None]]


class SaveNewest(Callback):
    """Saves `step=<steps done>.ckpt` and deletes the oldest only when a newer one is there and whole.

    A run that goes on from such a file ends in exactly the weights, the optimizer state and the logged rows of a run
    that was never stopped. Lightning's own "last" is written only beside a top-k file, its name goes stale
    (`last-v1.ckpt`), and it brings back neither random numbers nor what an epoch's metrics have added up.

    Args:
        folder: where the files go
        settings: when, and how many to keep
        keepers: others that have a state of their own on every rank, by name
        after_save: called when training goes on after a save, which clocks may want to leave out
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
        self.first_save_seconds: float | None = None  # of this start, from the copy to the disk

    # --- when ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: D102
        if stage == "fit":
            refuse_callbacks(trainer)
            refuse_writers(trainer)
            at_step_boundaries(trainer, lambda: self._at_boundary(trainer))
            self._validations = Validations(
                self._own_states, lambda pace, count: self._signal(trainer, pace, count), lambda: self._restore(trainer)
            )
            self._validations.watch(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        resume_data(trainer)
        if trainer.is_global_zero and not pl_module.automatic_optimization:
            print(
                "note: the module optimizes by itself: rows count batches, checkpoints and max_steps its optimizers' "
                "steps; gradients that it keeps from one batch to the next are not saved"
            )
        self.schedule.begin(trainer)
        if self._validations.pending:
            self.schedule.step -= 1  # with that validation it becomes another state
        self._ended, self._rounding = False, rounding(trainer)
        own: dict[str, Keeper] = {
            "random": RandomNumbers(trainer.strategy.root_device),
            "metrics": EpochMetrics(trainer, pl_module),
            "callback_metrics": CallbackMetrics(trainer),
        }
        self.keepers |= own

    def _at_boundary(self, trainer: Trainer) -> None:
        if self._loaded is not None:
            self._restore(trainer)
        if not self._checked:
            self._checked = True
            refuse_state(trainer)
        due = self.schedule.due(trainer)
        if due or self._best:
            self._save(trainer, due, last=bool(self.schedule.stop))
        if self.schedule.stop:
            # Here, and not by `should_stop`, which first validates and ends the epoch: rows that a run which is not
            # stopped does not have.
            self._mark(trainer)
            raise Stopped(self.schedule.stop)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """A long validation does not outlast what the machine has left."""
        self._validations.batch_begins(trainer)

    def _signal(self, trainer: Trainer, pace: Pace, count: int) -> str | None:
        self.schedule.ask(trainer, pace, count)
        return None if self.schedule.stop == "max_time" else self.schedule.stop

    def _mark(self, trainer: Trainer) -> None:
        """Say to the batch script that the state is saved, where a signal asked for it."""
        if trainer.is_global_zero and self.schedule.stop not in (None, "max_time"):
            try:
                stopped.mark(self.folder.parent, trainer.global_step, str(self.schedule.stop))
            except OSError as error:
                print(f"warning: {self.folder.parent / stopped.MARKER} cannot be written ({error})", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._ended = True
        due = trainer.global_step > self.schedule.step
        if due or self._best:
            self._save(trainer, due, last=True)
        if isinstance(trainer.strategy.checkpoint_io, WholeFiles):
            trainer.strategy.checkpoint_io.wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What has been copied still gets to the disk, and what a validation that was cut off came after."""
        if isinstance(exception, CutOff):
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
        """What every rank alone knows. Collective, as saving is."""
        cut = self._validations.cut
        return {"ranks": gather_objects(cut or self._own_states()), "rounding": self._rounding}

    def _own_states(self) -> dict[str, Any]:
        return {name: keeper.rank_state() for name, keeper in self.keepers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self._loaded = state["ranks"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: D102
        self._validations.into(checkpoint)
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
        self._validations.pending = checkpoint.get(PENDING, False)
        before, now = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("rounding", {}), rounding(trainer)
        if trainer.is_global_zero and (changed := [name for name in before if before[name] != now.get(name)]):
            was = ", ".join(f"{name} {before[name]} (now {now.get(name)})" for name in changed)
            print(f"note: the checkpoint is of {was}: it goes on to rounding, not bit for bit")
        if before:
            in_batches_of(checkpoint, before["micro batches"], now["micro batches"])

    def _restore(self, trainer: Trainer) -> None:
        states, self._loaded = self._loaded, None
        if states is None:
            return
        if len(states) != trainer.world_size and trainer.is_global_zero:
            print(
                f"note: the checkpoint is of {len(states)} process(es) and goes on with {trainer.world_size}: the "
                "same samples in the same order, but other random numbers and rounding: not bit for bit"
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
        for logger in trainer.loggers:
            # A run that goes on from this state logs nothing again of what came before it.
            flush = getattr(logger, "flush", None) or getattr(getattr(logger, "experiment", None), "flush", None)
            if callable(flush):
                flush()  # TensorBoard keeps two minutes of events to itself
        # What `written` needs of now, as values: it runs beside the training that follows, which changes all else.
        begun, step, bad = time.monotonic(), trainer.global_step, self.bad_since()
        told = last or self.first_save_seconds is not None
        stalled: list[float] = []

        def written(error: Exception | None) -> bool:
            """On the process that writes, in its thread where it writes behind training."""
            if not saved_or_said(path, step, error):
                return False
            try:
                if best and (path == best[0] or linked_or_said(path, best[0])):
                    best[1]()
                self._prune(step, bad)
                if not told:
                    self._tell(path, step, time.monotonic() - begun, stalled)
            except OSError as refused:  # the state is there, and the other ranks know nothing of this
                print(f"warning: step {step} is saved, but older files were not put in order ({refused})", flush=True)
            if due and bad is None and self.settings.backup:
                try:
                    back_up(path, Path(self.settings.backup) / self.folder.parent.name)
                except Exception as refused:
                    print(f"warning: step {step} is saved, but not copied to checkpoint.backup ({refused})", flush=True)
            return True

        # Collective: every rank takes part, whichever of them writes.
        if background(trainer, self.settings.asynchronous and not last):
            trainer.save_checkpoint(path, storage_options=written)
            stalled.append(time.monotonic() - begun)
        else:
            error = save_in_front(trainer, path)
            whole = not trainer.is_global_zero or written(error)
            if last and due and not whole:
                raise NotSavedError(f"the end of this start, step {step}, is not saved; make room and continue")
        if due:
            self.schedule.saved(trainer)
        self.after_save()

    def _prune(self, step: int, bad: int | None) -> None:
        """Of those up to `step`, which has just been written: what is later was not this start's."""
        for_good = self.settings.keep_every_n_steps
        there = [path for path in ours(self.folder, "newest") if step_in_name(path) <= step]
        healthy = [path for path in there if bad is not None and step_in_name(path) < bad][-1:]
        for path in there[: -self.settings.keep]:
            if path not in healthy and not (for_good and step_in_name(path) % for_good == 0):
                path.unlink(missing_ok=True)
        sweep(self.folder, below=step)

    def _tell(self, path: Path, step: int, seconds: float, stalled: list[float]) -> None:
        self.first_save_seconds = seconds
        waited = stalled[0] if stalled else seconds
        print(
            f"note: the first save (step {step}, {bytes_of(path) / 2**20:.1f} MiB) took {seconds:.2f} s, training "
            f"waited {waited:.2f} s of it",
            flush=True,
        )


def _out_of_time(trainer: Trainer) -> bool:
    timers = [part for part in trainer.callbacks if isinstance(part, Timer)]  # type: ignore[attr-defined]
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)


def rounding(trainer: Trainer) -> dict[str, Any]:
    """What the last bits of a step depend on, beside the number of processes."""
    return {
        "micro batches": trainer.accumulate_grad_batches,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "device": trainer.strategy.root_device.type,
    }


def background(trainer: Trainer, wanted: bool) -> WholeFiles | None:
    """What writes behind training; None where the user's own CheckpointIO writes, or that is not wanted."""
    files = trainer.strategy.checkpoint_io
    return files if wanted and isinstance(files, WholeFiles) else None


def save_in_front(trainer: Trainer, path: Path) -> Exception | None:
    """Save while training waits. Collective; returns what went wrong, on the rank that writes.

    A user's own CheckpointIO raises by itself.
    """
    files = trainer.strategy.checkpoint_io
    if not isinstance(files, WholeFiles):
        trainer.save_checkpoint(path)
        return None
    trainer.save_checkpoint(path, storage_options=IN_FRONT)
    return files.error


def saved_or_said(path: Path, step: int, error: Exception | None) -> bool:
    """Whether a checkpoint that was just written is whole; where it is not, say so. For the rank that writes."""
    reason = error or fault(path)
    if reason:
        print(f"warning: step {step} could not be saved ({reason}); older checkpoints stay", flush=True)
    return not reason


def linked_or_said(path: Path, other: Path) -> bool:
    """Whether a saved state could be given its other name; where it could not, say so. For the rank that writes."""
    try:
        give_name(path, other)
    except OSError as error:
        print(f"warning: {path} could not be kept as {other.name} ({error})", flush=True)
        return False
    return True
