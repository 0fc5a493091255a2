"""Trains, saves and goes on under every strategy in one process group, for tests that compare what came out."""

import copy
import functools
from pathlib import Path
from typing import Any, cast

import torch
from lightning import LightningModule
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from src.engine.callbacks.ema import EMA
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.write import WholeFiles
from src.engine.errors import UserError
from src.engine.sharding.whole_tensors import to_full
from src.engine.sharding.wrapping import checkpoint_activations, compile_blocks
from src.strategies import NAMES, resolve_strategy
from src.strategies.fsdp import FSDP, choose_format
from template_tests.strategies.group import in_group
from template_tests.strategies.pairs import PAIRS, SCALED, scaled, tried
from tests.tiny import loader, quiet_trainer

STEPS, HALF, BATCH = 8, 4, 12
PRECISIONS = {"bf16": "bf16-true", "double": "64-true"}
CHANGES = {"recomputed": checkpoint_activations, "compiled": compile_blocks}
SGD = {"sgd": 0.0, "momentum": 0.9, "recomputed": 0.0}
DECAY, START = 0.7, 1  # of an average of the weights
# As hybrid sharding over nodes of one process: two replicas, of which each has all rows.
StrategyRegistry.register("two_replicas", FSDP, "whole on each rank", override=True, ranks_per_shard=1)


class Uneven(LightningModule):
    """Rows that two ranks cannot share evenly or at all, a frozen part, and parameters in another order than theirs."""

    BLOCKS = (nn.Linear,)

    def __init__(self, kind: str, scalar: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.zero = nn.Parameter(torch.tensor(0.0)) if scalar else None
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.kind = kind
        self.losses: list[Tensor] = []
        self.sums = torch.zeros(2, dtype=torch.float64)

    def loss(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.scale.dtype)
        hidden = self.first(self.frozen(batch[:, :5])).tanh() * self.scale
        return (self.last(hidden)[:, 0] - batch[:, 5]).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.add_(1)
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.sums += torch.stack([self.loss(batch).double() * len(batch), torch.tensor(float(len(batch))).double()])

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.kind in SGD:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=SGD[self.kind])
        vectors = [parameter for parameter in parameters if parameter.dim() == 1]
        matrices = [parameter for parameter in parameters if parameter.dim() > 1]
        groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        return torch.optim.AdamW(groups, 1e-2)


def run(folder: Path, kind: str, strategy: str, rank: int, world: int, begin: Path | None = None) -> dict[str, Any]:
    """All steps, with a file in `folder` in the middle and at the end; from `begin` on where it is given."""
    torch.manual_seed(rank)
    module = Uneven(kind)
    CHANGES.get(kind, lambda _: 0)(module)
    settings = CheckpointSettings(every_n_steps=HALF, every_n_minutes=None)
    trainer = quiet_trainer(
        strategy=resolve_strategy(strategy, world),
        devices=world,
        max_steps=STEPS,
        precision=PRECISIONS.get(kind, "32-true"),
        plugins=[WholeFiles(), *([] if strategy == "auto" else [TorchElasticEnvironment()])],
        callbacks=[*([EMA(DECAY, START)] if kind.startswith("averaged") else []), SaveNewest(folder, settings)],
        limit_val_batches=0,
    )
    choose_format(trainer.strategy, "sharded" if kind.endswith("parts") else "file")
    rows = torch.rand(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, loader(trainer, rows, BATCH // world, train=True), ckpt_path=begin, weights_only=True)
    curve = torch.stack(module.losses).double()
    state = to_full(trainer.strategy.lightning_module_state_dict(), trainer.is_global_zero)
    optimizer = to_full(trainer.strategy.optimizer_state(trainer.optimizers[0]), trainer.is_global_zero)
    whole = [name for name, value in state.items() if value is not None]
    at_end = copy.deepcopy({"state_dict": state, "optimizer_states": [optimizer]}) if kind == "parts" else {}
    momenta = [value for one in optimizer.get("state", {}).values() for value in one.values()]
    evaluated = []
    if begin is None:  # what is sharded by now loads a file and is evaluated
        for evaluate in (trainer.validate, trainer.test):
            module.sums.zero_()
            trainer.limit_val_batches = 1.0
            part = loader(trainer, rows[:25], BATCH // world, train=False)
            evaluate(module, part, ckpt_path=folder / f"step={HALF:08d}.ckpt", weights_only=True, verbose=False)
            sums = module.sums.clone()
            if strategy != "auto":
                torch.distributed.all_reduce(sums)
            evaluated.append((sums[0] / sums[1]).item())
    if strategy != "auto":
        torch.distributed.all_reduce(curve)
    return {
        "losses": (curve if strategy == "auto" else curve / world).tolist(),
        "whole": whole,
        "state": at_end,
        "momenta": sum(isinstance(value, Tensor) and value.dim() > 0 for value in momenta),
        "evaluated": evaluated,
    }


class Odd(LightningModule):
    """Holds `odd`, and is refused before it trains."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.odd = odd

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise AssertionError("not refused")

    def configure_optimizers(self) -> None:
        """None is needed."""


def refusals(world: int) -> dict[str, str]:
    """What FSDP says to what it cannot do."""
    said = {}
    for name, module, strategy in (
        ("scalar", Uneven("adamw", scalar=True), FSDP()),
        ("mesh", Uneven("adamw"), FSDP(ranks_per_shard=3)),
        ("none", Uneven("adamw"), FSDP(ranks_per_shard=0)),
        ("word", Uneven("adamw"), FSDP(ranks_per_shard=cast(Any, "nodes"))),
        ("lazy", Odd(nn.LazyLinear(2)), FSDP()),
        ("meta", Odd(nn.Linear(2, 2, device="meta")), FSDP()),
    ):
        trainer = quiet_trainer(strategy=strategy, devices=world, plugins=[TorchElasticEnvironment()], max_steps=1)
        try:
            trainer.fit(module, loader(trainer, torch.rand(4, 6), 2, train=True))
        except UserError as error:
            said[name] = str(error)
    return said


def ranks(rank: int, world: int, phase: int, runs: list[tuple[str, str, str]], folder: str) -> None:
    """What each process does. A run is (kind, strategy, name of the run whose middle it begins from, or nothing)."""
    results: dict[str, Any] = {}
    torch.compile = functools.partial(torch.compile, backend="eager")  # names and hooks are the same, and no compiler
    with in_group(rank, world, f"{folder}/meet-{phase}"):
        for kind, strategy, source in runs:
            begin = Path(folder) / source / "checkpoints" / f"step={HALF:08d}.ckpt" if source else None
            name = f"{kind}-{strategy}-{world}" + (f"-from-{source}" if source else "")
            results[name] = run(Path(folder) / name / "checkpoints", kind, strategy, rank, world, begin)
        if phase == 1:
            results["refused"] = refusals(world)
            results["pairs"] = {"/".join(pair): tried(*pair, world) for pair in PAIRS}
            results["scaled"] = {
                f"{strategy}/{case}": scaled(strategy, world, *SCALED[case])
                for strategy in NAMES[1:]
                for case in SCALED
            }
    torch.save(results, Path(folder) / f"results-{phase}-{rank}.pt")
