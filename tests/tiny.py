"""A model that can be worked out by hand, a Trainer that keeps quiet, and a logger that remembers."""

from typing import Any, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import Dataset

from src.engine.data.loader import GlobalBatchLoader


class Line(LightningModule):
    """One weight w, loss mean((w x - 1)²), plain SGD."""

    def __init__(self, lr: float = 0.1, start: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([start]))
        self.lr = lr

    def error(self, batch: Tensor) -> Tensor:
        return (self.weight * batch - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.error(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.error(batch), batch_size=len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class Pair(Line):
    """Two weights, each with an optimizer, that the step uses one after the other; the first's gradient may overflow.

    Args:
        bad: batches in which it does

    """

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.other, self.bad = torch.nn.Parameter(torch.zeros(1)), bad
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for weight, optimizer in zip((self.weight, self.other), optimizers, strict=True):
            loss = (weight * batch - 1).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss * float("inf") if weight is self.weight and batch_idx in self.bad else loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([weight], self.lr) for weight in (self.weight, self.other)]


class Rows(Logger):
    """Remembers what was logged: `rows` is a list of (step, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not looked at."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def curve(self, key: str) -> dict[int | None, float]:
        """The values of one metric by step, of which none may have two."""
        found = [(step, metrics[key]) for step, metrics in self.rows if key in metrics]
        assert len(found) == len(dict(found)), found
        return dict(found)


def quiet_trainer(*, callbacks: list[Any] | None = None, **settings: Any) -> Trainer:
    """A Trainer on one CPU process that writes nothing by itself; `callbacks` may save checkpoints too."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    quiet |= {"accelerator": "cpu", "logger": False, "log_every_n_steps": 1}
    trainer = Trainer(**quiet | settings)
    trainer.callbacks += callbacks or []  # type: ignore[attr-defined]
    return trainer


def loader(
    trainer: Trainer | None,
    data: Tensor | Dataset,
    micro_batch_size: int,
    *,
    train: bool,
    num_workers: int | None = None,
) -> GlobalBatchLoader:
    """The data, or the rows of a tensor, in global batches."""
    return GlobalBatchLoader(cast(Dataset, data), micro_batch_size, trainer, train=train, num_workers=num_workers)


def loaders(
    trainer: Trainer, data: Tensor | Dataset, micro_batch_size: int
) -> tuple[GlobalBatchLoader, GlobalBatchLoader]:
    """One to train and one to validate on the same data."""
    return (
        loader(trainer, data, micro_batch_size, train=True),
        loader(trainer, data, micro_batch_size, train=False),
    )
