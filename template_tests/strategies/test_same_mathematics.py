"""Every strategy trains as one plain process does. What is compared is trained by `curves`, once for all tests."""

from pathlib import Path
from typing import Any

import pytest
import torch

from src.strategies import NAMES
from template_tests.strategies import curves

Run = tuple[str, str, str]  # case, strategy, precision
# fp32: sums are in another order (1.2e-6 was the most, of a loss of 10). bf16: FSDP gathers every weight rounded to
# bf16, where autocast leaves embeddings, norms and bare parameters in fp32, a relative 2⁻⁹ of each. Measured: 3.4e-3
# of losses about 2 and 9.1e-3 of 4, where ddp on two ranks differs from one process by 1.0e-3; 1.8e-2 of the norms.
# Of a gradient that is only rounding AdamW makes steps as large as of any other: 2.6e-2 of the weights.
LOSS = {"32-true": 1e-5, "bf16-mixed": 2e-2}
NORM = {"32-true": 1e-5, "bf16-mixed": 4e-2}
WEIGHT = {"32-true": 1e-5, "bf16-mixed": 4e-2}

ADDED = [name for name in curves.CASES if name not in ("plain", "compiled")]
IN_BF16 = ("clip_norm", "accumulate_3", "flat", "direct", "twice_checkpointed", "groups", "layer_norm")
OF_FSDP = ("reduced_each_pass", "cpu_offload", "sharded_before")  # under ddp they are others again
GRAD_OP = ("accumulate_3", "thawed", "tied", "twice_checkpointed", "validated", "clip_norm")


def runs_of(world: int) -> list[Run]:
    """What a group of so many processes trains; one alone trains without a strategy too, to compare with."""
    plain = [("plain", name, precision) for name in NAMES[1:] for precision in LOSS]
    if world == 1:
        return [
            *[("plain", "auto", precision) for precision in LOSS],
            *[(name, "auto", "32-true") for name in curves.CASES if name not in ("plain", "compiled")],
            *[(name, "auto", "bf16-mixed") for name in IN_BF16],
            *plain,
        ]
    if world == 4:
        return [("clip_norm", "hybrid_of_2", "32-true")]
    return [
        *plain,
        *[(name, "ddp_find_unused" if name == "unused" else "ddp", "32-true") for name in ADDED if name not in OF_FSDP],
        *[(name, "fsdp_full_shard", "32-true") for name in [*ADDED, "compiled"]],
        *[(name, "fsdp_full_shard", "bf16-mixed") for name in (*IN_BF16, "norm")],
        *[("norm", "ddp", "bf16-mixed"), ("thawed", "ddp_find_unused", "32-true")],
        *[(name, "fsdp_shard_grad_op", "32-true") for name in GRAD_OP],
    ]


ALL = [(world, run) for world in (1, 2, 4) for run in runs_of(world)]
COMPARED = [pytest.param(world, run, id=f"{'-'.join(run)}-{world}") for world, run in ALL if run[1] != "auto"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, str], dict[str, Any]]:
    """What came out by world size, rank and run."""
    folder = tmp_path_factory.mktemp("curves")
    found: dict[tuple[int, int, str], dict[str, Any]] = {}
    for world in (1, 2, 4):
        torch.multiprocessing.spawn(curves.ranks, (world, runs_of(world), str(folder)), nprocs=world)
        for rank in range(world):
            results = torch.load(Path(folder) / f"{world}-{rank}.pt", weights_only=True)
            found |= {(world, rank, run): result for run, result in results.items()}
    return found


def both(trained: dict, world: int, run: Run) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The run and the one that it must equal: a plain process, but ddp for what each rank normalizes by itself."""
    case, _, precision = run
    case = "checkpointed" if case == "compiled" else case  # the same mathematics, and not compiled
    key = (world, 0, f"{case}/ddp/{precision}") if case == "norm" else (1, 0, f"{case}/auto/{precision}")
    one = trained[world, 0, "/".join(run)]
    assert "error" not in one, one["error"]
    return one, trained[key], precision


@pytest.mark.parametrize(("world", "run"), COMPARED)
def test_the_loss_curve_is_that_of_one_process(trained, world, run):
    """On one seed and one global batch, every step's loss is that of a plain process, and so is the validation's."""
    one, expected, precision = both(trained, world, run)
    assert len(one["losses"]) == (curves.STEPS if run[0] == "plain" else curves.STEPS // 2)
    assert one["losses"] == pytest.approx(expected["losses"], abs=LOSS[precision])
    assert one["evaluated"] == pytest.approx(expected["evaluated"], abs=LOSS[precision])


@pytest.mark.parametrize(("world", "run"), COMPARED)
def test_gradient_norms_and_weights_are_those_of_one_process(trained, world, run):
    """The norm of each step's gradient, and the weights and buffers at the end, are a plain process's."""
    one, expected, precision = both(trained, world, run)
    assert one["norms"] == pytest.approx(expected["norms"], abs=NORM[precision])
    assert one["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(one["weights"][name], value, rtol=0, atol=WEIGHT[precision])


@pytest.mark.parametrize("run", ["flat/ddp/32-true", "flat/fsdp_full_shard/32-true", "flat/fsdp_full_shard/bf16-mixed"])
def test_targets_reach_the_loss_untouched(trained, run):
    """Float targets that bf16 cannot hold arrive in the step as they left the loader."""
    assert trained[2, 0, run]["targets"] == [("torch.float32", torch.tensor(curves.FLAT).item())]


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", "torch.float32"), ("bf16-mixed", "torch.bfloat16")])
def test_weights_are_gathered_in_the_type_they_are_used_in(trained, precision, dtype):
    """Under bf16-mixed a gathered weight takes half the memory, and half the time to send."""
    assert trained[2, 0, f"plain/fsdp_full_shard/{precision}"]["computed_in"] == dtype


@pytest.mark.parametrize(("case", "times"), [("plain", 1), ("accumulate_3", 1), ("reduced_each_pass", 3)])
def test_gradients_are_reduced_once_per_step(trained, case, times):
    """Earlier passes of a step keep their gradients on their rank, unless each pass is to be reduced."""
    one = trained[2, 0, f"{case}/fsdp_full_shard/32-true"]
    assert one["reduced"] == times * len(one["losses"])


@pytest.mark.parametrize("case", ["plain", *IN_BF16])
def test_gradients_are_added_in_fp32(trained, case):
    """Under bf16-mixed the mean of two ranks' gradients is finer than bf16 is."""
    for rank in range(2):
        assert trained[2, rank, f"{case}/fsdp_full_shard/bf16-mixed"]["rounded"] is False


@pytest.mark.parametrize(
    ("world", "run", "parts"),
    [
        (2, "plain/fsdp_full_shard/32-true", 2),
        (2, "plain/fsdp_shard_grad_op/bf16-mixed", 2),
        (2, "momentum/fsdp_full_shard/32-true", 2),
        (4, "clip_norm/hybrid_of_2/32-true", 2),
        (2, "plain/ddp/32-true", 1),
    ],
)
def test_each_rank_holds_its_part_of_the_optimizer(trained, world, run, parts):
    """A rank has one part of the momenta in memory, within a tenth for rows that cannot be shared evenly."""
    whole = trained[1, 0, f"{run.split('/')[0]}/auto/32-true"]["held"]
    for rank in range(world):
        assert trained[world, rank, run]["held"] == pytest.approx(whole / parts, rel=0.1)
