"""Errors that a user can fix: one line on stderr and exit code 2, never a traceback."""

import errno
import os
from pathlib import Path

from src.engine import exit_codes

FULL = (errno.ENOSPC, errno.EDQUOT)
LATER = (*FULL, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO)  # may be over at the next start


class UserError(Exception):
    """Bad input or a machine that does not fit it. The text says what it got, what is allowed, what to do."""

    exit_code = exit_codes.BAD_INPUT


class AgreedError(UserError):
    """A UserError that every rank raises; rank 0 prints it for all."""

    def __init__(self, message: str, exit_code: int = UserError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stopped(Exception):  # noqa: N818 no error
    """Training ends between two steps on purpose, with its state saved. Every rank raises it at the same step.

    The text is the reason: max_time, or a signal's name.
    """


class TrippedError(AgreedError):
    """The circuit breaker stopped a run. Nothing should restart it by itself: the restart is exact and trips again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_codes.TRIPPED)


class NotSavedError(UserError):
    """The final checkpoint could not be written; the previous one is intact."""

    exit_code = exit_codes.BUSY


class FileError(UserError):
    """A file of the run or of the project cannot be read or written."""

    def __init__(self, error: OSError) -> None:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "make room and continue" if error.errno in FULL else "fix that and start again"
        super().__init__(f"{where}{error.strerror or error}; {remedy}")
        self.exit_code = exit_codes.BUSY if error.errno in LATER else exit_codes.BAD_INPUT


def of_a_file(error: BaseException) -> FileError | None:
    """Return the error for a file of ours, or for a disk that may work at the next start; None for any other.

    A file of ours lies in the run root, in the cache or in the project; what a user's code opens elsewhere is theirs,
    with a traceback.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return None
    root, cache = os.environ.get("RUN_ROOT"), os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folders = [Path(folder).expanduser().resolve() for folder in (root, cache, Path(__file__).parents[2]) if folder]
    path = Path(str(error.filename)).resolve() if error.filename else None
    ours = path is not None and any(path.is_relative_to(folder) for folder in folders)
    return FileError(error) if ours or error.errno in LATER else None


def hint(error: BaseException) -> str | None:
    """Return the setting that helps when training failed with `error`; None where the traceback says enough."""
    text = str(error)
    if "find_unused_parameters=True" in text:
        return (
            "some parameters got no gradient in a step. If the model skips parts of itself on purpose: "
            "--trainer.strategy ddp_find_unused (slower)"
        )
    if "does not allow for gradient clipping" in text:
        return (
            "under 16-mixed a fused optimizer takes the loss scale out by itself, after gradients have been clipped. "
            "What works: --trainer.precision bf16-mixed, or the optimizer without fused=True, or no gradient_clip_val"
        )
    if "got mixed torch.Tensor and DTensor" in text or "setStorage" in text:
        return (
            "fsdp has a unit's weights whole only while that unit's forward pass is called and, where the step "
            "does its backward passes by itself, the root's until the first of them. Call the module that owns them "
            "instead of using them from outside, make that module a unit (BLOCKS), or use --trainer.strategy ddp"
        )
    if "connectFullMesh" in text:
        return (
            "gloo, which carries objects between the ranks, took an address that other nodes do not reach. Name the "
            "interface that they share (ip -brief link): GLOO_SOCKET_IFNAME=ib0, in the cluster file's nccl section"
        )
    return None
