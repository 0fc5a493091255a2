"""A job's starts and ends, kept beside its run: GPU hours are counted from them where a site has no accounting."""

import contextlib
import json
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
    """Add `start` or `end` to the history of a job of the run in `folder`."""
    before = last_sign(folder)
    (folder / "slurm").mkdir(parents=True, exist_ok=True)
    with (folder / "slurm" / f"{job}_history.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "time": time.time(), "last_sign": before, **facts}) + "\n")


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


def last_sign(folder: Path) -> float:
    """When the run last wrote something, in seconds since the epoch; 0 where it never has."""
    paths = [folder / "summary.json", folder / "metrics.csv", *folder.glob("slurm/*.out")]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
