"""End a run that hangs, on every rank, and name the rank that holds it up; keep the run's heartbeat."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lightning import Callback, LightningModule, Trainer

from src.engine import exit_codes
from src.engine.checkpoint.write import WholeFiles
from src.engine.watchdog.dump import dump_collectives, dump_stacks, dumps
from src.engine.watchdog.heartbeat import HEARTBEAT_SECONDS, Heartbeat, Sign
from src.engine.watchdog.peers import Peers, within
from src.engine.watchdog.report import explain

PULSE = 5.0  # seconds between two signs of life, at most
SAVE_SECONDS = 30  # for a checkpoint that is being written, before all ends
ANSWER_SECONDS = 10  # for anything else that may hang itself: a disk, the store, whoever reads stderr


class Event(NamedTuple):
    """What a rank has begun last."""

    name: str
    since: float  # by time.monotonic(); in the future where it may take longer than the limit
    number: int  # counts the events of this rank


def _notes(event: str) -> Any:
    """Return a hook that notes an event."""

    def hook(self: "Watchdog", *_: object, **__: object) -> None:
        self.event = Event(event, time.monotonic(), self.event.number + 1)

    return hook


class Watchdog(Callback):
    """Ends all ranks with exit code 74 when one has had no event for `limit` seconds, and says why, once.

    The hooks only note their name and the time; threads do the rest. One gives signs of life in the process group's
    store. One looks at the clock, and asks the store only through `within`: it hangs as well while the process that
    serves it is stopped. On rank 0 of a training a third one writes the heartbeat, for which the disk may take long.

    A rank whose limit has passed reads the signs of all ranks twice: at fault are ranks whose sign has not changed in
    between, else those that have come less far than the others. One rank prints that, and rank 0 calls `record_hang`
    with its first line. Each writes its Python stacks to `hang-rank<k>.txt` and, over NCCL, PyTorch's record of the
    last collectives. A checkpoint in the background gets half a minute; rank 0 then leaves, and the
    launcher ends the others.

    Time in which this process did not run at all does not count: a laptop that slept, a job that was suspended. Without
    a limit nothing is ended.
    """

    def __init__(
        self,
        limit: float | None,
        folder: Path,
        record_hang: Callable[[str], object] | None = None,
        resume_command: str = "the same command",
    ) -> None:
        self.limit, self.folder, self.record_hang, self.resume_command = limit, folder, record_hang, resume_command
        self.pulse = PULSE if limit is None else min(PULSE, limit / 4)
        self.event = Event("starting", time.monotonic(), 0)
        self._threads: list[threading.Thread] = []

    # --- what began last: all that happens on the hot path ---

    on_fit_start = _notes("making optimizers and loading the checkpoint")
    on_sanity_check_start = _notes("the validation before training")
    on_train_epoch_start = _notes("the start of an epoch")
    on_train_batch_start = _notes("training_step")
    on_before_backward = _notes("backward")
    on_before_optimizer_step = _notes("the optimizer step")
    on_train_batch_end = _notes("the end of a step (logging)")
    on_train_epoch_end = _notes("the end of an epoch")
    on_train_end = _notes("the end of training (saving)")
    on_save_checkpoint = _notes("saving a checkpoint")
    on_validation_start = on_test_start = on_predict_start = _notes("fetching a batch to evaluate")
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _notes("the step of an evaluation")
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _notes("fetching a batch to evaluate")
    on_validation_end = on_test_end = on_predict_end = _notes("the end of an evaluation")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note each fetch of a batch, for which Lightning has no hook."""
        self.begin("the start of training")
        loop = trainer.fit_loop.epoch_loop
        before_fetch = loop._on_before_fetch

        def note_fetch() -> None:
            before_fetch()  # saves, where a save is due
            self.begin("fetching a batch")

        loop._on_before_fetch = note_fetch  # type: ignore[method-assign]

    def begin(self, event: str, allowed: float = 0.0) -> None:
        """Note an event that begins now, and the seconds that it may take beyond the limit."""
        self.event = Event(event, time.monotonic() + allowed, self.event.number + 1)

    # --- the threads' life ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to watch: every rank is here and the process group stands."""
        self._stop()
        self.begin("setting up")
        self._trainer, self._main = trainer, threading.get_ident()
        self._ended = ended = threading.Event()
        self._rank_zero: Sign | None = None  # its newest sign: all that is known of it when it cannot serve the store
        self._peers = Peers(trainer.global_rank, trainer.world_size)
        self._start(self._publish, ended)
        if trainer.is_global_zero and stage == "fit":
            heartbeat = Heartbeat(self.folder)
            heartbeat.write(trainer.global_step, [])
            self._start(self._write_heartbeat, heartbeat, ended)
        if self.limit is not None:
            self._start(self._watch, self.limit, ended)

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=act, args=arguments, daemon=True))
        self._threads[-1].start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the ranks that still wait for this one that it has failed."""
        self.begin(f"ended with {type(exception).__name__}")
        if self._threads:
            within(2, lambda: self._peers.publish(self._sign()))
        self._stop()

    def _stop(self) -> None:
        for thread in self._threads:
            self._ended.set()
            thread.join(ANSWER_SECONDS)
        self._threads = []

    def _sign(self) -> Sign:
        frame, event = sys._current_frames().get(self._main), self.event
        return Sign(
            rank=self._trainer.global_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            clock=time.time(),
            step=self._trainer.global_step,
            doing=event.name,
            since=max(0.0, time.monotonic() - event.since),
            events=event.number,
            line=f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "-",
        )

    def _publish(self, ended: threading.Event) -> None:
        """Give signs of life, and note rank 0's."""
        try:
            while not ended.is_set():
                self._peers.publish(self._sign())
                self._rank_zero = self._peers.latest(0) or self._rank_zero
                ended.wait(self.pulse if self._rank_zero else self.pulse / 20)
        except Exception:  # the process that serves the store has ended; the clock needs no store
            return

    def _write_heartbeat(self, heartbeat: Heartbeat, ended: threading.Event) -> None:
        """Write the heartbeat until the run ends in order, then remove it."""
        while not ended.wait(HEARTBEAT_SECONDS):
            heartbeat.write(self._trainer.global_step, within(ANSWER_SECONDS, self._peers.latest_of_all) or [])
        heartbeat.remove()

    def _watch(self, limit: float, ended: threading.Event) -> None:
        tick = self.pulse / 5
        seen, resumed = time.monotonic(), 0.0
        while not ended.wait(tick):
            now = time.monotonic()
            if now - seen > tick + self.pulse:  # this thread did not run: the process was stopped, or the machine slept
                resumed = now
            seen = now
            if now - max(self.event.since, resumed) > limit:
                self._end(*self._diagnose(limit))

    # --- the end ---

    def _diagnose(self, limit: float) -> tuple[str, bool]:
        """Return the report as this rank sees it, and whether it is the rank that prints it."""
        if (signs := within(4 * self.pulse + ANSWER_SECONDS, self._compare_signs)) is not None:
            return explain(*signs, limit), within(ANSWER_SECONDS, self._peers.claim_report) is not False
        # The process that serves the store is stopped or gone: rank 0, or torchrun, most likely with its machine.
        mine = self._sign()
        text = explain([mine], [], limit) if mine.rank == 0 else explain([self._rank_zero, mine], [0], limit)
        return f"{text}\n  the process group's store does not answer: nothing is known of other ranks", True

    def _compare_signs(self) -> tuple[list[Sign | None], list[int]]:
        """Return every rank's newest sign, and the ranks that have given no new one for a while."""
        before = self._peers.latest_of_all()
        time.sleep(2.5 * self.pulse)
        after = self._peers.latest_of_all()
        return after, [new.rank for old, new in zip(before, after, strict=True) if new and old == new]

    def _end(self, report: str, prints: bool) -> None:
        """Write down where this rank is, and leave without waiting for anything that may hang."""
        trainer, record_hang, rank = self._trainer, self.record_hang, self._trainer.global_rank
        text = f"{report}\n  {dumps(self.folder)}; continue with: {self.resume_command}"
        if prints:
            within(ANSWER_SECONDS, lambda: print(text, file=sys.stderr, flush=True))  # who reads it may hang as well
        within(ANSWER_SECONDS, lambda: dump_stacks(self.folder, rank, text))
        within(ANSWER_SECONDS, lambda: dump_collectives(self.folder, rank))
        if rank == 0 and record_hang is not None:
            within(ANSWER_SECONDS, lambda: record_hang(report.partition("\n")[0].removeprefix("error: ")))
        if rank == 0 and isinstance(trainer.strategy.checkpoint_io, WholeFiles):
            within(SAVE_SECONDS, trainer.strategy.checkpoint_io.wait)
        for child in multiprocessing.active_children():  # a loader's worker that hangs would not see that we are gone
            child.kill()
        # A launcher ends all ranks when one leaves: the others have written their stacks, and rank 0 its checkpoint.
        time.sleep(2 * self.pulse if rank == 0 else SAVE_SECONDS + ANSWER_SECONDS)
        kill = getattr(trainer.strategy.launcher, "kill", None)
        if kill is not None:
            kill(signal.SIGKILL)  # the ranks that this process has started
        within(ANSWER_SECONDS, sys.stdout.flush)
        os._exit(exit_codes.HUNG)
