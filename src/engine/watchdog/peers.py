"""Let ranks know of each other without a collective: each leaves signs of life in the process group's store."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from src.engine.watchdog.heartbeat import Sign

Answer = TypeVar("Answer")


class Peers:
    """The signs of all ranks, and who reports a hang, in the store of the process group; alone in one of its own.

    Every method blocks while the process that serves the store is stopped, whatever timeout it has (torch 2.13): call
    it through `within` where that must not hold up the caller.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        group = torch.distributed.distributed_c10d
        store: Any = group._get_default_store() if torch.distributed.is_initialized() else torch.distributed.HashStore()
        # A connection of its own: a store answers one thread at a time, and the main thread may wait in it for long.
        self._store: Any = torch.distributed.PrefixStore("watchdog", store.clone())
        self.rank, self.world_size = rank, world_size

    def publish(self, sign: Sign) -> None:
        """Replace this rank's sign."""
        self._store.set(f"sign/{self.rank}", json.dumps(asdict(sign)))

    def latest(self, rank: int) -> Sign | None:
        """Return the newest sign of a rank, or None if it never gave one."""
        name = f"sign/{rank}"
        return Sign(**json.loads(self._store.get(name))) if self._store.check([name]) else None

    def latest_of_all(self) -> list[Sign | None]:
        """Return the newest sign of every rank."""
        return [self.latest(rank) for rank in range(self.world_size)]

    def claim_report(self) -> bool:
        """Return whether this rank is the one that prints the report: the first to ask."""
        return self._store.compare_set("reporter", "", str(self.rank)).decode() == str(self.rank)


def within(seconds: float, act: Callable[[], Answer]) -> Answer | None:
    """Return what `act` returns, or None if it fails or takes longer: its thread is then left behind."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):  # a store whose process is gone, a full disk
            answers.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
