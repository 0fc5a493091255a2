"""Names for `trainer.strategy`. A new strategy is a file in this folder and one line here."""

from lightning.pytorch.strategies import StrategyRegistry

from src.errors import UserError
from src.strategies.ddp import DDP

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

NAMES = ("auto", "ddp", "ddp_find_unused")


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
