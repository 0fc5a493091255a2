"""Modules that break at a chosen step."""

import os
import signal
from pathlib import Path

from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from tests.small_task import SmallModule


class CrashAtStep(BoringModel):
    """BoringModel that raises once `crash_at` optimizer steps are done; -1 never."""

    def __init__(self, crash_at: int = -1) -> None:
        super().__init__()
        self.crash_at = crash_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self.crash_at:
            raise RuntimeError("this step breaks on purpose")
        return super().training_step(batch, batch_idx)["loss"]  # type: ignore[index]


class KilledAtStep(SmallModule):
    """SmallModule whose process gets SIGKILL, once for each marker, before the first pass behind a step."""

    def __init__(self, markers: dict[int, str], **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.markers = {step: Path(path) for step, path in markers.items()}

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        marker = self.markers.get(self.global_step)
        if marker and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
