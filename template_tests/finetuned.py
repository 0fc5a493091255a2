"""Fine-tuning with Lightning's own callback: parts that are trained from the second epoch on."""

from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from tests.small_task import SmallModule


class Tuned(SmallModule):
    """SmallModule with a BatchNorm in front of its blocks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm = nn.BatchNorm1d(16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.norm(self.model.letters(batch[:, :-1]).transpose(1, 2)).transpose(1, 2)
        return self.model.loss(self.model.blocks(x), batch[:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], self.lr)


class Unfreezing(BaseFinetuning):
    """The blocks and the norm are trained from epoch 1 on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(parts(pl_module), train_bn=False)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(parts(pl_module), optimizer)


def parts(module: Any) -> Any:
    return [module.model.blocks, module.norm]
