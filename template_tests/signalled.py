"""A module that gets a signal at chosen places of its training."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MeanMetric

from tests.small_task import SmallModule


class Signalled(SmallModule):
    """SmallModule that signals its own process, once for each place.

    Validation draws random numbers, and adds up a metric of its own.

    Args:
        places: `fit 5 0`: in the first pass of the step after 5 steps; `validate 4 1`: in the second batch of the
            validation after step 4
        folder: where it remembers what it has done
        number: the signal
        rank: the only rank that gets it; -1 all
        plateau: whether the rate falls with the validation's loss
        split: rank 0 gets SIGUSR1 at once, the others `number` some steps later
        slow: seconds for each batch of a validation

    """

    def __init__(
        self,
        places: list[str],
        folder: str,
        number: int = signal.SIGTERM,
        rank: int = -1,
        plateau: bool = False,
        split: bool = False,
        slow: float = 0.0,
        **settings: float,
    ) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.places, self.folder, self.number, self.rank, self.plateau = places, Path(folder), number, rank, plateau
        self.split, self.slow = split, slow
        self.own = MeanMetric()
        self.passes = 0

    def _at(self, place: str) -> None:
        marker = self.folder / f"{place} {self.global_rank}".replace(" ", "-")
        if place in self.places and self.rank in (-1, self.global_rank) and not marker.exists():
            marker.touch()
            self._signal()

    def _signal(self) -> None:
        if self.split and self.global_rank:
            threading.Timer(0.02, os.kill, (os.getpid(), self.number)).start()
        else:
            os.kill(os.getpid(), signal.SIGUSR1 if self.split else self.number)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.passes = batch_idx % self.trainer.accumulate_grad_batches

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._at(f"fit {self.global_step} {self.passes}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self._at(f"validate {self.global_step} {batch_idx}")
        time.sleep(self.slow)
        super().validation_step(batch, batch_idx)
        self.own.update(torch.rand(()) + batch.float().mean())
        self.log("val/own", self.own, on_epoch=True)

    def configure_optimizers(self) -> Any:
        found: Any = super().configure_optimizers()
        if self.plateau:
            schedule = ReduceLROnPlateau(found["optimizer"], patience=0, threshold=0.2)
            each = {"scheduler": schedule, "monitor": "val/loss", "interval": "step", "frequency": 2}
            found["lr_scheduler"] = each
        return found


class ByItself(Signalled):
    """Signalled that makes its optimizer's steps itself."""

    def __init__(self, places: list[str], folder: str, **settings: float) -> None:
        super().__init__(places, folder, **settings)  # type: ignore[arg-type]
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss
