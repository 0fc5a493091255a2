"""Each strategy with each precision for a step, for tests that look at what arrives there."""

from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn

from src.precision import CHOICES, resolve_precision
from src.strategies import NAMES, resolve_strategy
from tests.tiny import loaders, quiet_trainer

FINE = 1234.567  # fp32 has it to 1e-4, bf16 has 1232
PAIRS = [
    (strategy, precision)
    for strategy in NAMES[1:]
    for precision in CHOICES[1:]
    if not precision.startswith("16")  # needs a GPU
]


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
