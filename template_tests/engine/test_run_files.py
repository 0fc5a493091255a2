"""What the operating system says of a file of ours is one line with the path and what to do, and a code that fits."""

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.checkpoint.__main__ import main as checkpoint
from src.cli import main
from src.engine import exit_codes
from src.engine.errors import UserError
from src.engine.files import TEMPORARY, create, open_own, put, replacing, write_text
from src.engine.run.directory import open_run
from src.engine.run.lock import release
from tests.commands import CPU, SMALL, fit

FILES = (
    *("config.yaml", "manifest.json", "summary.json", "heartbeat", "metrics.csv", "STOPPED", "tensorboard"),
    *("checkpoints", "code.diff", "DONE", ".lock", "wandb_id", "checkpoints/step=00000004.ckpt", ""),
)
SPOILED = ("folder", "garbage", "gone")
REFUSED = {"unreadable": errno.EACCES, "read-only": errno.EROFS, "full": errno.ENOSPC}
GARBAGE = b"\xff\xfe{[: \0 - ]"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run once; returns its folder."""
    root = tmp_path_factory.mktemp("trained")
    os.environ["RUN_ROOT"], before = str(root), os.environ.get("RUN_ROOT")
    try:
        run = fit(root, "a", *SMALL)
    finally:
        os.environ.pop("RUN_ROOT") if before is None else os.environ.update(RUN_ROOT=before)
    for name in FILES[:-1]:
        if not (run / name).exists():
            (run / name).write_text("{}")
    return run


def spoil(path: Path, how: str) -> None:
    """Put a folder, garbage or nothing in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if how == "folder":
        (path / "inside").mkdir(parents=True)
    elif how == "garbage":
        path.write_bytes(GARBAGE)


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, how: str) -> None:
    """Have the system refuse to open a file, or what is in a folder, also for root, to whom it refuses nothing."""
    code = REFUSED[how]
    temporary = path.with_name(TEMPORARY.format(name=path.name))

    def is_refused(name: object, writes: bool) -> bool:
        if not isinstance(name, str | os.PathLike) or not (writes or how == "unreadable"):
            return False
        asked = Path(os.path.abspath(os.fspath(name)))
        return asked == path or path in asked.parents or (writes and asked == temporary)

    def replace(module: Any, name: str, writes: Callable[..., bool]) -> None:
        real = getattr(module, name)

        def stand_in(file: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if is_refused(file, writes(*args, **kwargs)):
                raise OSError(code, os.strerror(code), str(file))
            return real(file, *args, **kwargs)

        monkeypatch.setattr(module, name, stand_in)

    def by_mode(mode: str = "r", *_: Any, **__: Any) -> bool:
        return any(letter in mode for letter in "wax+")

    for module in (builtins, io):
        replace(module, "open", by_mode)
    replace(os, "open", lambda flags=0, *_, **__: bool(flags & WRITES))
    for name in ("listdir", "scandir"):
        replace(os, name, lambda *_, **__: False)
    for name in ("mkdir", "unlink", "rename", "replace"):
        replace(os, name, lambda *_, **__: how != "full")


@pytest.mark.parametrize("how", [*SPOILED, *REFUSED])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_it_should_be_gives_no_traceback(
    name: str,
    how: str,
    trained: Path,
    run_root: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every command ends with a line that names it or goes on, with 75 for a full disk; other runs stay in the list."""
    if how in SPOILED and not name:
        pytest.skip("without the folder there is no run")
    for run in ("a", "b"):
        shutil.copytree(trained, run_root / run)
    (run_root / "a" / "DONE").unlink()
    allowed = (exit_codes.DONE, exit_codes.BAD_INPUT, exit_codes.NO_CHECKPOINT, exit_codes.BUSY)
    if how in SPOILED:
        spoil(run_root / "a" / name, how)
    else:
        refuse(monkeypatch, run_root / "a" / name, how)
    assert checkpoint(["list"]) == 0
    listed = capfd.readouterr().out
    assert listed.count("\nb ") == 1
    assert listed.count("\na ") == (1 if (name, how) != ("config.yaml", "gone") else 0)  # that is no run's folder
    commands = [lambda: checkpoint(["status", "a"]), lambda: checkpoint(["verify"]), lambda: checkpoint(["list", "a"])]
    commands.append(lambda: main(["validate", *CPU, *SMALL, "--run", "a"]))
    commands.append(lambda: main(["fit", *CPU, *SMALL, "--trainer.max_steps", "5", "--run", "a"]))
    for command in commands:
        code, said = command(), capfd.readouterr()
        assert code in allowed
        assert "Traceback" not in said.err
        if code:
            names = str(run_root / "a"), "run a ", "'a'", f"a/{name}  damaged"
            assert any(text in said.err + said.out for text in names)
            assert how != "full" or code == exit_codes.BUSY


@pytest.mark.parametrize("how", REFUSED)
def test_what_the_system_says_of_a_run_reaches_every_rank(
    how: str, trained: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 finds the run and tells the others what it ended with: a UserError, whose text and code they get."""
    shutil.copytree(trained, run_root / "a")
    (run_root / "a" / "DONE").unlink()
    refuse(monkeypatch, run_root / "a" / "config.yaml", how)
    with pytest.raises(UserError, match=f"{run_root}/a/config.yaml: ") as said:
        open_run("a", "task", "changed: 1", 0)
    release()
    assert said.value.exit_code == (exit_codes.BUSY if how == "full" else exit_codes.BAD_INPUT)


def test_a_disk_that_fills_up_names_the_file(tmp_path: Path) -> None:
    """The system's error on a write names none."""
    (tmp_path / "kept").write_text("old")
    with pytest.raises(OSError, match="kept"), replacing(tmp_path / "kept"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "kept").read_text() == "old"


def test_a_configuration_that_cannot_be_read_is_one_line(
    run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the user's own folders too."""
    (tmp_path / "mine.yaml").write_text("{}")
    refuse(monkeypatch, tmp_path / "mine.yaml", "unreadable")
    assert main(["fit", *CPU, "--config", str(tmp_path / "mine.yaml"), *SMALL]) == exit_codes.BAD_INPUT
    said = capfd.readouterr().err
    assert f"{tmp_path}/mine.yaml" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("how", ["garbage", *REFUSED])
def test_a_cache_that_cannot_be_used_is_one_line(
    how: str, run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the path, and 75 for a full disk."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("text " * 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache := tmp_path / "cache"))
    if how == "garbage":
        cache.write_bytes(GARBAGE)
    else:
        refuse(monkeypatch, cache, how)
    small = ["--model.depth", "1", "--model.width", "16", "--model.heads", "1", "--run", "a"]
    command = ["fit", *CPU, "--task", "language", "--data.folder", str(tmp_path / "texts"), *small]
    assert main(command) == (exit_codes.BUSY if how == "full" else exit_codes.BAD_INPUT)
    said = capfd.readouterr().err
    assert str(cache) in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_text(path, "ours"),
        lambda path: create(path.with_name(TEMPORARY.format(name=path.name))).close(),
        lambda path: put(path.with_name(TEMPORARY.format(name=path.name)), b"ours"),
        lambda path: open_own(path.with_name(TEMPORARY.format(name=path.name))).close(),
    ],
    ids=["write_text", "create", "put", "open_own"],
)
@pytest.mark.parametrize("target", ["theirs", "missing"])
def test_a_file_that_is_written_follows_no_link(tmp_path: Path, write: Callable[[Path], None], target: str) -> None:
    """A name that is known to others may be a link that they have put there; it is replaced or refused."""
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".ours.tmp").symlink_to(tmp_path / target)
    try:
        write(tmp_path / "ours")
    except OSError as error:
        assert "link, which is not followed" in str(error)  # noqa: PT017
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "missing").exists()
    assert not (tmp_path / "ours").is_symlink()


def test_a_link_that_comes_while_a_file_is_made_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the removal of what was there and the new file."""
    unlink = Path.unlink

    def replaced_by_link(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        path.symlink_to(tmp_path / "theirs")

    (tmp_path / "theirs").write_text("theirs")
    monkeypatch.setattr(Path, "unlink", replaced_by_link)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "ours", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("name", [".lock", "metrics.csv", ".heartbeat.tmp"])
def test_a_run_opens_no_link_for_writing(
    name: str, trained: Path, run_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither the lock and the rows, which are opened under their own names, nor a temporary file."""
    shutil.copytree(trained, run_root / "a")
    (run_root / "a" / "DONE").unlink()
    (tmp_path / "theirs").write_bytes(content := b"step,x\r\n" if name == "metrics.csv" else b"theirs")
    (run_root / "a" / name).unlink(missing_ok=True)
    (run_root / "a" / name).symlink_to(tmp_path / "theirs")
    code = main(["fit", *CPU, *SMALL, "--trainer.max_steps", "5", "--run", "a"])
    said = capfd.readouterr()
    assert (tmp_path / "theirs").read_bytes() == content
    assert "Traceback" not in said.err
    assert (code, "it is a link, which is not followed" in said.err) == ((2, True) if name == ".lock" else (0, False))
