"""Find the folder where runs live: it can be written to, has room, and outlives this machine."""

import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from src.engine.distributed import gather_objects
from src.engine.errors import AgreedError, FileError, UserError
from src.engine.run.temporary import is_temporary
from src.engine.stopped import READ_BY_SCRIPT


def run_root(written: bool = True) -> tuple[Path, list[str]]:
    """Return `$RUN_ROOT` or ./runs, made if need be, and notes on what is doubtful about it.

    `written` says that it will be written to, and not only read.
    """
    given = os.environ.get("RUN_ROOT")
    root = Path(given or "runs").expanduser()
    notes = []
    if given and not root.is_absolute():
        notes.append(f"RUN_ROOT {given} is relative: it means {root.absolute()} here, and another folder elsewhere")
    root = root.absolute()
    try:
        if not written and root.is_dir():
            return root, notes
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        refused = UserError(
            f"the run root {root} cannot be written to ({error.strerror}): set RUN_ROOT to a folder on scratch"
        )
        refused.exit_code = FileError(error).exit_code
        raise refused from error
    if READ_BY_SCRIPT not in os.environ:  # else the launcher has looked
        notes += _open_to_others(root)
    if why := is_temporary(root):
        notes.append(f"the run root {root} is {why}: set RUN_ROOT to a folder that outlives this machine")
    return root, notes


def _open_to_others(root: Path) -> list[str]:
    """Refuse a run root that everybody can write to, except a sticky one; return a note where its group can."""
    mode = root.stat().st_mode
    if mode & stat.S_ISVTX:
        return []
    if mode & stat.S_IWOTH:
        raise UserError(
            f"everybody can write to the run root {root}, and so change what a resumed run loads: chmod o-w {root}, or "
            "set RUN_ROOT to a folder of your own"
        )
    return [f"its group can write to the run root {root}: chmod g-w {root}, or trust them"] * bool(mode & stat.S_IWGRP)


def require_room(root: Path, checkpoint_bytes: int, checkpoints: int) -> None:
    """Refuse a run root where so many checkpoints do not fit."""
    free, need = shutil.disk_usage(root).free, checkpoints * checkpoint_bytes
    if free < need:
        raise UserError(
            f"{root} has {free / 2**30:.1f} GiB free and {checkpoints} checkpoints take {need / 2**30:.1f} GiB: "
            "make room, set RUN_ROOT to a larger disk, or keep fewer (--checkpoint.keep)"
        )


def refuse_unshared(folder: Path) -> None:
    """Require that every rank sees the run directory that rank 0 made; a folder of each node would scatter the run.

    Collective, where there is a process group. A name that no node has asked for before is in no cache of NFS.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    mark, reason = gather_objects(_leave_mark(folder) if torch.distributed.get_rank() == 0 else None)[0]
    if reason:
        raise AgreedError(f"the run directory {folder} cannot be written to ({reason})")
    hosts = gather_objects(None if (folder / mark).exists() else socket.gethostname())
    if torch.distributed.get_rank() == 0:
        with suppress(OSError):
            (folder / mark).unlink()
    if blind := [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host]:
        raise AgreedError(
            f"the run directory {folder}, made by rank 0 on this node, is not there for {', '.join(blind[:3])}"
            f"{' …' if len(blind) > 3 else ''}: set RUN_ROOT to a folder that all nodes share"
        )


def _leave_mark(folder: Path) -> tuple[str, str]:
    """Make a file of a new name; returns the name, or else the reason why there is none."""
    try:
        descriptor, path = tempfile.mkstemp(dir=folder, prefix=".seen-")
    except OSError as error:
        return "", error.strerror or str(error)
    os.close(descriptor)
    return Path(path).name, ""
