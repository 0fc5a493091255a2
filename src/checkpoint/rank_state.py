"""What each rank alone knows and a checkpoint must bring back: random numbers, and an epoch's sums so far."""

import random
from typing import Any, Protocol

import numpy as np
import torch
from lightning import LightningModule, Trainer
from torchmetrics import Metric


class Keeper(Protocol):
    """Something with a state of its own on every rank."""

    def rank_state(self) -> Any:
        """Tensors and plain types."""

    def load_rank_state(self, state: Any) -> None:
        """Go on from there."""


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


class EpochMetrics:
    """What `self.log(on_epoch=True)` and torchmetrics have added up in the epoch so far; neither Lightning saves."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.results = trainer.fit_loop.epoch_loop._results
        self.metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._pending: dict[str, dict[str, torch.Tensor]] = {}

    def rank_state(self) -> dict[str, Any]:  # noqa: D102
        logged = {key: part for key, part in self.results.items() if part.is_tensor and part.meta.on_epoch}
        return {
            "logged": {key: _values(part) for key, part in logged.items() if part.update_called},
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
            for name, value in earlier.items():
                now = getattr(part, name)
                both = part.meta.reduce_fx if part.meta.is_max_reduction or part.meta.is_min_reduction else torch.add
                setattr(part, name, both(value.to(now.device), now))


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
