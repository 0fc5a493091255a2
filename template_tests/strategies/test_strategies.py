from typing import Any, cast

import pytest
import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from src.engine.checkpoint.write import WholeFiles
from src.engine.errors import UserError
from src.engine.run.start_block import strategy_name
from src.strategies import DDP, FSDP, NAMES, is_ours, resolve_strategy
from src.strategies.fsdp import choose_format
from tests.tiny import Line, quiet_trainer


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


@pytest.mark.parametrize(
    ("name", "reshard", "over"),
    [
        ("fsdp_full_shard", True, None),
        ("fsdp_shard_grad_op", False, None),
        ("fsdp_hybrid_shard", True, "node"),
    ],
)
def test_a_sharded_name_means_its_settings(name, reshard, over):
    """They differ in what is kept after a forward pass and over which ranks is sharded; nothing is offloaded."""
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, FSDP)
    assert (strategy.reshard_after_forward, strategy.ranks_per_shard, strategy.cpu_offload) == (reshard, over, False)
    assert strategy.reduce_dtype == torch.float32


@pytest.mark.parametrize(
    ("precision", "settings", "gathered", "summed"),
    [
        ("32-true", {}, None, torch.float32),
        ("bf16-mixed", {}, torch.bfloat16, torch.float32),
        ("bf16-true", {}, None, torch.float32),
        ("bf16-mixed", {"reduce_dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ("64-true", {}, None, None),
    ],
)
def test_gradients_are_summed_in_fp32_unless_told_otherwise(precision, settings, gathered, summed):
    """Units are gathered in the type that they compute in; their inputs, and so targets, are left as they are."""
    policy = cast(FSDP, quiet_trainer(strategy=FSDP(**settings), precision=precision).strategy)._policy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (gathered, summed, False)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (FSDP(ranks_per_shard="node"), ["note: on one node fsdp_hybrid_shard is fsdp_full_shard"]),
        (FSDP(), []),
    ],
)
def test_what_a_setting_amounts_to_is_told(strategy, told):
    """Hybrid sharding on one node is noted; plain full sharding is not."""
    notes = [note for note in strategy._notes(torch.nn.Linear(1, 1), []) if note.startswith("note: ")]
    assert [note[: len(start)] for note, start in zip(notes, told, strict=True)] == told


@pytest.mark.parametrize(("precision", "told"), [("64-true", True), ("bf16-mixed", False)])
def test_a_reduce_dtype_without_effect_is_told(precision, told):
    """Gradients in 64 bits are added up in 64 bits."""
    strategy = cast(FSDP, quiet_trainer(strategy=FSDP(reduce_dtype="bfloat16"), precision=precision).strategy)
    notes = strategy._notes(torch.nn.Linear(1, 1), [])
    assert any(note.startswith("warning: reduce_dtype torch.bfloat16 has no effect") for note in notes) is told


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(
    ("device", "given", "backend"),
    [("cuda", None, "cpu:gloo,cuda:nccl"), ("cuda", "nccl", "nccl"), ("cpu", None, "gloo")],
)
def test_host_memory_is_reached_over_gloo(monkeypatch, name, device, given, backend):
    """On GPUs every strategy's process group speaks gloo too, unless a backend was asked for."""
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, DDP)
    strategy._process_group_backend = given
    monkeypatch.setattr(DDP, "root_device", torch.device(device))
    assert strategy._get_process_group_backend() == backend


@pytest.mark.parametrize(
    ("strategy", "plugins", "wanted", "sharded", "note"),
    [
        (FSDP(), [WholeFiles()], None, True, ""),
        (FSDP(), [WholeFiles()], "file", False, ""),
        (FSDP(), [TorchCheckpointIO()], "sharded", False, "trainer.plugins has a CheckpointIO"),
        (FSDP(), [TorchCheckpointIO()], None, False, ""),
        (DDP(), [WholeFiles()], "sharded", None, "only the fsdp strategies shard"),
        (DDP(), [WholeFiles()], None, None, ""),
    ],
)
def test_checkpoints_are_in_parts_where_that_can_be(strategy, plugins, wanted, sharded, note):
    """By default under fsdp; where it was asked for and cannot be, a note says why."""
    trainer = quiet_trainer(strategy=strategy, plugins=plugins)
    notes = choose_format(trainer.strategy, wanted)
    assert getattr(trainer.strategy, "sharded_files", None) is sharded
    assert len(notes) == bool(note)
    assert all(note in said for said in notes)


def test_ddp_in_a_single_process_goes_without_the_wrap():
    """One process reduces nothing, so the module is trained as it is; the wrap would keep a copy of its gradients."""
    module, seen = Line(), []
    module.on_train_batch_end = lambda *_: seen.append(trainer.strategy.model is module)  # type: ignore[method-assign]
    trainer = quiet_trainer(strategy="ddp", devices=1, max_steps=1)
    try:
        trainer.fit(module, torch.ones(2, 1))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [True]


def test_the_names_in_lightnings_messages_are_ours():
    """What Lightning tells people to write where parameters are unused gets this project's DDP, too."""
    assert resolve_strategy("ddp_find_unused_parameters_true", 2) == "ddp_find_unused"


@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_fork_find_unused_parameters_true", "ddp_notebook"])
def test_processes_that_are_copies_are_refused(name):
    """A command cannot be copied into another process: one line says which name can be used."""
    with pytest.raises(UserError, match=f"{name} is for notebooks.*use ddp"):
        resolve_strategy(name, 2)


def test_a_strategy_that_somebody_registers_is_treated_as_ours():
    """A subclass under a new name has our precision and launcher; Lightning's own strategies have not."""
    StrategyRegistry.register("mine", type("Mine", (DDP,), {}))
    try:
        assert [is_ours(name) for name in ("mine", "auto", *NAMES, DDP())] == [True] * (len(NAMES) + 3)
        assert not any(is_ours(strategy) for strategy in ("fsdp", SingleDeviceStrategy()))
    finally:
        StrategyRegistry.remove("mine")


def test_a_type_that_gradients_cannot_be_added_in_is_refused():
    """In a script, where no parser has looked at it."""
    with pytest.raises(UserError, match="reduce_dtype is 'int8': use one of float32, bfloat16, float16"):
        FSDP(reduce_dtype=cast(Any, "int8"))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("auto", "one device, no process group"),
        ("fsdp_full_shard", "fsdp_full_shard"),
        (FSDP(), "FSDP"),
        (
            Namespace(class_path="src.strategies.FSDP", init_args=Namespace(cpu_offload=True, ranks_per_shard=None)),
            "FSDP(cpu_offload=True)",
        ),
    ],
)
def test_a_strategys_name_says_how_it_is_set(given, name):
    """By name, by class in a configuration with what it was given, or as an object."""
    assert strategy_name(given) == name
