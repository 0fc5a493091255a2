"""Show loss, speed and time left: a progress bar at a terminal, a line now and then in a log file."""

import sys
import time

from lightning import Callback, LightningModule, Trainer
from tqdm import tqdm

from src.engine.callbacks.global_batch import GlobalBatch
from src.engine.callbacks.log_interval import row_index, row_is_due, steps_in_all
from src.engine.callbacks.throughput import Throughput

LINE_EVERY = 10  # seconds between two lines where there is no terminal


class Progress(Callback):
    """Count steps of the whole run, as rows do; numbers change once per log interval."""

    def __init__(self, loss: GlobalBatch, speed: Throughput) -> None:
        self._loss, self._speed = loss, speed
        self._bar: tqdm | None = None
        self._total: float = 0
        self._first, self._done, self._start, self._printed = 0, 0, 0.0, 0.0
        self._validation: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._total = steps_in_all(trainer)
        self._first = self._done = row_index(trainer)
        self._start = time.monotonic()
        if trainer.is_global_zero and sys.stderr.isatty():
            total = None if self._total == float("inf") else int(self._total)
            self._bar = tqdm(total=total, initial=self._done, desc="train", unit="step", dynamic_ncols=True)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if not trainer.is_global_zero:
            return
        log_now = row_is_due(trainer)
        self._done = row_index(trainer) + (not trainer.fit_loop._should_accumulate())
        if self._bar is not None:
            self._bar.update(self._done - self._bar.n)
            if log_now:
                self._bar.set_postfix_str(self._numbers(), refresh=False)
        elif log_now and time.monotonic() - self._printed > LINE_EVERY:
            self._printed = time.monotonic()
            print(f"{self._step()}  {self._numbers()}  {self._left()}", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val")}
        self._validation = metrics
        if metrics and self._bar is None:
            text = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
            print(f"{self._step()}  {text}", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._numbers())  # with the last validation, which came after the last step
            self._bar.close()

    def _numbers(self) -> str:
        parts = [] if self._loss.value is None else [f"loss {self._loss.value:.4g}"]
        if self._bar is not None:
            parts += [f"{key} {value:.4g}" for key, value in self._validation.items()]
        values = self._speed.values
        if "perf/tokens_per_sec" in values:
            parts.append(f"{values['perf/tokens_per_sec']:,.0f} tokens/s")
        elif "perf/samples_per_sec" in values:
            parts.append(f"{values['perf/samples_per_sec']:,.0f} samples/s")
        if values.get("perf/mfu", 0) >= 0.001:
            parts.append(f"MFU {values['perf/mfu']:.1%}")
        return "  ".join(parts)

    def _step(self) -> str:
        total = "" if self._total == float("inf") else f"/{self._total:.0f}"
        return f"step {self._done}{total}"

    def _left(self) -> str:
        done = self._done - self._first
        if not done or self._total == float("inf"):
            return ""
        left = (self._total - self._done) * (time.monotonic() - self._start) / done
        return f"{int(left // 3600)}:{int(left % 3600 // 60):02d}:{int(left % 60):02d} left"
