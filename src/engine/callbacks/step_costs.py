"""Save memory and time in every step: old gradients are freed early, and the garbage collector has less to walk."""

import gc
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden


class FreeGradients(Callback):
    """Zero the gradients when a step begins, before its first forward pass, in which memory runs out.

    Lightning does so between the forward and the backward pass, so that the old gradients (4 bytes a parameter, in
    fp32) lie beside all activations: 2.2 GiB of 23.5 per GPU with 1.2 B parameters over two.
    Where the module or a callback looks at what is zeroed, in `on_before_zero_grad`, they are left alone.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        begins = batch_idx % trainer.accumulate_grad_batches == 0
        if not begins or not pl_module.automatic_optimization or is_overridden("on_before_zero_grad", pl_module):
            return
        if any(type(call).on_before_zero_grad is not Callback.on_before_zero_grad for call in trainer.callbacks):  # type: ignore[attr-defined]
            return
        for optimizer in trainer.optimizers:
            pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)


class FreezeGarbage(Callback):
    """Keep the objects that exist when training begins, mostly of libraries, out of the collector's walks.

    A start has 380 000 objects. One full collection of them took 0.2 s, without them at most 6.4 ms (24 blocks under
    fsdp on one core of an Intel Xeon, Python 3.11, 2026-11-29, by gc.callbacks). There was one in 200 to 400 steps, for
    which other ranks would wait; what that saves over many ranks has not been measured. Objects made later are
    collected as ever; frozen ones that become garbage in a cycle stay until training ends.
    """

    def __init__(self) -> None:
        self._ours = False

    def on_train_start(self, *args: Any) -> None:
        self._ours = not gc.get_freeze_count()
        if self._ours:
            gc.collect()
            gc.freeze()

    def on_train_end(self, *args: Any) -> None:
        """Give whoever continues in this process a collector that sees everything."""
        if self._ours:
            gc.unfreeze()

    on_exception = on_train_end  # type: ignore[assignment]
