"""Write checkpoint files that are whole or not there, while training continues."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from src.engine.checkpoint.contents import HostCopies, plain
from src.engine.checkpoint.files import fault
from src.engine.checkpoint.names import ours
from src.engine.checkpoint.shards import FAILED, PARTS, await_parts, join, part_path, parts_of, read, sweep
from src.engine.distributed import gather_objects
from src.engine.files import replacing, sync, write_text

FULL = 2**20  # bytes; a file system keeps back a few
IN_FRONT = "in front of training"
Then = Callable[[Exception | None], object]
Write = Callable[[dict[str, Any]], Exception | None]


class WholeFiles(TorchCheckpointIO):
    """Write to a temporary name in the same folder, sync it to the disk, and only then give the file its own name.

    A process that is killed while it writes, or a machine that loses power, leaves the file of before or none.
    Lightning builds the whole file in memory first and does not wait for the disk.

    A full disk need not end the training, which a later save may still preserve: where the caller says by
    `storage_options` that it will look, `error` is what was wrong with the newest save, on the process that writes, and
    None where it went well. Anybody else's save (Lightning's ModelCheckpoint, which then deletes an older file) raises.

    Lightning's AsyncCheckpointIO copies on the GPU, where a second state seldom fits, and raises what went wrong at the
    next save; torch.distributed.checkpoint's writes a folder that no plain torch.load reads. Hence a thread of our own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.lazily: tuple[str, ...] = ()  # what a strategy puts together by itself of a checkpoint in parts
        self._copies = HostCopies()
        self._told = False  # that there is no memory for them
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Then | str | None = None) -> None:
        """Write `checkpoint` to `path` whole, or set `error`, and raise it where `storage_options` is None.

        With `IN_FRONT` training waits until the file is there.
        Where `storage_options` is a function, training waits only until the state is copied to the host's memory.
        The function is called from the writing thread when the file is there, with the error or None. A save that
        comes while another is being written waits for it.
        """
        self.wait()
        self._save(lambda state: write(state, Path(path)), plain(checkpoint), storage_options)

    def _save(self, act: Write, state: dict[str, Any], storage_options: Then | str | None) -> None:
        if not callable(storage_options):
            self.error = act(state)
            if self.error is not None and storage_options is None:
                raise self.error
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            copied = self._copies.of(state)
        except (RuntimeError, MemoryError) as error:  # page-locked memory has limits of its own
            self._copies = HostCopies()
            if not self._told:
                self._told = True
                print(f"note: the state cannot be copied, so training waits for the disk ({error})".splitlines()[0])
            self._write_behind(act, state, storage_options)
            return
        self._pending = self._writer.submit(self._write_behind, act, copied, storage_options)

    def _write_behind(self, act: Write, state: dict[str, Any], then: Then) -> None:
        self.error = act(state)
        then(self.error)

    def save_parts(
        self, checkpoint: dict[str, Any], parts: dict[str, Tensor], path: Path, storage_options: Then | str | None
    ) -> None:
        """Write each rank's `parts`, and on rank 0 then the file that makes a checkpoint of them. Collective.

        `parts` has this rank's rows of each sharded tensor by its place in the checkpoint, where IN_PARTS stands for
        it. A function as `storage_options` is called on rank 0 alone.
        """
        self.wait()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        of_ranks = gather_objects((secrets.token_hex(4), bool(parts)))
        files = [
            part_path(path, of_ranks[0][0], number, len(of_ranks)) if has_parts else None
            for number, (_, has_parts) in enumerate(of_ranks)
        ]
        then = (lambda _: None) if rank and callable(storage_options) else storage_options
        state = {"checkpoint": {} if rank else plain(checkpoint), "parts": parts}
        self._save(lambda state: write_parts(state["checkpoint"], state["parts"], path, files, rank), state, then)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what is in it, with whole tensors where the file has its own in parts."""
        content = super().load_checkpoint(path, *args, **kwargs)
        return join(content, Path(path), self.lazily) if PARTS in content else content

    def wait(self) -> None:
        """Wait until nothing is being written; raise what the function that a save was given has raised."""
        if self._pending is not None:
            pending = self._pending
            try:
                pending.result()
            finally:
                if pending.done():  # SIGTERM may have come meanwhile: who cleans up then waits again
                    self._pending = None

    def teardown(self) -> None:
        """Wait, and end the writing thread; Lightning calls it however training ends."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None


def write(checkpoint: dict[str, Any], target: Path) -> Exception | None:
    """Write a checkpoint whole; return what went wrong, None where nothing did."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, _plainly(target.parent):
            torch.save(checkpoint, temporary)  # by name: PyTorch writes without holding up Python's other threads
    except Exception as error:  # an object that has no pickle may raise anything
        return error
    return None


def write_parts(
    checkpoint: dict[str, Any], parts: dict[str, Tensor], path: Path, files: list[Path | None], rank: int
) -> Exception | None:
    """Write this rank's file of parts; on rank 0 then, when all exist, the file that makes a checkpoint of them."""
    own, all_parts = files[rank], [file for file in files if file is not None]
    error = write(parts, own) if own else None
    if rank and own and error:
        with suppress(OSError):  # a disk that is full; rank 0 will miss the part
            write_text(own.with_name(own.name + FAILED), str(error))
    if rank:
        return error
    try:
        if error is None:
            await_parts(all_parts)
            error = write({**checkpoint, PARTS: {file.name: file.stat().st_size for file in all_parts}}, path)
    except OSError as missed:
        error = missed
    if error:
        for file in all_parts:
            with suppress(OSError):
                file.unlink(missing_ok=True)
    return error


@contextmanager
def _plainly(folder: Path) -> Iterator[None]:
    """Raise what the disk reports in place of torch's words ("enforce fail at inline_container.cc … pos 64 vs 0")."""
    try:
        yield
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        if reason := re.search(r"strerror: (.+)", str(error)):
            raise OSError(reason[1]) from error
        free = FULL
        with suppress(OSError):  # a folder that is gone
            free = shutil.disk_usage(folder).free
        raise (OSError("no space left on the disk") if free < FULL else error) from None


def save_in_front(trainer: Trainer, path: Path) -> Exception | None:
    """Save while training waits; return what went wrong, on the rank that writes. Collective.

    A user's own CheckpointIO raises by itself.
    """
    files = trainer.strategy.checkpoint_io
    if not isinstance(files, WholeFiles):
        trainer.save_checkpoint(path)
        return None
    trainer.save_checkpoint(path, storage_options=IN_FRONT)
    return files.error


def saved_or_said(path: Path, step: int, error: Exception | None) -> bool:
    """Return whether a new checkpoint is whole, and warn where it is not. For the rank that writes."""
    try:
        reason = error or fault(path)
    except OSError as refused:  # the disk does not give out what was written
        reason = refused
    if reason:
        print(f"warning: step {step} could not be saved ({reason}); older checkpoints stay", flush=True)
    return not reason


def linked_or_said(path: Path, other: Path) -> bool:
    """Give a saved state another name; return whether that worked, and warn where not. For the rank that writes."""
    try:
        give_name(path, other)
    except OSError as error:
        print(f"warning: {path} could not be kept as {other.name} ({error})", flush=True)
        return False
    return True


def give_name(path: Path, other: Path) -> None:
    """Give the file at `path` a second name, `other`: a link, or a whole copy where the file system has no links."""
    with replacing(other) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # object stores mounted as folders, SMB
            shutil.copyfile(path, temporary)
            sync(temporary)  # before it is read back
            if reason := fault(temporary):  # an older file goes when this one is there
                raise OSError(f"the copy is damaged: {reason}") from None


def back_up(path: Path, folder: Path) -> None:
    """Copy a checkpoint and its parts to `folder`, and delete older copies there once the new one is whole."""
    for file in [*parts_of(read(path), path), path]:
        copy = folder / file.relative_to(path.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with replacing(copy) as temporary:
            shutil.copyfile(file, temporary)
    if reason := fault(folder / path.name):
        raise OSError(f"the copy is damaged: {reason}")
    for other in ours(folder, "newest"):
        if other.name != path.name:
            other.unlink()
    sweep(folder)
