"""Checkpoint files that are whole or not there: how one is written, and how it is known to be good."""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

TEMPORARY = ".{name}.tmp"  # no `*.ckpt`, so that nothing takes it for a checkpoint


class WholeFiles(TorchCheckpointIO):
    """Writes to a temporary name in the same folder, to the disk, and only then under the file's own name.

    A process that is killed while it writes, or a machine that loses power, leaves the file of before or none.
    Lightning builds the whole file in memory first and does not wait for the disk.

    A disk that is full or gone does not end the training, which another save may still preserve: `error` says what was
    wrong with the newest save, and is None where it went well. Only the process that writes knows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | RuntimeError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path` whole, or set `error`."""
        target = Path(path)
        temporary = target.with_name(TEMPORARY.format(name=target.name))
        self.error = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            _sync_folder(target.parent)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            self.error = error
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk as well; without it a power cut may bring back the old one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
