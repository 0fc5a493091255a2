"""Makes what is trained and logged the mean over the *global* batch, however it is spread over devices and time."""

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from src.batching import GlobalBatchSampler, training_loaders
from src.callbacks.log_interval import row_index, row_is_due, write_row


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
        foreign = [loader for loader in training_loaders(trainer) if not _is_ours(loader)]
        notes = (note for loader in foreign for note in _foreign_data_notes(loader, trainer.world_size))
        for note in dict.fromkeys(notes):
            print(note)

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
            self._sum = part if self._sum is None else self._sum.to(part.device) + part
        if row_is_due(trainer):
            done = row_index(trainer) + 1
            self._log(trainer, done - self._since)
            self._sum, self._since = None, done

    def rank_state(self) -> dict[str, Any]:
        """What this rank has added up since the last row; a resumed run goes on with it."""
        return {"sum": None if self._sum is None else self._sum.cpu(), "since": self._since}

    def load_rank_state(self, state: dict[str, Any]) -> None:  # noqa: D102
        self._sum, self._since = state["sum"], state["since"]

    def merge(self, states: list[Any], rank: int) -> Any:
        """Each rank goes on with the mean, whose mean is the same."""
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
        """Those of all loaders; [] where one loader is another's, whose samples nobody knows."""
        loaders = training_loaders(trainer)
        return [loader.sampler for loader in loaders] if all(map(_is_ours, loaders)) else []

    def _weight(self, trainer: Trainer) -> float:
        """The mean over the loaders, which agree where they are of one length."""
        index, accumulation = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        weights = [sampler.weight(index, accumulation) for sampler in self._samplers(trainer)]
        return sum(weights) / len(weights) if weights else 1.0


def _is_ours(loader: object) -> bool:
    return isinstance(getattr(loader, "sampler", None), GlobalBatchSampler)


def _foreign_data_notes(loader: object, world_size: int) -> list[str]:
    """What data that this project does not slice can do to a run."""
    notes = []
    keeps_place = hasattr(loader, "state_dict")
    if keeps_place and world_size > 1:
        notes.append(
            "note: the data keeps its own place: a continued run gives every rank that of rank 0, so it must be of all "
            "ranks, as src.batching.GlobalBatchLoader's is"
        )
    if keeps_place and sized_len(loader) is None:
        notes.append(
            "note: the data has no length and is read one batch ahead: a continued run misses a batch unless its "
            "state_dict leaves out the last one that it gave"
        )
    if not keeps_place:
        notes.append(
            "note: the data does not know its place: a run that is continued in the middle of an epoch trains on the "
            "epoch's first samples again; src.batching.GlobalBatchLoader goes on with the next one"
        )
    if world_size > 1 and isinstance(getattr(loader, "dataset", None), IterableDataset):
        notes.append(
            "note: the data is an IterableDataset: every rank reads the same stream unless the data set shares itself "
            "out by torch.distributed.get_rank() and get_world_size()"
        )
    elif world_size > 1 and isinstance(loader, DataLoader):
        notes.append(
            "note: the data comes from a plain DataLoader: Lightning shares it over the devices and repeats samples to "
            "fill the last batch, in evaluation too; src.batching.GlobalBatchLoader counts each once"
        )
    return notes
