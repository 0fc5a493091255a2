"""What is trained is counted, and what is not in hand at the end is said."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.cli import main
from src.engine.callbacks.counts import TrainingCounts
from src.engine.callbacks.global_batch import GlobalBatch
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.errors import AgreedError
from src.engine.resolve.batch import BatchPlan
from src.engine.run.directory import Run
from tests.commands import BORING, CPU, read_json
from tests.tiny import Line, loader, quiet_trainer

DATA = torch.linspace(0.1, 2, 16)[:, None]


class Half(LightningDataModule):
    """Gives its loader half of the batch size that it is given."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(self.trainer, DATA, self.batch_size // 2, train=True)


class Forwards(Half):
    """Hands all arguments on to its parent."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


HALF = ["--model", "tests.tiny.Line", "--data", "template_tests.engine.callbacks.test_counts.Half"]


class ByHand(Line):
    """Optimizes by itself; `steps` says with what."""

    automatic_optimization = False
    steps = "raw"

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers(use_pl_optimizer=self.steps == "lightning")
        optimizer.zero_grad()
        self.manual_backward(self.error(batch))
        if self.steps != "none":
            optimizer.step()


class Shorter(DataLoader):
    """Says that it has more batches than it gives."""

    def __len__(self) -> int:
        return super().__len__() + 3


class Parts:
    """Eight parts of two samples; it states no batch size."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(DATA.split(2))


@pytest.fixture
def counted(tmp_path: Path):
    """Trains an epoch with counts and checkpoints; returns the Trainer."""

    def run(module: Line, train: Any = None, plan: Any = None, asked: Any = None, val: Any = None, **settings: Any):
        newest = SaveNewest(tmp_path, CheckpointSettings())
        counts = TrainingCounts(Run(str(tmp_path), "new"), plan, asked)
        callbacks = [counts, GlobalBatch(), newest, SaveBest(tmp_path, CheckpointSettings(), newest)]
        trainer = quiet_trainer(callbacks=callbacks, **{"max_epochs": 1, "num_sanity_val_steps": 0} | settings)
        trainer.fit(module, loader(trainer, DATA, 4, train=True) if train is None else train, val)
        return trainer

    return run


# --- the batch ---


@pytest.mark.parametrize("batch", [["--global_batch_size", "8"], ["--micro_batch_size", "8"]])
def test_a_batch_that_the_data_does_not_give_is_refused(
    batch: list[str], run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An explicit batch is trained or refused with both numbers, in one line and with exit code 2."""
    assert main(["fit", *CPU, *HALF, *batch]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "_batch_size 8 cannot be enforced: the training loader gives 4 samples a pass, not 8" in line


def test_the_batch_that_is_trained_is_in_the_manifest(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody asked for a batch the one of the loader is said and kept, and the run can be continued."""
    named = ["--run", "half", "--trainer.accumulate_grad_batches", "2"]
    assert main(["fit", *CPU, *HALF, *named]) == 0
    assert "the global batch is 8 = 4 over 1 device(s) × 2 accumulation" in capsys.readouterr().out
    manifest = read_json(run_root / "half/manifest.json")
    assert [manifest[f"{name}_batch_size"] for name in ("global", "micro", "planned")] == [8, 4, 16]
    (run_root / "half/DONE").unlink()
    assert main(["fit", *CPU, *HALF, *named, "--trainer.max_epochs", "2"]) == 0


def test_data_that_takes_no_batch_size_is_refused_another(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before there is a run folder."""
    assert main(["fit", *CPU, *BORING, "--global_batch_size", "4"]) == 2
    assert "global_batch_size 4 cannot be enforced: BoringModel brings its own loaders" in capsys.readouterr().err
    assert not run_root.exists()


@pytest.mark.parametrize("plan", [BatchPlan(8, 1, 1), None])
def test_a_guess_refuses_nothing_and_is_kept(plan, counted, tmp_path, capsys):
    """A loader that states no batch size may have the samples in another dimension: a note, and the counted number."""
    counted(Line(), Parts(), plan, plan and "global_batch_size 8", accumulate_grad_batches=2)
    assert capsys.readouterr().out.count("as far as the first batch tells, the training loader gives 2 samples") == 1
    manifest = read_json(tmp_path / "manifest.json")
    assert [manifest[f"{name}_batch_size"] for name in ("global", "micro", "planned")] == [4, 2, plan and 8]


@pytest.mark.parametrize("plan", [BatchPlan(4, 1, 1), None])
def test_a_batch_as_planned_is_not_worth_a_word(plan, counted, tmp_path, capsys):
    """The manifest gets what the loader states only where it is something else."""
    counted(Line(), plan=plan, asked=None)
    assert ("gives 4 samples a pass" in capsys.readouterr().out) == (plan is None)
    assert (tmp_path / "manifest.json").exists() == (plan is None)


def test_a_data_module_with_kwargs_takes_the_batch(run_root: Path) -> None:
    """The batch size goes through **kwargs to the parent that names it."""
    data = ["--data", "template_tests.engine.callbacks.test_counts.Forwards"]
    assert main(["fit", *CPU, *HALF[:2], *data, "--run", "a"]) == 0
    assert main(["fit", *CPU, *HALF[:2], *data, "--data.batch_size", "4", "--run", "b"]) == 0
    sizes = [read_json(run_root / name / "manifest.json")["planned_batch_size"] for name in "ab"]
    assert sizes == [8, 4]


@pytest.mark.parametrize("accumulation", [2, 4])
def test_several_loaders_are_weighed_like_one(accumulation, capsys):
    """The weights after an odd last batch of two loaders are the same with and without accumulation; no note is due."""

    class Both(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.error(torch.cat([batch["a"], batch["b"]]))

    def trained(accumulation: int) -> float:
        trainer = quiet_trainer(callbacks=[GlobalBatch()], max_epochs=2, accumulate_grad_batches=accumulation)
        parts = [loader(trainer, DATA[:13] * times, 8 // accumulation, train=True) for times in (1, 2)]
        module = Both(start=0.5)
        trainer.fit(module, CombinedLoader(dict(zip("ab", parts, strict=True)), "max_size_cycle"))
        return module.weight.item()

    assert trained(accumulation) == pytest.approx(trained(1), abs=1e-6)
    assert "note: the data" not in capsys.readouterr().out


# --- steps and validations ---


@pytest.mark.parametrize("steps", ["raw", "lightning"])
def test_steps_of_raw_optimizers_count_once(steps, counted, tmp_path):
    """They are counted, saved and limited by max_steps like those that go through Lightning."""
    module = ByHand()
    module.steps = steps
    assert counted(module, max_steps=3, max_epochs=None).global_step == 3
    assert (tmp_path / "step=00000003.ckpt").exists()


def test_training_without_a_step_is_no_finished_run(counted):
    """It ends as bad input: nothing is saved."""
    module = ByHand()
    module.steps = "none"
    with pytest.raises(AgreedError, match="4 batches ran and no optimizer step was counted"):
        counted(module)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
def test_a_module_without_optimizers_is_no_finished_run(counted, monkeypatch):
    """Steps of an optimizer that configure_optimizers does not give are nobody's to count."""
    monkeypatch.setattr(ByHand, "configure_optimizers", lambda self: None)
    monkeypatch.setattr(ByHand, "training_step", lambda self, batch, batch_idx: None)
    with pytest.raises(AgreedError, match="step the optimizers that configure_optimizers gives"):
        counted(ByHand())


@pytest.mark.filterwarnings("ignore:Total length of .* is zero")
def test_data_without_a_batch_is_no_finished_run(counted):
    """Lightning skips the training and ends well."""
    with pytest.raises(AgreedError, match="the training loader is empty"):
        counted(Line(), DataLoader(cast(Dataset, DATA[:0])))


def test_no_batch_is_what_was_asked_for(counted):
    """limit_train_batches 0 trains nothing on purpose."""
    assert counted(Line(), limit_train_batches=0).global_step == 0


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
def test_data_that_is_shorter_than_its_length_is_said(counted, capsys):
    """With what follows from it: the validation at the end of the epoch does not come."""
    counted(Line(), Shorter(cast(Dataset, DATA), 4), val=DataLoader(cast(Dataset, DATA), 4))
    said = capsys.readouterr().out
    assert "warning: the training data ended after 4 batches, and its length says 7" in said
    assert "warning: nothing was validated (none was due in 4 batches)" in said


def test_a_training_that_ends_before_its_validation_says_so(counted, capsys):
    """At its end."""
    counted(Line(), val=loader(None, DATA, 4, train=False), max_steps=2)
    assert "warning: nothing was validated (none was due in 2 batches)" in capsys.readouterr().out


def test_a_monitor_that_was_never_logged_is_said_at_the_end(counted, monkeypatch, capsys):
    """Nobody reads what stood at the first validation ten hours ago."""
    monkeypatch.setattr(Line, "validation_step", lambda self, batch, batch_idx: None)
    counted(Line(), val=loader(None, DATA, 4, train=False))
    assert capsys.readouterr().out.count("warning: no best checkpoint is kept: checkpoint.monitor 'val/loss'") == 1


def test_a_whole_training_has_no_warning(counted, capsys):
    """One that trained, validated and saved."""
    counted(Line(), val=loader(None, DATA, 4, train=False))
    assert "warning" not in capsys.readouterr().out
