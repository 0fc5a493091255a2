"""`status`: whether a run is alive, how it ended, and what a restart would repeat."""

import contextlib
import csv
import datetime
import json
import math
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.checkpoint.entries import files_of, look, restart_from
from src.engine.checkpoint.choose import NoWholeCheckpointError
from src.engine.checkpoint.files import place_inside
from src.engine.checkpoint.names import ours, step_in_name
from src.engine.errors import UserError
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
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)  # the last of metrics.csv: step and loss
    notes: list[str] = field(default_factory=list)


def state_of(run: Path, now: float | None = None) -> State:
    """Return how the run stands, from DONE, the lock and the summary, in this order."""
    now = time.time() if now is None else now
    summary, beat, rows = _summary(run), read_json(run / HEARTBEAT_FILE), _last_rows(run)
    signs = [sign for sign in (beat.get("written"), _written(run, summary)) if isinstance(sign, int | float)]
    # Of a run that was killed each of these is of another moment.
    saved = map(step_in_name, ours(run / "checkpoints", "newest")[-1:])
    logged = (row["step"] + 1 for row in rows[-1:])  # rows count from 0
    steps = (summary.get("last_step"), beat.get("step"), *logged, *saved)
    last = max((step for step in steps if isinstance(step, int)), default=None)
    state = State("new", "never trained", last, max(signs, default=None), summary=summary, rows=rows)
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
        state.name, state.why = "stopped", "there are checkpoints, and no summary.json"
    if silence is not None and silence < 0:
        state.notes.append(
            f"the last sign of life is {duration(-silence)} in the future and counts as fresh: "
            "the clocks of this machine and of the one that trains differ"
        )
    return state


def _is_gone(beat: dict[str, Any]) -> bool:
    """Return whether the process that wrote the sign of life ran on this machine and has ended."""
    pid = beat.get("pid")
    return beat.get("host") == socket.gethostname() and isinstance(pid, int) and not Path(f"/proc/{pid}").exists()


def _last_rows(run: Path) -> list[dict[str, Any]]:
    """Return the last rows of metrics.csv as {step, loss}; loss is None in a row without one."""
    rows = []
    with contextlib.suppress(OSError), (run / "metrics.csv").open("rb") as file:
        names = file.readline().decode(errors="replace").strip().split(",")
        begin = file.tell()
        file.seek(max(begin, file.seek(0, 2) - 65536))
        whole = file.tell() == begin
        lines = file.read().decode(errors="replace").split("\n")[:-1]  # without what is being written
        for row in csv.reader(lines if whole else lines[1:]):
            values = dict(zip(names, row, strict=False))
            with contextlib.suppress(KeyError, ValueError):  # torn
                loss = float(values["train/loss"]) if values.get("train/loss") else None
                rows.append({"step": int(values["step"]), "loss": loss})
    return rows


def _losses(rows: list[dict[str, Any]]) -> list[tuple[int, float | None]]:
    """Return the last three losses, None if not finite: with healthy ones a run was stopped from outside."""
    losses = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None][-3:]
    return [(step, loss if math.isfinite(loss) else None) for step, loss in losses]


def _summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): continue the run, which writes it anew, or delete it") from error
    return content if isinstance(content, dict) else {}


def _written(run: Path, summary: dict[str, Any]) -> float | None:
    """Return when the summary was written, by the clock of the machine that trains; else by the file's date."""
    if not summary:
        return None
    try:
        return datetime.datetime.fromisoformat(summary["written"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return (run / "summary.json").stat().st_mtime


def facts(run: Path) -> dict[str, Any]:
    """Return all that `status` prints, as values for a program. Reads every byte of the newest checkpoint."""
    state = state_of(run)
    notes, chosen, checkpoint, lost = list(state.notes), None, None, state.last_step
    try:
        chosen, damaged = restart_from(run)
        notes += damaged
    except NoWholeCheckpointError as error:
        notes.append(str(error))
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
        "losses": _losses(state.rows),
        "sign_of_life": state.written,
        "ranks": rank_rows(read_json(run / HEARTBEAT_FILE), time.time() if state.name == "running" else None),
        "checkpoint": checkpoint,
        "steps_lost": lost,
        "error": state.summary.get("error"),
        "continue_command": state.summary.get("continue_command"),
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
