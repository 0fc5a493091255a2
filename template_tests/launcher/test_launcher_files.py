"""What the launcher reads and writes beside a run may be broken, gone, a folder or a link: one line, no traceback."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm import jobs, race, submission
from slurm.cluster import ROOT
from slurm.errors import LaunchError
from slurm.node import history
from slurm.node import start as job
from src.engine import exit_codes
from template_tests.launcher.test_jobs import program, queue, submitted

GARBAGE = b"\xff\xfe{[: \0 - ]"
NOT_OURS = (
    b'{"event": 1, "job": [], "last_step": "x", "total_steps": "y", "allocated_seconds": {}, "useful_seconds": []}\n'
)
FILES = (
    *("slurm/11.json", "slurm/11_history.jsonl", "slurm/race-r", "slurm/token.submitting", "slurm/11_batch.out"),
    *("slurm/11_0_log.out", "summary.json", "heartbeat", "STOPPED", "DONE", "checkpoints", "slurm"),
)


def spoil(path: Path, how: str) -> None:
    """Put something else in the place of a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if how == "folder":
        (path / "inside").mkdir(parents=True)
    elif how == "broken link":
        path.symlink_to("nowhere")
    elif how != "gone":
        path.write_bytes({"garbage": GARBAGE, "empty": b"", "other JSON": NOT_OURS, "a number": b"7\n"}[how])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run root with two runs that have a job each; Slurm's commands speak of these jobs."""
    root = tmp_path / "runs"
    for name, number in (("a", "11"), ("b", "12")):
        submitted(root, name, number, race="r" if name == "a" else "")
        (root / name / "checkpoints").mkdir()
        (root / name / "slurm" / f"{number}_batch.out").write_text(f"job {number}, first start\n")
        (root / name / "slurm" / f"{number}_0_log.out").touch()
        (root / name / "summary.json").write_text('{"last_step": 3, "total_steps": 9}')
        history.note(root / name, number, "start")
    race.claim(root / "a/slurm", "r", "11")
    queue(tmp_path / "bin", "11|N/A|11|RUNNING|None|n1", "12|N/A|12|RUNNING|None|n2", "13|N/A|13|PENDING|None|")
    squeue = (tmp_path / "bin/squeue").read_text().replace("PENDING||c.0", "PENDING||token")
    (tmp_path / "bin/squeue").write_text(squeue)
    for name in ("sacct", "sbatch", "scancel", "scontrol"):
        program(tmp_path / "bin", name, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("RUN_ROOT", str(root))
    return root


@pytest.mark.parametrize("how", ["folder", "garbage", "empty", "other JSON", "a number", "broken link", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_of_one_run_hides_no_other(
    name: str, how: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever it is: `list` shows the other run, and every command ends without a traceback, in a line if not well."""
    if how == "gone":
        shutil.copy(root / "a/slurm/11.json", root / "a/slurm/token.submitting")
    spoil(root / "a" / name, how)
    assert jobs.main(["list"]) == 0
    listed = capfd.readouterr()
    assert listed.out.count("\nb ") == 1, listed
    assert "Traceback" not in listed.err
    for command in (["list", "a"], ["list", "b"], ["report"], ["logs", "a"], ["logs", "a", "--err"], ["cancel", "b"]):
        code, said = jobs.main(command), capfd.readouterr()
        assert code in (exit_codes.DONE, exit_codes.BAD_INPUT), said
        assert "Traceback" not in said.err
        if code:
            assert said.err.splitlines()[-1].startswith("error: "), said


@pytest.mark.parametrize("value", [None, {"x": 1}, [[1]], "text", -1])
@pytest.mark.parametrize("field", [*submission.FIELDS, "number"])
def test_a_record_with_a_value_that_cannot_be_hides_no_other(
    field: str, value: object, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of another version of the launcher, or edited: shown, or named as damaged, and the other run is there."""
    path = root / "a/slurm/11.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    for command in ("list", "report"):
        assert jobs.main([command]) == 0
        said = capfd.readouterr()
        assert said.out.count("\nb ") == 1
        assert said.err.count(f"{path} is damaged") in (0, 1)


@pytest.mark.parametrize("how", ["folder", "garbage", "other JSON", "a number", "broken link"])
@pytest.mark.parametrize("name", [name for name in FILES if name != "slurm"])
def test_a_start_of_a_job_ends_in_a_line_or_trains(
    name: str,
    how: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What cannot be read names its path and ends with a code of the table; else the start finds where to meet."""
    for variable, value in (("JOB_ID", "11"), ("JOB_NODELIST", "n1"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"SLURM_{variable}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.chdir(ROOT)
    spoil(root / "a" / name, how)
    monkeypatch.setattr("sys.argv", ["job.py", "--tasks", "1", "--race", "r", "--max-restarts", "9", str(root / "a")])
    code, said = job.main(), capfd.readouterr()
    assert "Traceback" not in said.err
    assert code in (exit_codes.DONE, exit_codes.BAD_INPUT, exit_codes.BUSY)
    if code:
        assert f"error: {root / 'a' / name}" in said.err
    else:
        assert "export MASTER_ADDR" in said.out or said.out == "exit 0\n"
    monkeypatch.setattr("sys.argv", ["job.py", "--ended", "1", "--logs", str(root / "a/slurm"), str(root / "a")])
    code, said = job.main(), capfd.readouterr()
    assert "Traceback" not in said.err
    if code:
        assert f"error: {root / 'a' / name}" in said.err
    else:
        assert said.out.strip().isdigit()


@pytest.mark.parametrize("name", ["slurm/11.json", "slurm/token.submitting"])
def test_a_run_whose_record_is_broken_is_not_submitted_twice(name: str, root: Path) -> None:
    """Its job is in the queue; whether it is that of another point of a grid cannot be said."""
    spoil(root / "a" / name, "garbage")
    (root.parent / "bin/squeue").write_text("#!/bin/sh\nprintf '11 N/A c.0\\n13 N/A token\\n'\n")
    if "token" in name:
        (root / "a/slurm/11.json").unlink()
    with pytest.raises(LaunchError, match=r"^run a has job 1[13] already"):
        submission._refuse_second(job_of(root, "a"))
    submission._refuse_second(job_of(root, "c"))


def job_of(root: Path, name: str) -> submission.Job:
    """As much of a job as the check looks at."""
    made = object.__new__(submission.Job)
    for field, value in (("run_root", root), ("folder", root / name / "slurm"), ("runs", [name]), ("name", name)):
        object.__setattr__(made, field, value)
    return made


def unwritable(error: int) -> Callable[..., None]:
    """Stands in for a call that the operating system refuses."""

    def refuse(path: object, *arguments: object, **options: object) -> None:
        raise OSError(error, "refused", str(path))

    return refuse


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_number_that_cannot_be_written_down_hides_no_run(
    error: int, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`list` only reads what another user, or a full disk, does not let it complete."""
    shutil.copy(root / "a/slurm/11.json", root / "a/slurm/token.submitting")
    monkeypatch.setattr("os.replace", unwritable(error))
    assert jobs.main(["list"]) == 0
    said = capfd.readouterr()
    assert said.out.count("\nb ") == 1
    assert f"warning: {root}/a/slurm/" in said.err


@pytest.mark.parametrize(("error", "code"), [(errno.EROFS, exit_codes.BAD_INPUT), (errno.ENOSPC, exit_codes.BUSY)])
def test_a_race_that_cannot_be_claimed_ends_the_start_with_the_path(
    error: int, code: int, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full may be well at the next start, one that is read-only will not."""
    for variable, value in (("JOB_ID", "11"), ("JOB_NODELIST", "n1")):
        monkeypatch.setenv(f"SLURM_{variable}", value)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["job.py", "--tasks", "1", "--race", "new", str(root / "a")])
    monkeypatch.setattr("os.link", unwritable(error))
    assert job.main() == code
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert str(root / "a/slurm") in line


def test_nothing_written_follows_a_link(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Names are known to whoever may write to the folder, and could lead to a file that is the user's."""
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    folder = root / "a/slurm"
    for name in (".14.json", ".14.json.tmp", ".race-s-14", ".race-s-14.tmp", "14_history.jsonl"):
        (folder / name).symlink_to(theirs)
    submission._write_whole(folder / "14.json", {"job": "14"})
    assert race.claim(folder, "s", "14") == "14"
    history.note(root / "a", "14", "start")
    assert theirs.read_text() == "theirs"
    assert json.loads((folder / "14.json").read_text()) == {"job": "14"}
    assert "14_history.jsonl" in capfd.readouterr().err
