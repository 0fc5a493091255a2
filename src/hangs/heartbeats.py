"""What ranks know of each other without a collective: each leaves a sign of life in the process group's store."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

Answer = TypeVar("Answer")
Verdict = dict[str, Any]  # "text", and "silent": what was known of the ranks that gave no sign of life


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life.

    Args:
        rank: whose
        host: where it runs
        pid: its process, there
        born: when that process started, in the host's clock ticks since its boot; 0 where that cannot be known
        number: counts the signs of this rank
        clock: when it was given, in seconds since 1970 by the host's clock
        step: optimizer steps done
        doing: what began last
        quiet: seconds since then
        events: how many such have begun; the rank with the fewest is behind
        place: the line of code where it is

    """

    rank: int
    host: str
    pid: int
    born: int
    number: int
    clock: float
    step: int
    doing: str
    quiet: float
    events: int
    place: str


class Heartbeats:
    """The signs of all ranks, in a store that one process serves.

    Reading blocks while that process is stopped, whatever timeout the store has (torch 2.13): whoever must not be
    held up asks by `within`.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        # A connection of its own: a store answers one thread at a time, and the main thread may wait in it for long.
        self._store: Any = torch.distributed.PrefixStore("watchdog", store.clone())
        self.rank, self.world_size = rank, world_size

    def give(self, beat: Beat) -> None:
        """Replace this rank's sign."""
        self._store.set(f"rank/{beat.rank}", json.dumps(asdict(beat)))

    def of(self, rank: int) -> Beat | None:
        """The newest sign of a rank; None where it never gave one."""
        name = f"rank/{rank}"
        return Beat(**json.loads(self._store.get(name))) if self._store.check([name]) else None

    def all(self) -> list[Beat | None]:
        """The newest sign of every rank."""
        names = [f"rank/{rank}" for rank in range(self.world_size)]
        if self._store.has_extended_api() and self._store.check(names):  # two questions, however many ranks
            return [Beat(**json.loads(sign)) for sign in self._store.multi_get(names)]
        return [self.of(rank) for rank in range(self.world_size)]

    def claim(self) -> bool:
        """Whether it is this rank that finds out what is wrong and says so."""
        return self._store.compare_set("claim", "", str(self.rank)).decode() == str(self.rank)

    def withdraw(self) -> None:
        """It was nothing."""
        self._store.delete_key("claim")

    def announce(self, verdict: Verdict) -> None:
        """Tell every rank to end, and why."""
        self._store.set("verdict", json.dumps(verdict))

    def verdict(self) -> Verdict | None:
        """What a rank has announced; None where none has."""
        return json.loads(self._store.get("verdict")) if self._store.check(["verdict"]) else None

    def leave_together(self, living: list[int], seconds: float) -> None:
        """Return when all the `living` ranks have come here, on rank 0 first, or after so many seconds.

        A launcher ends all ranks when one leaves: none is to be ended while it still writes down where it was.
        """
        until = time.monotonic() + seconds
        self._store.set(f"leaves/{self.rank}", "")
        wanted = ["leave"] if self.rank and 0 in living else [f"leaves/{rank}" for rank in living]
        while not self._store.check(wanted) and time.monotonic() < until:
            time.sleep(0.1)
        self._store.set("leave", "")


def within(seconds: float, act: Callable[[], Answer]) -> Answer | None:
    """What `act` returns; None where it fails or takes longer. It then goes on in its thread, if it ever can."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):  # a store whose process is gone, a disk that is full
            answers.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def process_state(pid: int) -> tuple[str, int]:
    """The state letter of a process of this host (T: stopped) and when it started; ("", 0) where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def is_here(beat: Beat) -> bool:
    """Whether the process that gave this sign is one of this host and still there, not another of its number."""
    return bool(beat.born) and beat.host == socket.gethostname() and process_state(beat.pid)[1] == beat.born


def end_process(beat: Beat) -> None:
    """Kill the process of a rank that cannot end by itself, where it is one of this host."""
    if is_here(beat):
        with suppress(OSError):
            os.kill(beat.pid, signal.SIGKILL)
