"""Choose the checkpoint to resume from or to evaluate: by the step inside the file, never by its name or date."""

import os
from pathlib import Path

import torch

from src.engine import exit_codes
from src.engine.checkpoint.files import fault, resumable, steps_inside, why_damaged
from src.engine.checkpoint.move import free_name
from src.engine.checkpoint.names import kind_by_name
from src.engine.checkpoint.shards import read
from src.engine.errors import UserError

QUARANTINE = "quarantine"


class NoWholeCheckpointError(UserError):
    """There are checkpoint files and not one is whole. No restart mends it."""

    exit_code = exit_codes.NO_CHECKPOINT


def newest(folder: Path, *, quarantine: bool = False) -> tuple[Path, int] | None:
    """Return the whole checkpoint with the most steps, and that number; None where the folder holds no checkpoint file.

    The best by a metric may be of the middle of a step and counts only where no other is whole, as do the files of a
    user's own ModelCheckpoint; of these, one with weights alone cannot be resumed from. A damaged file is passed over
    with a warning, or moved to `quarantine/` in the folder. Where there are files and none is whole, this raises
    NoWholeCheckpointError: starting from scratch would bury the work. What the disk refuses to read raises OSError
    (exit code 75): an older state would lose work.
    """
    steps: dict[Path, int] = {}
    damaged: dict[Path, str] = {}
    for path in sorted(folder.glob("*.ckpt")):
        try:
            if resumable(path):
                steps[path] = steps_inside(path)
        except Exception as error:  # a torn file fails in many ways, none of which may stop the search
            damaged[path] = why_damaged(error)
    candidates = len(steps) + len(damaged)
    chosen = None
    for path in sorted(steps, key=lambda file: (kind_by_name(file) == "newest", steps[file]), reverse=True):
        if reason := fault(path):
            damaged[path] = reason
        else:
            chosen = path
            break
    for path, reason in damaged.items():
        away = _move_aside(path) if quarantine and chosen is not None else "passed over"
        print(f"warning: {path} is damaged; {away} ({reason})")
    if candidates and chosen is None:
        raise NoWholeCheckpointError(
            f"none of the {candidates} checkpoints in {folder} is whole, so this run cannot be resumed; "
            "another --run name starts anew"
        )
    return None if chosen is None else (chosen, steps[chosen])


def _move_aside(path: Path) -> str:
    folder = path.parent / QUARANTINE
    try:
        folder.mkdir(exist_ok=True)
        os.replace(path, free_name(folder / path.name))
    except OSError as error:
        return f"passed over, as it cannot be moved: {error.strerror}"
    return f"moved to {folder}"


def score_inside(path: Path, callback: str) -> torch.Tensor | None:
    """Return the best score in the state of the callback with this key; None where there is none."""
    if fault(path):
        return None
    state = read(path).get("callbacks", {}).get(callback, {})
    return state.get("best_model_score")
