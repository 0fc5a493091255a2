"""The same command again: a run that is finished, unfinished, in use, or another model's."""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from src.cli import main
from tests.commands import BORING, CPU, SMALL, fit, only_run, read_json, rows


def test_a_finished_run_does_nothing_more(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again exits with 0 and changes no file."""
    run = fit(run_root, "twice", *SMALL)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    fit(run_root, "twice", *SMALL)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
    assert "is finished (step 4), nothing to do" in capsys.readouterr().out


def test_a_finished_run_says_what_would_have_changed(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More steps for a finished run are not ignored in silence: the note has the command that trains it further."""
    run = fit(run_root, "short", *SMALL)
    fit(run_root, "short", *SMALL, "--trainer.max_steps", "8")
    (said,) = re.findall("trainer.max_steps 4 -> 8; to train it further: (rm .*)", capsys.readouterr().out)
    remove, _, again = said.partition(" && ")
    subprocess.run(shlex.split(remove), check=True)
    assert main(shlex.split(again)[3:]) == 0
    assert (run / "DONE").read_text() == "8\n"


def test_an_unfinished_run_goes_on_from_its_newest_checkpoint(
    run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same name continues the step count in the same files, and each step has one row."""
    # True, and the matter of exact resume, not of this claim.
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    crash = [
        "--model",
        "template_tests.crash.CrashAtStep",
        "--checkpoint.every_n_steps",
        "2",
        "--checkpoint.monitor",
        "none",
    ]
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


def test_a_timer_without_an_end_ends_nothing(run_root: Path) -> None:
    """A Timer that only measures leaves a run that has come to its end finished."""
    timer = ["--trainer.callbacks", "lightning.pytorch.callbacks.Timer", "--trainer.callbacks.interval", "step"]
    assert main(["fit", *CPU, *SMALL, *timer, "--run", "timed"]) == 0
    assert (run_root / "timed/DONE").exists()


def test_a_run_keeps_its_model(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another model under the name of a run is refused and changes nothing there."""
    run = fit(run_root, "mine", *BORING, "--trainer.max_steps", "2")
    (run / "DONE").unlink()
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert main(["fit", *CPU, *SMALL, "--run", "mine"]) == 2
    assert "has been trained with task BoringModel (now SmallModule)" in capsys.readouterr().err
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
    assert f"warning: {newest} is damaged; moved to {newest.parent / 'quarantine'}" in output
    assert "continues from step 3" in output
    (run / "DONE").unlink()
    files = list(run.glob("checkpoints/*.ckpt"))
    for path in files:
        path.write_bytes(b"")
    for _ in range(2):  # the second time, too: never from scratch
        assert main(["fit", *CPU, *many, "--run", "hurt"]) == 65
        assert f"none of the {len(files)} checkpoints" in capsys.readouterr().err
    assert sorted(run.glob("checkpoints/*.ckpt")) == sorted(files)


UNFINISHED = [*SMALL, "--checkpoint.every_n_steps", "1", "--checkpoint.keep", "9"]


@pytest.fixture
def unfinished(run_root: Path) -> Path:
    """A run that was killed after step 3 of 4."""
    run = fit(run_root, "mine", *UNFINISHED)
    (run / "DONE").unlink()
    (run / "checkpoints/step=00000004.ckpt").unlink()
    return run


def test_a_run_in_use_is_refused(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands on one run would write twice into the same files: the second one is told who is there.

    It touches nothing, neither what the first one is writing right now nor the configuration.
    """
    (unfinished / "checkpoints/.half.tmp").write_text("of a save that has just begun")
    with (unfinished / ".lock").open("w") as lock:
        lock.write("process 1 on node7")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = {
            path: (path.stat().st_mtime_ns, path.read_bytes()) for path in unfinished.rglob("*") if path.is_file()
        }
        assert main(["fit", *CPU, *UNFINISHED, "--checkpoint.keep", "1", "--run", "mine"]) == 75
        after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in unfinished.rglob("*") if path.is_file()}
    assert after == before
    assert "being trained right now by process 1 on node7" in capsys.readouterr().err
    assert main(["fit", *CPU, *UNFINISHED, "--run", "mine"]) == 0


@pytest.mark.parametrize(
    ("name", "option", "value", "was"),
    [("global_batch_size", "--global_batch_size", "16", 8), ("seed_everything", "--seed_everything", "7", 42)],
)
def test_another_batch_or_seed_must_be_meant(
    name: str, option: str, value: str, was: int, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused in one line until --allow-changed names it; then the run goes on with it and keeps it."""
    changed = ["fit", *CPU, *UNFINISHED, "--run", "mine", option, value]
    assert main(changed) == 2
    assert f"{name} {was} (now {value})" in capsys.readouterr().err
    assert main([*changed, "--allow-changed", "world_size"]) == 2
    assert main([*changed, "--allow-changed", f"world_size,{name}"]) == 0
    assert "continues from step 3" in capsys.readouterr().out
    assert read_json(unfinished / "manifest.json")[name] == int(value)


def test_only_what_needs_leave_gets_it(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is none of them is refused with the names that are."""
    assert main(["fit", *CPU, *UNFINISHED, "--run", "mine", "--allow_changed", "batch"]) == 2
    assert "--allow_changed batch: only task, model, seed_everything, global_batch_size, world_size" in (
        capsys.readouterr().err
    )


def test_a_fresh_start_leaves_the_old_run_alone(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It gets the next free name, and the command that continues it names that and is no fresh start."""
    before = {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}
    for name in ("mine-2", "mine-3"):
        assert main(["fit", *CPU, "--fresh", *UNFINISHED, "--run", "mine"]) == 0
        (again,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("continue "))
        assert again.endswith(f"--run {name}")
        assert "fresh" not in again
        assert read_json(unfinished.parent / name / "summary.json")["last_step"] == 4
    assert {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()} == before


def test_the_printed_command_continues(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The start, the summary and the last line of a run that has no name of the user's say one and the same command."""
    slot = ["--trainer.max_steps", "100000", "--trainer.max_time", "00:00:00:01"]
    assert main(["fit", *CPU, *SMALL, *slot]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    (again,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("continue "))
    run = only_run(run_root)
    assert read_json(run / "summary.json")["continue_command"] == again == last.split("; continue with: ")[1]
    words = shlex.split(again)
    assert words[:3] == ["python", "-m", "src.cli"]
    assert main(["fit", *CPU, *SMALL, *slot]) == 0
    assert f"run {run.name} has the same configuration and is not finished: --run {run.name}" in capsys.readouterr().out
    for other in set(run_root.iterdir()) - {run}:
        shutil.rmtree(other)
    assert main([*words[3:], "--trainer.max_steps", "1"]) == 0
    assert only_run(run_root) == run
    assert (run / "DONE").exists()


def test_a_run_that_was_moved_and_renamed_goes_on(
    unfinished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its new name, in its new place, and nothing is written to the old one."""
    place = unfinished.parent.parent / "elsewhere"
    place.mkdir()
    unfinished.rename(place / "other")
    monkeypatch.setenv("RUN_ROOT", str(place))
    assert main(["fit", *CPU, *UNFINISHED, "--run", "other"]) == 0
    assert "continues from step 3" in capsys.readouterr().out
    assert not unfinished.exists()
    assert read_json(place / "other/summary.json")["last_checkpoint"].startswith(str(place))


def test_less_data_than_the_run_has_seen_is_refused(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind sample 24 of 512, a data set of 20 is another one; one of 100 goes on with a note."""
    again = ["fit", *CPU, *UNFINISHED, "--run", "mine", "--data.size"]
    assert main([*again, "20"]) == 2
    assert "has 20 samples, and the checkpoint is at sample 24 of 512" in capsys.readouterr().err
    assert main([*again, "100"]) == 0
    assert "the data set had 512 samples and has 100 now" in capsys.readouterr().out


def test_the_newest_is_found_by_what_is_inside(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and dates say nothing: a stale `last.ckpt` that was touched today loses to the state of step 3."""
    folder = unfinished / "checkpoints"
    (folder / "last.ckpt").write_bytes((folder / "step=00000001.ckpt").read_bytes())
    (folder / "step=00000003.ckpt").rename(folder / "step=00000000.ckpt")
    os.utime(folder / "step=00000000.ckpt", (0, 0))  # a clock that was set back
    assert main(["fit", *CPU, *UNFINISHED, "--run", "mine"]) == 0
    said = "continues from step 3: step=00000000.ckpt, epoch 0, 24 of its 512 samples done"
    assert said in capsys.readouterr().out
