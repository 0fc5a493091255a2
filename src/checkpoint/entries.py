"""What lies in a run's checkpoints folder, and how a command line names a run or one file of it."""

import contextlib
import io
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from src.checkpoint.choose import newest
from src.checkpoint.files import fault, kind_by_name
from src.checkpoint.shards import PARTS, lacking
from src.errors import UserError
from src.run import existing_run
from src.storage import run_root

FOLDER = "checkpoints"
PARTS_OF_A_RUN = ("config.yaml", "summary.json", FOLDER)


@dataclass
class Entry:
    """One checkpoint file. Everything about its content is read from inside, so a renamed file is still right."""

    path: Path
    kind: str  # newest | best | other, or the subfolder that it was moved aside to
    size: int
    modified: float
    step: int | None = None
    epoch: int | None = None
    monitor: str | None = None  # with `metric`, only of the best
    metric: float | None = None
    weights_only: bool = False  # of a user's ModelCheckpoint: nothing goes on from it
    reason: str | None = None  # why it cannot be loaded, as far as a look that reads few bytes can tell

    @property
    def candidate(self) -> bool:
        """Whether a restart may take it; what lies in a subfolder it never takes."""
        return self.path.parent.name == FOLDER


def run_folder(text: str) -> Path:
    """The run directory that the command line names: a folder's name in the run root, or a path.

    Raises:
        UserError: there is none; the text says where it was looked for and what is there.

    """
    if "/" not in text and text not in (".", ".."):
        return existing_run(run_root(written=False)[0], text)
    folder = Path(text).expanduser().absolute()
    if not any((folder / part).exists() for part in PARTS_OF_A_RUN):
        raise UserError(
            f"{text} is no run directory (it has none of {', '.join(PARTS_OF_A_RUN)}): "
            f"give one, or the name of a run in {run_root(written=False)[0]}"
        )
    return folder


def run_or_file(text: str) -> Path:
    """A checkpoint file, or else a run directory."""
    path = Path(text).expanduser().absolute()
    if path.suffix == ".ckpt" and not path.exists():
        raise UserError(f"there is no file {path}: `list` shows those of a run")
    return path if path.is_file() else run_folder(text)


def run_of(path: Path) -> str:
    """The name of the run that a checkpoint file belongs to."""
    folders = [path.parent, path.parent.parent]
    return next((folder.parent.name for folder in folders if folder.name == FOLDER), path.parent.name)


def files_of(run: Path) -> list[Path]:
    """Every checkpoint file of the run, those that were moved aside too."""
    folder = run / FOLDER
    return [*sorted(folder.glob("*.ckpt")), *sorted(folder.glob("*/*.ckpt"))]


def entries(run: Path) -> list[Entry]:
    """Every checkpoint of the run, newest step first; those whose step cannot be read come last."""
    found = [entry for path in files_of(run) if (entry := look(path))]
    kinds = ("newest", "best", "other")  # of the same step; then what was moved aside
    found.sort(key=lambda entry: kinds.index(entry.kind) if entry.kind in kinds else len(kinds))
    return sorted(found, key=lambda entry: -1 if entry.step is None else entry.step, reverse=True)


def candidates(run: Path) -> list[Entry]:
    """The entries that a restart may take, in the order in which it tries them (see `newest`)."""
    known = [entry for entry in entries(run) if entry.candidate and entry.step is not None]
    return sorted(known, key=lambda entry: entry.kind != "newest")  # stable: the newest step first in both groups


def look(path: Path) -> Entry | None:
    """What the file says of itself, read in an instant; None where it has just gone, as old ones do in training."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    entry = Entry(path, kind_of(path), stat.st_size, stat.st_mtime)
    try:
        with zipfile.ZipFile(path):  # its directory is at the end: a torn file is named as such
            pass
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        entry.size += sum(content.get(PARTS, {}).values())
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
    """What became of a checkpoint, by its place and name."""
    if path.parent.name != FOLDER:
        return path.parent.name
    return kind_by_name(path)


def _score(content: dict[str, Any]) -> tuple[str | None, float | None]:
    """What the callback that saved the best knew when it did: the metric's name and its value in this state."""
    states = content.get("callbacks", {})
    for key in sorted(states, key=lambda key: not str(key).startswith("SaveBest")):  # before a project's own
        state = states[key]
        if isinstance(state, dict) and state.get("best_model_score") is not None:
            value = float(state["best_model_score"])
            return state.get("monitor"), value if math.isfinite(value) else None
    return None, None


def restart_from(run: Path) -> tuple[tuple[Path, int] | None, list[str]]:
    """What a restart would take, as `newest` decides, and what that says of damaged files.

    Raises:
        NoWholeCheckpointError: there are files and none is whole.

    """
    with contextlib.redirect_stdout(io.StringIO()) as said:  # a table or JSON goes to stdout
        found = newest(run / FOLDER)
    return found, [line.removeprefix("warning: ") for line in said.getvalue().splitlines()]


def steps_there(run: Path) -> str:
    """The steps that can be asked for, for a message: what lies in subfolders is no choice."""
    steps = sorted({entry.step for entry in candidates(run) if entry.step is not None})
    return "steps there: " + ", ".join(map(str, steps)) if steps else "it has no checkpoint with a readable step"


def faults(paths: list[Path]) -> Iterator[tuple[Path, str | None]]:
    """Each file with what is wrong with it; one that vanishes meanwhile was replaced by a newer and is left out."""
    for path in paths:
        reason = fault(path)
        if reason is None or path.exists():
            yield path, reason
