"""Lightning's own callbacks in a run that is resumed: docs/callbacks.md has the same table."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch import callbacks as shipped
from torch import Tensor, nn

from src.engine.callbacks.frozen import Frozen
from src.engine.checkpoint.before_training import NOT_RESUMABLE
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.write import WholeFiles
from src.engine.errors import AgreedError
from src.engine.trainer import ProjectTrainer
from template_tests.finetuned import Tuned, Unfreezing
from tests.commands import ROOT
from tests.small_task import SmallData
from tests.tiny import Rows

REFUSED: dict[str, dict[str, Any]] = {
    "BatchSizeFinder": {},
    "GradientAccumulationScheduler": {"scheduling": {1: 2}},
    "LearningRateFinder": {},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.2},
    "SpikeDetection": {},
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1},
}
RESUMED: dict[str, dict[str, Any]] = {
    "BackboneFinetuning": {"unfreeze_backbone_at_epoch": 1, "should_align": False},
    "BaseFinetuning": {},
    "DeviceStatsMonitor": {"cpu_stats": False},
    "EarlyStopping": {"monitor": "val/loss", "patience": 1, "min_delta": 0.3},
    "EMAWeightAveraging": {"decay": 0.8, "update_starting_at_step": 3},
    "LambdaCallback": {},
    "LearningRateMonitor": {"logging_interval": "step"},
    "ModelCheckpoint": {"monitor": "val/loss", "save_top_k": 2},
    "ModelSummary": {},
    "OnExceptionCheckpoint": {},
    "Timer": {"duration": "00:01:00:00"},
    "TQDMProgressBar": {},
    "WeightAveraging": {},
}
# Bases that do nothing by themselves, displays that need another package, and a report that counts from each start.
UNTRIED = {"BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"}
UNTRIED |= {"RichModelSummary", "RichProgressBar", "ThroughputMonitor"}


class Module(Tuned):
    """Has what the callbacks ask for: a backbone, and dropout, which a wrong position would change."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)

    @property
    def backbone(self) -> nn.Module:
        return self.model.blocks

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluate(batch, "val")


class KillAt(Callback):
    """Ends the training in the middle of a step, as a crash does."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("killed")


def callback(name: str, folder: Path) -> Callback:
    if name == "BaseFinetuning":
        return Unfreezing()
    settings = (REFUSED | RESUMED)[name]
    if name in ("ModelCheckpoint", "OnExceptionCheckpoint"):
        settings = settings | {"dirpath": folder / "theirs"}
    return getattr(shipped, name)(**settings)


def train(name: str, folder: Path, kill: int | None = None, resume: Path | None = None) -> tuple[Any, Rows]:
    """Three epochs of six steps, saved every fourth step; return what a checkpoint of the end holds and the rows."""
    torch.manual_seed(0)
    settings = CheckpointSettings(every_n_steps=4, keep=9, asynchronous=False)
    call, logger = callback(name, folder), Rows()
    trainer = ProjectTrainer(
        accelerator="cpu",
        precision="32-true",
        max_epochs=3,
        log_every_n_steps=1,
        logger=logger,
        default_root_dir=folder,
        plugins=[WholeFiles()],
        enable_checkpointing=isinstance(call, shipped.Checkpoint),
        enable_progress_bar=isinstance(call, shipped.ProgressBar),
        enable_model_summary=isinstance(call, shipped.ModelSummary),
        callbacks=[call, KillAt(kill)],
    )
    trainer.callbacks += [Frozen(), SaveNewest(folder, settings)]  # type: ignore[attr-defined]
    trainer.fit(Module(), SmallData(size=24, val_size=8, num_workers=0), ckpt_path=resume, weights_only=True)
    newest = max(folder.glob("step=*.ckpt"))
    state = torch.load(newest, weights_only=True)
    return {key: state[key] for key in ("state_dict", "optimizer_states", "global_step")}, logger


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kill", [6, 11])
@pytest.mark.parametrize("name", RESUMED)
def test_a_callback_of_lightnings_resumes_exactly(name: str, kill: int, tmp_path: Path) -> None:
    """A run that is killed and resumed ends in the weights, optimizer state and rows of an undisturbed one."""
    whole, rows = train(name, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        train(name, tmp_path / "killed", kill)
    saved = max((tmp_path / "killed").glob("step=*.ckpt"))
    resumed, later = train(name, tmp_path / "killed", resume=saved)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    unlike = ("time", "uptime", "device", "DeviceStats", "batches_per_sec", "samples_per_sec")

    def comparable(logged: Rows) -> list[Any]:
        return [
            (step, {key: value for key, value in row.items() if not any(part in key for part in unlike)})
            for step, row in logged.rows
        ]

    expected = [row for row in comparable(rows) if row[1]]
    found = [row for row in comparable(later) if row[1]]
    assert found
    assert found == expected[-len(found) :]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_does_not_resume_exactly_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    """One line says what, why and what to do, before the first step; a run that keeps no checkpoints may use it."""
    with pytest.raises(AgreedError, match=f"^trainer.callbacks has {name}: .*; ") as refused:
        train(name, tmp_path)
    assert "\n" not in str(refused.value)
    assert "--trainer.enable_checkpointing false" in str(refused.value)


def test_the_table_names_every_callback_that_lightning_ships() -> None:
    """Each public one is in this file and, with what becomes of it, in the docs."""
    table = dict(
        re.findall(r"^\| `(\w+)` \| (exact|refused|no effect)", (ROOT / "docs/callbacks.md").read_text(), re.M)
    )
    assert table.keys() == set(shipped.__all__)
    assert {name for name, word in table.items() if word == "refused"} == REFUSED.keys()
    assert {kind.__name__ for kind in NOT_RESUMABLE} == REFUSED.keys()
    assert RESUMED.keys() | REFUSED.keys() | UNTRIED == set(shipped.__all__)
