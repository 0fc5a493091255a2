"""What the operating system says of a file of ours is one line with the path and what to do, and a code that fits."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from src import exit_codes
from src.checkpoint.__main__ import main as checkpoint
from src.cli import main
from src.files import replacing, write_text
from tests.commands import CPU, SMALL, fit

FILES = (
    *("config.yaml", "manifest.json", "summary.json", "heartbeat", "metrics.csv", "STOPPED", "tensorboard"),
    *("checkpoints", "ranks.json", "code.diff", "DONE", ".lock"),
)
GARBAGE = b"\xff\xfe{[: \0 - ]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run once; returns its folder."""
    root = tmp_path_factory.mktemp("trained")
    os.environ["RUN_ROOT"], before = str(root), os.environ.get("RUN_ROOT")
    try:
        return fit(root, "a", *SMALL)
    finally:
        os.environ.pop("RUN_ROOT") if before is None else os.environ.update(RUN_ROOT=before)


def spoil(path: Path, how: str) -> None:
    """Put a folder or garbage in the place of a file, or garbage in that of a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if how == "folder":
        (path / "inside").mkdir(parents=True)
    else:
        path.write_bytes(GARBAGE)


@pytest.mark.parametrize("how", ["folder", "garbage"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_it_should_be_gives_no_traceback(
    name: str, how: str, trained: Path, run_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every command ends with a line or goes on, and the other runs stay in the list."""
    for run in ("a", "b"):
        shutil.copytree(trained, run_root / run)
    (run_root / "a" / "DONE").unlink()
    spoil(run_root / "a" / name, how)
    allowed = (exit_codes.DONE, exit_codes.BAD_INPUT, exit_codes.NO_CHECKPOINT, exit_codes.BUSY)
    assert checkpoint(["list"]) == 0
    listed = capfd.readouterr().out
    assert listed.count("\na ") == listed.count("\nb ") == 1
    commands = [lambda: checkpoint(["status", "a"]), lambda: checkpoint(["verify"]), lambda: checkpoint(["list", "a"])]
    commands.append(lambda: main(["fit", *CPU, *SMALL, "--trainer.max_steps", "5", "--run", "a"]))
    for command in commands:
        code, said = command(), capfd.readouterr()
        assert code in allowed
        assert "Traceback" not in said.err
        if code:
            assert str(run_root / "a") in said.err or "run a " in said.err


def test_a_disk_that_fills_up_names_the_file(tmp_path: Path) -> None:
    """The system's error on a write names none."""
    (tmp_path / "kept").write_text("old")
    with pytest.raises(OSError, match="kept"), replacing(tmp_path / "kept"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "kept").read_text() == "old"


def test_a_file_that_is_replaced_follows_no_link(tmp_path: Path) -> None:
    """The temporary name is known to others, who may have put a link there."""
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".ours.tmp").symlink_to(tmp_path / "theirs")
    write_text(tmp_path / "ours", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "ours").read_text() == "ours"
    assert not (tmp_path / "ours").is_symlink()
