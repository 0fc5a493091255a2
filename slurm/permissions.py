"""Keep what a job executes where no other user can change it."""

import os
import stat
from pathlib import Path

from slurm.errors import LaunchError


def make_folder(folder: Path, mode: int = 0o755) -> None:
    """Make `folder` and its missing parents; whatever the umask, no group can write to them."""
    try:
        for missing in reversed([parent for parent in folder.parents if not parent.exists()]):
            missing.mkdir(mode=0o755, exist_ok=True)
        folder.mkdir(mode=mode, exist_ok=True)  # an error if it is a file
    except OSError as error:
        raise LaunchError(f"the folder {folder} cannot be made ({error.strerror}): set RUN_ROOT") from error


def refuse_shared(folder: Path) -> None:
    """Refuse another user's folder (root's is fine) and one that all can write to, unless it is sticky, as /tmp is."""
    info = folder.stat()
    if info.st_uid not in (os.geteuid(), 0):
        reason, remedy = f"belongs to user {info.st_uid}", "choose a folder of your own"
    elif info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        reason, remedy = "can be written to by others", f"chmod o-w {folder}"
    else:
        return
    raise LaunchError(
        f"{folder} {reason}, who could change what your jobs execute: {remedy}, or accept that with --trust-run-root"
    )


def group_warning(folder: Path) -> list[str]:
    """Return the warning about a folder that its group can write to; none if it is missing."""
    mode = folder.stat().st_mode if folder.exists() else 0
    if mode & stat.S_IWGRP and not mode & stat.S_ISVTX:
        return [f"its group can write to {folder} and so change what your jobs execute (--trust-run-root: it may)"]
    return []
