"""Let rank 0 work alone while the others wait, for longer than a collective would."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning import Trainer
from lightning.fabric.utilities.distributed import _InfiniteBarrier

from src.engine.watchdog.callback import Watchdog


@contextmanager
def rank_zero_work(trainer: Trainer, what: str, hours: float = 24.0) -> Iterator[bool]:
    """Let rank 0 do something that takes longer than the collective timeout. Every rank must enter.

        with rank_zero_work(self.trainer, "the evaluation on all of MBPP") as mine:
            if mine:
                ...

    The others wait at the end, over gloo and without a timeout; if rank 0's process dies they end with an error. After
    so many hours it counts as a hang at `what`.
    """
    watchdogs = [callback for callback in trainer.callbacks if isinstance(callback, Watchdog)]  # type: ignore[attr-defined]
    for watchdog in watchdogs:
        watchdog.begin(what, 3600 * hours)
    with _InfiniteBarrier():
        yield trainer.is_global_zero
    for watchdog in watchdogs:
        watchdog.begin(f"what follows {what}")
