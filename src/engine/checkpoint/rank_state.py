"""Save and restore what each rank alone knows: random numbers, and an epoch's sums of metrics so far."""

import builtins
import dataclasses
import random
from typing import Any, Protocol

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric

KEPT = {"fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"}  # of Lightning's _Metadata
KEPT |= {"add_dataloader_idx", "dataloader_idx", "metric_attribute"}


class Keeper(Protocol):
    """Something with a state of its own on every rank."""

    def rank_state(self) -> Any:
        """Return the state: tensors and plain types."""

    def load_rank_state(self, state: Any) -> None:
        """Restore a state."""

    def merge(self, states: list[Any], rank: int) -> Any:
        """Return the state that `rank` restores from those of another number of ranks; None: none."""


class RandomNumbers:
    """The global generators of Python, NumPy and PyTorch, of this rank's GPU too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rank_state(self) -> dict[str, Any]:
        numbers: Any = np.random.get_state()
        _, keys, position, has_gauss, cached = numbers
        numpy = {
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "rest": [int(position), int(has_gauss), float(cached)],
        }
        version, words, gauss = random.getstate()
        states = {"python": [version, list(words), gauss], "numpy": numpy, "torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def load_rank_state(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        keys = state["numpy"]["keys"].cpu().numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, *state["numpy"]["rest"]))
        torch.set_rng_state(state["torch"].cpu())
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)

    def merge(self, states: list[Any], rank: int) -> Any:
        """Restore the same rank's; a new rank keeps its own seed."""
        return states[rank] if rank < len(states) else None


class CallbackMetrics:
    """The newest value of each metric, which a schedule may look at long after the validation that made it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def rank_state(self) -> dict[str, Any]:
        newest = self.trainer._logger_connector._callback_metrics
        return {name: value.detach().cpu().clone() for name, value in newest.items() if isinstance(value, Tensor)}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        device = self.trainer.strategy.root_device
        self.trainer._logger_connector._callback_metrics |= {name: value.to(device) for name, value in state.items()}

    def merge(self, states: list[Any], rank: int) -> Any:
        """Give every rank the same state, or their schedules would differ."""
        return states[0]


class EpochMetrics:
    """What `self.log` and torchmetrics have added up in the epoch so far, and logged last. Lightning saves neither."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer = trainer
        self.results = trainer.fit_loop.epoch_loop._results
        self.metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}

    def rank_state(self) -> dict[str, Any]:
        # What was logged before the first batch is logged again, as the epoch's start is repeated.
        begun = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        logged = {
            key: part for key, part in self.results.items() if part.update_called and part.meta.sync.group is None
        }
        return {
            "results": {key: _entry(part) for key, part in logged.items()} if begun else {},
            "metrics": {name: _values(part) for name, part in self.metrics.items() if part.update_called},
        }

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Restore the entries before the first batch: a key that is logged in some batches only may not come again."""
        results = state.get("results", {})
        begun = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        # A user's ModelCheckpoint may save at an epoch's end, when its sums still exist; the next epoch begins without.
        over = set() if begun else {entry["meta"]["metric_attribute"] for entry in results.values()}
        for name, values in state["metrics"].items():
            if name in self.metrics and name not in over:
                _set(self.metrics[name], values)
        if begun:
            for key, entry in results.items():
                self._make(key, entry)
            self.trainer._logger_connector._first_loop_iter = True  # the next batch is not the first, which clears all

    def _make(self, key: str, entry: dict[str, Any]) -> None:
        metric = self.metrics.get(entry["meta"]["metric_attribute"])
        if entry["values"] is None and metric is None:
            return
        reduce = getattr(builtins if entry["builtin"] else torch, entry["reduce"])
        meta = _Metadata(**entry["meta"], reduce_fx=reduce)
        should, zero_only = entry["sync"]
        meta.sync = _Sync(self.trainer.strategy.reduce, should, zero_only)
        part = _ResultMetric(meta, is_tensor=entry["values"] is not None)
        part.to(self.trainer.strategy.root_device)
        if entry["values"] is None:
            part.value, part._update_count = metric, 1
        else:
            _set(part, entry["values"])
        part._forward_cache = None if entry["last"] is None else entry["last"].to(part.device)
        self.results[key] = part

    def merge(self, states: list[Any], rank: int) -> Any:
        """Begin without sums: the means of this epoch are those of its remaining steps."""


def every_runs_keepers(trainer: Trainer, module: LightningModule) -> dict[str, Keeper]:
    """Return what keeps the state that every run has on each rank, by name."""
    return {
        "random": RandomNumbers(trainer.strategy.root_device),
        "metrics": EpochMetrics(trainer, module),
        "callback_metrics": CallbackMetrics(trainer),
    }


def _entry(part: _ResultMetric) -> dict[str, Any]:
    """Return of a logged key how it was logged, what it has added up, and its value of the last batch."""
    meta, last = part.meta, part._forward_cache
    return {
        "meta": {field.name: getattr(meta, field.name) for field in dataclasses.fields(meta) if field.name in KEPT},
        "reduce": meta.reduce_fx.__name__,
        "builtin": meta.reduce_fx is not getattr(torch, meta.reduce_fx.__name__),  # Lightning compares it
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "values": _values(part) if part.is_tensor else None,
        "last": last.detach().cpu().clone() if isinstance(last, Tensor) else None,
    }


def _values(metric: Metric) -> dict[str, Any]:
    copy = {name: getattr(metric, name) for name in metric._defaults}
    return {
        name: [item.detach().cpu() for item in value] if isinstance(value, list) else value.detach().cpu().clone()
        for name, value in copy.items()
    }


def _set(metric: Metric, values: dict[str, Any]) -> None:
    for name, value in values.items():
        to = metric.device
        setattr(metric, name, [item.to(to) for item in value] if isinstance(value, list) else value.to(to))
    metric._update_count, metric._computed = max(metric._update_count, 1), None
