"""`list` and `verify`: which runs and checkpoints there are, and which of them are whole."""

import contextlib
import json
from pathlib import Path
from typing import Any

from src.checkpoint.choose import NoWholeCheckpointError
from src.checkpoint.entries import FOLDER, Entry, entries, faults, files_of, kind_of, restart_from
from src.checkpoint.status import state_of
from src.checkpoint.units import age, number, shorten, size, table
from src.errors import UserError
from src.run import newest_first


def list_runs(root: Path, as_json: bool) -> None:
    """One line per run, the one that was started last first. No checkpoint is opened."""
    runs = [_run_facts(folder) for folder in newest_first(root)]
    if as_json:
        print(json.dumps(runs, indent=2))
        return
    if not runs:
        print(f"no run in {root} yet")
        return
    rows = [
        (run["name"], run["state"], number(run["last_step"]), str(run["checkpoints"]), age(run["newest_modified"]))
        for run in runs
    ]
    print(table(("RUN", "STATE", "STEP", "CHECKPOINTS", "NEWEST"), rows, right=(2, 3, 4)))


def _run_facts(folder: Path) -> dict[str, Any]:
    files, times = [], []
    try:
        files = [path for path in files_of(folder) if path.parent.name == FOLDER]
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # training has just replaced it
                times.append(path.stat().st_mtime)
        state, step = (told := state_of(folder)).name, told.last_step
    except (UserError, OSError):  # `status` says why; the other runs are shown all the same
        state, step = "unreadable", None
    return {
        "name": folder.name,
        "state": state,
        "last_step": step,
        "checkpoints": len(files),
        "newest_modified": max(times, default=None),
        "folder": str(folder),
    }


def list_checkpoints(run: Path, before_step: int | None, as_json: bool) -> None:
    """The run's checkpoints, newest step first; with `before_step` only those of fewer steps."""
    found = entries(run)
    unknown = [entry for entry in found if entry.step is None]
    if before_step is not None:
        found = [entry for entry in found if entry.step is not None and entry.step < before_step]
    if as_json:
        print(json.dumps([_facts(entry) for entry in found], indent=2))
        return
    if not found:
        print(f"{run} has no checkpoint {'yet' if before_step is None else f'before step {before_step}'}")
    else:
        head = ("STEP", "EPOCH", "METRIC", "SIZE", "AGE", "VALID", "KIND", "FILE")
        print(table(head, [_row(entry) for entry in found], right=(0, 1, 3, 4)))
        print("VALID is what a quick look finds; `verify` reads every byte")
    if unknown and before_step is not None:
        print(f"not shown: {len(unknown)} damaged, of which no step can be read")


def _row(entry: Entry) -> tuple[str, ...]:
    metric = "-" if entry.metric is None else f"{entry.monitor}={entry.metric:.6g}"
    valid = "yes" if entry.reason is None else f"damaged: {shorten(entry.reason, 60)}"
    return (
        number(entry.step),
        number(entry.epoch),
        metric,
        size(entry.size),
        age(entry.modified),
        valid,
        entry.kind,
        entry.path.name,
    )


def _facts(entry: Entry) -> dict[str, Any]:
    return {
        "step": entry.step,
        "epoch": entry.epoch,
        "monitor": entry.monitor,
        "metric": entry.metric,
        "bytes": entry.size,
        "modified": entry.modified,
        "valid": entry.reason is None,
        "reason": entry.reason,
        "kind": entry.kind,
        "file": str(entry.path),
    }


def verify_file(path: Path) -> int:
    """Read every byte of one file; returns the exit code."""
    return _verify([path], path.parent)


def verify_run(run: Path) -> int:
    """Read every byte of each checkpoint and say which a restart would take; returns the exit code.

    What was moved aside is read too, but no restart takes it: it does not count.

    Raises:
        NoWholeCheckpointError: there are candidates and none is whole.

    """
    code = _verify(files_of(run), run)
    found, _ = restart_from(run)
    if found is None:
        print(f"{run.name}: no checkpoint yet")
    else:
        print(f"{run.name}: a restart goes on from step {found[1]}, {found[0].name}")
    return code


def _verify(paths: list[Path], folder: Path) -> int:
    code = 0
    for path, reason in faults(paths):
        aside = kind_of(path) if path.parent.parent == folder / FOLDER else None
        note = f" ({aside}, no candidate)" if aside else ""
        said = "ok" if reason is None else f"damaged: {shorten(reason, 300)}"
        print(f"{path.relative_to(folder.parent)}  {said}{note}", flush=True)
        if reason is not None and not aside:
            code = NoWholeCheckpointError.exit_code
    return code
