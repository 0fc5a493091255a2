"""Text as a memory-mapped array of bytes, cut into windows."""

import hashlib
import os
import sysconfig
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from src.engine.data.loader import GlobalBatchLoader
from src.engine.errors import UserError
from src.models.gpt import GPT

SPLITS = ("train", "val", "test")
# Not Python's standard library but what lies beside it; its tests are full of bytes that are no code.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Windows(Dataset):
    """Windows of `context` bytes and the byte after each, without overlap: item i is uint8 of shape (context + 1,)."""

    def __init__(self, path: Path, context: int) -> None:
        size = path.stat().st_size
        if size <= context:  # an empty file cannot be mapped either
            raise UserError(f"{path} has {size} bytes, fewer than one window of context {context}: more text?")
        self.bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self.context = context
        self._offsets = np.arange(context + 1)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Return a whole batch by one read, uint8 of shape (B, context + 1)."""
        starts = np.asarray(indices)[:, None] * self.context
        return torch.from_numpy(self.bytes[starts + self._offsets])


def _as_is(batch: Tensor) -> Tensor:
    """Return the batch, which `__getitems__` has collated."""
    return batch


def text_files(folder: Path | None) -> tuple[Path, list[Path]]:
    """Return the root and its text files, sorted; None is the Python standard library."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"data.folder {root} is no folder")
    if folder is None:
        files = [file for file in root.rglob("*.py") if not NOT_STDLIB & set(file.relative_to(root).parts)]
    else:
        files = [file for file in root.rglob("*") if file.is_file() and _is_text(file)]
    if not files:
        raise UserError(f"data.folder {root} holds no text files")
    return root, sorted(files)


def _is_text(file: Path) -> bool:
    """Return whether the first 8 KiB have no zero byte (git's rule)."""
    with file.open("rb") as stream:
        return b"\0" not in stream.read(8192)


def store(root: Path, files: list[Path], cache: Path) -> Path:
    """Write train.bin, val.bin and test.bin once, split by file; returns their folder, named by the content.

    Every node or process may call this at the same time: each writes a folder of its own and the first rename wins.
    """
    facts = [(str(file.relative_to(root)), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    folder = cache / f"text-{hashlib.sha256(repr((str(root), facts)).encode()).hexdigest()[:16]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=cache))
    streams = {split: (temporary / f"{split}.bin").open("wb") for split in SPLITS}
    for file, (name, _, _) in zip(files, facts, strict=True):
        share = zlib.crc32(name.encode()) % 20  # by the name's hash, so that a new file moves no other
        streams["val" if share == 0 else "test" if share == 1 else "train"].write(file.read_bytes() + b"\0")
    for stream in streams.values():
        stream.close()
    try:
        temporary.rename(folder)
    except OSError:  # somebody else was first
        for split in SPLITS:
            (temporary / f"{split}.bin").unlink()
        temporary.rmdir()
    return folder


class TextBytes(LightningDataModule):
    """Bytes of text files for a next-byte model, in windows of the model's context.

    Args:
        folder: any folder with text files; default: the standard library of the Python that runs this
        batch_size: samples per device and pass; the command line derives it from global_batch_size
        num_workers: loader processes per rank; default: from this rank's share of the CPUs
        cache: where the arrays are kept; default: $XDG_CACHE_HOME or ~/.cache

    """

    def __init__(
        self,
        folder: str | None = None,
        batch_size: int = 16,
        num_workers: int | None = None,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        self.folder = None if folder is None else Path(folder)
        self.batch_size, self.num_workers = batch_size, num_workers
        self.cache = Path(cache or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "language-data"

    def prepare_data(self) -> None:
        """Write the arrays, in one process per node."""
        store(*text_files(self.folder), self.cache)

    def setup(self, stage: str) -> None:
        """Map the arrays."""
        assert self.trainer is not None
        context = cast(GPT, self.trainer.lightning_module.model).context
        folder = store(*text_files(self.folder), self.cache)
        self.train_set, self.val_set, self.test_set = (Windows(folder / f"{split}.bin", context) for split in SPLITS)

    def _loader(self, windows: Windows, *, train: bool = False) -> GlobalBatchLoader:
        return GlobalBatchLoader(
            windows, self.batch_size, self.trainer, train=train, num_workers=self.num_workers, collate_fn=_as_is
        )

    def train_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.train_set, train=True)

    def val_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.val_set)

    def test_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.test_set)

    def predict_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.test_set)
