"""Whether two runs came to the same, to the last bit, and where they do not."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

STATES = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")


def outcome(run: Path) -> dict[str, Any]:
    """What a run has come to: its newest checkpoint's states and its logged rows, without those of the clock."""
    newest = max(run.glob("checkpoints/step=*.ckpt"), key=lambda path: path.name)
    checkpoint = torch.load(newest, map_location="cpu", weights_only=True)
    with (run / "metrics.csv").open(newline="") as file:
        rows = [{key: text for key, text in row.items() if not key.startswith("perf/")} for row in csv.DictReader(file)]
    return {key: checkpoint[key] for key in STATES} | {"metrics.csv": rows}


def differences(left: Any, right: Any, name: str = "") -> Iterator[str]:
    """One line for each part that is not the same; nothing where all is."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            yield f"{name}: {tuple(left.shape)} {left.dtype}, {tuple(right.shape)} {right.dtype}"
        elif not torch.equal(left, right):
            gap = (left.double() - right.double()).abs()
            yield f"{name}: {int((gap != 0).sum())} of {gap.numel()} values differ, by {float(gap.max()):.3g} at most"
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
    elif left != right:
        yield f"{name}: {left!r}, {right!r}"
