"""Keep the starts and ends of a run's jobs beside the run: GPU hours are counted from them, without accounting."""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def own_job(environment: Mapping[str, str]) -> str:
    """Return the number of the job that runs here, JOB_INDEX in an array."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def note(folder: Path, job: str, event: str, **facts: object) -> None:
    """Add `start` or `end` to a job's history in the run directory `folder`. A full disk does not stop the job."""
    line = json.dumps({"event": event, "time": time.time(), "last_sign": last_sign(folder), **facts}) + "\n"
    try:
        (folder / "slurm").mkdir(parents=True, exist_ok=True)
        with open(_path(folder, job), "a", encoding="utf-8", opener=_follow_no_link) as file:
            file.write(line)
    except OSError as error:
        print(f"warning: not noted in the job's history ({error}): {line}", file=sys.stderr, flush=True)


def read(folder: Path, job: str) -> list[dict[str, Any]]:
    """Return the events in a job's history, the oldest first, without lines that are damaged, as by a full disk."""
    path = _path(folder, job)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        print(f"warning: {path}: {error.strerror}; counted as no start of job {job}", file=sys.stderr)
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return [event for event in events if _is_whole(event)]


def spans(events: Sequence[Mapping[str, Any]], folder: Path, running: bool) -> list[float]:
    """Return the seconds of each start in a job's history. A killed one lasted until the run last wrote a file."""
    seconds = []
    for event, following in itertools.zip_longest(events, events[1:]):
        if event["event"] != "start":
            continue
        if following is None:
            end = time.time() if running else last_sign(folder)
        else:
            end = following["time"] if following["event"] == "end" else following["last_sign"]
        seconds.append(max(0.0, end - event["time"]))
    return seconds


def last_sign(folder: Path) -> float:
    """Return when the run last wrote something, in seconds since the epoch; 0 where it never has."""
    times = [0.0]
    for path in (folder / "heartbeat", folder / "summary.json", folder / "metrics.csv", *folder.glob("slurm/*.out")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _path(folder: Path, job: str) -> Path:
    return folder / "slurm" / f"{job}_history.jsonl"


def _follow_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def _is_whole(event: Any) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    return all(isinstance(event.get(name), int | float) for name in ("time", "last_sign"))
