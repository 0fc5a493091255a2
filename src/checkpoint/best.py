"""Keeps the best state by a validation metric."""

from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from src.checkpoint.choose import score_inside
from src.checkpoint.save import background, is_saved
from src.checkpoint.schedule import CheckpointSettings


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
        self._told, self._asynchronous = False, settings.asynchronous

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

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        files = background(trainer, self._asynchronous)
        if files is None:
            super()._save_checkpoint(trainer, filepath)
            return
        trainer.save_checkpoint(filepath, storage_options=_later)
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Delete the last best, when the new one is there."""
        if not trainer.is_global_zero:
            return
        new, step, files = Path(self.best_model_path), trainer.global_step, trainer.strategy.checkpoint_io

        def remove() -> None:
            if is_saved(new, step, getattr(files, "error", None)):
                files.remove_checkpoint(filepath)

        behind = background(trainer, self._asynchronous)
        if behind is None:
            remove()
        else:
            behind.after(remove)

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


def _later(error: Exception | None) -> None:
    """Whether it went well is asked when the last best is to go."""
