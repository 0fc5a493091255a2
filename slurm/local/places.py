"""What the local Slurm needs outside of its folder: a link by which sbatch finds it, and a line in the hosts file."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from slurm.errors import LaunchError

HOSTS = Path("/etc/hosts")
LINK = Path("/etc/slurm/slurm.conf")
# LINK leads to the configuration by way of this one, which is gone after a restart of the machine: else the services
# that the packages bring would start at boot with our configuration.
UNTIL_REBOOT = Path("/run/local-slurm.conf")


def claim(conf: Path) -> None:
    """Make sure that the places are free or `conf`'s already.

    Raises:
        LaunchError: another Slurm is configured on this machine

    """
    if os.path.lexists(LINK) and _target(LINK) != str(UNTIL_REBOOT):
        raise LaunchError(
            f"{LINK} was not made here: this machine has a Slurm of its own. To leave that alone: "
            f"python slurm/local_cluster.py up --private"
        )
    if (other := _target(UNTIL_REBOOT)) not in (None, str(conf)):
        raise LaunchError(f"another local Slurm is up, with {other}: stop that one first, or use --private")


def enter(conf: Path, hosts_line: str, names: Iterable[str]) -> None:
    """Let sbatch find `conf`, and `names` lead to this machine.

    Raises:
        LaunchError: a name leads elsewhere

    """
    for link, target in ((UNTIL_REBOOT, conf), (LINK, UNTIL_REBOOT)):
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)
    # Written in place: in a container the file is mounted and cannot be replaced.
    hosts = HOSTS.read_text()
    if hosts_line not in hosts:
        HOSTS.write_text(hosts + ("" if hosts.endswith("\n") or not hosts else "\n") + hosts_line)
    for name in names:
        if (address := socket.gethostbyname(name)) != "127.0.0.1":
            raise LaunchError(f"{name} must be this machine, and {HOSTS} says {address}: take that line out")


def leave(conf: Path, hosts_line: str) -> None:
    """Take away what `enter` brought, and nothing else."""
    if _target(UNTIL_REBOOT) in (None, str(conf)):
        if _target(LINK) == str(UNTIL_REBOOT):
            LINK.unlink()
        UNTIL_REBOOT.unlink(missing_ok=True)
    hosts = HOSTS.read_text()
    if hosts_line in hosts:
        HOSTS.write_text(hosts.replace(hosts_line, ""))


def _target(link: Path) -> str | None:
    return os.readlink(link) if link.is_symlink() else None
