"""A W&B logger goes on in one run."""

import errno
import os
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from src.engine.run import loggers
from src.engine.run.directory import Run
from src.engine.run.loggers import keep_wandb_run, run_loggers
from tests.commands import CPU, SMALL, fit, losses, train
from tests.small_task import SmallModule


class WandbLogger(CSVLogger):
    """Stands for Lightning's, which is known by its name, so that nothing of W&B is imported where nobody uses it."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return Run(str(tmp_path), "new")


def test_every_start_has_the_id_of_the_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start, in another process, finds the id in the run directory and resumes it."""
    keep_wandb_run(run, [WandbLogger(run.path)])
    first = os.environ["WANDB_RUN_ID"]
    monkeypatch.delenv("WANDB_RUN_ID")
    keep_wandb_run(run, [WandbLogger(run.path)])
    assert os.environ["WANDB_RUN_ID"] == first
    assert os.environ["WANDB_RESUME"] == "allow"


def test_both_starts_of_a_run_are_one_wandb_run(tmp_path: Path) -> None:
    """The real package, offline: a run that crashed and the start that continues it have one id there."""
    pytest.importorskip("wandb", reason="needs the extra: pip install -e '.[wandb]'")
    crash = [
        "--model",
        "template_tests.crash.CrashAtStep",
        "--checkpoint.monitor",
        "none",
        "--checkpoint.every_n_steps",
        "2",
    ]
    logger = ["--trainer.logger", "WandbLogger", "--trainer.logger.save_dir", str(tmp_path)]
    command = ["fit", *CPU, *crash, *logger, "--trainer.max_steps", "6", "--run", "both", "--model.crash_at"]
    assert train(tmp_path, *command, "5", check=False, WANDB_MODE="offline").returncode == 1
    train(tmp_path, *command, "-1", WANDB_MODE="offline")
    starts = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(starts) == 2
    assert {path.name.rsplit("-", 1)[1] for path in starts} == {(tmp_path / "both/wandb_id").read_text()}


def test_an_id_from_outside_is_the_runs_id(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep's agent chooses ids itself."""
    monkeypatch.setenv("WANDB_RUN_ID", "sweep-7")
    keep_wandb_run(run, [WandbLogger(run.path)])
    assert (run.path / "wandb_id").read_text() == "sweep-7"


def test_without_wandb_nothing_is_set(run: Run) -> None:
    """Other loggers leave the environment and the run directory as they are."""
    keep_wandb_run(run, [CSVLogger(run.path)])
    assert "WANDB_RUN_ID" not in os.environ
    assert list(run.path.iterdir()) == []


def test_only_rank_0_makes_an_id(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start at once would each write one, and read another's half."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    keep_wandb_run(run, [WandbLogger(run.path)])
    assert list(run.path.iterdir()) == []


class Raw(SmallModule):
    """A module that writes to TensorBoard by itself."""

    def on_train_batch_end(self, *args: object) -> None:
        self.logger.experiment.add_scalar("raw", 1.0, self.global_step)  # type: ignore[union-attr]


def steps(run: Path, name: str) -> list[int]:
    """The steps at which TensorBoard has a scalar, over all of a run's files."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars(name)]


def test_tensorboard_outlasts_a_full_disk(
    run_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a logged metric nor a module's own call ends the run; said once; and it continues when there is room."""
    write, refused = loggers.put, []

    def full_in_the_middle(path: Path, record: bytes) -> int:
        event = Event.FromString(record[12:-4])
        if event.step in (1, 2) and event.summary.value:
            refused.append(event.step)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, record)

    monkeypatch.setattr(loggers, "put", full_in_the_middle)
    run = fit(run_root, "full", *SMALL, "--model", "template_tests.engine.test_loggers.Raw")
    assert set(refused) == {1, 2}
    assert steps(run, "train/loss") == [0, 3]
    assert steps(run, "raw") == [3, 4]
    assert len(losses(run)) == 4
    assert capsys.readouterr().out.count("cannot be written (No space left on device)") == 1


def test_a_resumed_run_has_each_event_once(tmp_path: Path) -> None:
    """What an earlier start has logged after its last save is in TensorBoard's files, and not in what it shows."""
    for state, first in (("new", 0), ("continued", 4)):
        board, _ = run_loggers(Run(str(tmp_path), state, rows=first))
        for step in range(first, 6):
            board.log_metrics({"train/loss": step}, step)
        board.finalize("success")
    assert steps(tmp_path, "train/loss") == list(range(6))
