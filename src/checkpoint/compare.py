"""`diff`: compare two runs to the last bit."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.contents import average_in
from src.engine.checkpoint.files import fault
from src.engine.checkpoint.shards import load
from src.engine.errors import UserError

STATES = ("state_dict", "optimizer_states", "lr_schedulers", "MixedPrecision", "global_step", "epoch")
SHOWN = 40  # lines on what differs


def diff(first: Path, second: Path) -> bool:
    """Print where two runs, or two checkpoint files, differ; return whether they do.

    Logged rows and what each rank alone knows count between two runs; if one is a file, only its states.
    """
    if first.is_dir() and second.is_dir():
        lines = list(differences(outcome(first), outcome(second)))
    else:
        lines = list(differences(states(_file(first)), states(_file(second))))
    print(shown(lines) or "identical")
    return bool(lines)


def shown(lines: list[str]) -> str:
    """Return the first lines, and how many more there are."""
    more = f"\n… and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "\n".join(lines[:SHOWN]) + more


def _file(path: Path) -> Path:
    if path.is_dir():
        return _newest(path)
    if reason := fault(path):
        raise UserError(f"{path} is no whole checkpoint ({reason}): give another")
    return path


def _newest(run: Path) -> Path:
    chosen = newest(run / "checkpoints")
    if chosen is None:
        raise UserError(f"{run} has no checkpoint yet, so there is nothing to compare")
    return chosen[0]


def outcome(run: Path) -> dict[str, Any]:
    """Return the states in a run's newest checkpoint, each rank's too, and its logged rows without timings."""
    rows, path = [], run / "metrics.csv"
    if path.exists():
        with path.open(newline="", errors="replace") as file:
            rows = [
                {key: text for key, text in row.items() if not key.startswith("perf/")} for row in csv.DictReader(file)
            ]
    checkpoint = _newest(run)
    content = load(checkpoint)
    ranks = content.get("callbacks", {}).get("SaveNewest", {}).get("ranks")
    data = content.get("loops", {}).get("fit_loop", {}).get("state_dict")
    return states(checkpoint) | {"data": data, "ranks": ranks, "metrics.csv": rows}


def states(path: Path) -> dict[str, Any]:
    """Return what a checkpoint file restores of a training, on the CPU."""
    checkpoint = load(path)
    average = average_in(checkpoint)
    return {key: checkpoint[key] for key in STATES if key in checkpoint} | ({"average": average} if average else {})


def differences(left: Any, right: Any, name: str = "") -> Iterator[str]:
    """Yield one line for each value that differs."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            yield f"{name}: {tuple(left.shape)} {left.dtype}, {tuple(right.shape)} {right.dtype}"
        elif not torch.equal(left, right):
            other = (left != right) & ~(left.isnan() & right.isnan())  # two runs may have diverged alike
            if other.any():
                gap = (left.double() - right.double())[other].abs().max()
                yield f"{name}: {int(other.sum())} of {other.numel()} values differ, by {float(gap):.3g} at most"
    elif isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            full = f"{name}.{key}" if name else str(key)
            if key in left and key in right:
                yield from differences(left[key], right[key], full)
            else:
                yield f"{full}: only in the {'first' if key in left else 'second'}"
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            yield f"{name}: {len(left)} entries, {len(right)} entries"
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from differences(one, other, f"{name}[{index}]")
    elif left != right and not (left != left and right != right):  # NaN alone is not itself
        yield f"{name}: {left!r}, {right!r}"
