"""Folders that other users can write to, and which of them are refused."""

import grp
import os
import pwd
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm import shared_root
from slurm.errors import LaunchError
from slurm.shared_root import make_private, refuse_shared


def folder(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def refused(path: Path, top: Path | None = None) -> str | None:
    """The line of the refusal, None where there is none."""
    try:
        refuse_shared(path, top)
    except LaunchError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _group_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests: the group of new folders is a shared one."""
    shared = SimpleNamespace(gr_name="lab", gr_gid=os.getegid(), gr_mem=["alice", "bob"])
    monkeypatch.setattr(grp, "getgrgid", lambda number: shared)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2750, 0o1777, 0o1775])
def test_a_folder_of_the_user_s_own_is_fine(mode: int, tmp_path: Path) -> None:
    """Also one that others can read, or write to as they do to /tmp."""
    assert refused(folder(tmp_path / "runs", mode)) is None


@pytest.mark.parametrize(("mode", "shown"), [(0o777, "drwxrwxrwx"), (0o2770, "drwxrws---"), (0o702, "drwx----w-")])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, shown: str, tmp_path: Path) -> None:
    """With its mode and group, what ends it, and how to go on."""
    path = folder(tmp_path / "runs", mode)
    assert refused(path) == (
        f"{path} can be written to by others ({shown}, group lab), who could change what your jobs execute: "
        f"chmod go-w {path}, or accept that with --trust-run-root"
    )


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can write to it whatever its mode; root can anyway, and a folder of root's is fine."""
    path = folder(tmp_path / "runs", 0o700)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert refused(path) is None
        os.chown(path, 12345, -1)
    line = refused(path)
    assert line is not None
    assert re.match(f"{path} belongs to .+, who could change what your jobs execute: choose a folder of your own", line)


def test_the_user_s_private_group_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group of one and a umask of 002; a second member makes it another matter."""
    path = folder(tmp_path / "runs", 0o775)
    user = pwd.getpwuid(os.geteuid())
    own = SimpleNamespace(gr_name=user.pw_name, gr_gid=user.pw_gid, gr_mem=[])
    monkeypatch.setattr(grp, "getgrgid", lambda number: own)
    assert refused(path) is None
    own.gr_mem = [user.pw_name, "bob"]
    assert refused(path) is not None
    own.gr_mem, own.gr_gid = [], user.pw_gid + 1
    assert refused(path) is not None
    own.gr_name, own.gr_gid = "users", user.pw_gid
    assert refused(path) is not None


def test_folders_above_count_up_to_the_top_that_is_named(tmp_path: Path) -> None:
    """Who can write to the folder above can put another one in its place."""
    lab = folder(tmp_path / "lab", 0o777)
    runs = folder(lab / "runs", 0o777)
    store = folder(runs / "store", 0o700)
    assert refused(store) is None
    assert (refused(store, runs) or "").startswith(f"{runs} can be written to")
    runs.chmod(0o755)
    assert refused(store, runs) is None
    assert (refused(store, lab) or "").startswith(f"{lab} can be written to")


def test_a_folder_that_is_missing_is_fine(tmp_path: Path) -> None:
    """It will be made for its owner alone; a dry run makes none."""
    assert refused(tmp_path / "runs/store") is None
    assert not (tmp_path / "runs").exists()


def test_a_private_folder_is_made_with_those_above(tmp_path: Path) -> None:
    """Whatever the umask: nobody else enters it, and nobody else writes to those above. Once made it stays as it is."""
    before = os.umask(0)
    try:
        make_private(tmp_path / "a/b/c")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o755, 0o700]
    (tmp_path / "a/b/c").chmod(0o750)
    shared_root.make_private(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o750
