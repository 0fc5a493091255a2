"""Each strategy with each precision for a step, for tests that look at what arrives there."""

from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn

from src.engine.resolve.precision import CHOICES, resolve_precision
from src.engine.sharding.whole_tensors import to_full
from src.strategies import NAMES, resolve_strategy
from tests.tiny import loader, loaders, quiet_trainer

FINE = 1234.567  # fp32 has it to 1e-4, bf16 has 1232
PAIRS = [
    (strategy, precision)
    for strategy in NAMES[1:]
    for precision in CHOICES[1:]
    if not precision.startswith("16")  # needs a GPU
]

# Loss scale, and the step of an infinite gradient.
SCALED = {"unscaled": (1.0, -1), "scaled": (1024.0, -1), "overflowing": (1024.0, 1)}


class Floats(LightningModule):
    """Notes the type and the value of a float target in its steps."""

    BLOCKS = (nn.Linear,)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, tuple[str, float]] = {}
        self.finite = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen["train"] = str(batch.dtype), batch.double().max().item()
        loss = ((self.layer(batch / FINE) - batch) / FINE).square().mean()
        self.finite = bool(loss.isfinite())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen["val"] = str(batch.dtype), batch.double().max().item()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


def tried(strategy: str, precision: str, world: int) -> dict[str, Any]:
    """A step and a validation; how the weights are kept afterwards."""
    module, before = Floats(), torch.full((8, 1), FINE)
    trainer = quiet_trainer(
        strategy=resolve_strategy(strategy, world),
        precision=resolve_precision(precision, []).value,
        devices=world,
        max_steps=1,
        val_check_interval=1,
        num_sanity_val_steps=0,
        plugins=[TorchElasticEnvironment()],
    )
    trainer.fit(module, *loaders(trainer, before, 2))
    kept = str(next(module.parameters()).dtype)
    return {"seen": module.seen, "finite": module.finite, "kept": kept, "steps": trainer.global_step}


class Scaled(LightningModule):
    """Four weights. In step `at` the gradient of the last one alone, which FSDP has on rank 1, is infinite."""

    BLOCKS = (nn.Linear,)

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.at = nn.Linear(1, 4, bias=False), at
        self.weights: list[list[float]] = []
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        large = torch.tensor([1.0, 1.0, 1.0, float("inf") if batch_idx == self.at else 1.0])
        return ((self.layer(batch).float() + 1) * large).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        (weight,) = to_full([self.layer.weight.detach()], keep=True)
        self.weights.append(weight.flatten().tolist())
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


def scaled(strategy: str, world: int, scale: float, at: int) -> dict[str, Any]:
    """Three steps of 16-mixed with gradients clipped to a norm of 0.5, the weights and the scale after each."""
    torch.manual_seed(0)
    module, scaler = Scaled(at), torch.amp.GradScaler("cpu", init_scale=scale)
    trainer = quiet_trainer(
        strategy=resolve_strategy(strategy, world),
        devices=world,
        max_steps=3,
        gradient_clip_val=0.5,
        plugins=[TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler)],
    )
    trainer.fit(module, loader(trainer, torch.ones(3 * world, 1), 1, train=True))
    return {"weights": module.weights, "scales": module.scales}
