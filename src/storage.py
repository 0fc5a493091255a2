"""Where runs live: a folder that can be written to, has room, and outlives this machine."""

import os
import re
import shutil
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

import torch

from src.errors import AgreedError, UserError
from src.ranks import gather_objects

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - names to warn about, not to write to
NODE_LOCAL_VARIABLES = ("TMPDIR", "SLURM_TMPDIR", "LOCAL_SCRATCH", "SLURM_SCRATCH")
APPEAR_SECONDS = 30  # a new name on NFS may show late
VANISHING_FILESYSTEMS = ("overlay", "tmpfs", "ramfs")


def run_root() -> tuple[Path, list[str]]:
    """Where runs live, `$RUN_ROOT` or ./runs, made if need be; and what is doubtful about it.

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
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"the run root {root} cannot be written to ({error.strerror}): set RUN_ROOT to a folder on scratch"
        ) from error
    if why := _vanishes(root):
        notes.append(f"the run root {root} is {why}: set RUN_ROOT to a folder that outlives this machine")
    return root, notes


def _vanishes(root: Path) -> str | None:
    """Why this folder will not be there tomorrow, or on another node; None where nothing says so."""
    resolved = root.resolve()
    local = [Path(value) for name in NODE_LOCAL_VARIABLES if (value := os.environ.get(name))]
    for folder in [*map(Path, NODE_LOCAL), *local]:
        if resolved.is_relative_to(folder):
            return f"node-local ({folder})"
    kind = filesystem(resolved)
    return f"on the container's or node's own {kind} file system" if kind in VANISHING_FILESYSTEMS else None


def filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`; "" where the system does not say."""
    if not mounts.exists():
        return ""
    best, kind = "", ""
    for line in mounts.read_text().splitlines():
        _, point, name, *_ = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)  # a space is \040 there
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, name
    return kind


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
