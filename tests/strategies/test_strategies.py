import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from src.errors import UserError
from src.strategies import NAMES, resolve_strategy


@pytest.mark.parametrize(
    ("requested", "world_size", "expected"),
    [("auto", 1, "auto"), ("auto", 2, "ddp"), ("ddp", 1, "ddp"), ("ddp_find_unused", 8, "ddp_find_unused")],
)
def test_auto_is_ddp_from_two_processes_on(requested, world_size, expected):
    """`auto` is no process group for one device and ddp for more; a name that is given stays."""
    assert resolve_strategy(requested, world_size) == expected


def test_lightnings_own_names_and_objects_pass():
    """Strategies that Lightning knows by name, and strategy objects, are handed on as they are."""
    strategy = SingleDeviceStrategy()
    assert resolve_strategy(strategy, 4) is strategy
    assert resolve_strategy("fsdp", 4) == "fsdp"


@pytest.mark.parametrize("name", ["dpp", "", "DDP"])
def test_an_unknown_name_is_refused_with_the_names(name):
    """A strategy that nobody knows is refused, with those that this project knows."""
    with pytest.raises(UserError) as refused:
        resolve_strategy(name, 2)
    assert all(known in str(refused.value) for known in NAMES)


@pytest.mark.parametrize(("name", "unused"), [("ddp", False), ("ddp_find_unused", True)])
def test_a_name_means_its_settings(name, unused):
    """Both names are DDP with gradients kept once; only one of them walks the graph for unused parameters."""
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs.get("gradient_as_bucket_view") is True
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) is unused
