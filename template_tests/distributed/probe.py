"""A module of somebody else's that writes down what it sees on every rank."""

import hashlib
import json
import os
from pathlib import Path

import torch
from lightning import LightningModule
from torch import Tensor, nn

from tests.small_task import SmallData


class NumbersData(SmallData):
    """`size` numbers to train on, `val_size` to evaluate on: sample i is the number i."""

    def __init__(self, size: int = 24, val_size: int = 7, batch_size: int = 4) -> None:
        super().__init__(size, val_size, batch_size)

    def samples(self, count: int, seed: int) -> Tensor:
        return torch.arange(float(count))[:, None]


class Probe(LightningModule):
    """Writes `probe-<rank>.json` into $PROBE_FOLDER when training ends.

    Args:
        unused: have parameters that no step uses
        fail_at: raise in this batch on rank 1
        norm: have a BatchNorm
    """

    def __init__(self, unused: bool = False, fail_at: int | None = None, norm: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)
        self.frozen = nn.Sequential(nn.Dropout(0.5)).eval().requires_grad_(False)
        self.unused = nn.Linear(1, 1) if unused else None
        self.norm = nn.BatchNorm1d(1) if norm else None
        self.fail_at = fail_at
        self.seen: dict = {"train": {}, "val": [], "gradients": [], "modes": [], "order": {}}

    def on_train_start(self) -> None:
        assert self.trainer.train_dataloader is not None
        self.seen["weights_at_start"] = fingerprint([p.detach() for p in self.parameters()])
        self.seen["draw"] = torch.rand(1).item()
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        self.seen["environment"] = type(environment).__name__
        self.seen["group"] = torch.distributed.is_initialized()
        self.seen["world_size"] = self.trainer.world_size
        self.seen["cublas"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fail_at == batch_idx and self.global_rank == 1:
            raise RuntimeError("this rank breaks on purpose")
        sampler = self.trainer.train_dataloader.sampler  # type: ignore[union-attr]
        counted = batch[: sampler.samples(batch_idx)].flatten().int().tolist()
        self.seen["train"].setdefault(str(self.current_epoch), []).append(counted)
        self.seen["modes"].append([self.training, self.layer.training, self.frozen.training])
        return self.layer(batch / 100).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: object) -> None:
        self.seen["gradients"].append(fingerprint([p.grad for p in self.layer.parameters()]))  # type: ignore[misc]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen["val"].extend(batch.flatten().int().tolist())
        self.log("val/mean", batch.mean(), batch_size=len(batch), on_epoch=True, sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def on_train_end(self) -> None:
        folder = Path(os.environ["PROBE_FOLDER"])
        (folder / f"probe-{self.global_rank}.json").write_text(json.dumps(self.seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fingerprint(tensors: list[Tensor]) -> str:
    """Equal for bit-identical tensors only."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
