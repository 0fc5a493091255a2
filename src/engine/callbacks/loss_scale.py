"""Count the steps that an fp16 loss scaler skips in silence."""

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from src.engine.callbacks.log_interval import row_is_due, write_row
from src.engine.resolve.precision import current_scale


class LossScale(Callback):
    """Logs fp16/scale and fp16/skipped_steps (since the run began) where the precision has a loss scaler.

    A scaler that meets an inf or NaN gradient skips the step and halves its scale. The comparison stays on the device:
    no synchronisation but the one per log interval.
    """

    def __init__(self) -> None:
        self.skipped: Tensor | float = 0.0
        self._before: Tensor | None = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        self._compare(scale := current_scale(trainer))  # with what it was before another optimizer's step
        self._before = None if scale is None else scale.clone()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        scale, stepped = current_scale(trainer), self._before is not None
        self._compare(scale)
        self._before = None
        if scale is not None and stepped and row_is_due(trainer):
            write_row(trainer, {"fp16/scale": float(scale), "fp16/skipped_steps": float(self.skipped)})

    def _compare(self, scale: Tensor | None) -> None:
        if scale is not None and self._before is not None:
            self.skipped = self.skipped + (scale < self._before).float()

    def state_dict(self) -> dict[str, float]:
        return {"skipped": float(self.skipped)}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.skipped = state_dict["skipped"]
