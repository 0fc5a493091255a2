"""Keep the best state by a validation metric."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from src.engine.checkpoint.choose import score_inside
from src.engine.checkpoint.names import ours
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.write import linked_or_said


class SaveBest(ModelCheckpoint):
    """Keep the best state by `monitor` as `best-step=….ckpt`; print a note once when nobody logs that metric.

    The state is saved by `newest`, after the validation and all else that follows from the step, and only once where
    the newest state is due too. A run can be resumed from it as from any other, unless the validation came between two
    micro batches of one step, which a fraction as val_check_interval can bring.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings, newest: SaveNewest) -> None:
        super().__init__(
            dirpath=folder,
            filename="best-{step:08d}",
            monitor=settings.monitor,
            mode=settings.mode,
            save_top_k=1,
            save_on_train_epoch_end=False,  # but where validation ends, in the middle of an epoch or at its end
            enable_version_counter=False,
        )
        self.folder, self.newest = folder, newest
        self._noted, self._named = False, ""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore no paths: the run may have been moved. The files know better."""
        self._named = Path(state_dict["best_model_path"]).name

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the best of an earlier start, which may be younger than the state that training resumes from."""
        super().on_train_start(trainer, pl_module)
        found = trainer.strategy.broadcast(self._find(trainer.global_step) if trainer.is_global_zero else None)
        if found is not None:
            path, score = found
            self.best_model_path = self.kth_best_model_path = path
            self.best_model_score = self.kth_value = score
            self.best_k_models = {path: score}

    def _find(self, step: int) -> tuple[str, torch.Tensor] | None:
        """Return the best on the disk and its score. On one rank, for all."""
        newest = self.folder / f"step={step:08d}.ckpt"
        if self._named == f"best-{newest.name}" and newest.is_file():  # killed before it had both its names
            linked_or_said(newest, self.folder / self._named)
        scores = {str(path): score_inside(path, self.state_key) for path in ours(self.folder, "best")}
        known = [(path, score) for path, score in scores.items() if score is not None]
        choose = min if self.mode == "min" else max
        found = choose(known, key=lambda item: float(item[1]), default=None)
        for path, _ in known:
            if found is not None and path != found[0]:  # killed before the last best was gone
                with suppress(OSError):  # the other ranks wait for the answer
                    Path(path).unlink()
        return found

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        path = Path(filepath)
        self.newest.as_best(path, lambda: self._delete_others(path))
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Delete nothing yet: the last best goes when the new one is there."""

    def _delete_others(self, best: Path) -> None:
        for path in ours(self.folder, "best"):
            if path != best:
                path.unlink(missing_ok=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor in trainer.callback_metrics or trainer.sanity_checking:
            super().on_validation_end(trainer, pl_module)
        elif not self._noted and trainer.is_global_zero:
            self._noted = True
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            print(
                f"note: checkpoint.monitor {self.monitor!r} is never logged (logged: {logged}), so no best checkpoint "
                "is kept; set --checkpoint.monitor to one of them"
            )
