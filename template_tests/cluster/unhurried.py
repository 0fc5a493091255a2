"""A training that leaves time to be interrupted, on a task that shows any step made twice, left out, or otherwise."""

import time
from pathlib import Path

from torch import Tensor

from tests.small_task import SmallModule


class Unhurried(SmallModule):
    """SmallModule with dropout, which waits before each step until `go` is there.

    Args:
        folder: where to look for `go`
        seconds: to wait

    """

    def __init__(self, folder: str, seconds: float = 0.1, dropout: float = 0.3, **settings: float) -> None:
        super().__init__(dropout=dropout, **settings)  # type: ignore[arg-type]
        self.go, self.seconds = Path(folder, "go"), seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.go.exists():
            time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)
