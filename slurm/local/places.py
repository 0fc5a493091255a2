"""Make the local Slurm known outside of its folder: a link by which sbatch finds it, and a line in the hosts file."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from slurm.errors import LaunchError

HOSTS = Path("/etc/hosts")
LINK = Path("/etc/slurm/slurm.conf")


def refuse_another(conf: Path) -> None:
    """Refuse a machine on which another Slurm is configured."""
    if os.path.lexists(LINK) and not _leads_to(conf):
        raise LaunchError(
            f"{LINK} does not lead to {conf}: this machine has another Slurm, which is left alone. If that is a local "
            "one: make cluster-down, with the LOCAL_SLURM that it was started with"
        )


def enter(conf: Path, hosts_line: str, names: Iterable[str]) -> None:
    """Let sbatch find `conf`, and `names` resolve to this machine."""
    if not _leads_to(conf):
        LINK.parent.mkdir(parents=True, exist_ok=True)
        LINK.symlink_to(conf)
    # Written in place: in a container the file is mounted and cannot be replaced.
    hosts = HOSTS.read_text()
    if hosts_line not in hosts:
        HOSTS.write_text(hosts + ("" if hosts.endswith("\n") or not hosts else "\n") + hosts_line)
    for name in names:
        if (address := socket.gethostbyname(name)) != "127.0.0.1":
            raise LaunchError(f"{name} must be this machine, and {HOSTS} says {address}: take that line out")


def leave(conf: Path, hosts_line: str) -> None:
    """Remove what `enter` has added, and nothing else."""
    if _leads_to(conf):
        LINK.unlink()
    hosts = HOSTS.read_text()
    if hosts_line in hosts:
        HOSTS.write_text(hosts.replace(hosts_line, ""))


def _leads_to(conf: Path) -> bool:
    return LINK.is_symlink() and os.readlink(LINK) == str(conf)
