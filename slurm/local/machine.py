"""Change this machine for the local Slurm: its daemons, the link by which sbatch finds it, a line in the hosts file."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm.errors import LaunchError

HOSTS = Path("/etc/hosts")
LINK = Path("/etc/slurm/slurm.conf")


def environment(**more: str) -> dict[str, str]:
    """Return the environment without a surrounding job's variables, and with sbin, where daemons are, on the path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
    return clean | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/bin"} | more


def command_line(pid: int) -> list[str]:
    """Return a process's arguments, the program by its name; nothing for one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] or [""]
        return [Path(program).name, *arguments]
    return []


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds; return False if it did not within so many seconds."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return held


@contextlib.contextmanager
def locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock on a folder that exists; BlockingIOError if another process holds it and `how` says not to wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def refuse_another(conf: Path) -> None:
    """Refuse a machine on which another Slurm is configured."""
    if os.path.lexists(LINK) and not _leads_to(conf):
        raise LaunchError(
            f"{LINK} does not lead to {conf}: this machine has another Slurm, which is left alone. If that is a local "
            "one: make cluster-down, with the LOCAL_SLURM that it was started with"
        )


def enter(conf: Path, hosts_line: str) -> None:
    """Let sbatch find `conf`, and the nodes' names resolve to this machine."""
    if not _leads_to(conf):
        LINK.parent.mkdir(parents=True, exist_ok=True)
        LINK.symlink_to(conf)
    # Written in place: in a container the file is mounted and cannot be replaced.
    hosts = HOSTS.read_text()
    if hosts_line not in hosts:
        HOSTS.write_text(hosts + ("" if hosts.endswith("\n") or not hosts else "\n") + hosts_line)


def leave(conf: Path, hosts_line: str) -> None:
    """Remove what `enter` has added, and nothing else."""
    if _leads_to(conf):
        LINK.unlink()
    hosts = HOSTS.read_text()
    if hosts_line in hosts:
        HOSTS.write_text(hosts.replace(hosts_line, ""))


def _leads_to(conf: Path) -> bool:
    return LINK.is_symlink() and os.readlink(LINK) == str(conf)
