"""What every run is promised, each once, on a task of the tests' own: run this after any change of yours."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from src.checkpoint.compare import differences, outcome
from src.cli import main
from tests.commands import CPU, SMALL, TWO, cut_back, fit, losses, read_json, train, weights
from tests.small_task import SmallModule

# Five steps per epoch, of which each is saved; a validation in the middle of each epoch.
KEEP = ["--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99", "--model.dropout", "0.3", "--data.size", "40"]
RUN = [*SMALL, *KEEP, "--trainer.max_steps", "14", "--trainer.log_every_n_steps", "3", "--run", "run"]
BREAKS = ["--model", "tests.test_promises.Breaks", "--model.how"]


class Breaks(SmallModule):
    """SmallModule that breaks in the way `how` once `step` optimizer steps are done.

    Args:
        how: nan (the loss), raise, memory, stop (a SIGTERM as from Slurm), none
        step: the number of steps before

    """

    def __init__(self, how: str = "none", step: int = 3, dropout: float = 0.3) -> None:
        super().__init__(dropout=dropout)
        self.how, self.step = how, step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.how == "nan" and self.global_step >= self.step:
            return loss * float("nan")
        if self.global_step == self.step:
            if self.how == "raise":
                raise RuntimeError("this step breaks on purpose")
            if self.how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
        return loss


def test_a_killed_run_ends_as_if_it_had_not_been_killed(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an epoch, at its end, or after the last step: same weights, states and rows to the last bit."""
    assert main(["fit", *CPU, *RUN]) == 0
    for step in (3, 5, 14):
        root = run_root.parent / f"killed-{step}"
        copy = cut_back(run_root / "run", step, root)
        monkeypatch.setenv("RUN_ROOT", str(root))
        assert main(["fit", *CPU, *RUN]) == 0
        assert list(differences(outcome(copy), outcome(run_root / "run"))) == [], step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp_full_shard"])
def test_two_processes_end_as_if_they_had_not_been_killed(strategy: str, tmp_path: Path) -> None:
    """The same on two processes, under a whole and a sharded strategy."""
    command = ["fit", *TWO, *RUN, "--trainer.strategy", strategy]
    train(tmp_path / "whole", *command)
    copy = cut_back(tmp_path / "whole/run", 8, tmp_path / "killed")
    assert "continues from step 8" in train(tmp_path / "killed", *command).stdout
    assert list(differences(outcome(copy), outcome(tmp_path / "whole/run"))) == []


def test_processes_and_strategies_give_the_same_curve(run_root: Path, tmp_path: Path) -> None:
    """The global batch decides what is learned, however many processes share it in whatever way."""
    alone = losses(fit(run_root, "alone", *SMALL))
    assert len(alone) == 4
    for strategy in ("ddp", "fsdp_full_shard"):
        train(tmp_path / strategy, "fit", *TWO, *SMALL, "--run", "two", "--trainer.strategy", strategy)
        assert losses(tmp_path / strategy / "two") == pytest.approx(alone, abs=1e-5), strategy


def test_a_signal_saves_and_the_run_resumes(tmp_path: Path) -> None:
    """SIGTERM ends with exit code 85 and a checkpoint; the same command ends as a run that nobody stopped."""
    command = ["fit", *CPU, *RUN, *BREAKS]
    assert train(tmp_path / "stopped", *command, "stop", check=False).returncode == 85
    assert "continues from step 4" in train(tmp_path / "stopped", *command, "none").stdout
    train(tmp_path / "whole", *command, "none")
    assert list(differences(outcome(tmp_path / "stopped/run"), outcome(tmp_path / "whole/run"))) == []


def test_a_finished_run_is_left_alone(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again exits with 0 and changes no file."""
    run = fit(run_root, "done", *SMALL)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    fit(run_root, "done", *SMALL)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
    assert "is finished (step 4), nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model.widht", "8"], "widht"),
        (["--trainer.strategy", "fspd_full"], "fsdp_full_shard"),
        (["--trainer.precision", "bf17"], "bf16-mixed"),
        (["--global_batch_size", "7", "--trainer.devices", "2"], "7"),
        (["--micro_batch_size", "4", "--data.batch_size", "8"], "micro_batch_size"),
        (["--model.depth", "0"], "depth is 0"),
    ],
    ids=["key", "strategy", "precision", "remainder", "two batch sizes", "value of the model"],
)
def test_a_mistake_is_one_line(wrong: list[str], said: str, run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with exit code 2 and what would work, without a traceback, before a run directory is made."""
    assert main(["fit", *CPU, *SMALL, *wrong]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert said in error.strip().splitlines()[-1]
    assert not run_root.exists() or list(run_root.iterdir()) == []


@pytest.mark.usefixtures("run_root")
def test_an_error_of_the_module_has_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """What breaks in your own code ends with exit code 1 and the place where it broke."""
    assert main(["fit", *CPU, *RUN, *BREAKS, "raise"]) == 1
    error = capsys.readouterr().err
    assert "test_promises.py" in error
    assert "RuntimeError: this step breaks on purpose" in error


@pytest.mark.usefixtures("run_root")
def test_out_of_memory_says_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 71 and settings to paste that keep the global batch."""
    assert main(["fit", *CPU, *RUN, *BREAKS, "memory"]) == 71
    error = capsys.readouterr().err
    assert "each keeps the global batch of 8" in error
    assert "  --micro_batch_size 4\n" in error


def test_a_broken_run_stops_itself(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN in so many steps in a row ends with exit code 70, and the newest checkpoint is from before."""
    assert main(["fit", *CPU, *RUN, *BREAKS, "nan", "--breaker.steps", "3"]) == 70
    assert "breaker rule nonfinite" in capsys.readouterr().err
    run = run_root / "run"
    assert read_json(run / "summary.json")["exit_reason"] == "tripped"
    assert all(bool(weight.isfinite().all()) for weight in weights(run).values())
