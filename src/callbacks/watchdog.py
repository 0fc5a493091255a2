"""Ends a run that hangs, on every rank, and says which rank holds it up and in what."""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from src import exit_codes
from src.checkpoint.ranks import NAME
from src.checkpoint.write import WholeFiles
from src.hangs.dump import dump_collectives, dump_stacks, dumps
from src.hangs.heartbeats import Beat, Heartbeats, Verdict, end_process, process_state, within
from src.hangs.ranks_file import keep_ranks
from src.hangs.report import explain

PULSE = 5.0  # seconds between two signs of life, at most
LAST_SAVE = 30  # seconds for a checkpoint that is being written, before all ends
LAST_WORDS = 10  # seconds for whatever else may hang itself


class Watchdog(Callback):
    """Ends all ranks with exit code 74 when one has had no event for `limit` seconds, and says why, once.

    The hooks only note their name and the time. Two threads do the rest: one leaves a sign of life in the process
    group's store and looks whether another rank has called for the end, one looks at the clock and needs no store,
    which hangs as well when the process that serves it is stopped.

    The rank that finds the hang reads the signs of all ranks twice. It names those whose sign has not changed in
    between, and else those that have come less far than the others. Each rank writes its Python stacks to
    `hang-rank<k>.txt` and, with a process group, PyTorch's record of the last collectives. A checkpoint that is being
    written behind training gets half a minute. Ranks that are stopped are killed by their neighbours on the same host.

    While it trains, rank 0 also writes each rank's last sign to `ranks.json`, for `python -m src.checkpoint status`.

    Time in which this process did not run at all does not count: a laptop that slept, a job that was suspended.

    Args:
        limit: seconds without an event
        folder: where the dumps go; None: a new folder for temporary files, as others may write to the shared one
        tell: called on rank 0 with the message's first line before all ends, for a record; may hang
        again: the command that continues the run

    """

    def __init__(
        self,
        limit: float,
        folder: Path | None = None,
        tell: Callable[[str], object] | None = None,
        again: str = "the same command",
    ) -> None:
        self.limit, self.folder, self.tell, self.again = limit, folder or Path(tempfile.mkdtemp()), tell, again
        self.pulse = min(PULSE, limit / 4)
        self.keeps_ranks = folder is not None
        self._threads: list[threading.Thread] = []
        self._at = ("starting", time.monotonic(), 0)  # what began last, when, and the how many-th event it was

    # --- what began last: all that happens on the hot path ---

    def begin(self, what: str, allowed: float = 0.0) -> None:
        """Note an event.

        Args:
            what: begins now
            allowed: seconds that it may take beyond the limit

        """
        self._at = (what, time.monotonic() + allowed, self._at[2] + 1)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self.begin("making optimizers and loading the checkpoint")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self.begin("the validation before training")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self.begin("the start of training")
        loop = trainer.fit_loop.epoch_loop
        before_fetch = loop._on_before_fetch

        def note_fetch() -> None:
            before_fetch()  # saves, where a save is due
            self.begin("fetching a batch")

        loop._on_before_fetch = note_fetch  # type: ignore[method-assign]  # Lightning has no hook there

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self.begin("the start of an epoch")

    def on_train_batch_start(self, *args: object) -> None:  # noqa: D102
        self._at = ("training_step", time.monotonic(), self._at[2] + 1)

    def on_before_backward(self, *args: object) -> None:  # noqa: D102
        self._at = ("backward", time.monotonic(), self._at[2] + 1)

    def on_before_optimizer_step(self, *args: object) -> None:  # noqa: D102
        self._at = ("the optimizer step", time.monotonic(), self._at[2] + 1)

    def on_train_batch_end(self, *args: object) -> None:  # noqa: D102
        self._at = ("the end of a step (logging)", time.monotonic(), self._at[2] + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self.begin("the end of an epoch")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self.begin("the end of training (saving)")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: D102
        self.begin("saving a checkpoint")

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        self.begin("fetching a batch to evaluate")

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        self.begin("the step of an evaluation")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        self.begin("fetching a batch to evaluate")

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        self.begin("the end of an evaluation")

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    # --- the threads' life ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Every rank is here, the process group stands: begin to watch."""
        self._stop()
        self.begin("setting up")
        self._trainer, self._main = trainer, threading.get_ident()
        self._born, self._number = process_state(os.getpid())[1], 0
        self._ended, self._resumed = threading.Event(), 0.0
        self._verdict: Verdict | None = None
        self._first: Beat | None = None  # of rank 0, which may serve the store and then be known by this alone
        self._others: Heartbeats | None = None  # None too where they cannot be reached any more
        self._threads = [threading.Thread(target=self._watch, args=(self._ended,), daemon=True)]
        rank, world_size = trainer.global_rank, trainer.world_size
        if world_size > 1 and torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()
            self._others = Heartbeats(store, rank, world_size)
            self._threads.append(threading.Thread(target=self._beat, args=(self._others, self._ended), daemon=True))
            if rank == 0 and stage == "fit" and self.keeps_ranks:
                file = (self.folder / NAME, Heartbeats(store, rank, world_size), 2 * self.pulse, self._ended)
                self._threads.append(threading.Thread(target=keep_ranks, args=file, daemon=True))
        for thread in self._threads:
            thread.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: D102
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave word for ranks that may wait for this one in vain."""
        self.begin(f"ended with {type(exception).__name__}")
        if self._threads and (others := self._others) is not None:
            within(2, lambda: others.give(self._sign()))
        self._stop()

    def _stop(self) -> None:
        for thread in self._threads:
            self._ended.set()
            thread.join(1)
        self._threads = []

    def _sign(self) -> Beat:
        doing, since, events = self._at
        self._number += 1
        frame = sys._current_frames().get(self._main)
        code = None if frame is None else frame.f_code
        return Beat(
            rank=self._trainer.global_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=self._born,
            number=self._number,
            clock=time.time(),
            step=self._trainer.global_step,
            doing=doing,
            quiet=max(0.0, time.monotonic() - since),
            events=events,
            place=f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})" if frame and code else "its end",
        )

    def _beat(self, others: Heartbeats, ended: threading.Event) -> None:
        try:
            others.give(self._sign())
            while self._first is None and not ended.wait(self.pulse / 20):
                self._first = others.of(0)
            while not ended.is_set():
                others.give(self._sign())
                self._first, self._verdict = others.of(0) or self._first, others.verdict()
                ended.wait(self.pulse)
        except Exception:  # the process that serves the store has ended; the clock goes on
            return

    def _watch(self, ended: threading.Event) -> None:
        tick = self.pulse / 5
        seen = time.monotonic()
        while not ended.wait(tick):
            now = time.monotonic()
            if now - seen > tick + self.pulse:  # this thread did not run: the process was stopped, or the machine slept
                self._resumed = now
            if self._verdict is not None:
                self._end(self._verdict)
            at = self._at
            if now - max(at[1], self._resumed) > self.limit and (verdict := self._examine(at)) is not None:
                self._end(verdict)
            seen = time.monotonic()

    # --- the end ---

    def _examine(self, at: tuple[str, float, int]) -> Verdict | None:
        """The verdict on a hang, the same on every rank that can be reached; None where things have moved on."""
        others, mine = self._others, self._sign()
        if others is None:
            return self._say([mine], [])
        found = within(8 * self.pulse + LAST_WORDS, lambda: self._agree(others, at))
        if found is not None:
            return found[0] if found else None
        # The store's server is stopped or gone: rank 0, unless torchrun serves it.
        first = None if mine.rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else self._first
        known = [first, mine] if first else [mine]
        more = "\n  of the other ranks nothing is known: the store of the process group does not answer"
        self._others = None
        return self._say(known, [0] if first else [], more if len(known) < others.world_size else "")

    def _agree(self, others: Heartbeats, at: tuple[str, float, int]) -> list[Verdict]:
        """The one verdict, by whichever rank comes first; none where things have moved on."""
        mine, patience = others.claim(), time.monotonic() + 4 * self.pulse
        while not mine and time.monotonic() < patience:  # if that rank ends before it has said anything, this one does
            if (verdict := others.verdict()) is not None:
                return [verdict]
            time.sleep(self.pulse / 5)
        before = others.all()
        time.sleep(2.5 * self.pulse)
        after = others.all()
        if self._at is not at:
            others.withdraw()
            return []
        silent = [new.rank for old, new in zip(before, after, strict=True) if new and old == new]
        verdict = self._say(after, silent)
        others.announce(verdict)
        return [verdict]

    def _say(self, beats: Sequence[Beat | None], silent: list[int], more: str = "") -> Verdict:
        text = explain(beats, silent, self.limit) + more
        text += f"\n  {dumps(self.folder)}; continue with: {self.again}"
        within(LAST_WORDS, lambda: print(text, file=sys.stderr, flush=True))  # who reads it may hang as well
        return {"text": text, "silent": [vars(beat) for beat in beats if beat and beat.rank in silent]}

    def _end(self, verdict: Verdict) -> None:
        """Write down where this rank is, and leave without waiting for anything that may hang."""
        rank, silent = self._trainer.global_rank, [Beat(**beat) for beat in verdict["silent"]]
        within(LAST_WORDS, lambda: dump_stacks(self.folder, rank, verdict["text"]))
        within(LAST_WORDS, lambda: dump_collectives(self.folder, rank))
        if rank == 0:
            if (tell := self.tell) is not None:
                within(LAST_WORDS, lambda: tell(verdict["text"].partition("\n")[0].removeprefix("error: ")))
            writer = self._trainer.strategy.checkpoint_io
            if isinstance(writer, WholeFiles):
                within(LAST_SAVE, writer.wait)
        if (others := self._others) is not None:
            gone = {beat.rank for beat in silent}
            living = [number for number in range(self._trainer.world_size) if number not in gone]
            patience = LAST_WORDS + (0 if rank == 0 else LAST_SAVE + 2 * LAST_WORDS)
            within(patience, lambda: others.leave_together(living, patience))
            time.sleep(0 if rank else 1)  # the others end their loaders' processes and leave
        for beat in silent:
            end_process(beat)
        for child in multiprocessing.active_children():  # a worker that hangs would not see that we are gone
            child.kill()
        kill = getattr(self._trainer.strategy.launcher, "kill", None)
        if kill is not None:
            kill(signal.SIGKILL)  # the ranks that this process has started
        within(LAST_WORDS, sys.stdout.flush)
        os._exit(exit_codes.HUNG)
