"""Fully sharded data parallel (PyTorch's FSDP2, `fully_shard`) for any LightningModule, on GPUs and on CPUs."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.optim import Optimizer

from src.strategies.ddp import DDP
from src.strategies.full_state import full, like, optimizer_like
from src.strategies.wrapping import find_units

# What Lightning calls on a module directly, where hooks on its forward would not see it.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Reduce = Literal["float32", "bfloat16", "float16"]


class FSDP(DDP):
    """Parameters, gradients and optimizer state in parts over the ranks; each unit is put together where it is used.

    The mathematics is DDP's: gradients are averaged over ranks, in fp32 whatever the parameters are computed in, and
    the weights that the optimizer sees are fp32. Checkpoints are DDP's too: one file with plain names, which either
    continues on any number of processes.

    FSDP2 and not Lightning's FSDPStrategy: that one cannot run on CPUs, cannot clip by norm and reduces gradients in
    half precision.

    Args:
        reshard_after_forward: free a unit's parameters after its forward pass and gather them again for the backward
            pass ("full shard"); False keeps them, for less communication and more memory ("grad-op")
        ranks_per_shard: shard over so many neighbouring ranks and replicate over the groups of them (hybrid); "node":
            over the ranks of a node; None: over all
        reduce_dtype: in which gradients are summed; anything below float32 is less exact, and was slower on H100
        sync_every_micro_batch: reduce gradients after every micro batch of a step: keeps no whole gradients in memory,
            for as many times the communication
        cpu_offload: keep parameters, gradients and optimizer state in the host's memory
        kwargs: as for Lightning's DDPStrategy, such as `timeout`

    """

    def __init__(
        self,
        reshard_after_forward: bool = True,
        ranks_per_shard: int | Literal["node"] | None = None,
        reduce_dtype: Reduce = "float32",
        sync_every_micro_batch: bool = False,
        cpu_offload: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.reshard_after_forward, self.ranks_per_shard = reshard_after_forward, ranks_per_shard
        self.reduce_dtype, self.cpu_offload = getattr(torch, reduce_dtype), cpu_offload
        self.sync_every_micro_batch = sync_every_micro_batch
        self.units: list[str] = []

    # --- shard ---

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then let it make its optimizers of what this rank has of it."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        assert self.lightning_module is not None
        module = self.precision_plugin.convert_module(self.lightning_module)
        if not isinstance(module, FSDPModule):
            self._shard(module)
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> None:
        mesh = self._mesh()
        self._start_equal(module)
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": self._policy()}
        settings["offload_policy"] = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        for name, unit in find_units(module):
            fully_shard(unit, reshard_after_forward=self.reshard_after_forward, **settings)
            self.units.append(name)
        # What is left is the root's, needed at the start and at the end of a pass: never worth gathering twice.
        fully_shard(module, reshard_after_forward=False, **settings)
        for step in STEPS:
            register_fsdp_forward_method(module, step)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.root_device)

    def _mesh(self) -> DeviceMesh:
        kind, world = self.root_device.type, self.world_size
        size = self.num_processes if self.ranks_per_shard == "node" else self.ranks_per_shard or world
        if size == world:
            return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        if world % size:
            raise ValueError(f"ranks_per_shard {size} does not divide the {world} ranks")
        return init_device_mesh(kind, (world // size, size), mesh_dim_names=("replicate", "shard"))

    def _start_equal(self, module: nn.Module) -> None:
        """Give every rank rank 0's weights, as DDP does, one after the other: all may not fit on the device."""
        for tensor in [*module.parameters(), *module.buffers()]:
            there = tensor.detach().to(self.root_device)
            torch.distributed.broadcast(there, 0)
            tensor.detach().copy_(there)

    def _policy(self) -> MixedPrecisionPolicy:
        """Units are gathered and computed in half precision under autocast; inputs are left alone.

        Casting inputs would turn a step's targets into bf16 as well (1234.567 became 1232.0).
        """
        half = HALVES.get(str(self.precision_plugin.precision))
        if half is None:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(param_dtype=half, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)

    # --- train ---

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of a step's earlier micro batches are kept on each rank and reduced with the last."""
        module = self.lightning_module
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(self.sync_every_micro_batch)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    # --- save and load ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights on rank 0, nothing elsewhere. Collective."""
        return full(self.lightning_module.state_dict(), self.is_global_zero)  # type: ignore[union-attr]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, as an optimizer of the whole module has it. Collective."""
        return full(super().optimizer_state(optimizer), self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Whole weights into a module that may be sharded already."""
        assert self.lightning_module is not None
        current = self.lightning_module.state_dict()
        weights = {name: like(value, current.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Of the whole state, what belongs to this rank's part."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(optimizer_like(state, optimizer))

    def teardown(self) -> None:
        """As DDP's, but the parts stay where they are."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
