"""Make what is trained and logged the mean over the *global* batch, however it is spread over devices and time."""

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from src.engine.callbacks.log_interval import row_index, row_is_due, write_row
from src.engine.data.loader import GlobalBatchSampler, training_loaders


class GlobalBatch(Callback):
    """Weigh an epoch's last, smaller global batch correctly and log `train/loss`.

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
        self._sum, self._since = None, row_index(trainer)
        torch.manual_seed(torch.initial_seed() + trainer.global_rank)
        samplers = self._samplers(trainer)
        if not trainer.is_global_zero:
            return
        if len({sampler.size for sampler in samplers}) > 1:
            print(
                "note: the training loaders differ in length: steps at the end of a shorter one depend on the number "
                "of processes and on accumulation"
            )
        if not all(map(_is_ours, training_loaders(trainer))):
            print(
                "note: the training data is not from GlobalBatchLoader: a resumed run is exact only if the loader "
                "keeps its place (state_dict, good for every rank), and several ranks train on samples of "
                "their own only if the loader shares them out"
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        weight = self._weight(trainer)
        if weight != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided it by the accumulation already.
            scaled = loss.detach().float().reshape(()) * self._weight(trainer)
            self._sum = scaled if self._sum is None else self._sum.to(scaled.device) + scaled
        if row_is_due(trainer):
            done = row_index(trainer) + 1
            self._log(trainer, done - self._since)
            self._sum, self._since = None, done

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank has added up since the last row; a resumed run continues with it."""
        return {"sum": None if self._sum is None else self._sum.cpu(), "since": self._since}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        self._sum, self._since = state["sum"], state["since"]

    def merge(self, states: list[Any], rank: int) -> Any:
        """Give every rank the mean of all ranks' sums."""
        sums = [state["sum"] for state in states if state["sum"] is not None]
        return {"sum": torch.stack(sums).mean(0) if sums else None, "since": states[0]["since"]}

    def _log(self, trainer: Trainer, steps: int) -> None:
        logged = trainer.fit_loop._results  # what the module logs, also where it will show only at the epoch's end
        if self._sum is None or any(key.endswith(".train/loss") for key in logged):
            return
        mean = trainer.strategy.reduce(self._sum / steps, reduce_op="mean")
        value = float(mean)  # the interval's one synchronisation with the device
        self.value = value
        write_row(trainer, {"train/loss": value})

    @staticmethod
    def _samplers(trainer: Trainer) -> list[GlobalBatchSampler]:
        """Return the samplers of all loaders; [] where one loader is another's, whose samples nobody knows."""
        loaders = training_loaders(trainer)
        return [loader.sampler for loader in loaders] if all(map(_is_ours, loaders)) else []

    def _weight(self, trainer: Trainer) -> float:
        """Return the mean weight over the loaders, which agree where they are of one length."""
        index, accumulation = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        weights = [sampler.weight(index, accumulation) for sampler in self._samplers(trainer)]
        return sum(weights) / len(weights) if weights else 1.0


def _is_ours(loader: object) -> bool:
    return isinstance(getattr(loader, "sampler", None), GlobalBatchSampler)
