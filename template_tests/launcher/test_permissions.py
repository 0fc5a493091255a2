"""Folders that other users can write to: which are refused, which are warned about, and how new ones are made."""

import os
import re
from pathlib import Path

import pytest

from slurm.errors import LaunchError
from slurm.permissions import group_warning, make_folder, refuse_shared


def folder(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2750, 0o1777, 0o1775])
def test_a_folder_of_the_user_s_own_is_fine(mode: int, tmp_path: Path) -> None:
    """Also one that others can read, or write to as they do to /tmp."""
    path = folder(tmp_path / "runs", mode)
    refuse_shared(path)
    assert group_warning(path) == []


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    """With what ends it, and how to go on."""
    path = folder(tmp_path / "runs", mode)
    line = (
        f"{path} can be written to by others, who could change what your jobs execute: chmod o-w {path}, or accept "
        "that with --trust-run-root"
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(line)}$"):
        refuse_shared(path)


@pytest.mark.parametrize("mode", [0o770, 0o2775])
def test_a_folder_that_its_group_can_write_to_is_warned_about(mode: int, tmp_path: Path) -> None:
    """A lab's common scratch is made so, and often the user is the group's only member."""
    path = folder(tmp_path / "runs", mode)
    refuse_shared(path)
    (line,) = group_warning(path)
    assert line.startswith(f"its group can write to {path} and so change what your jobs execute")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can write to it whatever its mode; root can anyway, and a folder of root's is fine."""
    path = folder(tmp_path / "runs", 0o700)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        refuse_shared(path)
        os.chown(path, 12345, -1)
    with pytest.raises(LaunchError, match=r"belongs to user \d+, who could change .*: choose a folder of your own"):
        refuse_shared(path)


def test_a_folder_that_is_missing_is_fine(tmp_path: Path) -> None:
    """It will be made so that no group can write to it; a dry run makes none."""
    assert group_warning(tmp_path / "runs") == []
    assert not (tmp_path / "runs").exists()


def test_a_private_folder_is_made_with_those_above(tmp_path: Path) -> None:
    """Whatever the umask: nobody else enters it, and nobody else writes to those above. Once made it stays as it is."""
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a/b/c", 0o700)
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o755, 0o700]
    (tmp_path / "a/b/c").chmod(0o750)
    make_folder(tmp_path / "a/b/c", 0o700)
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o750
