"""List a run's checkpoints, and find the run or file that a command line names."""

import contextlib
import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.names import kind_by_name
from src.engine.checkpoint.shards import PARTS, lacking
from src.engine.errors import UserError
from src.engine.run.directory import existing_run
from src.engine.run.storage import run_root

FOLDER = "checkpoints"
FILES_OF_A_RUN = ("config.yaml", "summary.json", FOLDER)


@dataclass
class Entry:
    """One checkpoint file. What is in it is read from inside, so a renamed file is still right."""

    path: Path
    kind: str  # newest, best, other; or the subfolder that it was moved to, from which no restart takes a file
    bytes: int
    modified: float
    step: int | None = None
    epoch: int | None = None
    monitor: str | None = None  # with `metric`, only of the best
    metric: float | None = None
    weights_only: bool = False  # of a user's ModelCheckpoint: no run resumes from it
    reason: str | None = None  # why it cannot be loaded, as far as reading a few bytes can tell

    def facts(self) -> dict[str, Any]:
        """Return the row of `list`."""
        row = vars(self) | {"valid": self.reason is None, "file": str(self.path)}
        del row["path"]
        return row


def run_folder(text: str) -> Path:
    """Return the run directory that the command line names: a folder's name in the run root, or a path."""
    if "/" not in text and text not in (".", ".."):
        return existing_run(run_root(written=False)[0], text)
    folder = Path(text).expanduser().absolute()
    if not any((folder / name).exists() for name in FILES_OF_A_RUN):
        raise UserError(
            f"{text} is neither a checkpoint file nor a run directory (it has none of {', '.join(FILES_OF_A_RUN)}): "
            f"give one, or the name of a run in {run_root(written=False)[0]}"
        )
    return folder


def run_or_file(text: str) -> Path:
    """Return the checkpoint file or the run directory that the command line names."""
    path = Path(text).expanduser().absolute()
    return path if path.is_file() else run_folder(text)


def files_of(run: Path) -> list[Path]:
    """Return every checkpoint file of the run, also those in subfolders."""
    folder = run / FOLDER
    return [*sorted(folder.glob("*.ckpt")), *sorted(folder.glob("*/*.ckpt"))]


def entries(run: Path) -> list[Entry]:
    """Return every checkpoint of the run, newest step first; those whose step cannot be read come last."""
    found = [entry for path in files_of(run) if (entry := look(path))]
    return sorted(
        found, key=lambda entry: (-1 if entry.step is None else entry.step, entry.kind == "newest"), reverse=True
    )


def candidates(run: Path) -> list[Entry]:
    """Return the entries that a restart may take, in the order in which it tries them (see `newest`)."""
    known = [entry for entry in entries(run) if is_candidate(entry.path) and entry.step is not None]
    return sorted(known, key=lambda entry: entry.kind != "newest")  # stable: the newest step first in both groups


def look(path: Path) -> Entry | None:
    """Return what the file says of itself, read in an instant; None if training has just deleted it."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    entry = Entry(path, kind_of(path), stat.st_size, stat.st_mtime)
    try:
        zipfile.ZipFile(path).close()  # its directory is at the end: a torn file is named as such
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        entry.bytes += sum(content.get(PARTS, {}).values())
        entry.reason = lacking(content, path)
        entry.step = int(content["global_step"])
        entry.epoch = content.get("epoch")
        entry.weights_only = entry.kind == "other" and "optimizer_states" not in content
        if entry.kind == "best":
            entry.monitor, entry.metric = _score(content)
    except Exception as error:  # a torn file fails in many ways
        entry.reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return entry


def kind_of(path: Path) -> str:
    """Return the kind of a checkpoint file, by its folder and name."""
    return kind_by_name(path) if path.parent.name == FOLDER else path.parent.name


def is_candidate(path: Path) -> bool:
    """Return whether a restart may take the file: it was moved to no subfolder."""
    return path.parent.parent.name != FOLDER


def _score(content: dict[str, Any]) -> tuple[str | None, float | None]:
    """Return the metric's name and value that the callback knew when it saved the best."""
    for key, state in content.get("callbacks", {}).items():
        if key.startswith("SaveBest"):
            value = float(state["best_model_score"])
            return state["monitor"], value if math.isfinite(value) else None
    return None, None


def restart_from(run: Path) -> tuple[tuple[Path, int] | None, list[str]]:
    """Return what a restart would take, as `newest` decides, and what that says about damaged files."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # a table or JSON goes to stdout
        chosen = newest(run / FOLDER)
    return chosen, [line.removeprefix("warning: ") for line in printed.getvalue().splitlines()]


def known_steps(run: Path) -> str:
    """Return the steps that a restart or an export can take, for a message."""
    steps = sorted({entry.step for entry in candidates(run) if entry.step is not None})
    return "steps there: " + ", ".join(map(str, steps)) if steps else "it has no checkpoint with a readable step"
