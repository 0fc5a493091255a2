"""Writes checkpoint files that are whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from src.checkpoint.files import TEMPORARY


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
