"""Files that no reader meets half written."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TEMPORARY = ".{name}.tmp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; what the block writes there is at `path` when it ends, on the disk.

    A process that is killed or a machine that loses power leaves at `path` what was there before, or all of the new. A
    block that raises leaves what was there before and nothing else.

    Raises:
        OSError: the disk refuses it; nothing has changed.

    """
    temporary = path.with_name(TEMPORARY.format(name=path.name))
    try:
        temporary.unlink(missing_ok=True)  # a link that somebody else has put there is not followed
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # what cannot sync a folder may say
            raise


def write_text(path: Path, text: str) -> None:
    """Replace what is in it."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def read_json(path: Path) -> dict[str, Any]:
    """What is in it; {} where there is no such file, or one that a power cut has left empty or torn."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def sync(path: Path) -> None:
    """To the disk, so that a power cut cannot take it back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
