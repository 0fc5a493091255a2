"""A sign of life beside the run, every few seconds, also while one step, a compilation or a save takes minutes."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from src.lock import HEARTBEAT_FILE, HEARTBEAT_SECONDS


class Heartbeat(Callback):
    """Writes `heartbeat` from a thread of rank 0; a start that ends in order takes it away.

    What a killed one leaves says where it ran and when it was last alive: `python -m src.checkpoint status` tells from
    it a run that still runs from one that has vanished. It says that the process lives, not that it gets on: that is
    the watchdog's.

    Args:
        folder: the run directory

    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / HEARTBEAT_FILE
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: D102
        if trainer.is_global_zero and self._thread is None:
            self._ended.clear()
            self._beat(trainer)  # before the thread has its turn
            self._thread = threading.Thread(target=self._keep, args=(trainer,), daemon=True)
            self._thread.start()

    def _keep(self, trainer: Trainer) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            self._beat(trainer)

    def _beat(self, trainer: Trainer) -> None:
        sign: dict[str, Any] = {"written": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        sign |= {"job": os.environ.get("SLURM_JOB_ID"), "step": trainer.global_step}
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with suppress(OSError):  # a disk that is full; the next one may be written again
            temporary.write_text(json.dumps(sign) + "\n")
            temporary.replace(self.path)  # nobody meets half of it

    def _stop(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join(HEARTBEAT_SECONDS)
            self._thread = None
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: D102
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Every end that can still be written down is in summary.json."""
        self._stop()
