"""What `status` says of each rank of a run: from `ranks.json`, which rank 0 writes (src/hangs/ranks_file.py)."""

from pathlib import Path
from typing import Any

from src.checkpoint.units import duration
from src.files import read_json

NAME = "ranks.json"
MISSED = 3  # looks of rank 0 at the others' signs, after which a rank is stale


def ranks_of(run: Path, now: float, since: float | None, running: bool) -> list[dict[str, Any]]:
    """A row for each rank: rank, host, step, doing, quiet, and `age`, the seconds since its last sign of life.

    `stale` says that it has missed several. Of a run that has ended, both go by the moment at which that was written
    down. [] where nothing is known: one process, a run that ended in order.

    Args:
        run: its directory
        now: seconds since 1970
        since: what was written down before is of an earlier start; None: nothing is
        running: whether the run is

    """
    content = read_json(run / NAME)
    try:
        written, every, rows = float(content["written"]), float(content["every"]), list(content["ranks"])
        if since is not None and written < since:
            return []
        passed = max(0.0, now - written) if running else 0.0
        for row in rows:
            row["age"] = row["silent"] + passed
            row["stale"] = row["age"] > MISSED * every
        return sorted(rows, key=lambda row: row["rank"])
    except (KeyError, TypeError, ValueError):  # of another version
        return []


def line(row: dict[str, Any]) -> str:
    """One rank, for people."""
    stale = "stale: " if row["stale"] else ""
    if row["host"] is None:
        return f"{stale}no sign of life yet, for {duration(row['age'])}"
    doing = f"in {row['doing']} for {duration(row['quiet'])}"
    return f"{stale}step {row['step']}, {doing}, on {row['host']}, heard of {duration(row['age'])} ago"
