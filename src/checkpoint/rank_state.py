"""What each rank alone knows and a checkpoint must bring back: random numbers, and an epoch's sums so far."""

import builtins
import dataclasses
import functools
import random
from typing import Any, Protocol

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric

BOTH = {"max": torch.maximum, "min": torch.minimum}  # how two parts of a logged metric come together, if not by adding
REDUCTIONS: dict[str, Any] = {  # torchmetrics' own, by their names
    "dim_zero_sum": lambda values: values.sum(0),
    "dim_zero_mean": lambda values: values.mean(0),
    "dim_zero_max": lambda values: values.amax(0),
    "dim_zero_min": lambda values: values.amin(0),
    "dim_zero_cat": lambda values: values.flatten(0, 1) if values.dim() > 1 else values,
}

KEPT = {"fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"}  # of Lightning's _Metadata
KEPT |= {"add_dataloader_idx", "dataloader_idx", "metric_attribute"}


class Keeper(Protocol):
    """Something with a state of its own on every rank."""

    def rank_state(self) -> Any:
        """Tensors and plain types."""

    def load_rank_state(self, state: Any) -> None:
        """Go on from there."""

    def merge(self, states: list[Any], rank: int) -> Any:
        """What `rank` goes on from where there were other ranks, with `states`; None: from nothing."""


class RandomNumbers:
    """The global generators of Python, NumPy and PyTorch, of this rank's GPU too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rank_state(self) -> dict[str, Any]:  # noqa: D102
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

    def load_rank_state(self, state: dict[str, Any]) -> None:  # noqa: D102
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        keys = state["numpy"]["keys"].cpu().numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, *state["numpy"]["rest"]))
        torch.set_rng_state(state["torch"].cpu())
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)

    def merge(self, states: list[Any], rank: int) -> Any:
        """A rank that was not there before keeps the seed of its own."""
        return states[rank] if rank < len(states) else None


class CallbackMetrics:
    """The newest value of each metric, which a schedule may look at long after the validation that made it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def rank_state(self) -> dict[str, Any]:  # noqa: D102
        newest = self.trainer._logger_connector._callback_metrics
        return {name: value.detach().cpu().clone() for name, value in newest.items() if isinstance(value, Tensor)}

    def load_rank_state(self, state: dict[str, Any]) -> None:  # noqa: D102
        device = self.trainer.strategy.root_device
        self.trainer._logger_connector._callback_metrics |= {name: value.to(device) for name, value in state.items()}

    def merge(self, states: list[Any], rank: int) -> Any:
        """All ranks must see the same, or their schedules part."""
        return states[0]


class EpochMetrics:
    """What `self.log` and torchmetrics have added up in the epoch so far, and logged last; Lightning saves neither."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer = trainer
        self.results = trainer.fit_loop.epoch_loop._results
        self.metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}

    def rank_state(self) -> dict[str, Any]:  # noqa: D102
        # What was logged before the first batch is logged again: the epoch's start is gone through again.
        begun = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        logged = {
            key: part for key, part in self.results.items() if part.update_called and part.meta.sync.group is None
        }
        return {
            "results": {key: _entry(part) for key, part in logged.items()} if begun else {},
            "metrics": {name: _values(part) for name, part in self.metrics.items() if part.update_called},
        }

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Make the entries at once: a key that is logged in some batches only may not come again."""
        results = state.get("results", {})
        begun = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        # A ModelCheckpoint of the user's may save when an epoch's sums are there still, and the next begins without.
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
        meta = _Remembered(**entry["meta"], reduce_fx=reduce)
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
        """Rank 0 goes on with what all have added up; the others have the same entries, as reducing is collective."""
        results, metrics = [state.get("results", {}) for state in states], [state["metrics"] for state in states]
        together: dict[str, Any] = {"results": {}, "metrics": {}}
        for key in {key: None for part in results for key in part}:
            parts = [part[key] for part in results if key in part]
            together["results"][key] = parts[0] | {"values": _added(parts, rank)}
        for key in {key: None for part in metrics for key in part} & self.metrics.keys() if rank == 0 else ():
            reductions = self.metrics[key]._reductions
            found = [part[key] for part in metrics if key in part]
            together["metrics"][key] = {
                name: _together(reductions[name], [part[name] for part in found]) for name in found[0]
            }
        return together


class _Remembered(_Metadata):
    """How a key was logged before this start. Lightning refuses a call that differs from it.

    Whether ranks are put together depends on how many there are, so the first call of this start decides that.
    """

    __hash__ = None  # type: ignore[assignment]  # as a dataclass's

    def __eq__(self, other: object) -> bool:
        names = [field.name for field in dataclasses.fields(self) if field.name != "_sync"]
        same = isinstance(other, _Metadata) and all(getattr(self, name) == getattr(other, name) for name in names)
        if same:
            self._sync = other._sync  # type: ignore[attr-defined]
        return same


def _added(entries: list[dict[str, Any]], rank: int) -> dict[str, Any] | None:
    """The values of one logged key on all ranks: together on rank 0, on the others what changes nothing."""
    values = [entry["values"] for entry in entries]
    if values[0] is None:
        return None
    reduce = entries[0]["reduce"]
    if rank:
        nothing = {"max": -float("inf"), "min": float("inf")}.get(reduce, 0)
        return {name: torch.full_like(value, nothing) for name, value in values[0].items()}
    both = BOTH.get(reduce, torch.add)
    return {name: functools.reduce(both, [part[name] for part in values]) for name in values[0]}


def _entry(part: _ResultMetric) -> dict[str, Any]:
    """A logged key: how it was logged, what it has added up, and its value of the last batch."""
    meta, last = part.meta, part._forward_cache
    return {
        "meta": {field.name: getattr(meta, field.name) for field in dataclasses.fields(meta) if field.name in KEPT},
        "reduce": meta.reduce_fx.__name__,
        "builtin": meta.reduce_fx is not getattr(torch, meta.reduce_fx.__name__),  # Lightning compares it
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "values": _values(part) if part.is_tensor else None,
        "last": last.detach().cpu().clone() if isinstance(last, Tensor) else None,
    }


def _together(reduction: Any, values: list[Any]) -> Any:
    """One rank's state of a torchmetrics metric in place of many; what it cannot add up is the first rank's."""
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if reduction is None or getattr(reduction, "__name__", "") not in REDUCTIONS:
        return values[0]
    return REDUCTIONS[reduction.__name__](torch.stack(values))


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
