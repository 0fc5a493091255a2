"""Lock a run's folder for the process that trains it, and tell who holds the lock."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import BinaryIO

from src.engine import exit_codes
from src.engine.errors import UserError
from src.engine.files import open_own, read_json
from src.engine.watchdog.heartbeat import HEARTBEAT_FILE, HEARTBEAT_SECONDS

LOOK_SECONDS = 1.0  # for how long a command that only looks at a run (`status`) may hold its lock
_locks: dict[Path, BinaryIO] = {}  # open until `release` or the end of this process


class InUseError(UserError):
    """Somebody trains this run right now. Later it may be free."""

    exit_code = exit_codes.BUSY


def hold(folder: Path) -> None:
    """Keep everybody else from this run until `release`; the lock goes with the process, however it ends.

    Two commands on one run would train twice into the same files. A lock may hold on one node only (`localflock`) or
    be refused (Lustre without `flock`): there a heartbeat that is still written says that somebody trains the run.
    """
    if folder in _locks:
        return
    lock = open_own(folder / ".lock")
    try:
        holder = _wait_for(lock)
        if holder is not None:
            raise InUseError(f"run {folder.name} is being trained right now by {holder}")
        _refuse_living(folder, here=False)  # a process of this machine would hold the lock
    except Exception as error:
        lock.close()
        if not isinstance(error, OSError):
            raise
        _refuse_living(folder, here=True)  # a file system without locks
        return
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    _locks[folder] = lock


def _wait_for(lock: BinaryIO) -> str | None:
    """Lock it, or return who holds it for longer than a look takes."""
    until = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if time.monotonic() > until:
                return lock.read().decode(errors="replace").strip()
        time.sleep(0.05)


def _refuse_living(folder: Path, here: bool) -> None:
    """Refuse a run whose heartbeat is written anew during two periods of it, as the clocks of two machines may differ.

    A run that ended in order has none, and a killed one on this machine has no process: only a restart on another
    machine, within an hour of a kill, waits.
    """
    path = folder / HEARTBEAT_FILE
    beat = read_json(path)
    host, pid, written = beat.get("host"), beat.get("pid"), beat.get("written")
    on_this = host == socket.gethostname()
    if not isinstance(written, int | float) or abs(time.time() - written) > 3600:
        return
    if on_this and not (here and pid != os.getpid() and Path(f"/proc/{pid}").exists()):
        return
    print(
        f"waiting {2 * HEARTBEAT_SECONDS} s to see whether process {pid} on {host} still trains {folder.name}",
        flush=True,
    )
    until = time.monotonic() + 2 * HEARTBEAT_SECONDS
    while time.monotonic() < until:
        time.sleep(HEARTBEAT_SECONDS / 20)
        if (now := read_json(path)) != beat and now:
            raise InUseError(f"run {folder.name} is being trained right now by process {now['pid']} on {now['host']}")


def owner(folder: Path) -> str | None:
    """Return which process trains this run right now; None where nobody does, as far as this machine can see."""
    path = folder / ".lock"
    if not path.exists():
        return None
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip()
        except OSError:  # a file system without locks
            return None
    return None


def release() -> None:
    """Let go of the runs of this process."""
    while _locks:
        _locks.popitem()[1].close()


# A loader's process outlives a trainer that is killed, for seconds, and would hold the lock that it was forked with. To
# close it there takes nothing from the trainer.
os.register_at_fork(after_in_child=release)
