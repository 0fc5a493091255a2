"""Several jobs for one run, of different shapes: the first that starts trains, the others leave before they write.

What decides is a file that only one job can make, on the run's own folder: nothing has to watch, so it holds with the
terminal closed, when two start in the same second, and after a requeue, which comes back under the same number.
"""

import os
import sys
from pathlib import Path

from slurm.errors import LaunchError
from slurm.sbatch import ask, queued


def claim(folder: Path, race: str, job: str) -> str:
    """The number of the job that has the race: `job` itself where it was first, now or at an earlier start.

    A link is made of a file that is whole already: nobody reads half a number, and on NFS it succeeds once as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, own = folder / f"race-{race}", folder / f".race-{race}-{job}"
    own.write_text(f"{job}\n")
    try:
        os.link(own, mark)
    except FileExistsError:
        pass
    finally:
        own.unlink()
    return mark.read_text().strip()


def holder(folder: Path, race: str) -> str | None:
    """The job that has the race; None while it is open."""
    mark = folder / f"race-{race}"
    return mark.read_text().strip() if mark.exists() else None


def token(race: str, index: int) -> str:
    """The comment of one of its jobs."""
    return f"{race}.{index}"


def cancel_others(race: str, job: str) -> list[str]:
    """Take the race's other jobs out of the queue, as far as Slurm answers: one that starts all the same leaves."""
    try:
        others = [number for number, _, comment in queued() if comment.rpartition(".")[0] == race and number != job]
        if others:
            ask("scancel", *others)
    except LaunchError as error:
        print(f"the other jobs of the race are not cancelled, they leave when they start: {error}", file=sys.stderr)
        return []
    return others
