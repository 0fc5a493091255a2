"""A state that is saved under one strategy and world size goes on under every other one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from src.checkpoint.export import WRAPPERS
from src.engine.checkpoint.contents import average_in
from src.engine.checkpoint.shards import IN_PARTS, load
from src.engine.nested import rebuild
from src.strategies import NAMES
from template_tests.strategies import pairs, states

SHAPES = [("auto", 1), ("ddp", 1), ("fsdp_full_shard", 1), ("fsdp_shard_grad_op", 1)]
SHAPES += [("ddp", 2), ("fsdp_full_shard", 2), ("fsdp_shard_grad_op", 2)]
KINDS = ("sgd", "momentum", "bf16", "double")  # beside AdamW's parameter groups, between all shapes
FEW = [("auto", 1), ("fsdp_full_shard", 2)]
MORE = [("ddp", 2), ("fsdp_shard_grad_op", 2), ("fsdp_hybrid_shard", 2)]
# Another number of ranks adds in another order.
TOLERANCE = {"bf16": 2e-2, "double": 1e-12}

SAVED = [("adamw", *shape) for shape in SHAPES] + [(kind, *shape) for kind in KINDS for shape in FEW]
SAVED += [("averaged", *shape) for shape in [*FEW, ("ddp", 2)]]
PARTS = [*FEW, ("fsdp_full_shard", 1), *MORE, ("two_replicas", 2)]
SAVED += [(kind, *shape) for kind in ("parts", "averaged-parts") for shape in PARTS]
SAVED += [(kind, *shape) for kind in states.CHANGES for shape in [*FEW, *MORE]]


def name(kind: str, strategy: str, world: int) -> str:
    return f"{kind}-{strategy}-{world}"


def continued(world: int, sources: tuple[int, ...]) -> list[tuple[str, str, str]]:
    """What goes on with `world` processes from a file that so many have saved."""
    return [
        (kind, strategy, name(kind, saved_by, of))
        for kind, saved_by, of in SAVED
        for other, strategy, here in SAVED
        if other == kind
        and here == world
        and of in sources
        # Between two strategies of two processes it is one process's file or nothing for what hangs on the kind alone.
        and (kind not in states.CHANGES or strategy == saved_by or "auto" in (strategy, saved_by))
    ]


PAIRS = [(world, run) for world in (1, 2) for run in continued(world, (1, 2))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of all runs and what each rank has seen, trained in three groups of processes."""
    folder = tmp_path_factory.mktemp("states")
    saving = {world: [(kind, strategy, "") for kind, strategy, here in SAVED if here == world] for world in (1, 2)}
    phases = [(1, saving[1] + continued(1, (1,))), (2, saving[2] + continued(2, (1, 2))), (1, continued(1, (2,)))]
    for phase, (world, runs) in enumerate(phases):
        torch.multiprocessing.spawn(states.ranks, (world, phase, runs, str(folder)), nprocs=world)
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """By rank and run."""
    found: list[dict[str, Any]] = [{}, {}]
    for path in sorted(folder.glob("results-*.pt")):
        found[int(path.stem[-1])] |= torch.load(path, weights_only=True)
    return found


def file(folder: Path, run: str, step: int) -> dict[str, Any]:
    return load(folder / run / "checkpoints" / f"step={step:08d}.ckpt")


def numbers(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights, buffers, averages and the optimizer's tensors by name."""
    found = dict(checkpoint["state_dict"])
    found |= {f"average.{name}": value for name, value in average_in(checkpoint).items()}
    for number, state in checkpoint["optimizer_states"][0]["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found


@pytest.mark.parametrize(("world", "run"), PAIRS, ids=str)
def test_a_state_goes_on_under_every_strategy(seen, folder, world, run):
    """The curve from the middle on, and the state at the end, are those of the run that was not stopped."""
    kind, strategy, source = run
    # Lightning's own single process loads a 64-true state into a module that is fp32 still.
    tolerance = 1e-6 if (kind, strategy) == ("double", "auto") else TOLERANCE.get(kind, 1e-5)
    here = f"{name(kind, strategy, world)}-from-{source}"
    straight = seen[0][name(kind, "auto", 1)]
    assert len(straight["losses"]) == states.STEPS
    assert seen[0][here]["losses"] == pytest.approx(straight["losses"][states.HALF :], abs=tolerance)
    expected = numbers(file(folder, name(kind, "auto", 1), states.STEPS))
    found = numbers(file(folder, here, states.STEPS))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("kind", "strategy", "world"), [one for one in SAVED if one[:2] != ("double", "auto")])
def test_the_same_shape_goes_on_bit_for_bit(seen, folder, kind, strategy, world):
    """Under the strategy and the world size that saved it, a state goes on as if it had never been saved."""
    straight = name(kind, strategy, world)
    here = f"{straight}-from-{straight}"
    assert seen[0][here]["losses"] == seen[0][straight]["losses"][states.HALF :]
    first, second = (numbers(file(folder, run, states.STEPS)) for run in (straight, here))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("kind", "strategy", "world"), SAVED)
def test_a_file_has_the_modules_own_names_and_types(folder, kind, strategy, world):
    """A file loads strictly into the bare module, with whole tensors of the precision's type in the host's memory."""
    weights = file(folder, name(kind, strategy, world), states.HALF)["state_dict"]
    module = states.Uneven(kind)
    module.load_state_dict(weights, strict=True)
    dtype = {"bf16": torch.bfloat16, "double": torch.float64}.get(kind, torch.float32)
    assert all(type(value) is torch.Tensor for value in weights.values())
    assert {value.dtype for key, value in weights.items() if key != "seen"} == {dtype}
    assert weights["seen"] == states.HALF


@pytest.mark.parametrize(("kind", "strategy", "world"), SAVED)
def test_no_wrapper_leaves_its_name_in_a_file(folder, kind, strategy, world):
    """Under every strategy, compiled or with activations recomputed, nothing in a file is named after a wrapper."""
    names: list[str] = []
    rebuild(file(folder, name(kind, strategy, world), states.HALF), lambda name, _: names.append(name))
    assert any(name.endswith(".first.weight") for name in names)
    assert [name for name in names if {*WRAPPERS, "module"} & set(name.split("."))] == []


@pytest.mark.parametrize(("kind", "strategy", "world"), [one for one in SAVED if one[0].startswith("averaged")])
def test_averaging_changes_evaluations_and_nothing_else(seen, folder, kind, strategy, world):
    """Training is to the last bit what it is without an average; evaluated is the average, which is whole in a file."""
    with_average, without = (
        seen[0][name(one, strategy, world)]
        for one in (kind, kind.replace("averaged-", "").replace("averaged", "adamw"))
    )
    assert with_average["losses"] == without["losses"]
    assert with_average["evaluated"] != pytest.approx(without["evaluated"], abs=1e-3)
    saved = file(folder, name(kind, strategy, world), states.HALF)
    average = average_in(saved)
    assert average.keys() == {name for name, part in states.Uneven(kind).named_parameters() if part.requires_grad}
    assert all(value.shape == saved["state_dict"][name].shape for name, value in average.items())


@pytest.mark.parametrize(("kind", "momenta"), [("sgd", 0), ("momentum", 5), ("adamw", 10)])
def test_an_optimizers_state_is_saved_by_its_own_numbers(folder, kind, momenta):
    """Frozen parameters and plain SGD have no state; what there is has the shape of a whole parameter."""
    of_parts = file(folder, name(kind, "fsdp_full_shard", 2), states.HALF)["optimizer_states"][0]
    of_whole = file(folder, name(kind, "auto", 1), states.HALF)["optimizer_states"][0]
    assert of_parts["param_groups"] == of_whole["param_groups"]
    shapes = [
        {
            (number, key, value.shape)
            for number, one in state["state"].items()
            for key, value in one.items()
            if value is not None
        }
        for state in (of_parts, of_whole)
    ]
    assert shapes[0] == shapes[1]
    assert sum(len(shape) > 0 for _, _, shape in shapes[0]) == momenta


@pytest.mark.parametrize("kind", ["parts", "averaged-parts"])
@pytest.mark.parametrize(("strategy", "world"), [("fsdp_full_shard", 1), ("fsdp_full_shard", 2), *MORE[1:]])
def test_each_rank_writes_its_rows(folder, kind, strategy, world):
    """The file that names a checkpoint holds no sharded tensor; each rank's file has its rows, of all of them."""
    place = folder / name(kind, strategy, world) / "checkpoints"
    content = torch.load(place / f"step={states.HALF:08d}.ckpt", weights_only=True)
    sharded = {key for key, value in content["state_dict"].items() if value == IN_PARTS}
    assert sharded == {key for key, _ in states.Uneven(kind).named_parameters()}
    files = [torch.load(place / "shards" / part, weights_only=True) for part in content["parts"]]
    assert len(files) == world
    rows = [file["state_dict.first.weight"].shape[0] for file in files]
    assert rows == ([7] if world == 1 else [4, 3])
    average = {f"callbacks.EMA.weights.{key}" for key in average_in(content)}
    assert bool(average) == kind.startswith("averaged")
    assert files[0].keys() >= average


@pytest.mark.parametrize(("strategy", "writers"), [("two_replicas", [0]), ("fsdp_hybrid_shard", [0, 1])])
def test_each_row_is_written_by_one_rank(seen, folder, strategy, writers):
    """A replica writes no row that another has written; what is loaded is bit for bit what the ranks had."""
    place = folder / name("parts", strategy, 2) / "checkpoints"
    content = torch.load(place / f"step={states.STEPS:08d}.ckpt", weights_only=True)
    there = sorted((place / "shards").glob(f"step={states.STEPS:08d}-*"))
    assert [path.name for path in there] == list(content["parts"])
    assert [int(path.stem[-len("0-of-2")]) for path in there] == writers
    had = seen[0][name("parts", strategy, 2)]["state"]
    expected, found = numbers(had), numbers(file(folder, name("parts", strategy, 2), states.STEPS))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    rows = [row for path in there for row in torch.load(path, weights_only=True).values()]
    sharded = sum(value.numel() for value in expected.values() if value.dim())
    assert sum(row.numel() for row in rows) == sharded > 0


@pytest.mark.parametrize("strategy", ["fsdp_full_shard", "fsdp_shard_grad_op"])
def test_only_rank_0_holds_a_whole_state(seen, strategy):
    """To save, rank 0 gets the whole weights and momenta and the others none of either."""
    first, second = (of_rank[name("adamw", strategy, 2)] for of_rank in seen)
    assert "first.weight" in first["whole"]
    assert second["whole"] == ["seen"]
    assert (first["momenta"], second["momenta"]) == (10, 0)


@pytest.mark.parametrize(("kind", "strategy", "world"), SAVED)
def test_a_sharded_module_is_evaluated_with_a_files_weights(seen, kind, strategy, world):
    """After training, `validate` and `test` load a file into the same module and find what a plain process finds."""
    evaluated = seen[0][name(kind, strategy, world)]["evaluated"]
    expected = seen[0][name(kind, "auto", 1)]["evaluated"]
    assert len(expected) == 2
    assert evaluated == pytest.approx(expected, abs=TOLERANCE.get(kind, 1e-5))


def test_what_cannot_be_divided_is_refused_in_one_line(seen):
    """What FSDP cannot cut is named, and a mesh that does not divide the ranks is refused."""
    said = seen[0]["refused"]
    for name, reason in (("scalar", "Change zero to a 1D tensor"), ("lazy", "LazyModule"), ("meta", "meta tensor")):
        assert said[name].startswith("fsdp cannot shard this module: ")
        assert reason in said[name]
        assert said[name].endswith("use --trainer.strategy ddp")
    for name, given in (("mesh", "3"), ("none", "0"), ("word", "'nodes'")):
        assert said[name] == f"ranks_per_shard is {given}: use a divisor of the 2 ranks, or node"
    assert all("\n" not in text for text in said.values())


@pytest.mark.parametrize("pair", pairs.PAIRS, ids="/".join)
def test_every_strategy_trains_in_every_precision(seen, pair):
    """A batch's floats reach training and validation as they are, but for a `true` precision, which is of the batch."""
    precision, exact = pair[1], torch.tensor(pairs.FINE).item()
    kept = {"bf16-true": "torch.bfloat16", "64-true": "torch.float64"}.get(precision, "torch.float32")
    value = 1232.0 if precision == "bf16-true" else exact
    for of_rank in seen:
        found = of_rank["pairs"]["/".join(pair)]
        assert found == {
            "seen": dict.fromkeys(("train", "val"), (kept, value)),
            "finite": True,
            "kept": kept,
            "steps": 1,
        }


@pytest.mark.parametrize("strategy", NAMES[1:])
def test_gradients_are_clipped_without_the_loss_scale(seen, strategy):
    """Under 16-mixed a norm of 0.5 is one of the true gradients, whatever the loss is scaled with."""
    for of_rank in seen:
        plain, scaled = (of_rank["scaled"][f"{strategy}/{case}"]["weights"] for case in ("unscaled", "scaled"))
        steps = torch.tensor(scaled).diff(dim=0)
        torch.testing.assert_close(steps.norm(dim=1), torch.full((2,), 0.5), rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.tensor(scaled), torch.tensor(plain), rtol=0, atol=1e-4)


@pytest.mark.parametrize("strategy", NAMES[1:])
def test_all_ranks_skip_a_step_that_overflows_on_one(seen, strategy):
    """An infinite gradient in the part of one rank: no rank makes that step, and all go on with half the scale."""
    for of_rank in seen:
        found = of_rank["scaled"][f"{strategy}/overflowing"]
        first, skipped, last = found["weights"]
        assert skipped == first
        assert all(after != before for before, after in zip(first, last, strict=True))
        assert found["scales"] == [1024.0, 512.0, 512.0]
