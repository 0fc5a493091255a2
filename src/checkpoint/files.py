"""Checkpoint files as they lie on the disk: how one is known to be good. Needs torch alone, so that it starts fast."""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from src.checkpoint import shards
from src.files import TEMPORARY

PENDING = "validation_pending"  # in a checkpoint: the validation after its last step comes first

# What training itself saves under `checkpoints/`. A ModelCheckpoint of the user's writes there too, under other names.
OURS = re.compile(r"(best-)?step=(\d{8,})")


def kind_by_name(path: Path) -> str:
    """`newest` or `best`, and `other` for what somebody else has saved: that is neither deleted nor counted as ours."""
    found = OURS.fullmatch(path.stem) if path.suffix == ".ckpt" else None
    return "other" if found is None else "best" if found[1] else "newest"


def is_of_a_run(path: Path) -> bool:
    """Whether training goes on from there, and it is not moved aside or somebody else's."""
    return path.parent.name == "checkpoints" and kind_by_name(path) != "other"


def ours(folder: Path, kind: str) -> list[Path]:
    """What training has saved of this kind, fewest steps first."""
    return sorted((path for path in folder.glob("*.ckpt") if kind_by_name(path) == kind), key=step_in_name)


def moved_aside(folder: Path) -> list[Path]:
    """What training has saved and somebody has moved to a folder of its own there, under a number more at times."""
    return [path for path in sorted(folder.glob("*/*.ckpt")) if OURS.match(path.stem)]


def step_in_name(path: Path) -> int:
    """Of a file of ours."""
    found = OURS.fullmatch(path.stem)
    assert found is not None
    return int(found[2])


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint file; None where it is whole.

    Every byte is read: torch.save writes a zip with a checksum per tensor, and a memory-mapped load looks at none of
    them (4 KB of zeros in the middle of a file were found only so).
    """
    if reason := _torn(path):
        return reason
    try:
        content = _content(path)
        int(content["global_step"])
    except Exception as error:  # what pickle, torch or a missing key may raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if reason := shards.lacking(content, path):
        return reason
    for part in shards.parts_of(content, path):
        if reason := _torn(part):
            return f"{part.parent.name}/{part.name}, a part of it: {reason}"
    return None


def _torn(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except Exception as error:  # a torn zip fails in many ways
        return f"{type(error).__name__}: {error}"
    return None if torn is None else f"the checksum of {torn} in it is wrong"


def bytes_of(path: Path) -> int:
    """How much room a checkpoint takes, its parts too."""
    return path.stat().st_size + sum(_content(path).get(shards.PARTS, {}).values())


def unreadable(path: Path) -> str | None:
    """Why the disk does not give out the bytes of a file right now, whatever they are; None where it does."""
    try:
        with path.open("rb") as file:
            while file.read(2**20):
                pass
    except OSError as error:
        return error.strerror or str(error)
    return None


def steps_inside(path: Path) -> int:
    """Optimizer steps done in a checkpoint: a memory-mapped load of tensors and plain types only (`weights_only`)."""
    return int(_content(path)["global_step"])


def rows_inside(path: Path) -> int:
    """Steps that have a row in a checkpoint's run; under manual optimization batches, as Lightning's loggers count."""
    content = _content(path)
    loops = content.get("loops", {}).get("fit_loop", {})
    manual = loops.get("epoch_loop.manual_optimization.optim_step_progress", {}).get("total", {}).get("completed")
    if not manual:
        return int(content["global_step"])
    # A validation counts as part of the batch before it, which has its row.
    return int(loops["epoch_loop.state_dict"]["_batches_that_stepped"]) + bool(content.get(PENDING))


def place_inside(path: Path) -> str:
    """Where in the data a checkpoint's run is, for people to read; loaders that keep no position have none."""
    content = _content(path)
    loaders = content.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    keys = {"epoch", "samples", "size"}
    places = [state for state in loaders if isinstance(state, dict) and keys <= state.keys()]
    epoch = f"epoch {places[0]['epoch'] if places else content.get('epoch', '?')}"
    return ", ".join([epoch, *(f"{place['samples']} of its {place['size']} samples done" for place in places)])


def goes_on(path: Path) -> bool:
    """Whether training can go on from a file: one of weights alone, as a user's ModelCheckpoint may save, is none."""
    return kind_by_name(path) != "other" or "optimizer_states" in _content(path)


def _content(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def clear_temporary(folder: Path) -> None:
    """Remove what a killed save has left; only for the one process that owns the run."""
    for place in (folder, folder / shards.FOLDER):
        for path in place.glob(TEMPORARY.format(name="*")):
            path.unlink()
    shards.sweep(folder)
