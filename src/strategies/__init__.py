"""Names for `trainer.strategy`. A new strategy is a file in this folder and one line here.

They work with a Trainer of your own, too, as soon as this package is imported:

    from src.strategies import DDP, FSDP, gather_objects

    Trainer(strategy="fsdp_full_shard", devices=4)
    Trainer(strategy=FSDP(ranks_per_shard=2), devices=4)

Every one trains in 32-true, bf16-mixed, bf16-true and 64-true; 16-mixed and 16-true want GPUs. There objects
(`gather_objects(value)` has every rank's) and tensors in the host's memory travel over gloo, all else over NCCL; where
gloo takes a network interface that other nodes do not reach, GLOO_SOCKET_IFNAME names another.
"""

from lightning.pytorch.strategies import StrategyRegistry

from src.errors import UserError
from src.ranks import gather_objects as gather_objects
from src.strategies.ddp import DDP, NoShard
from src.strategies.fsdp import FSDP

# gradient_as_bucket_view saves one copy of the gradients; find_unused_parameters costs a graph walk per step.
StrategyRegistry.register("ddp", DDP, "one replica per device", override=True, gradient_as_bucket_view=True)
StrategyRegistry.register(
    "ddp_find_unused",
    DDP,
    "ddp for models that skip some parameters in some steps",
    override=True,
    gradient_as_bucket_view=True,
    find_unused_parameters=True,
)

StrategyRegistry.register(
    "fsdp_no_shard", NoShard, "ddp, as PyTorch itself now says", override=True, gradient_as_bucket_view=True
)
StrategyRegistry.register("fsdp_full_shard", FSDP, "parameters, gradients and optimizer in parts", override=True)
StrategyRegistry.register(
    "fsdp_shard_grad_op",
    FSDP,
    "parameters whole from forward to backward",
    override=True,
    reshard_after_forward=False,
)
StrategyRegistry.register(
    "fsdp_hybrid_shard",
    FSDP,
    "in parts over a node, replicated over nodes",
    override=True,
    ranks_per_shard="node",
)

NAMES = (
    "auto",
    "ddp",
    "ddp_find_unused",
    "fsdp_full_shard",
    "fsdp_shard_grad_op",
    "fsdp_no_shard",
    "fsdp_hybrid_shard",
)


def resolve_strategy(requested: object, world_size: int) -> object:
    """`auto` is one device without a process group, or ddp; strategy objects and Lightning's other names pass.

    Raises:
        UserError: a name that is not registered.

    """
    if not isinstance(requested, str):
        return requested
    if requested == "auto":
        return "auto" if world_size == 1 else "ddp"
    if requested not in StrategyRegistry.available_strategies():
        raise UserError(f"trainer.strategy {requested!r} is unknown; use one of {', '.join(NAMES)}")
    return requested
