"""When a run saves: the newest state every N steps and at the end, and the best by a validation metric."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from src.callbacks.log_interval import steps_in_all
from src.checkpoint.choose import score_inside
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

    Lightning's own "last" is written only beside a top-k file, and its name goes stale (`last-v1.ckpt`).
    """

    def __init__(self, folder: Path, settings: CheckpointSettings) -> None:
        self.folder, self.every_n_steps, self.keep = folder, settings.every_n_steps, settings.keep
        self._saved_step, self._last_step = 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._saved_step, self._last_step = trainer.global_step, steps_in_all(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:  # noqa: D102
        # The last step too is saved here: on_train_end comes after Lightning has counted the epoch as done.
        last = trainer.global_step > self._saved_step and trainer.global_step >= self._last_step
        if last or trainer.global_step >= self._saved_step + self.every_n_steps:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        if trainer.global_step > self._saved_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        # Collective: every rank takes part, whichever of them writes.
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step:08d}.ckpt")
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            for old in sorted(self.folder.glob("step=*.ckpt"))[: -self.keep]:
                old.unlink()


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
