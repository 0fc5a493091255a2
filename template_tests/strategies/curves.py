"""Trains small models under every strategy in one process group, for tests that compare what came out.

A case is something that a model or a Trainer may have; a run is a case under one strategy, precision and world size.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from lightning import LightningModule
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from src.engine.sharding.whole_tensors import to_full
from src.engine.sharding.wrapping import checkpoint_activations, compile_blocks
from src.strategies import resolve_strategy
from src.strategies.fsdp import FSDP
from template_tests.strategies.group import in_group
from tests.small_task import LETTERS, texts
from tests.tiny import loader, quiet_trainer

STEPS, BATCH, WIDTH = 20, 12, 10  # a batch that 1, 2 and 4 ranks share in 1, 2 or 3 passes
FLAT = 1234.567  # bf16 has 1232


class Block(nn.Module):
    """As few parameters as a block can have: it is their number that FSDP takes time for on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(x))


class Net(LightningModule):
    """Predicts the next letter. Every setting adds one thing that a strategy may get wrong."""

    BLOCKS: tuple[type[nn.Module], ...] = (Block,)

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        direct: bool = False,
        norm: bool = False,
        double: bool = False,
        flat: bool = False,
        twice: bool = False,
        sharded: bool = False,
        manual: bool = False,
        thaws_at: int = -1,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.letters, self.head = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, LETTERS)
        self.blocks = nn.Sequential(Block(), Block())
        if tied:
            self.head.weight = self.letters.weight
            cast(Block, self.blocks[0]).layer.weight = cast(Block, self.blocks[1]).layer.weight
        self.skipped = Block() if unused else None
        if frozen:
            self.blocks[0].requires_grad_(False)
            self.letters.requires_grad_(False)
        if thaws_at >= 0:
            self.blocks[0].requires_grad_(False)
        self.thaws_at = thaws_at
        self.scale = nn.Parameter(torch.full((2, 3), 0.5).t()) if direct else None  # transposed too
        self.norm = nn.BatchNorm1d(WIDTH) if norm else None
        self.layer_norm = nn.LayerNorm(WIDTH) if layer_norm else None
        self.register_buffer("shift", torch.tensor(1 / 3, dtype=torch.float64) if double else None)
        self.flat, self.twice, self.make, self.sharded = flat, twice, optimizer, sharded
        self.unseen = manual or direct  # its steps do not go through what hooks on a forward pass see
        if manual:  # the root alone
            self.automatic_optimization, self.BLOCKS = False, ()
        self.losses: list[Tensor] = []
        self.norms: list[float] = []
        self.reduced = 0  # passes after which a gradient was there; FSDP's are there only when they are reduced
        self.computed_in = ""
        self.rounded = False  # whether bf16 could hold the last step's gradients
        self.evaluated = torch.zeros(2)
        self.targets: set[tuple[str, float]] = set()

    def configure_model(self) -> None:
        if self.sharded and isinstance(self.trainer.strategy, FSDP):
            fully_shard(self.blocks[0], mesh=self.trainer.strategy.mesh())

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args) if self.unseen else super().__call__(*args)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters)
        if self.scale is not None:
            x = x * self.scale.sum()
        if isinstance(self.shift, Tensor):
            assert self.shift.dtype == torch.float64
            x = (x + self.shift).float()
        if self.norm is not None:
            x = self.norm(x.float().transpose(1, 2)).transpose(1, 2)
        if self.layer_norm is not None:
            x = self.layer_norm(x.float())
        return self.head(self.blocks(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """As fine-tuning does: one part is trained from some batch on, and another one is not any more."""
        if batch_idx == self.thaws_at:
            self.blocks[0].requires_grad_(True)
            self.blocks[1].requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        letters, numbers = batch
        self.computed_in = str(self.head.weight.dtype)
        if self.flat:
            self.targets.add((str(numbers.dtype), numbers.max().item()))
            return F.mse_loss(self(letters[:, :-1]).float().mean((1, 2)) + FLAT, numbers)
        loss = F.cross_entropy(self(letters[:, :-1]).flatten(0, 1).float(), letters[:, 1:].flatten())
        return loss + self(letters[:, 1:]).float().square().mean() if self.twice else loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += torch.stack([self.loss(batch) * len(batch[0]), torch.tensor(len(batch[0]))])

    def on_after_backward(self) -> None:
        self.reduced += any(parameter.grad is not None for parameter in self.parameters())

    def on_before_optimizer_step(self, optimizer: object) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in gradients]
        self.rounded = all(torch.equal(part, part.bfloat16().float()) for part in parts)
        norm = torch.nn.utils.get_total_norm(gradients)
        self.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        thaws = self.thaws_at >= 0
        return self.make([parameter for parameter in self.parameters() if parameter.requires_grad or thaws])


class Samples(torch.utils.data.Dataset):
    """Rows of letters, each with the number that a flat model is to predict."""

    def __init__(self, size: int) -> None:
        self.rows = texts(size, seed=3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], torch.tensor(FLAT)


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Vectors before matrices, which is not the order of the module."""
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    groups = [{"params": vectors, "weight_decay": 0.0, "lr": 2e-2}, {"params": matrices, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, 1e-2)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """Settings of the module and of the Trainer; `change` is done to the module; `fsdp` are settings of FSDP."""

    module: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], object] = lambda module: None


CASES = {
    "plain": Case(),
    "clip_norm": Case(trainer={"gradient_clip_val": 0.3}),
    "clip_value": Case(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulate_2": Case(trainer={"accumulate_grad_batches": 2}),
    "accumulate_3": Case(trainer={"accumulate_grad_batches": 3}),
    "accumulate_3_clipped": Case({"optimizer": momentum}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}),
    "reduced_each_pass": Case(trainer={"accumulate_grad_batches": 3}, fsdp={"sync_every_micro_batch": True}),
    "tied": Case({"tied": True}),
    "frozen": Case({"frozen": True}),
    "thawed": Case({"thaws_at": 4}),
    "thawed_within_a_step": Case({"thaws_at": 13}, {"accumulate_grad_batches": 3}),
    "unused": Case({"unused": True}),
    "checkpointed": Case(change=checkpoint_activations),
    "cpu_offload": Case(trainer={"gradient_clip_val": 0.3}, fsdp={"cpu_offload": True}),
    "groups": Case({"optimizer": in_groups}, {"gradient_clip_val": 0.3}),
    "sgd": Case({"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.3)}),
    "momentum": Case({"optimizer": momentum}),
    "fused": Case({"optimizer": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True)}),
    "direct": Case({"direct": True}),
    "double": Case({"double": True}),
    "flat": Case({"flat": True}),
    "twice": Case({"twice": True}),
    "twice_checkpointed": Case({"twice": True}, change=checkpoint_activations),
    "manual": Case({"manual": True}),
    "validated": Case(trainer={"val_check_interval": 5, "num_sanity_val_steps": 2}),
    "norm": Case({"norm": True}, {"val_check_interval": 5, "num_sanity_val_steps": 0}),
    "layer_norm": Case({"layer_norm": True}),
    "sharded_before": Case({"sharded": True}, {"gradient_clip_val": 0.3}),
    "compiled": Case(change=compile_blocks),
}
SHARDED = ("fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_hybrid_shard")


def choose(strategy: str, world: int, settings: dict[str, Any]) -> Any:
    if strategy == "hybrid_of_2":
        return FSDP(ranks_per_shard=2)
    if strategy in SHARDED and settings:
        return FSDP(reshard_after_forward=strategy != "fsdp_shard_grad_op", **settings)
    return resolve_strategy(strategy, world)


def train(name: str, strategy: str, precision: str, rank: int, world: int) -> dict[str, Any]:
    """One run. Every rank begins with weights of its own, so that rank 0's must reach the others."""
    case = CASES[name]
    torch.manual_seed(0 if name == "sharded_before" else rank)  # parts that a module has sharded are its own affair
    module = Net(**case.module)
    case.change(module)
    accumulation = case.trainer.get("accumulate_grad_batches", 1)
    settings = {"strategy": choose(strategy, world, case.fsdp), "precision": precision, "devices": world}
    settings |= {"max_epochs": 1} | ({"limit_val_batches": 0} if "val_check_interval" not in case.trainer else {})
    plugins = [] if strategy == "auto" else [TorchElasticEnvironment()]
    trainer = quiet_trainer(plugins=plugins, **settings, **case.trainer)
    micro, steps = BATCH // world // accumulation, STEPS if name == "plain" else STEPS // 2
    if name == "validated":  # what is gathered there first, training uses
        trainer.validate(module, loader(trainer, Samples(2 * BATCH), micro, train=False), verbose=False)
        module.evaluated.zero_()
    # Of 25 samples two ranks have 13 and 12, the last one in a batch of its own.
    trainer.fit(
        module,
        loader(trainer, Samples(steps * BATCH), micro, train=True),
        loader(trainer, Samples(2 * BATCH + 1), micro, train=False),
    )
    curve = torch.stack(module.losses).double().unflatten(0, (-1, accumulation)).mean(1)
    if strategy != "auto":
        for values in (curve, module.evaluated):
            torch.distributed.all_reduce(values)
    weights = to_full(trainer.strategy.lightning_module_state_dict(), trainer.is_global_zero)
    return {
        "losses": (curve if strategy == "auto" else curve / world).tolist(),
        "evaluated": (module.evaluated[0] / module.evaluated[1].clamp(min=1)).item(),
        "norms": module.norms,
        "weights": {key: value.clone() for key, value in weights.items() if value is not None},
        "targets": sorted(module.targets),
        "computed_in": module.computed_in,
        "rounded": module.rounded,
        "reduced": module.reduced,
        "held": held(trainer.optimizers[0]),
    }


def held(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers of an optimizer's momenta are in this rank's memory."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in tensors if value.dim())


def ranks(rank: int, world: int, runs: list[tuple[str, str, str]], folder: str) -> None:
    """What each process does: all runs one after the other in one group, and what came out into a file."""
    results = {}
    with in_group(rank, world, f"{folder}/meet-{world}"):
        for run in runs:
            try:
                results["/".join(run)] = train(*run, rank, world)
            except Exception:  # the others still count; a rank that fails alone ends the group by its timeout
                results["/".join(run)] = {"error": traceback.format_exc()}
    torch.save(results, Path(folder) / f"{world}-{rank}.pt")
