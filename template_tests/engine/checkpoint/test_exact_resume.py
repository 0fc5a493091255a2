"""A run that goes on from any of its checkpoints ends bit for bit like the run that was never stopped."""

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from src.checkpoint.compare import differences
from src.engine.callbacks.global_batch import GlobalBatch
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from tests.tiny import Line, Rows, loader, loaders, quiet_trainer

EVERYTHING = {"random", "lr", "val/loss", "train/mean", "train/metric", "train/loss"}


class Augmented(Dataset):
    """Twenty-two samples, each with noise that is drawn when it is read."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), index / 22) + 0.01 * torch.randn(3) + 0.01 * random.random() + 0.01 * np.random.rand()


class Everything(Line):
    """Draws from every generator, logs step, epoch and torchmetrics means, drops units, steps a schedule per epoch."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))
        self.metric, self.schedule = MeanMetric(), schedule

    def on_train_epoch_start(self) -> None:
        self.log("train/start", float(self.current_epoch), reduce_fx="sum")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        loss = (self.net(batch) - 1).square().mean() * (1 + 0.1 * drawn)
        self.log("random", drawn)
        self.log("train/mean", loss, on_step=False, on_epoch=True, batch_size=len(batch))
        self.log("train/max", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.metric(loss.detach())
        self.log("train/metric", self.metric, on_step=False, on_epoch=True)
        if batch_idx in (0, 2, 5):
            self.log("train/some", loss, on_step=True, on_epoch=True)
            self.log("train/seldom", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch).square().mean() + 0.1 * torch.rand(()), batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), 0.01)
        schedule: Any
        if self.schedule == "whole":
            steps = int(self.trainer.estimated_stepping_batches)  # Lightning makes the loaders now
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.schedule == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def fit(folder: Path, seed: int, resume: Path | None, workers: int, schedule: str, **settings: Any) -> tuple[Any, Rows]:
    """Train; returns all that a checkpoint of the end would hold, and the rows."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    rows, loss = Rows(), GlobalBatch()
    module = Everything(schedule)
    saver = SaveNewest(folder, CheckpointSettings(every_n_steps=1, keep=99), {"loss": loss})
    trainer = quiet_trainer(callbacks=[loss, saver], logger=rows, **settings)
    train = loader(trainer, Augmented(), 2, train=True, num_workers=workers)
    trainer.fit(module, train, loader(trainer, Augmented(), 4, train=False), ckpt_path=resume, weights_only=True)
    state = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
    }
    return state, rows


def merged(rows: Rows) -> dict[int, dict[str, float]]:
    """One dictionary per step."""
    found: dict[int, dict[str, float]] = {}
    for step, values in rows.rows:
        found.setdefault(step or 0, {}).update(values)
    return found


@pytest.mark.parametrize(
    ("workers", "schedule", "settings"),
    [
        pytest.param(
            0, "epoch", {"max_epochs": 3, "val_check_interval": 4, "log_every_n_steps": 3}, id="validation-inside"
        ),
        pytest.param(0, "plateau", {"max_epochs": 3}, id="plateau"),
        pytest.param(
            0,
            "plateau",
            {"max_epochs": 3, "val_check_interval": 4, "check_val_every_n_epoch": None},
            id="plateau-after-validation",
        ),
        pytest.param(0, "whole", {"max_epochs": 2, "val_check_interval": 4}, id="schedule-of-the-whole"),
        pytest.param(0, "epoch", {"max_steps": 26, "limit_train_batches": 9}, id="steps-and-a-limit"),
        pytest.param(
            0,
            "epoch",
            {"max_epochs": 3, "accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "log_every_n_steps": 2},
            id="accumulation",
        ),
        pytest.param(
            0,
            "epoch",
            {"max_steps": 30, "val_check_interval": 7, "check_val_every_n_epoch": None, "log_every_n_steps": 4},
            id="validation-over-epochs",
        ),
        pytest.param(2, "epoch", {"max_epochs": 2, "val_check_interval": 4}, id="workers"),
    ],
)
def test_every_checkpoint_leads_to_the_same_end(
    workers: int, schedule: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, optimizer, schedule, counters and every row are those of the uninterrupted run."""
    end, rows = fit(tmp_path / "whole", 1, None, workers, schedule, **settings)
    expected = merged(rows)
    assert {key for row in expected.values() for key in row} >= EVERYTHING - {"lr"}
    checkpoints = sorted((tmp_path / "whole").glob("step=*.ckpt"))
    assert len(checkpoints) == end["step"]
    for path in checkpoints[:-1] if workers == 0 else checkpoints[2:-1:4]:
        step = int(path.stem.removeprefix("step="))
        resumed, later = fit(tmp_path / path.stem, 99, path, workers, schedule, **settings)
        assert list(differences(end, resumed)) == [], path.stem
        wanted = {index: row for index, row in expected.items() if index >= step}
        assert merged(later) == wanted, path.stem


@pytest.mark.parametrize("out_of_time", [False, True])
def test_a_wish_to_stop_goes_with_the_state(out_of_time: bool, tmp_path: Path) -> None:
    """A run that is to stop at its minimum does so also if killed before it; not where a Timer ran out."""

    class Asks(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 2

    def train(name: str, asks: list[Callback], resume: Path | None) -> int:
        saver = SaveNewest(tmp_path / name, CheckpointSettings(every_n_steps=1, keep=99))
        trainer = quiet_trainer(callbacks=[*asks, saver], min_steps=5, max_steps=20, limit_val_batches=0)
        trainer.fit(Line(), *loaders(trainer, torch.ones(8, 1), 1), ckpt_path=resume, weights_only=True)
        return trainer.global_step

    timer = Timer(timedelta(seconds=1000))
    timer.time_remaining = lambda stage="train": 0.0  # type: ignore[method-assign]
    assert train("whole", [Asks(), *([timer] if out_of_time else [])], None) == 8  # the first epoch's end
    assert train(
        "again", [Timer(timedelta(seconds=1000))] if out_of_time else [], tmp_path / "whole/step=00000003.ckpt"
    ) == (20 if out_of_time else 8)


def test_an_epoch_that_has_no_batch_yet_begins_again(tmp_path: Path) -> None:
    """What a module sets up in on_train_epoch_start is there, where training goes on from the end of an epoch."""

    class Collects(Line):
        def on_train_epoch_start(self) -> None:
            self.outputs: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.outputs.append(loss := self.error(batch))
            return loss

    def train(name: str, resume: Path | None) -> float:
        saver = SaveNewest(tmp_path / name, CheckpointSettings(every_epoch=True, keep=99))
        trainer, module = quiet_trainer(callbacks=[saver], max_epochs=3, limit_val_batches=0), Collects()
        trainer.fit(module, *loaders(trainer, torch.ones(4, 1), 1), ckpt_path=resume, weights_only=True)
        assert len(module.outputs) == 4
        return module.weight.item()

    whole = train("whole", None)
    assert train("again", tmp_path / "whole/step=00000004.ckpt") == whole


class Placed:
    """Four batches, in a loader of somebody else's that goes on behind those it has given."""

    def __init__(self) -> None:
        self.given, self.loaded = 0, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        self.given, self.loaded = self.loaded, 0
        while self.given < 4:
            self.given += 1
            yield torch.ones(1, 1)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["given"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("early", [False, True])
def test_an_epoch_does_not_begin_with_the_sums_of_the_one_before(tmp_path: Path, early: bool) -> None:
    """A ModelCheckpoint of the user's saves at an epoch's end, when its sums are there: the next one's are its own.

    And its samples are, also where the schedule has the loaders made before the checkpoint is read.
    """

    class Counts(Line):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.metric(float(self.global_step))
            self.log("train/metric", self.metric, on_step=False, on_epoch=True)
            self.log("train/mean", float(self.global_step), on_step=False, on_epoch=True)
            return self.error(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            assert not early or self.trainer.estimated_stepping_batches == 12
            return super().configure_optimizers()

    def train(name: str, resume: Path | None) -> Rows:
        user = ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        saver = SaveNewest(tmp_path / "ours", CheckpointSettings(every_n_steps=99))
        rows = Rows()
        trainer = quiet_trainer(callbacks=[user, saver], max_epochs=3, limit_val_batches=0, logger=rows)
        data = Placed() if early else loader(trainer, torch.ones(4, 1), 1, train=True)
        trainer.fit(Counts(), data, ckpt_path=resume, weights_only=True)
        return rows

    train("whole", None)
    rows = train("again", tmp_path / "whole/epoch=0.ckpt")
    for name in ("train/mean", "train/metric"):
        assert rows.curve(name) == {7: 5.5, 11: 9.5}
