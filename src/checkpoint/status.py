"""`status`: whether a run is alive, how it ended, and what a restart would have to do again."""

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

from src.checkpoint.choose import NoWholeCheckpointError
from src.checkpoint.entries import files_of, look, restart_from
from src.checkpoint.files import ours, place_inside, step_in_name
from src.checkpoint.units import age, duration, shorten
from src.errors import UserError
from src.files import read_json
from src.hangs.heartbeat import HEARTBEAT_FILE, rank_line, rank_rows
from src.lock import owner

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
    notes: list[str] = field(default_factory=list)


def state_of(run: Path, now: float | None = None) -> State:
    """Tell from DONE, the lock and the summary, in this order, how the run stands.

    Raises:
        UserError: summary.json cannot be read.

    """
    now = time.time() if now is None else now
    summary = _summary(run)
    beat = read_json(run / HEARTBEAT_FILE)
    signs = [sign for sign in (beat.get("written"), _written(run, summary)) if isinstance(sign, int | float)]
    # Of a run that was killed each of these is of another moment.
    saved = map(step_in_name, ours(run / "checkpoints", "newest")[-1:])
    steps = (summary.get("last_step"), beat.get("step"), _last_row(run), *saved)
    last = max((step for step in steps if isinstance(step, int)), default=None)
    state = State("new", "never trained", last, max(signs, default=None), summary=summary)
    reason = summary.get("exit_reason")
    silence = None if state.written is None else now - state.written
    if (run / "DONE").exists():
        state.name, state.why = "finished", "DONE is there"
    elif (holder := owner(run)) is not None:
        state.name, state.owner, state.why = "running", holder, f"trained by {holder or 'a process of this machine'}"
    elif reason == "running" and silence is not None and silence <= SILENT and not _gone(beat):
        state.name, state.why = "running", "a fresh sign of life; nobody holds the lock as far as this machine sees"
    elif reason == "running":
        silent = f"no sign of life for {duration(silence or 0)}"
        state.name, state.why = "vanished", f"{silent}: killed without a signal, e.g. a preempted spot machine"
        if "host" in beat:
            job = f" in job {beat['job']}" if beat.get("job") else ""
            state.why += f"; it was on {beat['host']}, process {beat.get('pid')}{job}"
    elif reason is not None:
        state.name, state.why = ENDINGS.get(reason, "stopped"), str(reason)
        if reason == "finished":
            state.why = "was finished and has been rolled back, or was killed before it wrote DONE"
    elif files_of(run):
        state.name, state.why = "stopped", "there are checkpoints, and no summary.json"
    if silence is not None and silence < 0:
        state.notes.append(
            f"the last sign of life lies {duration(-silence)} in the future and counts as fresh: "
            "the clocks of this machine and of the one that trains differ"
        )
    return state


def _gone(beat: dict[str, Any]) -> bool:
    """Whether the process that wrote the sign of life was one of this machine and is no more."""
    pid = beat.get("pid")
    return beat.get("host") == socket.gethostname() and isinstance(pid, int) and not Path(f"/proc/{pid}").exists()


def _last_row(run: Path) -> int | None:
    """The steps that were done when the last whole row was logged; rows count from 0."""
    with contextlib.suppress(OSError, ValueError), (run / "metrics.csv").open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 65536))
        for line in reversed(file.read().split(b"\n")[:-1]):
            with contextlib.suppress(ValueError):
                return int(line.partition(b",")[0]) + 1
    return None


def _losses(run: Path) -> list[tuple[int, float | None]]:
    """The last rows of the loss (None: not finite): one that was healthy before it stopped was stopped from outside."""
    path, rows = run / "metrics.csv", []
    if path.exists():
        with path.open(newline="", errors="replace") as file:
            for row in csv.DictReader(file):
                with contextlib.suppress(KeyError, TypeError, ValueError):  # a row without one, or torn
                    loss = float(row["train/loss"])
                    rows.append((int(row["step"]), loss if math.isfinite(loss) else None))
    return rows[-3:]


def _summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): continue the run, which writes it anew, or delete it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: continue the run, which writes it anew, or delete it")
    return content


def _written(run: Path, summary: dict[str, Any]) -> float | None:
    """When the summary was written, by the clock of the machine that trains; else by the file's date."""
    if not summary:
        return None
    try:
        return datetime.datetime.fromisoformat(summary["written"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return (run / "summary.json").stat().st_mtime


def facts(run: Path) -> dict[str, Any]:
    """All that `status` says, in values for a program. Reads every byte of the newest checkpoint."""
    state = state_of(run)
    notes, checkpoint, lost = list(state.notes), None, state.last_step
    try:
        found, damaged = restart_from(run)
        notes += damaged
    except NoWholeCheckpointError as error:
        found = None
        notes.append(str(error))
    if found and (entry := look(found[0])):
        checkpoint = {
            "step": entry.step,
            "epoch": entry.epoch,
            "place": place_inside(entry.path),
            "bytes": entry.size,
            "modified": entry.modified,
            "file": str(entry.path),
        }
        lost = None if state.last_step is None else max(0, state.last_step - found[1])
    now = time.time() if state.name == "running" else None
    return {
        "run": run.name,
        "folder": str(run),
        "state": state.name,
        "why": state.why,
        "owner": state.owner,
        "last_step": state.last_step,
        "losses": _losses(run),
        "sign_of_life": state.written,
        "ranks": rank_rows(read_json(run / HEARTBEAT_FILE), now),
        "checkpoint": checkpoint,
        "steps_lost": lost,
        "error": state.summary.get("error"),
        "continue_command": state.summary.get("continue_command"),
        "notes": notes,
    }


def show(run: Path, as_json: bool) -> None:
    """Print how the run stands."""
    told = facts(run)
    print(json.dumps(told, indent=2) if as_json else "\n".join(_lines(told)))


def _lines(told: dict[str, Any]) -> list[str]:
    checkpoint, ended = told["checkpoint"], told["state"] in ("finished", "new")
    lines = [("run", told["folder"]), ("state", f"{told['state']} ({told['why']})")]
    least = "at least " if told["state"] == "vanished" else ""
    if told["last_step"] is not None:
        lines.append(("last step", f"{least}{told['last_step']}"))
    if told["losses"]:
        losses = [("not finite" if loss is None else f"{loss:.4g}", step) for step, loss in told["losses"]]
        lines.append(("train/loss", ", ".join(f"{loss} at step {step}" for loss, step in losses)))
    if told["sign_of_life"] is not None:
        lines.append(("sign of life", f"{age(told['sign_of_life'])} ago"))
    lines += [(f"rank {row['rank']}", rank_line(row)) for row in told["ranks"]]
    if checkpoint:
        place = f"step {checkpoint['step']}, {checkpoint['place']}, {age(checkpoint['modified'])} old"
        lines.append(("checkpoint", f"{place}: {checkpoint['file']}"))
    else:
        lines.append(("checkpoint", "none"))
    if told["steps_lost"] is not None and not ended:
        when = "would be lost now" if told["state"] == "running" else "to be done again"
        lines.append(("lost", f"{least}{told['steps_lost']} steps {when}"))
    if told["error"] and told["state"] in ("crashed", "tripped"):
        lines.append(("error", shorten(told["error"], 500)))
    lines += [("note", note) for note in told["notes"]]
    if told["continue_command"] and not ended and told["state"] != "running":
        lines.append(("continue", told["continue_command"]))
    width = max(len(name) for name, _ in lines)
    return [f"{name:<{width}}  {text}" for name, text in lines]
