"""Where runs live: a folder that can be written to, has room, and outlives this machine."""

import os
import shutil
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

import torch

from src.errors import AgreedError, UserError
from src.ranks import gather_objects
from src.vanishing import vanishes

APPEAR_SECONDS = 30  # a new name on NFS may show late


def run_root(written: bool = True) -> tuple[Path, list[str]]:
    """Where runs live, `$RUN_ROOT` or ./runs, made if need be; and what is doubtful about it.

    Args:
        written: it will be written to, else only read

    Raises:
        UserError: it cannot be made or written to.

    """
    given = os.environ.get("RUN_ROOT")
    root = Path(given or "runs").expanduser()
    notes = []
    if given and not root.is_absolute():
        notes.append(f"RUN_ROOT {given} is relative and means {root.absolute()} here; another folder elsewhere")
    root = root.absolute()
    try:
        if not written and root.is_dir():
            return root, notes
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"the run root {root} cannot be written to ({error.strerror}): set RUN_ROOT to a folder on scratch"
        ) from error
    if why := vanishes(root):
        notes.append(f"the run root {root} is {why}: set RUN_ROOT to a folder that outlives this machine")
    return root, notes


def require_room(root: Path, checkpoint_bytes: int, checkpoints: int) -> None:
    """So many checkpoints must fit.

    Raises:
        UserError: how much is needed and how much is free.

    """
    free, need = shutil.disk_usage(root).free, checkpoints * checkpoint_bytes
    if free < need:
        raise UserError(
            f"{root} has {free / 2**30:.1f} GiB free and {checkpoints} checkpoints take {need / 2**30:.1f} GiB: "
            "make room, set RUN_ROOT to a larger disk, or keep fewer (--checkpoint.keep)"
        )


def refuse_unshared(folder: Path) -> None:
    """Every rank must see the run directory that rank 0 made: a folder of each node would scatter the run over them.

    Collective, where there is a process group.

    Raises:
        AgreedError: on every rank; names a host that does not see it, or says that rank 0 cannot write to it.

    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    marks: list[str | None] = [f".seen-{uuid.uuid4().hex}", None]
    if torch.distributed.get_rank() == 0:
        try:
            (folder / str(marks[0])).touch()
        except OSError as error:
            marks[1] = error.strerror or str(error)
    torch.distributed.broadcast_object_list(marks, 0)
    if marks[1]:
        raise AgreedError(f"the run directory {folder} cannot be written to ({marks[1]})")
    mark = folder / str(marks[0])
    ranks = gather_objects(None if _appears(mark) else socket.gethostname())
    if torch.distributed.get_rank() == 0:
        with suppress(OSError):
            mark.unlink()
    if blind := [f"rank {rank} on {host}" for rank, host in enumerate(ranks) if host]:
        raise AgreedError(
            f"the run directory {folder}, made by rank 0 on this node, is not there for {', '.join(blind[:3])}"
            f"{' …' if len(blind) > 3 else ''}: set RUN_ROOT to a folder that all nodes share"
        )


def _appears(path: Path) -> bool:
    until = time.monotonic() + APPEAR_SECONDS
    while not path.exists():
        if not path.parent.is_dir() or time.monotonic() > until:
            return False
        os.listdir(path.parent)  # makes NFS look again
        time.sleep(0.1)
    return True
