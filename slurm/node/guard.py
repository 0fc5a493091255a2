"""Requeue a job shortly before its limit if training has not stopped by then.

A step, or a save, may outlast the time between Slurm's signal and the limit. Slurm would end the job as TIMEOUT, which
nothing restarts; requeued, it resumes from its newest checkpoint. Runs beside training in the batch script:
`python -m slurm.node.guard --seconds 10740 --margin 30 --max-restarts 20 RUN_FOLDER &`.
"""

import argparse
import datetime
import os
import re
import sys
import time
from pathlib import Path

from slurm.node import history, requeue, start

LOOK_SECONDS = 60


def end(known: float) -> float:
    """Return when the job reaches its limit, as Slurm says it now; `known` where it does not."""
    match = re.search(r"\bEndTime=(\S+)", requeue.scontrol("job", os.environ["SLURM_JOB_ID"]))
    try:
        return datetime.datetime.fromisoformat(match[1]).timestamp() if match else known
    except ValueError:  # Unknown
        return known


def wait(seconds: int, margin: int) -> None:
    """Wait until `margin` seconds before the limit, which is `seconds` from now unless Slurm knows better.

    It does: the limit counts from before the node's prolog, and an administrator may change it. The nearer the limit,
    the more often Slurm is asked: a hundred jobs that ask every minute would be a burden to it.
    """
    limit = end(time.time() + seconds)
    while (left := limit - margin - time.time()) > 0:
        time.sleep(min(left, max(LOOK_SECONDS, left / 4)))
        limit = end(limit)


def main() -> int:
    """Wait, and requeue the job unless training has stopped or no start is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=int, required=True, help="from now to the job's limit")
    parser.add_argument("--margin", type=int, required=True, help="seconds before the limit, for the requeue itself")
    start.add_limits(parser)
    options = parser.parse_args()
    wait(options.seconds, options.margin)
    from src.engine import stopped

    own, number = history.own_job(os.environ), int(os.environ.get("SLURM_RESTART_COUNT", 0))
    used_up = start.limits(options).used_up(options.run, own, number + 1)
    if stopped.read(options.run) or (options.run / "DONE").exists() or used_up:
        return 0  # the batch script is about to decide, or there is no other start
    why = f"training has not stopped {options.margin} s before the limit"
    history.note(options.run, own, "end", code=None, why=why)
    requeue.requeue(options.run, why, start.say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
