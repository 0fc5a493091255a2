"""Signals that ask a training to stop: a handler that notes them and does nothing else.

What may be done inside of a handler is next to nothing: it runs between any two instructions, on ranks that are
signalled at different moments. Saving there meets half a step, and collectives there wait for each other for ever
(stock Lightning under SIGTERM with steps of 5 ms: 0 of 10 ended well).

The way of a stop: noted here; the ranks ask each other between two steps (src/pace.py, src/checkpoint/schedule.py) or
in a validation (src/checkpoint/cut.py); src/checkpoint/save.py saves, leaves STOPPED (src/stopped.py) and raises
`Stopped`, which src/cli.py turns into the exit code. src/callbacks/preemption.py keeps Lightning's own answer away.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from src import exit_codes

# Preemption and scancel; by hand; the batch script's --signal, some time before the limit; a terminal that is gone;
# Ctrl-C.
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGINT)  # as nohup and a shell's background have it
_noted = 0
_leaves = _saves = False
_before: dict[int, Any] = {}  # the handlers of the process that calls `main`


def listen(saves: bool = False) -> None:
    """Take these signals; again whenever somebody else may have set a handler.

    Args:
        saves: training has begun, and Ctrl-C too is answered between two steps; the second one leaves at once

    """
    global _saves
    _saves = _saves or saves
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            there = signal.getsignal(number)
            if number not in MAY_BE_IGNORED or there != signal.SIG_IGN:
                _before.setdefault(number, there)
                signal.signal(number, _note)


def listen_while_importing() -> None:
    """Listen, and let Ctrl-C end the process without the traceback of an import."""
    listen()
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, lambda *_: os._exit(exit_codes.INTERRUPTED))


def restore() -> None:
    """Give the process its own handlers back."""
    if threading.current_thread() is threading.main_thread():
        while _before:
            signal.signal(*_before.popitem())


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let a signal end the process while it waits inside of PyTorch, where no handler of Python's runs.

    One that has come before ends it now: nothing is trained yet, and the others may not come.
    """
    if _noted:
        _leave(_noted)
    waits = [number for number in STOPS if signal.getsignal(number) is _note]
    for number in waits:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in waits:
            signal.signal(number, _note)


def asked() -> int:
    """The first of them that has come, 0 if none has."""
    return _noted


def leave_at_once() -> None:
    """From here on there is nothing to save: a signal ends the command with 128 + its number."""
    global _leaves
    _leaves = True
    if _noted:
        _leave(_noted)


def forget() -> None:
    """What came is answered."""
    global _noted, _leaves, _saves
    _noted, _leaves, _saves = 0, False, False


def ignore() -> None:
    """The command is over: a signal must not change how it ends. Python would restore the defaults while it leaves."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def name(number: int) -> str:
    """SIGTERM."""
    return signal.Signals(number).name


def _note(number: int, _frame: FrameType | None) -> None:
    global _noted
    if number == signal.SIGINT and (_leaves or not _saves or _noted):
        raise KeyboardInterrupt
    if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, b"\nCtrl-C: saving after this step; once more leaves at once\n")
    _noted = _noted or number
    if _leaves:
        _leave(number)


def _leave(number: int) -> None:
    ignore()  # a second one must not interrupt the summary
    raise SystemExit(128 + number)


def only_from_parent() -> None:
    """In a process that another one has started and ends: heed SIGTERM from that one alone.

    A scheduler signals every process of a job. A loader's process that went at once would take the training with it,
    while that still saves. To be called in the main thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    while True:
        info = signal.sigwaitinfo(STOPS)
        if info.si_signo == signal.SIGTERM and info.si_pid == os.getppid():
            os._exit(0)
