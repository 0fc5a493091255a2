"""Keep a command alive when nobody reads what it prints any more, or when the disk of its log is full."""

import io
import os
import sys
from typing import Any


class _NeverFailing(io.FileIO):
    """A file that leaves out what cannot be written: `| head` has ended, the terminal is gone, the disk is full."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def survive_closed_streams() -> None:
    """Make stdout and stderr last; to be called before anybody else holds on to them.

    A closed one (`>&-`) becomes /dev/null: else the next file that is opened gets its number, and what a library or
    another process prints goes into that file.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(free, True)
    os.close(free)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = io.BufferedWriter(_NeverFailing(number, "w", closefd=False))
        encoding = getattr(getattr(sys, name), "encoding", None)
        # "replace": a terminal may not know ×
        setattr(sys, name, io.TextIOWrapper(file, encoding, errors="replace", line_buffering=True))
