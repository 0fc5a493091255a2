"""When a run saves: the newest state every N steps and at the end, and the best by a validation metric."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from src.checkpoint.boundary import as_boundary, at_step_boundaries
from src.checkpoint.choose import score_inside
from src.checkpoint.files import fault
from src.checkpoint.rank_state import EpochMetrics, Keeper, RandomNumbers, gather
from src.errors import UserError


@dataclass
class CheckpointSettings:
    """What to save.

    Args:
        every_n_steps: optimizer steps between saves of the newest state, the most work that a killed run loses
        keep: how many of the newest to keep
        monitor: the validation metric that decides which state is the best
        mode: whether a smaller (min) or a larger (max) value of it is better

    """

    every_n_steps: int = 500
    keep: int = 2
    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"checkpoint.{name} is {getattr(self, name)}; it must be at least 1")


class SaveNewest(Callback):
    """Saves `step=<steps done>.ckpt` and deletes the oldest only when a newer one is there.

    A run that goes on from such a file ends in exactly the weights, the optimizer state and the logged rows of a run
    that was never stopped. Lightning's own "last" is written only beside a top-k file, its name goes stale
    (`last-v1.ckpt`), and it brings back neither random numbers nor what an epoch's metrics have added up.

    Args:
        folder: where the files go
        settings: when, and how many to keep
        keepers: others that have a state of their own on every rank, by name
        after_save: called when a save is done, which clocks may want to leave out

    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        keepers: dict[str, Keeper] | None = None,
        after_save: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.every_n_steps, self.keep = folder, settings.every_n_steps, settings.keep
        self.keepers, self.after_save = dict(keepers or {}), after_save
        self._saved_step = 0
        self._loaded: list[dict[str, Any]] | None = None
        self._ended = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: D102
        if stage == "fit":
            at_step_boundaries(trainer, lambda: self._at_boundary(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._saved_step, self._ended = trainer.global_step, False
        self._metrics = EpochMetrics(trainer, pl_module)
        own: dict[str, Keeper] = {"random": RandomNumbers(trainer.strategy.root_device), "metrics": self._metrics}
        self.keepers |= own

    def _at_boundary(self, trainer: Trainer) -> None:
        if self._loaded is not None:
            self._restore(trainer)
        if trainer.global_step >= self._saved_step + self.every_n_steps:
            self._save(trainer)

    def _restore(self, trainer: Trainer) -> None:
        states, self._loaded = self._loaded, None
        if states is None:
            return
        if len(states) != trainer.world_size:
            if trainer.is_global_zero:
                print(
                    f"note: the checkpoint is of {len(states)} process(es) and goes on with {trainer.world_size}: the "
                    "same samples in the same order, but other random numbers and rounding, so not bit for bit"
                )
            return
        for name, keeper in self.keepers.items():
            if name in states[trainer.global_rank]:
                keeper.load_rank_state(states[trainer.global_rank][name])

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:  # noqa: D102
        self._metrics.add_pending()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._metrics.add_pending()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._ended = True
        if trainer.global_step > self._saved_step:
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """What every rank alone knows. Collective, as saving is."""
        return {"ranks": gather({name: keeper.rank_state() for name, keeper in self.keepers.items()})}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self._loaded = state["ranks"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: D102
        if self._ended:
            as_boundary(checkpoint, trainer)

    def _save(self, trainer: Trainer) -> None:
        path = self.folder / f"step={trainer.global_step:08d}.ckpt"
        for logger in trainer.loggers:
            # A run that goes on from this state logs nothing again of what came before it.
            flush = getattr(logger, "flush", None) or getattr(getattr(logger, "experiment", None), "flush", None)
            if callable(flush):
                flush()  # TensorBoard keeps two minutes of events to itself
        # Collective: every rank takes part, whichever of them writes.
        trainer.save_checkpoint(path)
        self._saved_step = trainer.global_step
        if trainer.is_global_zero and is_saved(trainer, path):
            for old in sorted(self.folder.glob("step=*.ckpt"))[: -self.keep]:
                old.unlink()
        elif trainer.is_global_zero and self._ended:
            raise RuntimeError(f"the end of the run, step {trainer.global_step}, is not saved; make room and continue")
        self.after_save()


def is_saved(trainer: Trainer, path: Path) -> bool:
    """Whether a checkpoint that was just written is whole; where it is not, say so. For the rank that writes."""
    reason = getattr(trainer.strategy.checkpoint_io, "error", None) or fault(path)
    if reason:
        print(f"warning: step {trainer.global_step} could not be saved ({reason}); older checkpoints stay", flush=True)
    return not reason


class SaveBest(ModelCheckpoint):
    """Keeps the best state by `monitor` as `best-step=….ckpt`; says so once when nobody logs that metric."""

    def __init__(self, folder: Path, settings: CheckpointSettings) -> None:
        super().__init__(
            dirpath=folder,
            filename="best-{step:08d}",
            monitor=settings.monitor,
            mode=settings.mode,
            save_top_k=1,
            save_on_train_epoch_end=False,  # but where validation ends, in the middle of an epoch or at its end
            enable_version_counter=False,
        )
        self._told = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the paths in it are those of the folder's old place where a run was moved. The files know better."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Know the best of an earlier start, which may be younger than the state that training goes on from."""
        super().on_train_start(trainer, pl_module)
        assert self.dirpath is not None
        for path in Path(self.dirpath).glob("best-*.ckpt"):
            score = score_inside(path, self.state_key)
            better = torch.lt if self.mode == "min" else torch.gt
            if score is None or (self.best_model_score is not None and not better(score, self.best_model_score)):
                continue
            self.best_model_path = self.kth_best_model_path = str(path)
            self.best_model_score = self.kth_value = score
            self.best_k_models = {str(path): score}

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        # The last best goes only when the new one is there.
        if not trainer.is_global_zero or is_saved(trainer, Path(self.best_model_path)):
            super()._remove_checkpoint(trainer, filepath)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        if self.monitor in trainer.callback_metrics or trainer.sanity_checking:
            super().on_validation_end(trainer, pl_module)
        elif not self._told and trainer.is_global_zero:
            self._told = True
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            print(
                f"note: checkpoint.monitor {self.monitor!r} is never logged (logged: {logged}), so no best checkpoint "
                "is kept; set --checkpoint.monitor to one of them"
            )
