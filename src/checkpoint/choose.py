"""Which checkpoint to continue from or to evaluate: by the step inside the file, never by its name or date."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from src import exit_codes
from src.checkpoint.files import fault, goes_on, kind_by_name, steps_inside, unreadable
from src.checkpoint.put_aside import free_name
from src.errors import UserError

QUARANTINE = "quarantine"
T = TypeVar("T")
WAIT_SECONDS = 1.0  # before a file is read again that the disk has refused


class NoWholeCheckpointError(UserError):
    """There are checkpoint files and not one is whole. No restart mends it."""

    exit_code = exit_codes.NO_CHECKPOINT


class UnreadableError(NoWholeCheckpointError):
    """Not one could be read, which may pass, as it does on file servers."""

    exit_code = exit_codes.BUSY


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
        UnreadableError: where the disk does not give them out, which says nothing of what is in them.

    """
    files = sorted(folder.glob("*.ckpt"))
    steps: dict[Path, int] = {}
    damaged: dict[Path, str] = {}
    for path in list(files):
        try:
            if (done := _twice(path, _steps)) is None:
                files.remove(path)
            else:
                steps[path] = done
        except Exception as error:  # a torn file fails in many ways, none of which may stop the search
            damaged[path] = f"{type(error).__name__}: {error}".splitlines()[0]
    chosen = None
    for path in sorted(steps, key=lambda file: (kind_by_name(file) == "newest", steps[file]), reverse=True):
        if reason := _twice(path, fault):
            damaged[path] = reason
        else:
            chosen = path
            break
    refused = {path: reason for path in damaged if (reason := unreadable(path))}
    for path, reason in damaged.items():
        if path in refused:
            print(f"warning: {path} cannot be read right now and is passed over ({refused[path]})")
            continue
        away = _put_aside(path, quarantine and chosen is not None)
        print(f"warning: {path} is no whole checkpoint and is {away} ({reason})")
    if refused and chosen is None:
        raise UnreadableError(f"{len(refused)} checkpoints in {folder} cannot be read right now, and no other is whole")
    if files and chosen is None:
        raise NoWholeCheckpointError(
            f"none of the {len(files)} checkpoints in {folder} is whole, so this run cannot go on; "
            "another --run name starts anew"
        )
    return None if chosen is None else (chosen, steps[chosen])


def _steps(path: Path) -> int | None:
    """Steps inside; None in a file that nothing goes on from."""
    return steps_inside(path) if goes_on(path) else None


def _twice(path: Path, look: Callable[[Path], T]) -> T:
    """What a look at a file gives, or a second one where that fails: what a disk refuses may pass."""
    try:
        found = look(path)
        failed = look is fault and found is not None
    except Exception:  # a torn file fails in many ways
        failed = True
    if not failed:
        return found
    if path.exists() and unreadable(path):
        time.sleep(WAIT_SECONDS)
    return look(path)


def _put_aside(path: Path, quarantine: bool) -> str:
    if not quarantine:
        return "passed over"
    folder = path.parent / QUARANTINE
    try:
        folder.mkdir(exist_ok=True)
        os.replace(path, free_name(folder / path.name))
    except OSError as error:
        return f"passed over, as it cannot be moved: {error.strerror}"
    return f"moved to {folder}"


def score_inside(path: Path, callback: str) -> torch.Tensor | None:
    """The best score that the callback of this state key knew when it wrote `path`; None where there is none."""
    if fault(path):
        return None
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get("callbacks", {}).get(callback, {})
    return state.get("best_model_score")
