"""Register the names for `trainer.strategy`. A new strategy is a file in this folder and one line here.

They work with a Trainer of your own, too, as soon as this package is imported:

    from src.strategies import DDP, FSDP, gather_objects

    Trainer(strategy="fsdp_full_shard", devices=4)
    Trainer(strategy=FSDP(ranks_per_shard=2), devices=4)

Every one trains in 32-true, bf16-mixed, bf16-true and 64-true; 16-mixed and 16-true want GPUs. There objects
(`gather_objects(value)` has every rank's) and tensors in the host's memory travel over gloo, all else over NCCL; where
gloo takes a network interface that other nodes do not reach, GLOO_SOCKET_IFNAME names another.
"""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from src.engine.distributed import gather_objects as gather_objects
from src.engine.errors import UserError
from src.engine.text import nearest
from src.strategies.ddp import DDP
from src.strategies.fsdp import FSDP

# PyTorch has given FSDP's NO_SHARD up for DDP, which does the same and faster. gradient_as_bucket_view saves one copy
# of the gradients; find_unused_parameters, for models that skip some parameters in some steps, costs a walk over the
# graph in each.
OURS: dict[str, tuple[type[DDP], dict[str, Any]]] = {
    "ddp": (DDP, {"gradient_as_bucket_view": True}),
    "ddp_find_unused": (DDP, {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "fsdp_full_shard": (FSDP, {}),
    "fsdp_shard_grad_op": (FSDP, {"reshard_after_forward": False}),
    "fsdp_no_shard": (DDP, {"gradient_as_bucket_view": True}),
    "fsdp_hybrid_shard": (FSDP, {"ranks_per_shard": "node"}),
}
for _name, (_class, _settings) in OURS.items():
    StrategyRegistry.register(_name, _class, str(_class.__doc__).partition("\n")[0], override=True, **_settings)

NAMES = ("auto", *OURS)
# What Lightning's messages tell people to write.
SAME = {"ddp_find_unused_parameters_true": "ddp_find_unused", "ddp_find_unused_parameters_false": "ddp"}


def is_ours(strategy: object) -> bool:
    """Return whether a name or an object is a strategy of this package, or of a registered subclass."""
    if isinstance(strategy, str):
        return strategy == "auto" or issubclass(StrategyRegistry[strategy]["strategy"], DDP)
    return isinstance(strategy, DDP)


def resolve_strategy(requested: object, world_size: int) -> object:
    """Return what Lightning is given: for `auto` one device without a process group, or ddp; all else as it is."""
    if not isinstance(requested, str):
        return requested
    if requested == "auto":
        return "auto" if world_size == 1 else "ddp"
    if requested.startswith("ddp_") and any(way in requested for way in ("spawn", "fork", "notebook")):
        raise UserError(f"trainer.strategy {requested} is for notebooks, a command starts its processes anew: use ddp")
    requested = SAME.get(requested, requested)
    if requested not in StrategyRegistry.available_strategies():
        near = nearest(requested, NAMES)
        raise UserError(f"trainer.strategy {requested!r} is unknown{near}; use one of {', '.join(NAMES)}")
    return requested
