"""The same command again: a run that is finished, unfinished, in use, or another model's."""

import fcntl
import warnings
from pathlib import Path

import pytest

from src.cli import main
from tests.commands import BORING, CPU, SMALL, fit, read_json, rows


def test_a_finished_run_does_nothing_more(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again exits with 0 and changes no file."""
    run = fit(run_root, "twice", *SMALL)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    fit(run_root, "twice", *SMALL)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
    assert "is finished (step 4), nothing to do" in capsys.readouterr().out


def test_a_finished_run_says_what_would_have_changed(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More steps for a finished run are not ignored in silence."""
    fit(run_root, "short", *SMALL)
    fit(run_root, "short", *SMALL, "--trainer.max_steps", "8")
    assert "trainer.max_steps 4 -> 8; train on under a new --run name" in capsys.readouterr().out


def test_an_unfinished_run_goes_on_from_its_newest_checkpoint(
    run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same name continues the step count in the same files, and each step has one row."""
    # True, and the matter of exact resume, not of this claim.
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    crash = ["--model", "tests.crash.CrashAtStep", "--checkpoint.every_n_steps", "2", "--checkpoint.monitor", "none"]
    plain = [*crash, "--trainer.max_steps", "6", "--trainer.log_every_n_steps", "1", "--run", "again"]
    assert main(["fit", *CPU, *plain, "--model.crash_at", "5"]) == 1
    run = run_root / "again"
    summary = read_json(run / "summary.json")
    assert summary["exit_reason"] == "crashed"
    assert "breaks on purpose" in summary["error"]
    assert summary["last_step"] == 5
    assert not (run / "DONE").exists()
    assert main(["fit", *CPU, *plain, "--model.crash_at", "-1"]) == 0
    assert [int(row["step"]) for row in rows(run)] == [0, 1, 2, 3, 4, 5]
    assert read_json(run / "summary.json")["last_step"] == 6
    output = capsys.readouterr().out
    assert "continues from step 4" in output
    assert "changed since the last start: model.init_args.crash_at 5 -> -1" in output
    assert len(read_json(run / "manifest.json")["earlier_starts"]) == 1


def test_a_run_that_max_time_stops_can_be_continued(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Timer ends this start and not the run: no DONE, and the same command goes on from there."""
    endless = [*SMALL, "--trainer.max_steps", "100000", "--run", "slot", "--trainer.max_time"]
    assert main(["fit", *CPU, *endless, "00:00:00:01"]) == 0
    run = run_root / "slot"
    assert not (run / "DONE").exists()
    assert read_json(run / "summary.json")["exit_reason"] == "stopped by max_time"
    reached = read_json(run / "summary.json")["last_step"]
    assert main(["fit", *CPU, *endless, "00:00:00:02"]) == 0
    assert f"continues from step {reached}" in capsys.readouterr().out


def test_a_run_in_use_is_refused(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands on one run would write twice into the same files: the second one is told who is there."""
    (run_root / "busy").mkdir(parents=True)
    with (run_root / "busy" / ".lock").open("w") as lock:
        lock.write("process 1 on node7")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["fit", *CPU, *SMALL, "--run", "busy"]) == 2
    assert "being trained right now by process 1 on node7" in capsys.readouterr().err
    assert main(["fit", *CPU, *SMALL, "--run", "busy"]) == 0


def test_a_run_keeps_its_model(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another model under the name of a run is refused and changes nothing there."""
    run = fit(run_root, "mine", *BORING, "--trainer.max_steps", "2")
    (run / "DONE").unlink()
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert main(["fit", *CPU, *SMALL, "--run", "mine"]) == 2
    assert "use a new --run name" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is put aside, and the run goes on from the next older state; without any the exit code is 65."""
    many = [*SMALL, "--checkpoint.every_n_steps", "1", "--checkpoint.keep", "9"]
    run = fit(run_root, "hurt", *many)
    (run / "DONE").unlink()
    newest = run / "checkpoints/step=00000004.ckpt"
    newest.write_bytes(newest.read_bytes()[:5000])
    fit(run_root, "hurt", *many)
    output = capsys.readouterr().out
    assert f"warning: {newest} is no whole checkpoint and is moved to {newest.parent / 'quarantine'}" in output
    assert "continues from step 3" in output
    (run / "DONE").unlink()
    files = list(run.glob("checkpoints/*.ckpt"))
    for path in files:
        path.write_bytes(b"")
    for _ in range(2):  # the second time, too: never from scratch
        assert main(["fit", *CPU, *many, "--run", "hurt"]) == 65
        assert f"none of the {len(files)} checkpoints" in capsys.readouterr().err
    assert sorted(run.glob("checkpoints/*.ckpt")) == sorted(files)
