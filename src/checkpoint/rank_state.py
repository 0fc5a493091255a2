"""What each rank alone knows and a checkpoint must bring back: random numbers, and an epoch's sums so far."""

import functools
import random
from typing import Any, Protocol

import numpy as np
import torch
from lightning import LightningModule, Trainer
from torchmetrics import Metric

BOTH = {"max": torch.maximum, "min": torch.minimum}  # how two parts of a logged metric come together, if not by adding
REDUCTIONS: dict[str, Any] = {  # torchmetrics' own, by their names
    "dim_zero_sum": lambda values: values.sum(0),
    "dim_zero_mean": lambda values: values.mean(0),
    "dim_zero_max": lambda values: values.amax(0),
    "dim_zero_min": lambda values: values.amin(0),
    "dim_zero_cat": lambda values: values.flatten(0, 1) if values.dim() > 1 else values,
}


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
        keys = state["numpy"]["keys"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, *state["numpy"]["rest"]))
        torch.set_rng_state(state["torch"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def merge(self, states: list[Any], rank: int) -> Any:
        """A rank that was not there before keeps the seed of its own."""
        return states[rank] if rank < len(states) else None


class EpochMetrics:
    """What `self.log(on_epoch=True)` and torchmetrics have added up in the epoch so far; neither Lightning saves."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.results = trainer.fit_loop.epoch_loop._results
        self.metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._pending: dict[str, dict[str, Any]] = {}

    def rank_state(self) -> dict[str, Any]:  # noqa: D102
        logged = {key: part for key, part in self.results.items() if part.is_tensor and part.meta.on_epoch}
        return {
            "logged": {
                key: _values(part) | {"reduce": part.meta.reduce_fx.__name__}
                for key, part in logged.items()
                if part.update_called
            },
            "metrics": {name: _values(part) for name, part in self.metrics.items() if part.update_called},
        }

    def load_rank_state(self, state: dict[str, Any]) -> None:  # noqa: D102
        self._pending = state["logged"]  # what is logged comes into being when it is logged again
        for name, values in state["metrics"].items():
            if name in self.metrics:
                _set(self.metrics[name], values)

    def add_pending(self) -> None:
        """Add the earlier part to what has been logged since; nothing is added twice."""
        for key in self._pending.keys() & self.results.keys():
            part, earlier = self.results[key], self._pending.pop(key)
            both = BOTH.get(earlier.pop("reduce"), torch.add)
            for name, value in earlier.items():
                now = getattr(part, name)
                setattr(part, name, both(value.to(now.device), now))

    def merge(self, states: list[Any], rank: int) -> Any:
        """Rank 0 goes on with what all have added up, the others with nothing."""
        if rank:
            return None
        logged, metrics = [state["logged"] for state in states], [state["metrics"] for state in states]
        together: dict[str, Any] = {"logged": {}, "metrics": {}}
        for key in {key: None for part in logged for key in part}:
            parts = [part[key] for part in logged if key in part]
            both = BOTH.get(parts[0]["reduce"], torch.add)
            values = {
                name: functools.reduce(both, [part[name] for part in parts]) for name in parts[0].keys() - {"reduce"}
            }
            together["logged"][key] = values | {"reduce": parts[0]["reduce"]}
        for key in {key: None for part in metrics for key in part} & self.metrics.keys():
            reductions = self.metrics[key]._reductions
            parts = [part[key] for part in metrics if key in part]
            together["metrics"][key] = {
                name: _together(reductions[name], [part[name] for part in parts]) for name in parts[0]
            }
        return together


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


def gather(state: Any) -> list[Any]:
    """Every rank's state, on every rank. Collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states
