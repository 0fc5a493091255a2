"""Note signals that ask a training to stop, and do nothing else in the handler.

Inside a handler next to nothing is safe: it runs between any two instructions, on ranks that are signalled at different
moments. Saving there would save half a step, and collectives there would wait for each other for ever (stock Lightning
under SIGTERM with steps of 5 ms: 0 of 10 runs ended well).

The way of a stop, by files of this folder: noted here; the ranks ask each other at moments that all know (poll.py,
checkpoint/schedule.py); checkpoint/save.py saves, writes STOPPED (stopped.py) and raises `Stopped`, which src/cli.py
turns into the exit code. callbacks/preemption.py keeps Lightning's own handlers away.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from src.engine import exit_codes

# Preemption and scancel; by hand; the batch script's --signal, some time before the limit; a terminal that is gone;
# Ctrl-C.
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGINT)  # as nohup and a shell's background have it
_pending = 0
_exits = _saves = False
_before: dict[int, Any] = {}  # the handlers of the process that calls `main`


def listen(saves: bool = False) -> None:
    """Take these signals; to be called again whenever somebody else may have set a handler.

    Args:
        saves: training has begun, and Ctrl-C too is answered between two steps; the second one leaves at once

    """
    global _saves
    _saves = _saves or saves
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            handler = signal.getsignal(number)
            if number not in MAY_BE_IGNORED or handler != signal.SIG_IGN:
                _before.setdefault(number, handler)
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
    """Let a signal end the process while it waits inside PyTorch, where no Python handler runs.

    A pending one ends it now: nothing is trained yet, and the other ranks may not come.
    """
    if _pending:
        _exit(_pending)
    ours = [number for number in STOPS if signal.getsignal(number) is _note]
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, _note)


def pending() -> int:
    """Return the first signal that has come and is not answered, 0 if none has."""
    return _pending


def clear() -> None:
    """Forget the pending signal: it is answered."""
    global _pending, _exits, _saves
    _pending, _exits, _saves = 0, False, False


def exit_on_signal() -> None:
    """End the command with 128 + the signal's number from here on: there is nothing to save."""
    global _exits
    _exits = True
    if _pending:
        _exit(_pending)


def ignore() -> None:
    """Ignore signals, as the command is over and must end as it does; Python would restore the defaults at its exit."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def name(number: int) -> str:
    """Return a signal's name, such as SIGTERM."""
    return signal.Signals(number).name


def _note(number: int, _frame: FrameType | None) -> None:
    global _pending
    if number == signal.SIGINT and (_exits or not _saves or _pending):
        raise KeyboardInterrupt
    if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, b"\nCtrl-C: saving after this step; once more leaves at once\n")
    _pending = _pending or number
    if _exits:
        _exit(number)


def _exit(number: int) -> None:
    ignore()  # a second one must not interrupt the summary
    raise SystemExit(128 + number)


def ignore_unless_from_parent() -> None:
    """Heed SIGTERM from the parent process alone; to be called in the main thread of a loader's process.

    A scheduler signals every process of a job. A loader's process that left at once would end the training, which is
    still saving.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    while True:
        info = signal.sigwaitinfo(STOPS)
        if info.si_signo == signal.SIGTERM and info.si_pid == os.getppid():
            os._exit(0)
