"""Makes what is trained and logged the mean over the *global* batch, however it is spread over devices and time."""

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import IterableDataset

from src.batching import GlobalBatchSampler
from src.callbacks.log_interval import row_is_due, write_row


class GlobalBatch(Callback):
    """Weighs an epoch's last, smaller global batch correctly and logs `train/loss`.

    `train/loss` is the mean over all samples since the last logged step and over all ranks, so it is the same curve on
    1 device and on 16. It comes from what `training_step` returns; a module that logs it itself is left alone. One
    small reduction per log interval, no synchronisation in between.
    """

    def __init__(self) -> None:
        self.value: float | None = None  # the newest train/loss
        self._sum: Tensor | None = None
        self._since = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give every rank random numbers of its own: the same seed made the same weights, but masks must differ."""
        self._sum, self._since = None, trainer.global_step
        torch.manual_seed(torch.initial_seed() + trainer.global_rank)
        if trainer.world_size > 1 and trainer.is_global_zero and not self._sampler(trainer):
            print(_foreign_data_note(trainer.train_dataloader))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:  # noqa: D102
        weight = self._weight(trainer)
        if weight != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)

    def on_train_batch_end(  # noqa: D102
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided it by the accumulation already.
            part = loss.detach().float().reshape(()) * self._weight(trainer)
            self._sum = part if self._sum is None else self._sum + part
        if row_is_due(trainer, self._since):
            self._log(trainer, trainer.global_step - self._since)
            self._sum, self._since = None, trainer.global_step

    def _log(self, trainer: Trainer, steps: int) -> None:
        logged = trainer.fit_loop._results  # what the module logs, also where it will show only at the epoch's end
        if self._sum is None or any(key.endswith(".train/loss") for key in logged):
            return
        mean = trainer.strategy.reduce(self._sum / steps, reduce_op="mean")
        value = float(mean)  # the interval's one synchronisation with the device
        self.value = value
        write_row(trainer, {"train/loss": value})

    @staticmethod
    def _sampler(trainer: Trainer) -> GlobalBatchSampler | None:
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        return sampler if isinstance(sampler, GlobalBatchSampler) else None

    def _weight(self, trainer: Trainer) -> float:
        sampler = self._sampler(trainer)
        if sampler is None:
            return 1.0
        return sampler.weight(trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches)


def _foreign_data_note(loader: object) -> str:
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return (
            "note: the data is an IterableDataset: every rank reads the same stream unless the data set shares itself "
            "out by torch.distributed.get_rank() and get_world_size()"
        )
    return (
        "note: the data comes from a plain DataLoader: Lightning shares it over the devices and repeats samples to "
        "fill the last batch, in evaluation too; src.batching.GlobalBatchLoader counts each once"
    )
