"""Write the predictions of `predict` to a file."""

from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from src.engine.distributed import gather_objects
from src.engine.files import replacing


class WritePredictions(BasePredictionWriter):
    """Write what `predict_step` returned, one entry per batch in the data set's order, to `predictions.pt`.

    Ranks hand theirs to rank 0. Tensors and plain types load again with `torch.load(path, weights_only=True)`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="epoch")
        self.path = path

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        of_ranks = gather_objects(predictions)
        if not trainer.is_global_zero:
            return
        longest = max(map(len, of_ranks))
        # Loaders split every batch over the ranks, so the data set's order goes batch by batch, rank by rank.
        ordered = [batches[i] for i in range(longest) for batches in of_ranks if i < len(batches)]
        with replacing(self.path) as temporary, temporary.open("wb") as file:
            torch.save(ordered, file)
        print(f"predictions of {len(ordered)} batches: {self.path}")
