"""Frees a step's gradients before the next one's forward pass, in which memory runs out."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden


class FreeGradients(Callback):
    """Zeroes gradients when a step begins.

    Lightning does so between the forward and the backward pass, so that the old gradients (4 bytes a parameter, in
    fp32) lie beside all activations: 2.2 GiB of 23.5 per GPU with 1.2 B parameters over two.
    Where the module or a callback looks at what is zeroed, in `on_before_zero_grad`, they are left alone.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: D102
        begins = batch_idx % trainer.accumulate_grad_batches == 0
        if not begins or not pl_module.automatic_optimization or is_overridden("on_before_zero_grad", pl_module):
            return
        if any(type(call).on_before_zero_grad is not Callback.on_before_zero_grad for call in trainer.callbacks):  # type: ignore[attr-defined]
            return
        for optimizer in trainer.optimizers:
            pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
