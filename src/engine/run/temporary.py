"""Tell whether a folder will be gone tomorrow or is missing on other nodes. Without PyTorch, for the launcher."""

import os
import re
from pathlib import Path

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - names to warn about, not to write to
NODE_LOCAL_VARIABLES = ("TMPDIR", "SLURM_TMPDIR", "LOCAL_SCRATCH", "SLURM_SCRATCH")
VANISHING_FILESYSTEMS = ("overlay", "tmpfs", "ramfs")


def is_temporary(root: Path) -> str | None:
    """Return why this folder will not be there tomorrow, or on another node; None where nothing says so."""
    resolved = root.resolve()
    local = [Path(value) for name in NODE_LOCAL_VARIABLES if (value := os.environ.get(name))]
    for folder in [*map(Path, NODE_LOCAL), *local]:
        if resolved.is_relative_to(folder):
            return f"node-local ({folder})"
    kind = filesystem(resolved)
    return f"on the container's or node's own {kind} file system" if kind in VANISHING_FILESYSTEMS else None


def filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system that holds `path`; "" where the system does not say."""
    if not mounts.exists():
        return ""
    best, kind = "", ""
    for line in mounts.read_text().splitlines():
        _, point, name, *_ = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)  # a space is \040 there
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, name
    return kind
