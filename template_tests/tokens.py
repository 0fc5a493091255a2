"""A plain Lightning data module, as users bring it: nothing of this project in it."""

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


class RandomTokens(LightningDataModule):
    """Random (inputs, targets) for lightning.pytorch.demos.LightningTransformer."""

    def __init__(self, batch_size: int = 4, vocab: int = 50, length: int = 16, samples: int = 32) -> None:
        super().__init__()
        self.batch_size, self.vocab, self.length, self.samples = batch_size, vocab, length, samples

    def train_dataloader(self) -> DataLoader:
        tokens = torch.randint(self.vocab, (self.samples, self.length + 1))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), self.batch_size, shuffle=True)
