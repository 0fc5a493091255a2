"""Requeues a running job shortly before its limit, where training has not stopped by then.

A step, or a save, may take longer than the time between Slurm's signal and the end. Slurm would end the job as TIMEOUT,
which nothing restarts; like this it goes on from its newest checkpoint. Runs beside training in the batch script:
`python -m slurm.guard --lead 300 --max-restarts 20 RUN_FOLDER &`.
"""

import argparse
import datetime
import os
import re
import shutil
import sys
import time
from pathlib import Path

from slurm import history, job, requeue

LOOK_SECONDS = 60  # an administrator may change the limit
MISSES = 10  # until nothing is expected of a controller that has never answered
AT_LEAST = 5  # seconds, for the requeue itself


def end() -> float | None:
    """The job's limit, by this node's clock; None where Slurm does not say."""
    found = re.search(r"\bEndTime=(\S+)", requeue.scontrol("job", os.environ["SLURM_JOB_ID"]))
    try:
        return datetime.datetime.fromisoformat(found[1]).timestamp() if found else None
    except ValueError:  # Unknown
        return None


def wait(margin: int) -> bool:
    """Until so many seconds before the limit; False where Slurm does not say when that is.

    A controller that is away for a while changes nothing of what it has said before. The nearer the limit, the more
    often it is asked: a hundred jobs that ask every minute would be a burden to it.
    """
    known, misses = end(), 0
    while True:
        if known is None:
            misses += 1
            if misses == MISSES or shutil.which("scontrol") is None:
                return False
            time.sleep(LOOK_SECONDS)
        elif (left := known - margin - time.time()) > 0:
            time.sleep(min(left, max(LOOK_SECONDS, left / 4)))
        else:
            return True
        known = end() or known


def main() -> int:
    """Wait, and requeue if need be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lead", type=int, required=True, help="seconds between Slurm's signal and the limit")
    job.add_limits(parser)
    options = parser.parse_args()
    margin = max(AT_LEAST, min(30, options.lead // 4))
    if not wait(margin):
        job.say("Slurm does not say when this job ends: one whose steps outlast the signal will not be requeued")
        return 0
    from src import stopped

    number = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    against = job.limits(options).used_up(options.run, history.own_job(os.environ), number + 1)
    if stopped.read(options.run) or (options.run / "DONE").exists() or against:
        return 0  # the batch script is about to decide, or there is no other start
    why = f"training has not stopped {margin} s before the limit"
    history.note(options.run, history.own_job(os.environ), "end", code=None, why=why)
    requeue.requeue(options.run, why, job.say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
