"""Whether two runs came to the same, to the last bit, and where they do not."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from src.checkpoint.choose import newest
from src.checkpoint.contents import average_in
from src.checkpoint.shards import load
from src.errors import UserError

STATES = ("state_dict", "optimizer_states", "lr_schedulers", "MixedPrecision", "global_step", "epoch")


def outcome(run: Path) -> dict[str, Any]:
    """What a run has come to: its newest checkpoint's states, also what each rank alone knows, and its logged rows.

    What comes from the clock is left out.

    Raises:
        UserError: it has no checkpoint yet.

    """
    found = newest(run / "checkpoints")
    if found is None:
        raise UserError(f"{run} has no checkpoint yet, so there is nothing to compare")
    rows, path = [], run / "metrics.csv"
    if path.exists():
        with path.open(newline="", errors="replace") as file:
            rows = [
                {key: text for key, text in row.items() if not key.startswith("perf/")} for row in csv.DictReader(file)
            ]
    content = load(found[0])
    ranks = content.get("callbacks", {}).get("SaveNewest", {}).get("ranks")
    data = content.get("loops", {}).get("fit_loop", {}).get("state_dict")
    return states(found[0]) | {"data": data, "ranks": ranks, "metrics.csv": rows}


def states(path: Path) -> dict[str, Any]:
    """What a checkpoint file brings back of a training, on the CPU."""
    checkpoint = load(path)
    average = average_in(checkpoint)
    return {key: checkpoint[key] for key in STATES if key in checkpoint} | ({"average": average} if average else {})


def differences(left: Any, right: Any, name: str = "") -> Iterator[str]:
    """One line for each part that is not the same; nothing where all is."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
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
