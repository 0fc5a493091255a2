"""Write and read the heartbeat of a run: whether it lives, where, and what each of its ranks is doing.

    {"written": 1790000000.0, "host": "node1", "pid": 41, "job": "77", "step": 1200,
     "ranks": [{"rank": 0, "host": "node1", "step": 1200, "doing": "backward", "since": 3.1, "silent": 0.0}, …]}

Rank 0 writes it from a thread of its own, also while one step, a compilation or a save takes minutes. A start that ends
in order removes it. One that is killed or hangs leaves it.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.engine.files import write_text
from src.engine.text import duration

HEARTBEAT_FILE = "heartbeat"
HEARTBEAT_SECONDS: float = 10  # between two writes
STALE_SECONDS = 30


@dataclass(frozen=True)
class Sign:
    """A rank's sign of life."""

    rank: int
    host: str
    pid: int
    clock: float  # when it was given, by the host's clock: no two signs of a rank are equal
    step: int  # optimizer steps done
    doing: str  # the event that began last
    since: float  # seconds since it began
    events: int  # how many events have begun; the rank with the fewest is behind
    line: str  # of Python code, where its main thread is


class Heartbeat:
    """Write the file. Rank 0's clock measures how long a rank has been silent, as those of the hosts may differ."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HEARTBEAT_FILE
        self._heard: dict[int, tuple[Sign, float]] = {}  # each rank's newest sign, and when it was first seen

    def write(self, step: int, signs: Sequence[Sign | None]) -> None:
        """Replace the file. A rank of which there is no sign this time stays as it was, and is silent for longer."""
        now = time.monotonic()
        for sign in signs:
            if sign is not None and (sign.rank not in self._heard or self._heard[sign.rank][0] != sign):
                self._heard[sign.rank] = sign, now
        content = {
            "written": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "step": step,
            "ranks": [_row(sign, now - heard) for _, (sign, heard) in sorted(self._heard.items())],
        }
        with suppress(OSError):  # a full disk; the next write may succeed
            write_text(self.path, json.dumps(content) + "\n")

    def remove(self) -> None:
        """Delete the file: the run has ended in order."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def _row(sign: Sign, silent: float) -> dict[str, Any]:
    return {
        "rank": sign.rank,
        "host": sign.host,
        "step": sign.step,
        "doing": sign.doing,
        "since": sign.since,  # seconds, when the sign was given
        "silent": silent,  # seconds from the sign to the write
    }


def rank_rows(heartbeat: dict[str, Any], now: float | None) -> list[dict[str, Any]]:
    """Return the heartbeat's rows with `age`, the seconds since a rank's last sign, and whether that is too long.

    `now` is None for a run that has ended: its signs do not grow older.
    """
    passed = 0.0 if now is None else max(0.0, now - heartbeat.get("written", now))
    rows = [row | {"age": row["silent"] + passed} for row in heartbeat.get("ranks", [])]
    return [row | {"stale": row["age"] > STALE_SECONDS} for row in rows]


def rank_line(row: dict[str, Any]) -> str:
    """Describe one row for people."""
    stale = "stale: " if row["stale"] else ""
    doing = f'at "{row["doing"]}" for {duration(row["since"])}'
    return f"{stale}step {row['step']}, {doing}, on {row['host']}, last sign of life {duration(row['age'])} ago"
