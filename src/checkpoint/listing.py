"""`list` and `verify`: which runs and checkpoints there are, and which of them are whole."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.checkpoint.entries import FOLDER, entries, files_of, is_candidate, kind_of, restart_from
from src.checkpoint.status import state_of
from src.engine.checkpoint.choose import NoWholeCheckpointError
from src.engine.checkpoint.files import fault
from src.engine.run.directory import newest_first
from src.engine.text import age, number, shorten, size, table

Row = dict[str, Any]
# The columns of a table: their text, made of a row.
RUNS: dict[str, Callable[[Row], str]] = {
    "RUN": lambda row: row["name"],
    "STATE": lambda row: row["state"],
    "STEP": lambda row: number(row["last_step"]),
    "CHECKPOINTS": lambda row: str(row["checkpoints"]),
    "NEWEST": lambda row: age(row["newest_modified"]),
}
CHECKPOINTS: dict[str, Callable[[Row], str]] = {
    "STEP": lambda row: number(row["step"]),
    "EPOCH": lambda row: number(row["epoch"]),
    "METRIC": lambda row: "-" if row["metric"] is None else f"{row['monitor']}={row['metric']:.6g}",
    "SIZE": lambda row: size(row["bytes"]),
    "AGE": lambda row: age(row["modified"]),
    "VALID": lambda row: "yes" if row["valid"] else f"damaged: {shorten(row['reason'], 60)}",
    "KIND": lambda row: row["kind"],
    "FILE": lambda row: Path(row["file"]).name,
}
RIGHT = ("STEP", "EPOCH", "CHECKPOINTS", "NEWEST", "SIZE", "AGE")


def _print(rows: list[Row], columns: dict[str, Callable[[Row], str]], as_json: bool, without: str) -> None:
    """Print the rows as a table or as JSON; `without` is the text for no rows."""
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        cells = [list(columns), *([text(row) for text in columns.values()] for row in rows)]
        print(table(cells, right=[n for n, name in enumerate(columns) if name in RIGHT]))
    else:
        print(without)


def list_runs(root: Path, as_json: bool) -> None:
    """Print one line per run, the one that was started last first. No checkpoint is opened."""
    _print([_of_run(folder) for folder in newest_first(root)], RUNS, as_json, f"no run in {root} yet")


def _of_run(folder: Path) -> Row:
    row: Row = {
        "name": folder.name,
        "state": "unreadable",
        "last_step": None,
        "checkpoints": 0,
        "newest_modified": None,
    }
    with contextlib.suppress(OSError):  # `status` says why; the other runs are shown all the same
        state = state_of(folder)
        files = list((folder / FOLDER).glob("*.ckpt"))
        row |= {"state": state.name, "last_step": state.last_step, "checkpoints": len(files)}
        row["newest_modified"] = max((path.stat().st_mtime for path in files), default=None)
    return row | {"folder": str(folder)}


def list_checkpoints(run: Path, before_step: int | None, as_json: bool) -> None:
    """Print the run's checkpoints, newest step first; with `before_step` those of fewer steps, or of an unknown one."""
    rows = [
        entry.facts() for entry in entries(run) if before_step is None or entry.step is None or entry.step < before_step
    ]
    when = "yet" if before_step is None else f"before step {before_step}"
    _print(rows, CHECKPOINTS, as_json, f"{run} has no checkpoint {when}")


def verify(run_or_file: Path) -> int:
    """Read every byte of one file, or of a run's, and print which a restart would take; return the exit code.

    Files in subfolders are read too, but no restart takes them, so they do not count.
    """
    code = 0
    for path in [run_or_file] if run_or_file.is_file() else files_of(run_or_file):
        reason = fault(path)
        if reason is not None and not path.exists():  # training has just replaced it
            continue
        result = "ok" if reason is None else f"damaged: {shorten(reason, 300)}"
        note = "" if is_candidate(path) else f" ({kind_of(path)}, no candidate)"
        print(f"{path}  {result}{note}", flush=True)
        if reason is not None and is_candidate(path):
            code = NoWholeCheckpointError.exit_code
    if run_or_file.is_dir():
        chosen, _ = restart_from(run_or_file)
        restart = f"a restart resumes from step {chosen[1]}, {chosen[0].name}" if chosen else "no checkpoint yet"
        print(f"{run_or_file.name}: {restart}")
    return code
