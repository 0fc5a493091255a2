"""A task for the tests alone: predict the next of a few letters, in a second on one core.

It stands for whatever task a project has, so that no test of the command depends on an example that may be deleted.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from src.engine.data.loader import GlobalBatchLoader
from src.engine.errors import UserError
from tests.tiny import loader

LETTERS, LENGTH = 8, 16


class Block(nn.Module):
    """A norm and two layers, added to what comes in."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class SmallNet(nn.Module):
    """Logits of the next letter from each letter alone."""

    BLOCKS = (Block,)

    def __init__(self, width: int = 16, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.letters, self.head = nn.Embedding(LETTERS, width), nn.Linear(width, LETTERS)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(depth)))

    def features(self, letters: Tensor) -> Tensor:
        """(B, T) -> (B, T, C), before the head."""
        return self.blocks(self.letters(letters))

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        return F.cross_entropy(self.head(features).flatten(0, 1).float(), targets.flatten())


class SmallModule(LightningModule):
    """Trains the network with AdamW and a falling rate, and counts how many letters it guesses."""

    def __init__(self, width: int = 16, depth: int = 2, dropout: float = 0.0, lr: float = 1e-2) -> None:
        super().__init__()
        if depth < 1:
            raise UserError(f"model: depth is {depth}; it must be at least 1")
        self.model, self.lr = SmallNet(width, depth, dropout), lr
        self.tokens_per_sample = LENGTH
        self.flops_per_sample = 6 * LENGTH * sum(p.numel() for p in self.model.parameters())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model.loss(self.model.features(batch[:, :-1]), batch[:, 1:])

    def evaluate(self, batch: Tensor, split: str) -> None:
        features = self.model.features(batch[:, :-1])
        right = (self.model.head(features).argmax(-1) == batch[:, 1:]).float().mean()
        metrics = {f"{split}/loss": self.model.loss(features, batch[:, 1:]), f"{split}/accuracy": right}
        self.log_dict(metrics, batch_size=len(batch), on_epoch=True, sync_dist=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The likeliest letter after each, (B, T)."""
        return self.model.head(self.model.features(batch[:, :-1])).argmax(-1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        schedule = LambdaLR(optimizer, lambda step: (step + 1) ** -0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def texts(count: int, seed: int) -> Tensor:
    """`count` rows of letters in which nine of ten follow from the letter before: what a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(LETTERS, (count, LENGTH + 1), generator=generator)
    follows = torch.rand(rows.shape, generator=generator) < 0.9
    for place in range(1, LENGTH + 1):
        rows[:, place] = torch.where(follows[:, place], (3 * rows[:, place - 1] + 1) % LETTERS, rows[:, place])
    return rows


class SmallData(LightningDataModule):
    """`size` texts to train on, `val_size` others to validate on, and as many again to test on and to predict.

    A data module with samples of its own replaces `samples`.
    """

    def __init__(
        self, size: int = 512, val_size: int = 30, batch_size: int = 4, num_workers: int | None = None
    ) -> None:
        super().__init__()
        self.size, self.val_size, self.batch_size, self.num_workers = size, val_size, batch_size, num_workers

    def samples(self, count: int, seed: int) -> Tensor:
        """One sample per row; always the same for a count and a seed."""
        return texts(count, seed)

    def _loader(self, count: int, seed: int, *, train: bool = False) -> GlobalBatchLoader:
        samples = self.samples(count, seed)
        return loader(self.trainer, samples, self.batch_size, train=train, num_workers=self.num_workers)

    def train_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.size, 0, train=True)

    def val_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.val_size, 1)

    def test_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.val_size, 2)

    predict_dataloader = test_dataloader
