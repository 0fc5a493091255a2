"""Log speed, waiting time and peak memory once per log interval."""

import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from src.engine.callbacks.log_interval import row_index, row_is_due, write_row
from src.engine.data.loader import GlobalBatchSampler
from src.engine.memory.usage import peak_memory

# Dense bf16/fp16 tensor-core peaks in FLOP/s, from the vendor's data sheets. The longest name that fits counts.
PEAK_FLOPS = {
    "V100": 125e12,
    "T4": 65e12,
    "A10": 125e12,
    "A30": 165e12,
    "A40": 150e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX A6000": 155e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
}
DATA_BOUND = 0.3  # share of the time spent waiting for data that is worth a word


def peak_flops(device_name: str) -> float | None:
    """Return the card's peak; None where the table does not know it, or for a MIG slice, a part of a card."""
    if " MIG " in device_name:
        return None
    words = device_name.replace("-", " ")
    fitting = [name for name in PEAK_FLOPS if f" {name} " in f" {words} "]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def count_samples(batch: Any) -> int:
    """Return the samples in a batch: the first dimension of the first tensor in it, 0 without one."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((count for count in map(count_samples, batch) if count), 0)
    return 0


class Throughput(Callback):
    """Log perf/* and `lr` at each log interval.

    samples_per_sec and tokens_per_sec count all ranks; step_time is seconds per optimizer step; data_wait is the share
    of the time that the host waited for the next batch (max over ranks); peak_memory_gib is the max over ranks; mfu is
    the share of the card's peak, for modules that say `flops_per_sample` (forward and backward). A module that says
    `tokens_per_sample` gets tokens_per_sec. Validation and saving between two steps do not count as training time.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}  # the newest interval's
        self.samples = 0  # of this rank, since the start of this process
        self.seconds = 0.0  # of training, likewise
        self._said_data_bound = 0
        self._lr: float | None = None
        self._clear(0)

    def _clear(self, step: int) -> None:
        self._since, self._wait, self._busy, self._samples = step, 0.0, 0.0, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear(row_index(trainer))
        self._mark = time.perf_counter()

    def restart_clock(self) -> None:
        """Forget the time since the last hook; nothing of it was training."""
        self._mark = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.restart_clock()

    on_validation_end = on_train_epoch_start

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self._wait += now - self._mark
        self._mark = now

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the step's own learning rate; when the batch ends the schedule has moved on."""
        self._lr = float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        if isinstance(sampler, GlobalBatchSampler):
            self._samples += sampler.samples(batch_idx)
        else:
            self._samples += count_samples(batch)
        idle = None
        log_now = row_is_due(trainer)
        if log_now and pl_module.device.type == "cuda":
            before = time.perf_counter()
            torch.cuda.synchronize(pl_module.device)
            idle = time.perf_counter() - before
        now = time.perf_counter()
        self._busy += now - self._mark
        if log_now:
            self._log(trainer, pl_module, row_index(trainer) + 1 - self._since, idle)
        self._mark = time.perf_counter()

    def _log(self, trainer: Trainer, pl_module: LightningModule, steps: int, device_behind: float | None) -> None:
        seconds = self._wait + self._busy
        self.samples, self.seconds = self.samples + self._samples, self.seconds + seconds
        # A device that still had a step's work to do when the host arrived was not waiting for data.
        waited = 0.0 if device_behind and device_behind > seconds / steps / 2 else self._wait / seconds
        strategy, device = trainer.strategy, pl_module.device
        samples = strategy.reduce(torch.tensor(float(self._samples), device=device), reduce_op="sum")
        slowest = torch.tensor([seconds, waited, peak_memory(device)], device=device)
        seconds, waited, memory = strategy.reduce(slowest, reduce_op="max").tolist()
        samples_per_sec = float(samples) / seconds
        values = {
            "perf/samples_per_sec": samples_per_sec,
            "perf/step_time": seconds / steps,
            "perf/data_wait": waited,
            "perf/peak_memory_gib": memory,
        }
        if tokens := getattr(pl_module, "tokens_per_sample", None):
            values["perf/tokens_per_sec"] = samples_per_sec * tokens
        flops = getattr(pl_module, "flops_per_sample", None)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if flops and peak and trainer.precision not in ("32-true", "64-true"):
            values["perf/mfu"] = samples_per_sec * flops / (peak * trainer.world_size)
        if self._lr is not None:
            values["lr"] = self._lr
        self.values = values
        write_row(trainer, values)
        self._say_data_bound(trainer, waited)
        self._clear(row_index(trainer) + 1)

    def _say_data_bound(self, trainer: Trainer, waited: float) -> None:
        """Once, after two intervals in a row: the first one pays for starting the workers."""
        if self._said_data_bound < 0:
            return
        self._said_data_bound = self._said_data_bound + 1 if waited > DATA_BOUND else 0
        if self._said_data_bound < 2:
            return
        self._said_data_bound = -1
        loader = getattr(trainer.train_dataloader, "loader", trainer.train_dataloader)
        workers = getattr(loader, "num_workers", "?")
        if trainer.is_global_zero:
            print(
                f"note: data-bound: {waited:.0%} of the time is spent waiting for batches, {workers} workers per rank. "
                "Turn: --data.num_workers, more CPUs per task, a larger --micro_batch_size, less work per sample"
            )
