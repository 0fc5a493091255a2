"""`list` and `verify`: which runs and checkpoints there are, and which of them are whole."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.checkpoint.entries import FOLDER, KINDS, entries, files_of, kind_of, restart_from
from src.checkpoint.status import state_of
from src.engine.checkpoint.choose import NoWholeCheckpointError
from src.engine.checkpoint.files import fault
from src.engine.errors import UserError
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


def _print(rows: list[Row], columns: dict[str, Callable[[Row], str]]) -> None:
    cells = [list(columns), *([text(row) for text in columns.values()] for row in rows)]
    print(table(cells, right=[n for n, name in enumerate(columns) if name in RIGHT]))


def list_runs(root: Path, as_json: bool) -> None:
    """Print one line per run, the one that was started last first. No checkpoint is opened."""
    rows = [_of_run(folder) for folder in newest_first(root)]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        _print(rows, RUNS)
    else:
        print(f"no run in {root} yet")


def _of_run(folder: Path) -> Row:
    row: Row = {"name": folder.name, "state": "unreadable", "last_step": None, "checkpoints": 0}
    times = []
    with contextlib.suppress(UserError, OSError):  # `status` says why; the other runs are shown all the same
        files = [path for path in files_of(folder) if path.parent.name == FOLDER]
        row["checkpoints"] = len(files)
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # training has just deleted it
                times.append(path.stat().st_mtime)
        state = state_of(folder)
        row |= {"state": state.name, "last_step": state.last_step}
    return row | {"newest_modified": max(times, default=None), "folder": str(folder)}


def list_checkpoints(run: Path, before_step: int | None, as_json: bool) -> None:
    """Print the run's checkpoints, newest step first; with `before_step` only those of fewer steps."""
    rows = [entry.facts() for entry in entries(run)]
    unknown = sum(row["step"] is None for row in rows)
    if before_step is not None:
        rows = [row for row in rows if row["step"] is not None and row["step"] < before_step]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if rows:
        _print(rows, CHECKPOINTS)
        print("VALID is what a quick look finds; `verify` reads every byte")
    else:
        print(f"{run} has no checkpoint {'yet' if before_step is None else f'before step {before_step}'}")
    if unknown and before_step is not None:
        print(f"not shown: {unknown} damaged, whose step cannot be read")


def verify(run_or_file: Path) -> int:
    """Read every byte of one file, or of a run's, and print which a restart would take; return the exit code.

    Files in subfolders are read too, but no restart takes them, so they do not count.
    """
    if run_or_file.is_file():
        return _verify([run_or_file], run_or_file.parent.parent)
    run = run_or_file
    code = _verify(files_of(run), run.parent)
    chosen, _ = restart_from(run)
    if chosen is None:
        print(f"{run.name}: no checkpoint yet")
    else:
        print(f"{run.name}: a restart resumes from step {chosen[1]}, {chosen[0].name}")
    return code


def _verify(paths: list[Path], relative_to: Path) -> int:
    code = 0
    for path in paths:
        reason = fault(path)
        if reason is not None and not path.exists():  # training has just replaced it
            continue
        aside = path.parent.parent.name == FOLDER and kind_of(path) not in KINDS
        result = "ok" if reason is None else f"damaged: {shorten(reason, 300)}"
        note = f" ({kind_of(path)}, no candidate)" if aside else ""
        print(f"{path.relative_to(relative_to)}  {result}{note}", flush=True)
        if reason is not None and not aside:
            code = NoWholeCheckpointError.exit_code
    return code
