"""A module that breaks at a chosen step."""

from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor


class CrashAtStep(BoringModel):
    """BoringModel that raises once `crash_at` optimizer steps are done; -1 never."""

    def __init__(self, crash_at: int = -1) -> None:
        super().__init__()
        self.crash_at = crash_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self.crash_at:
            raise RuntimeError("this step breaks on purpose")
        return super().training_step(batch, batch_idx)["loss"]  # type: ignore[index]
