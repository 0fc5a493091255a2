"""Image classification: loss, accuracy, optimizer."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy

from src.engine.errors import UserError
from src.models.resnet import ResNet


class VisionModule(LightningModule):
    """Trains a small ResNet.

    Args:
        channels: of the images
        classes: number of labels
        width: channels of the first stage, a multiple of 8
        stages: each after the first halves the resolution
        lr: peak of the one-cycle schedule
        weight_decay: of AdamW

    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 10,
        width: int = 32,
        stages: int = 2,
        lr: float = 3e-3,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__()
        self.model = ResNet(channels, classes, width, stages)
        self.lr, self.weight_decay = lr, weight_decay
        # One metric per split: their counts are summed over ranks when the epoch ends.
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy; the command line's callbacks log it as train/loss."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def _evaluate(self, batch: tuple[Tensor, Tensor], split: str, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self.model(images)
        accuracy.update(logits, labels)
        self.log(f"{split}/accuracy", accuracy, on_epoch=True, batch_size=len(labels))
        loss = F.cross_entropy(logits, labels)
        self.log(f"{split}/loss", loss, on_epoch=True, sync_dist=True, batch_size=len(labels))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely label of each image, int64 of shape (B,)."""
        return self.model(batch[0]).argmax(-1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # One kernel for all parameters; with fp16 it would unscale gradients itself, after they are clipped.
        fused = self.device.type == "cuda" and self.trainer.scaler is None
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        if self.trainer.estimated_stepping_batches == math.inf:
            raise UserError("a one-cycle schedule needs an end: set --trainer.max_epochs or --trainer.max_steps")
        # PyTorch's OneCycleLR keeps the length in its state: a run that is given more steps would end with an error.
        schedule = LambdaLR(optimizer, self._lr_share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lr_share(self, step: int) -> float:
        """Return one cycle (Smith & Topin, 2018): from 1/25 of `lr` up over 30 % of the steps, then to 0."""
        done = min(1.0, step / max(1, self.trainer.estimated_stepping_batches - 1))
        if done < 0.3:
            return 1 / 25 + 24 / 25 * (1 - math.cos(math.pi * done / 0.3)) / 2
        return (1 + math.cos(math.pi * (done - 0.3) / 0.7)) / 2
