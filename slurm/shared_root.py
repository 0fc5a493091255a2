"""Folders on a machine with other users: what a job executes must lie where none of them can change it."""

import grp
import os
import pwd
import stat
from pathlib import Path

from slurm.errors import LaunchError


def make_private(folder: Path) -> None:
    """Make `folder`, which only its owner can enter, and the folders above it that are missing."""
    _make_with_parents(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def make_folder(folder: Path) -> None:
    """Make `folder` and those above it that are missing; whatever the umask: not writable by a group.

    Raises:
        LaunchError: it cannot be made.

    """
    try:
        _make_with_parents(folder)
        folder.mkdir(exist_ok=True)  # an error where it is a file
    except OSError as error:
        raise LaunchError(f"the folder {folder} cannot be made ({error.strerror}): set RUN_ROOT") from error


def _make_with_parents(folder: Path) -> None:
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=0o755, exist_ok=True)


def refuse_shared(folder: Path, top: Path | None = None) -> None:
    """Refuse a folder in which another user could replace files; one that does not exist yet is fine.

    A folder may be writable by others under the sticky bit, as /tmp is: nobody replaces another's files there. Writable
    by a group of the user alone, which many systems give each user, is fine too.

    Args:
        folder: where a job's files lie.
        top: a folder above; it and those between are looked at as well.

    Raises:
        LaunchError: others can write to one of them, or one belongs to another user than root.

    """
    places = [folder, *folder.parents]
    for place in places[: places.index(top) + 1 if top in places else 1]:
        try:
            info = place.stat()
        except FileNotFoundError:
            continue
        if info.st_uid not in (os.geteuid(), 0):
            reason, remedy = f"belongs to {_user(info.st_uid)}", "choose a folder of your own"
        elif _others_write(info):
            reason = f"can be written to by others ({stat.filemode(info.st_mode)}, group {_group(info.st_gid)})"
            remedy = f"chmod go-w {place}"
        else:
            continue
        raise LaunchError(
            f"{place} {reason}, who could change what your jobs execute: {remedy}, or accept that with --trust-run-root"
        )


def _others_write(info: os.stat_result) -> bool:
    if info.st_mode & stat.S_ISVTX:
        return False
    return bool(info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _own_group(info.st_gid)))


def _own_group(number: int) -> bool:
    """Whether the group is the user's private one: it has the user's name and no other member."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and group.gr_gid == user.pw_gid and set(group.gr_mem) <= {user.pw_name}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
