"""Who trains a run: a lock on its folder, which goes with the process that holds it, and a sign of life beside it."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from src import exit_codes
from src.errors import UserError
from src.files import read_json

HEARTBEAT_FILE = "heartbeat"  # of a run that has not ended in order; src/callbacks/heartbeat.py writes it
HEARTBEAT_SECONDS = 10
LOOK_SECONDS = 1.0  # for how long a command that only looks at a run (`status`) may hold its lock
_locks: dict[Path, IO[str]] = {}  # open until `release` or the end of this process


class InUseError(UserError):
    """Somebody trains this run right now. Later it may be free."""

    exit_code = exit_codes.BUSY


def hold(folder: Path) -> None:
    """Keep everybody else from this run until `release`; the lock goes with the process, however it ends.

    Two commands on one run would train twice into the same files. A lock may hold on one node only (`localflock`) or
    be refused (Lustre without `flock`): there a heartbeat that goes on says that somebody trains the run.

    Raises:
        InUseError: somebody else holds it; the text says who.
        UserError: the folder cannot be written to.

    """
    if folder in _locks:
        return
    try:
        lock, until = (folder / ".lock").open("a+"), time.monotonic() + LOOK_SECONDS
    except OSError as error:
        raise UserError(f"the run folder {folder} cannot be written to ({error.strerror})") from error
    try:
        while not _is_locked(lock):
            if time.monotonic() > until:
                lock.seek(0)
                holder = lock.read().strip()
                lock.close()
                raise InUseError(f"run {folder.name} is being trained right now by {holder}")
            time.sleep(0.05)
    except OSError:  # a file system without locks
        lock.close()
        _refuse_living(folder, here=True)
        return
    try:
        _refuse_living(folder, here=False)  # a process of this machine would hold the lock
    except Exception:
        lock.close()
        raise
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    _locks[folder] = lock


def _refuse_living(folder: Path, here: bool) -> None:
    """Refuse a run whose heartbeat is written anew while this looks, as the clocks of two machines may differ.

    A run that ended in order has none, and a killed one on this machine has no process: only a restart on another
    machine, within an hour of a kill, waits for two beats.

    Raises:
        InUseError: it lives; the text says where

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


def _is_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def owner(folder: Path) -> str | None:
    """Which process trains this run right now; None where nobody does, as far as this machine can see."""
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
