"""Which checkpoint to continue from or to evaluate: by the step inside the file, never by its name or date."""

import os
from pathlib import Path

import torch

from src.checkpoint.files import fault, goes_on, kind_by_name, steps_inside
from src.errors import UserError

QUARANTINE = "quarantine"


class NoWholeCheckpointError(UserError):
    """There are checkpoint files and not one is whole. No restart mends it: its exit code is its own (EX_DATAERR)."""

    exit_code = 65


def newest(folder: Path, *, quarantine: bool = False) -> tuple[Path, int] | None:
    """The whole checkpoint with the most steps, and that number; None where the folder holds no checkpoint file.

    The best by a metric may be of the middle of a step and count only where no other is whole, as do the files of a
    user's own ModelCheckpoint; of these, one with weights alone is no checkpoint to go on from. A damaged file gives
    way to the next, and is said.

    Args:
        folder: of `*.ckpt` files
        quarantine: move damaged files to `quarantine/` in it; nothing is deleted

    Raises:
        NoWholeCheckpointError: there are files and none is whole; starting from scratch would bury the work.

    """
    files = sorted(folder.glob("*.ckpt"))
    steps: dict[Path, int] = {}
    damaged: dict[Path, str] = {}
    for path in list(files):
        try:
            if goes_on(path):
                steps[path] = steps_inside(path)
            else:
                files.remove(path)
        except Exception as error:  # a torn file fails in many ways, none of which may stop the search
            damaged[path] = f"{type(error).__name__}: {error}".splitlines()[0]
    chosen = None
    for path in sorted(steps, key=lambda file: (kind_by_name(file) == "newest", steps[file]), reverse=True):
        if reason := fault(path):
            damaged[path] = reason
        else:
            chosen = path
            break
    for path, reason in damaged.items():
        done = _put_aside(path, quarantine and chosen is not None)
        print(f"warning: {path} is no whole checkpoint and is {done} ({reason})")
    if files and chosen is None:
        raise NoWholeCheckpointError(
            f"none of the {len(files)} checkpoints in {folder} is whole, so this run cannot go on; "
            "another --run name starts anew"
        )
    return None if chosen is None else (chosen, steps[chosen])


def _put_aside(path: Path, quarantine: bool) -> str:
    if not quarantine:
        return "passed over"
    folder = path.parent / QUARANTINE
    try:
        folder.mkdir(exist_ok=True)
        os.replace(path, folder / path.name)
    except OSError as error:
        return f"passed over, as it cannot be moved: {error.strerror}"
    return f"moved to {folder}"


def score_inside(path: Path, callback: str) -> torch.Tensor | None:
    """The best score that the callback of this state key knew when it wrote `path`; None where there is none."""
    if fault(path):
        return None
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get("callbacks", {}).get(callback, {})
    return state.get("best_model_score")
