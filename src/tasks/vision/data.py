"""scikit-learn's handwritten digits: 1797 real images of 8 × 8 pixels that ship with the package."""

import itertools

import torch
from lightning import LightningDataModule
from torch.utils.data import TensorDataset

from src.engine.data.loader import GlobalBatchLoader
from src.engine.errors import UserError


class Digits(LightningDataModule):
    """70 % train, 15 % validation, 15 % test, always the same.

    Args:
        batch_size: samples per device and pass; the command line derives it from global_batch_size
        num_workers: loader processes per rank; default: from this rank's share of the CPUs

    """

    def __init__(self, batch_size: int = 64, num_workers: int | None = None) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        """Load and split."""
        try:
            from sklearn.datasets import load_digits  # only this task needs it
        except ModuleNotFoundError as error:
            raise UserError("the digits come with scikit-learn: pip install -e '.[vision]'") from error
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        everything = pixels[order], torch.tensor(labels)[order].long()
        bounds = [0, int(0.7 * len(order)), int(0.85 * len(order)), len(order)]
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(*(part[start:stop] for part in everything)) for start, stop in itertools.pairwise(bounds)
        )

    def _loader(self, dataset: TensorDataset, *, train: bool = False) -> GlobalBatchLoader:
        return GlobalBatchLoader(dataset, self.batch_size, self.trainer, train=train, num_workers=self.num_workers)

    def train_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.train_set, train=True)

    def val_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.val_set)

    def test_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.test_set)

    def predict_dataloader(self) -> GlobalBatchLoader:
        return self._loader(self.test_set)
