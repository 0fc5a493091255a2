"""`status`: whether a run is alive, how it ended, and what a restart would repeat."""

import contextlib
import csv
import datetime
import json
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.checkpoint.entries import FOLDER, files_of, look, restart_from
from src.engine.checkpoint.choose import NoWholeCheckpointError
from src.engine.checkpoint.files import place_inside
from src.engine.checkpoint.names import ours, step_in_name
from src.engine.files import read_json
from src.engine.run.lock import owner
from src.engine.text import age, duration, shorten, table
from src.engine.watchdog.heartbeat import HEARTBEAT_FILE, rank_line, rank_rows

SILENT = 90  # seconds: file servers show what another machine has written up to a minute late
# Any other reason to end is a stop that a restart continues.
ENDINGS = {"crashed": "crashed", "out of memory": "crashed", "lost a rank": "crashed", "tripped": "tripped"}


@dataclass
class State:
    """How a run stands, without a look into its checkpoints."""

    name: str  # running | stopped | crashed | tripped | finished | vanished | new
    why: str
    last_step: int | None = None
    written: float | None = None  # the last sign of life, in seconds since the epoch
    owner: str | None = None


def state_of(run: Path, now: float | None = None) -> State:
    """Return how the run stands, from DONE, the lock and the summary, in this order."""
    now = time.time() if now is None else now
    summary, beat = read_json(run / "summary.json"), read_json(run / HEARTBEAT_FILE)
    signs = [beat["written"]] if "written" in beat else []
    with contextlib.suppress(KeyError, TypeError, ValueError):  # no summary, or a date that nobody can read
        signs.append(datetime.datetime.fromisoformat(summary["written"]).timestamp())
    # Of a run that was killed each of these is of another moment.
    saved = map(step_in_name, ours(run / FOLDER, "newest")[-1:])
    logged = (step + 1 for step, _ in last_rows(run)[-1:])  # rows count from 0
    steps = (summary.get("last_step"), beat.get("step"), *logged, *saved)
    last = max((step for step in steps if step is not None), default=None)
    state = State("new", "never trained", last, max(signs, default=None))
    reason = summary.get("exit_reason")
    silence = None if state.written is None else now - state.written
    if (run / "DONE").exists():
        state.name, state.why = "finished", "DONE is there"
    elif (holder := owner(run)) is not None:
        state.name, state.owner, state.why = "running", holder, f"trained by {holder or 'a process of this machine'}"
    elif reason == "running" and silence is not None and silence <= SILENT and not _is_gone(beat):
        state.name, state.why = "running", "a fresh sign of life; nobody holds the lock as far as this machine sees"
    elif reason == "running":
        silent = f"no sign of life for {duration(silence or 0)}"
        state.name, state.why = "vanished", f"{silent}: killed without a signal, e.g. a preempted spot machine"
        if "host" in beat:
            job = f" in job {beat['job']}" if beat.get("job") else ""
            state.why += f"; it was on {beat['host']}, process {beat.get('pid')}{job}"
    elif reason == "finished":
        state.name, state.why = "stopped", "finished and then rolled back, or killed before it wrote DONE"
    elif reason is not None:
        state.name, state.why = ENDINGS.get(reason, "stopped"), str(reason)
    elif files_of(run):
        state.name, state.why = "stopped", "there are checkpoints, and no whole summary.json"
    return state


def _is_gone(beat: dict[str, Any]) -> bool:
    """Return whether the process that wrote the sign of life ran on this machine and has ended."""
    return beat.get("host") == socket.gethostname() and not Path(f"/proc/{beat.get('pid')}").exists()


def last_rows(run: Path) -> list[tuple[int, float | None]]:
    """Return step and loss of the last rows of metrics.csv; the loss is None in a row without one."""
    rows = []
    with contextlib.suppress(OSError), (run / "metrics.csv").open("rb") as file:
        header = file.readline()
        file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - 65536))
        lines = (header + file.read()).decode(errors="replace").split("\n")[:-1]  # without what is being written
        for row in csv.DictReader(lines):
            with contextlib.suppress(KeyError, TypeError, ValueError):  # the first may be cut
                rows.append((int(row["step"]), float(row["train/loss"]) if row.get("train/loss") else None))
    return rows


def facts(run: Path) -> dict[str, Any]:
    """Return all that `status` prints, as values for a program. Reads every byte of the newest checkpoint."""
    state, summary = state_of(run), read_json(run / "summary.json")
    checkpoint, lost = None, state.last_step
    try:
        chosen, notes = restart_from(run)
    except NoWholeCheckpointError as error:
        chosen, notes = None, [str(error)]
    # With healthy losses a run was stopped from outside.
    losses = [(step, loss) for step, loss in last_rows(run) if loss is not None][-3:]
    if chosen and (entry := look(chosen[0])):
        checkpoint = entry.facts() | {"place": place_inside(entry.path)}
        lost = None if state.last_step is None else max(0, state.last_step - chosen[1])
    return {
        "run": run.name,
        "folder": str(run),
        "state": state.name,
        "why": state.why,
        "owner": state.owner,
        "last_step": state.last_step,
        "losses": [(step, loss if math.isfinite(loss) else None) for step, loss in losses],
        "sign_of_life": state.written,
        "ranks": rank_rows(read_json(run / HEARTBEAT_FILE), time.time() if state.name == "running" else None),
        "checkpoint": checkpoint,
        "steps_lost": lost,
        "error": summary.get("error"),
        "continue_command": summary.get("continue_command"),
        "notes": notes,
    }


def show(run: Path, as_json: bool) -> None:
    """Print how the run stands."""
    row = facts(run)
    print(json.dumps(row, indent=2) if as_json else table(_lines(row)))


def _lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    checkpoint, state = row["checkpoint"], row["state"]
    ended, least = state in ("finished", "new"), "at least " if state == "vanished" else ""
    lines = [("run", row["folder"]), ("state", f"{state} ({row['why']})")]
    if row["last_step"] is not None:
        lines.append(("last step", f"{least}{row['last_step']}"))
    if row["losses"]:
        losses = [("not finite" if loss is None else f"{loss:.4g}", step) for step, loss in row["losses"]]
        lines.append(("train/loss", ", ".join(f"{loss} at step {step}" for loss, step in losses)))
    if row["sign_of_life"] is not None:
        lines.append(("sign of life", f"{age(row['sign_of_life'])} ago"))
    lines += [(f"rank {rank['rank']}", rank_line(rank)) for rank in row["ranks"]]
    if checkpoint:
        where = f"step {checkpoint['step']}, {checkpoint['place']}, {age(checkpoint['modified'])} old"
        lines.append(("checkpoint", f"{where}: {checkpoint['file']}"))
    else:
        lines.append(("checkpoint", "none"))
    if row["steps_lost"] is not None and not ended:
        when = "would be lost now" if state == "running" else "will be repeated"
        lines.append(("lost", f"{least}{row['steps_lost']} steps {when}"))
    if row["error"] and state in ("crashed", "tripped"):
        lines.append(("error", shorten(row["error"], 500)))
    lines += [("note", note) for note in row["notes"]]
    if row["continue_command"] and not ended and state != "running":
        lines.append(("continue", row["continue_command"]))
    return lines
