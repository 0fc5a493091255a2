"""Write files of which no reader meets half, and follow no link that somebody else has placed."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".{name}.tmp"


def open_own(path: Path) -> BinaryIO:
    """Open a file for reading and writing without a buffer, made if missing; a link at its name is refused."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a link, which is not followed"
        raise
    return open(descriptor, "r+b", buffering=0)


def create(path: Path) -> BinaryIO:
    """Make a file and open it for writing; what is at its name is removed, and a link is never followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def put(path: Path, content: bytes, start: int | None = None) -> int:
    """Write all of `content` at `start`, by default at the end, or nothing; what lay behind `start` is cut off.

    Returns:
        where it starts

    """
    with open_own(path) as file:
        start = file.seek(0, os.SEEK_END) if start is None else file.seek(start)
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.truncate()
        except OSError as error:
            error.filename = str(path)
            file.truncate(start)  # half of a row would spoil the next one
            raise
    return start


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; what the block writes there is at `path` when it ends, on the disk.

    A process that is killed or a machine that loses power leaves at `path` what was there before, or all of the new. A
    block that raises leaves what was there before and nothing else.
    """
    temporary = path.with_name(TEMPORARY.format(name=path.name))
    try:
        create(temporary).close()  # the block opens it by name: it must not meet a link
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # a disk that is full names no file
        raise
    finally:
        with suppress(OSError):  # a folder that is gone or read-only
            temporary.unlink(missing_ok=True)  # it is there, too, where both were names of one file
    try:
        sync(path.parent)  # the new name; without it a power cut may bring back the old one
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems that cannot sync a folder
            raise


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file; {} where it is missing, or a power cut has left it empty or torn."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def sync(path: Path) -> None:
    """Wait until it is on the disk, so that a power cut cannot take it back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
