"""Clipping by norm of gradients that are distributed in several ways, on two processes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from src.engine.sharding.clipping import clip_grad_by_norm, install_clipping
from template_tests.strategies.group import in_group

# Five rows are three and two. 64 bits are not rounded to 32 on the way to the norm.
WHOLE = {
    "sharded": torch.arange(1.0, 16.0).view(5, 3),
    "one_row": torch.tensor([[9.0, 8.0]]),
    "replicated": torch.tensor([4.0, -5.0]),
    "plain": torch.tensor([3.0]),
    "double": torch.tensor([2.0], dtype=torch.float64),
}
NORM = torch.cat([value.double().flatten() for value in WHOLE.values()]).norm()


def clipped(gradients: dict[str, torch.Tensor], limit: float) -> dict[str, torch.Tensor]:
    """What is left of them, whole."""
    parameters = {name: nn.Parameter(torch.zeros_like(value)) for name, value in gradients.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    clip_grad_by_norm(torch.optim.SGD([*parameters.values(), nn.Parameter(torch.ones(1))], 0.1), limit)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in gradients.items()}


def clip(rank: int, folder: str) -> None:
    """What each process does."""
    with in_group(rank, 2, f"{folder}/meet"):
        mesh = init_device_mesh("cpu", (2,))
        as_they_are: dict[str, Any] = {name: value.clone() for name, value in WHOLE.items()}
        for name, placement in (("sharded", Shard(0)), ("one_row", Shard(0)), ("replicated", Replicate())):
            as_they_are[name] = distribute_tensor(WHOLE[name].clone(), mesh, [placement])
        part = DTensor.from_local(torch.tensor([3.0, 4.0]) * (rank + 1), mesh, [Partial()])  # 9 and 12 in all
        results = {"mixed": clipped(as_they_are, 1.0), "partial": clipped({"whole": part}, 5.0)}
        # What FSDP makes of a parameter that is in parts along its first dimension already.
        local = torch.tensor([3.0, 4.0])[rank : rank + 1]
        strided = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=1)])
        clipped({"strided": strided}, 1.0)
        results["strided"] = {"part": strided.to_local()}
        results["small"] = clipped({"whole": torch.tensor([0.3, 0.4])}, 1.0)
        torch.save(results, f"{folder}/{rank}.pt")
        torch.distributed.barrier()
        os._exit(0)  # a group that is torn down so soon can abort: a thread of gloo's is still starting


def test_gradients_are_scaled_by_the_norm_of_all_of_them(tmp_path: Path) -> None:
    """However each is distributed, on both ranks: to the limit, and not at all below it."""
    torch.multiprocessing.spawn(clip, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, value in WHOLE.items():
            torch.testing.assert_close(found["mixed"][name], (value / NORM).to(value.dtype))
        torch.testing.assert_close(found["partial"]["whole"], torch.tensor([3.0, 4.0]))
        torch.testing.assert_close(found["strided"]["part"], torch.tensor([0.6, 0.8])[rank : rank + 1])
        torch.testing.assert_close(found["small"]["whole"], torch.tensor([0.3, 0.4]))


class Clips(Precision):
    """Clips nothing."""

    def clip_grad_by_norm(self, *args: Any) -> None:
        """Does nothing."""


class Picks(Precision):
    """Clips some."""

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
        """The first."""
        yield optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize(("plugin", "ours"), [(Precision(), True), (Clips(), False), (Picks(), False)])
def test_a_plugin_that_clips_in_its_own_way_goes_on_to(plugin: Precision, ours: bool) -> None:
    """Ours takes the place of Lightning's alone."""
    install_clipping(plugin)
    assert (plugin.clip_grad_by_norm is clip_grad_by_norm) is ours
