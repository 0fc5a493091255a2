"""A job's starts and ends, kept beside its run: GPU hours are counted from them where a site has no accounting."""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def own_job(environment: Mapping[str, str]) -> str:
    """The number of the job that runs here, JOB_INDEX in an array."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def note(folder: Path, job: str, event: str, **facts: object) -> None:
    """Add `start` or `end` to the history of a job of the run in `folder`. A full disk does not stop the job."""
    line = json.dumps({"event": event, "time": time.time(), "last_sign": last_sign(folder), **facts}) + "\n"
    try:
        (folder / "slurm").mkdir(parents=True, exist_ok=True)
        with (folder / "slurm" / f"{job}_history.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        print(f"warning: not noted in the job's history ({error}): {line}", file=sys.stderr, flush=True)


def read(folder: Path, job: str) -> list[dict[str, Any]]:
    """What was noted, the oldest first; a line that was cut off, as by a full disk, is passed over."""
    path = folder / "slurm" / f"{job}_history.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def spans(folder: Path, job: str, running: bool) -> list[float]:
    """Seconds of each start of a job. One that was killed lasted at least until it last wrote something.

    Args:
        folder: the run directory
        job: its number
        running: whether its last start still goes on

    """
    entries, found = read(folder, job), []
    for entry, following in itertools.zip_longest(entries, entries[1:]):
        if entry["event"] != "start":
            continue
        if following is None:
            end = time.time() if running else last_sign(folder)
        else:
            end = following["time"] if following["event"] == "end" else following["last_sign"]
        found.append(max(0.0, end - entry["time"]))
    return found


def allocated(folder: Path) -> float:
    """Seconds of all starts of all jobs of a run that does not run now."""
    jobs = [path.name.removesuffix("_history.jsonl") for path in folder.glob("slurm/*_history.jsonl")]
    return sum(sum(spans(folder, job, running=False)) for job in jobs)


def last_sign(folder: Path) -> float:
    """When the run last wrote something, in seconds since the epoch; 0 where it never has."""
    paths = [folder / "summary.json", folder / "metrics.csv", *folder.glob("slurm/*.out")]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
