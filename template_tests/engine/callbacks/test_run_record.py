import json
from pathlib import Path

import pytest
import torch
from lightning import Callback

from src.engine.callbacks import run_record
from src.engine.callbacks.run_record import RunRecord
from src.engine.callbacks.throughput import Throughput
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.errors import UserError
from src.engine.run.directory import Run
from tests.tiny import Line, loaders, quiet_trainer

AGAIN = "python -m src.cli fit --run mine"


@pytest.fixture
def run(tmp_path) -> Run:
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    return Run(str(tmp_path / "mine"), "new")


@pytest.fixture
def fit(run, rows):
    """Trains 4 steps in the run directory; returns the callback and the trainer."""

    def train(module=None, world_size=1, checkpoints=False, more=(), **settings):
        speed = Throughput()
        block = [("run", run.folder), ("global batch", "2 = 2 micro")]
        facts = {"task": "line", "precision": "32-true", "world_size": world_size}
        record = RunRecord(run, facts, block, AGAIN, speed)
        callbacks = [record, speed, *more]
        if checkpoints:
            chosen = CheckpointSettings(every_n_steps=2)
            newest = SaveNewest(run.path / "checkpoints", chosen)
            callbacks += [newest, SaveBest(run.path / "checkpoints", chosen, newest)]
        trainer = quiet_trainer(callbacks=callbacks, logger=[rows], max_steps=4, **settings)
        trainer.fit(module or Line(), *loaders(trainer, torch.ones(8, 1), 2))
        return record, trainer

    return train


def summary(run: Run) -> dict:
    return json.loads((run.path / "summary.json").read_text())


def test_the_start_block_is_printed_before_training(fit, capsys):
    """Each line of the block stands on stdout, names in one column, before the first step."""
    said = []

    class Asking(Line):
        def training_step(self, batch, batch_idx):
            said.append(capsys.readouterr().out)
            return super().training_step(batch, batch_idx)

    fit(Asking())
    lines = said[0].splitlines()
    assert lines[0].startswith("run           ")
    assert lines[1] == "global batch  2 = 2 micro"


def test_the_manifest_says_how_it_was_started(fit, run):
    """The manifest has the facts, the world, the card of each process and the command that goes on."""
    fit()
    manifest = run.read_json("manifest.json")
    expected = {"task": "line", "precision": "32-true", "world_size": 1, "step": 0, "command": AGAIN, "cards": ["CPU"]}
    assert expected.items() <= manifest.items()
    assert manifest["earlier_starts"] == []


def test_every_start_stays_in_the_manifest(fit, run):
    """Starting again keeps when, where, with which code and from which step the run was started before."""
    fit()
    first = run.read_json("manifest.json")
    run.step = 4
    fit()
    run.step = 9
    fit()
    manifest = run.read_json("manifest.json")
    assert [start["step"] for start in manifest["earlier_starts"]] == [0, 4]
    assert manifest["step"] == 9
    keys = {"started", "host", "commit", "step", "command"}
    assert manifest["earlier_starts"][0] == {key: first[key] for key in keys}


def test_the_summary_is_written_at_the_start_and_with_each_save(fit, run):
    """A restart finds in it what it finds in the checkpoints; between two saves the disk is left alone."""
    seen = []

    class Reading(Line):
        def training_step(self, batch, batch_idx):
            seen.append((summary(run)["exit_reason"], summary(run)["last_step"]))
            return super().training_step(batch, batch_idx)

    fit(Reading(), checkpoints=True)
    assert seen == [("running", step) for step in (0, 0, 2, 2)]


def test_a_save_on_the_way_out_leaves_the_reason(fit, run):
    """Whoever still saves when training has raised does not turn a crash into a run that goes on."""

    class Saves(Callback):
        def on_exception(self, trainer, pl_module, exception):
            trainer.save_checkpoint(run.path / "late.ckpt")

    class Breaking(Line):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        fit(Breaking(), more=[Saves()])
    assert summary(run)["exit_reason"] == "crashed"


def test_the_summary_says_how_it_ended(fit, run):
    """A finished run's summary has its step, its best and newest checkpoint, speed, memory and the command."""
    record, trainer = fit(checkpoints=True, val_check_interval=2)
    record.write(trainer, "finished")
    found = summary(run)
    assert (found["exit_reason"], found["error"], found["last_step"]) == ("finished", None, 4)
    assert found["continue_command"] == AGAIN
    assert Path(found["last_checkpoint"]).name == "step=00000004.ckpt"
    assert found["best"]["metric"] == "val/loss"
    assert Path(found["best"]["checkpoint"]).name == "best-step=00000004.ckpt"
    assert found["best"]["value"] == pytest.approx(trainer.callback_metrics["val/loss"].item())
    assert found["samples_per_sec"] > 0
    assert found["peak_memory_gib"] > 0


def test_a_best_that_is_not_there_is_not_named(fit, run):
    """Where its save has failed, the summary names no best rather than a file that nobody finds."""
    record, trainer = fit(checkpoints=True, val_check_interval=2)
    (run.path / "checkpoints/best-step=00000004.ckpt").unlink()
    record.write(trainer, "finished")
    assert summary(run)["best"] is None


def test_a_disk_that_refuses_the_summary_ends_no_training(fit, run, monkeypatch, capsys):
    """One line says so, and the run ends as it would have."""

    class Full(Line):
        def on_train_batch_start(self, batch, batch_idx):
            def refuse(*_):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(Run, "write_json", refuse)

    _, trainer = fit(Full(), checkpoints=True)
    assert trainer.global_step == 4
    assert "summary.json cannot be written (No space left on device)" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", '{"wall', "[]"])
def test_a_torn_summary_stops_no_start(fit, run, content):
    """What a power cut has left of the summary and the manifest counts as nothing, and they are written anew."""
    for name in ("summary.json", "manifest.json"):
        (run.path / name).write_text(content)
    fit()
    assert summary(run)["exit_reason"] == "running"
    assert run.read_json("manifest.json")["earlier_starts"] == []


def test_wall_time_adds_up_over_starts(fit, run):
    """A continued run's time includes what earlier starts took."""
    run.write_json("summary.json", {"wall_time_seconds": 5000.0})
    fit()
    assert summary(run)["wall_time_seconds"] >= 5000


def test_time_that_was_lost_is_no_useful_time(fit, run):
    """Useful is what led to the current state, by the checkpoint, not by the summary of a start that went further."""
    run.write_json("summary.json", {"useful_seconds": 990.0})
    record, trainer = fit()
    record.load_state_dict({"useful_seconds": 550.0})
    record.write(trainer, "running")
    assert 550 <= summary(run)["useful_seconds"] < 850
    assert record.state_dict()["useful_seconds"] >= 550


@pytest.mark.parametrize(
    ("limits", "total"),
    [
        ({"max_steps": 4}, 4),
        ({"max_steps": -1, "max_epochs": 2}, 8),
        ({"max_steps": -1, "max_epochs": 2, "accumulate_grad_batches": 3}, 4),
        ({"max_steps": 3, "max_epochs": 2}, 3),
        ({"max_steps": 9, "max_epochs": 2}, 8),
        ({"max_steps": -1, "max_epochs": -1, "max_time": {"seconds": 1}}, None),
    ],
)
def test_the_summary_says_how_many_steps_there_will_be(limits, total):
    """Whichever limit comes first; a run that only time limits has no number."""
    trainer = quiet_trainer(**{"callbacks": [], "max_steps": 1} | limits)
    trainer.fit(Line(), *loaders(trainer, torch.ones(8, 1), 2))
    assert run_record.total_steps(trainer) == total


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (RuntimeError("lost a node"), "crashed", "RuntimeError: lost a node"),
        (torch.OutOfMemoryError("2 GiB"), "out of memory", "OutOfMemoryError: 2 GiB"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (SystemExit(3), "interrupted", "SystemExit: 3"),
    ],
)
def test_a_crash_is_in_the_summary(fit, run, error, reason, text):
    """A run that breaks in a step says how and why, and the step that it had reached."""

    class Breaking(Line):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    with pytest.raises((type(error), SystemExit)):
        fit(Breaking())
    found = summary(run)
    assert (found["exit_reason"], found["error"], found["last_step"]) == (reason, text, 3)


def test_a_smaller_world_than_asked_is_refused(fit, run):
    """Fewer processes than the configuration asks for stop the run before its first step and before its manifest."""
    with pytest.raises(UserError, match="2 processes asked for, 1 started"):
        fit(world_size=2)
    assert run.read_json("manifest.json") == {}
