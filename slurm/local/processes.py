"""Finding, waiting for and keeping apart the processes of the local Slurm."""

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """Without what a surrounding job hands down; daemons stand in sbin, which not every root has on its path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
    return clean | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/bin"} | more


def start(command: list[str]) -> str | None:
    """Start a daemon, which goes to the background by itself; what it complains about if it does not."""
    null = subprocess.DEVNULL
    done = subprocess.run(
        command, cwd="/", env=environment(), stdin=null, stdout=null, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None


def command_line(pid: int) -> list[str]:
    """A process's arguments, the program by its name; nothing for one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] or [""]
        return [Path(program).name, *arguments]
    return []


def of_jobs(conf: Path, nodes: Iterable[str]) -> list[int]:
    """Processes of jobs on the `nodes` of the configuration `conf`, also when no daemon knows of them any more."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={conf}".encode() in variables
            # slurmd sets this; a user's shell, also one in a job of another Slurm, may have exported SLURM_CONF.
            in_job = any(f"SLURMD_NODENAME={node}".encode() in variables for node in nodes)
            if ours and (in_job or Path(os.readlink(folder / "exe")).name.startswith("slurmstepd")):
                found.append(int(folder.name))
    return found


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition held before so many seconds were over."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return held


@contextlib.contextmanager
def locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock on a folder that exists.

    Raises:
        BlockingIOError: somebody else holds it, and `how` says not to wait

    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)
