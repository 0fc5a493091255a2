"""Modules that break at a chosen step."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
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


class FullDisk(SmallModule):
    """SmallModule on whose rank 1 no file gets larger than 1 KB once `first` optimizer steps are done; -1 never."""

    def __init__(self, first: int = -1, **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.first = first

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.global_step == self.first and self.global_rank == 1:
            files: Any = self.trainer.strategy.checkpoint_io
            files.wait()  # what is being written in the background has still room
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))


class FlatRate(SmallModule):
    """SmallModule whose learning rate never changes."""

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class BadFromStep(SmallModule):
    """SmallModule whose loss is NaN in some optimizer steps, and whose weights stay as they are in those.

    Args:
        first: the first of them, from 1; -1 never
        last: the last of them
        rank: the only rank whose loss it is; -1 all

    """

    def __init__(self, first: int = -1, last: int = -1, rank: int = -1, **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.first, self.last, self.rank = first, last, rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        bad = self.first <= self.global_step + 1 <= self.last and self.rank in (-1, self.global_rank)
        return super().training_step(batch, batch_idx) * (float("nan") if bad else 1.0)

    def on_before_optimizer_step(self, optimizer: object) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()


class Cramped(SmallModule):
    """SmallModule on a device that is full as soon as a batch has more than `most` samples.

    Args:
        most: samples that it takes
        rank: the only rank whose device is so small; -1 all
        command: the step in which it is: fit or test

    """

    def __init__(self, most: int = 4, rank: int = -1, command: str = "fit", **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.most, self.rank, self.command = most, rank, command

    def _take(self, batch: Tensor, command: str) -> None:
        if len(batch) > self.most and self.rank in (-1, self.global_rank) and command == self.command:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._take(batch, "fit")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._take(batch, "test")
        super().test_step(batch, batch_idx)
