"""Writes `ranks.json` of a run directory: each rank's last sign of life, as src/checkpoint/ranks.py reads it."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from src.files import write_text
from src.hangs.heartbeats import Beat, Heartbeats


def keep_ranks(path: Path, others: Heartbeats, every: float, ended: threading.Event) -> None:
    """Write what rank 0 hears of all ranks until `ended`, then remove the file; for a thread of its own.

    A run that hangs or is killed leaves the file: it says how far each rank was. How long a rank has been silent goes
    by this process's own clock, as those of the hosts may differ.

    Args:
        path: of the file
        others: the signs, over a connection of its own
        every: seconds between two looks
        ended: the run is done

    """
    heard: dict[int, tuple[Beat | None, float]] = {}  # each rank's newest sign, and when it was first seen here
    while not ended.wait(every):
        try:
            beats = others.all()
        except Exception:  # the process that serves the store has ended
            return
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = beat, now
        rows = [_row(rank, beat, now - since) for rank, (beat, since) in heard.items()]
        with suppress(OSError):  # a disk that is full; the next look may write again
            write_text(path, json.dumps({"written": time.time(), "every": every, "ranks": rows}) + "\n")
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _row(rank: int, beat: Beat | None, silent: float) -> dict[str, Any]:
    if beat is None:
        return {"rank": rank, "host": None, "step": None, "doing": None, "quiet": None, "silent": silent}
    return {
        "rank": rank,
        "host": beat.host,
        "step": beat.step,
        "doing": beat.doing,  # what began last, `quiet` seconds before the sign
        "quiet": beat.quiet,
        "silent": silent,  # seconds since the sign
    }
