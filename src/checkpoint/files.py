"""Checkpoint files as they lie on the disk: how one is known to be good. Needs torch alone, so that it starts fast."""

import zipfile
from pathlib import Path

import torch

TEMPORARY = ".{name}.tmp"  # no `*.ckpt`, so that nothing takes it for a checkpoint


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint file; None where it is whole.

    Every byte is read: torch.save writes a zip with a checksum per tensor, and a memory-mapped load looks at none of
    them (4 KB of zeros in the middle of a file were found only so).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except Exception as error:  # a torn zip fails in many ways
        return f"{type(error).__name__}: {error}"
    if torn is not None:
        return f"the checksum of {torn} in it is wrong"
    try:
        steps_inside(path)
    except Exception as error:  # what pickle, torch or a missing key may raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def steps_inside(path: Path) -> int:
    """Optimizer steps done in a checkpoint: a memory-mapped load of tensors and plain types only (`weights_only`)."""
    return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"])


def clear_temporary(folder: Path) -> None:
    """Remove what a killed save has left; only for the one process that owns the run."""
    for path in folder.glob(TEMPORARY.format(name="*")):
        path.unlink()
