"""What a command prints may have no reader any more, or no room: that ends no training."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO)  # `| tee log` or `| head` has ended; the terminal has
FULL = (errno.ENOSPC, errno.EDQUOT)


class Lasting:
    """A text stream that falls silent where its reader is gone, and leaves out what finds no room on the disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream does."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """As the stream does."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., object], *given: str) -> None:
        try:
            act(*given)
        except OSError as error:
            if error.errno not in (*GONE, *FULL):
                raise
            if error.errno in GONE:  # what the stream still holds goes nowhere as well, also at the end of the process
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def outlast_readers() -> None:
    """Make stdout and stderr last; before anybody else takes hold of them.

    A closed one (`>&-`) becomes /dev/null: else the next file that is opened gets its number, and what a library or
    another process prints goes into that file.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(free, True)
    os.close(free)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115 open until the end
        stream.reconfigure(errors="replace")  # a terminal that knows no ×
        setattr(sys, name, Lasting(stream))
