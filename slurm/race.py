"""Let several jobs of different shapes compete for one run: the first that starts trains, the others leave.

What decides is a file on the run's own folder that only one job can make: no process has to watch, so it holds with the
terminal closed, when two start in the same second, and after a requeue, which comes back under the same number.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from slurm.errors import LaunchError
from slurm.sbatch import ask, queued


def claim(folder: Path, race: str, job: str) -> str:
    """Return the number of the job that has the race: `job` itself where it was first, now or at an earlier start.

    A link is made of a file that is whole already: nobody reads half a number, and on NFS it succeeds once as well.
    """
    from src.engine.files import write_text

    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f".race-{race}-{job}"
    write_text(own, f"{job}\n")
    try:
        with suppress(FileExistsError):
            os.link(own, _mark(folder, race))
    finally:
        own.unlink()
    return holder(folder, race) or job


def holder(folder: Path, race: str) -> str | None:
    """Return the job that has the race; None while it is open."""
    mark = _mark(folder, race)
    if not os.path.lexists(mark):
        return None
    winner = mark.read_text(errors="replace").strip()
    if not winner.isdecimal():
        raise LaunchError(f"{mark} is damaged: expected the number of the job that trains; remove it")
    return winner


def _mark(folder: Path, race: str) -> Path:
    return folder / f"race-{race}"


def token(race: str, index: int) -> str:
    """Return the comment of one of the race's jobs."""
    return f"{race}.{index}"


def cancel_others(race: str, job: str) -> list[str]:
    """Cancel the race's other jobs, as far as Slurm answers, and return their numbers: one that starts still leaves."""
    try:
        others = [number for number, _, comment in queued() if comment.rpartition(".")[0] == race and number != job]
        if others:
            ask("scancel", *others)
    except LaunchError as error:
        print(f"the other jobs of the race are not cancelled, they leave when they start: {error}", file=sys.stderr)
        return []
    return others
