"""Fully sharded data parallel (PyTorch's FSDP2, `fully_shard`) for any LightningModule, on GPUs and on CPUs."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning import Trainer
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from src.checkpoint.files import is_of_a_run
from src.checkpoint.write import WholeFiles
from src.errors import AgreedError, UserError
from src.precision import keep_scale_on_host
from src.ranks import gather_objects
from src.strategies.clipping import install_clipping
from src.strategies.ddp import DDP
from src.strategies.forward import as_forward, before_backward
from src.strategies.full_state import full, in_parts, like, optimizer_like
from src.strategies.notes import unit_notes
from src.strategies.parts import free, kept_buffers, refuse_what_cannot_be_cut, sharded, start_equal
from src.strategies.wrapping import find_units, norms_in_fp32

# What Lightning calls on a module directly, where hooks on its forward would not see it.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Reduce = Literal["float32", "bfloat16", "float16"]


class FSDP(DDP):
    """Parameters, gradients and optimizer state in parts over the ranks; each unit is put together where it is used.

    In fp32 the mathematics is DDP's. Under mixed precision it is to half-precision rounding: embeddings, norms and bare
    parameters, which autocast leaves in fp32, are gathered in 16 bits too. Gradients are averaged over ranks in fp32
    whatever the parameters are computed in, and the weights that the optimizer sees are fp32.

    Checkpoints have DDP's names and whole tensors' shapes: either continues the other's, on any number of processes.
    Where `sharded_files` is set, each rank writes its parts of them (src/checkpoint/shards.py).

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
        if reduce_dtype not in get_args(Reduce):
            raise UserError(f"reduce_dtype is {reduce_dtype!r}: use one of {', '.join(get_args(Reduce))}")
        self.reduce_dtype, self.cpu_offload = getattr(torch, reduce_dtype), cpu_offload
        self.sync_every_micro_batch = sync_every_micro_batch
        self.sharded_files = False
        self.units: list[str] = []
        self._buffers: list[tuple[nn.Module, str]] = []
        self._kept: list[FSDPModule] = []

    # --- shard ---

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then let it make its optimizers of what this rank has of it.

        Raises:
            AgreedError: the ranks or the parameters cannot be divided as asked, or BatchNorm not be synchronized.

        """
        assert self.accelerator is not None
        self.refuse_sync_batchnorm(trainer)
        self.accelerator.setup(trainer)
        module: nn.Module | None = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            module = self._layer_sync.apply(module)
        module = self.precision_plugin.convert_module(module)
        install_clipping(self.precision_plugin)
        if self._offloads():
            keep_scale_on_host(self.precision_plugin)
        if not isinstance(module, FSDPModule):
            self._shard(module)
        free(module)  # an optimizer must get the parts
        self.model, self._buffers = module, kept_buffers(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> None:
        mesh = self.mesh()
        refuse_what_cannot_be_cut(module)
        start_equal(module, self.root_device)
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": self._policy()}
        settings["offload_policy"] = CPUOffloadPolicy() if self._offloads() else OffloadPolicy()
        units = find_units(module)
        for note in self._notes(module, units) if self.is_global_zero else ():
            print(note, flush=True)
        if settings["mp_policy"].param_dtype is not None:
            whole = MixedPrecisionPolicy(None, self.reduce_dtype, cast_forward_inputs=False)
            for norm in norms_in_fp32(module, self.root_device.type):
                fully_shard(norm, reshard_after_forward=False, **settings | {"mp_policy": whole})
        for name, unit in units:
            fully_shard(unit, reshard_after_forward=self.reshard_after_forward, **settings)
            self.units.append(name)
        # What is left is the root's, needed at the start and at the end of a pass: never worth gathering twice.
        fully_shard(module, reshard_after_forward=False, **settings)
        for step in STEPS:
            as_forward(module, step)
        self._move_rest(module)

    def _offloads(self) -> bool:
        return self.cpu_offload and self.root_device.type != "cpu"  # it pins memory, which takes an accelerator

    def _move_rest(self, module: nn.Module) -> None:
        """Buffers, states of torchmetrics, and what `module.device` says, to the device; offloaded parameters stay."""
        for part in module.modules():
            if next(part.parameters(), None) is None:
                part.to(self.root_device)
            for buffer in part.buffers(recurse=False):
                buffer.data = buffer.data.to(self.root_device)
        _update_properties(module, device=self.root_device)

    def mesh(self) -> DeviceMesh:
        """The ranks to shard over. A `configure_model` that shards parts by itself does it on this one.

        Raises:
            AgreedError: the ranks cannot be divided as asked.

        """
        kind, world = self.root_device.type, self.world_size
        size = world if self.ranks_per_shard is None else self.ranks_per_shard
        size = self.num_processes if size == "node" else size
        if size == world:
            return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        if not isinstance(size, int) or size < 1 or world % size:
            raise AgreedError(f"ranks_per_shard is {size!r}: use a divisor of the {world} ranks, or node")
        return init_device_mesh(kind, (world // size, size), mesh_dim_names=("replicate", "shard"))

    def _notes(self, module: nn.Module, units: list[tuple[str, nn.Module]]) -> list[str]:
        notes = unit_notes(module, units)
        if self.ranks_per_shard == "node" and self.num_nodes == 1:
            notes.append("note: on one node fsdp_hybrid_shard is fsdp_full_shard")
        if self.precision_plugin.precision == "64-true" and self.reduce_dtype != torch.float32:
            notes.append(f"warning: reduce_dtype {self.reduce_dtype} has no effect: 64-true adds gradients in 64 bits")
        return notes

    def _policy(self) -> MixedPrecisionPolicy:
        """Units are gathered and computed in half precision under autocast; inputs are left alone.

        Casting inputs would turn a step's targets into bf16 as well (1234.567 became 1232.0).
        """
        precision = str(self.precision_plugin.precision)
        reduce = None if precision == "64-true" else self.reduce_dtype
        return MixedPrecisionPolicy(HALVES.get(precision), reduce, cast_forward_inputs=False)

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

    def pre_backward(self, closure_loss: Tensor) -> None:
        """A backward pass that a step does by itself begins before FSDP has seen the step's output."""
        module = self.lightning_module
        assert isinstance(module, FSDPModule)
        if not module.automatic_optimization:
            before_backward(module, closure_loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Buffers that training changes, such as BatchNorm's, are rank 0's everywhere, as under DDP."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        buffers = [getattr(module, name) for module, name in self._buffers]
        if buffers and self.world_size > 1:
            world = torch.distributed.group.WORLD
            assert world is not None
            torch.distributed._broadcast_coalesced(world, buffers, 2**28, 0)

    # --- evaluate ---

    def on_validation_start(self) -> None:
        """Ranks may have different numbers of batches, but all must gather a unit together.

        Where the numbers differ, units are gathered once, before the first batch, and kept to the end.
        """
        module = self.lightning_module
        assert module is not None
        self._share_buffers()
        free(module)  # a step without a backward pass has left the root gathered, and the parts may have changed
        loop: Any = module.trainer._active_loop
        counts = gather_objects(list(loop.max_batches))
        if all(count == counts[0] for count in counts):
            return
        self._kept = sharded(module)
        with torch.inference_mode(False), torch.no_grad():
            for part in self._kept:
                part.set_reshard_after_forward(False, recurse=False)
                part.unshard()

    def on_validation_end(self) -> None:
        """Whoever asks for parameters after an evaluation gets the parts, the root's too."""
        module = self.lightning_module
        assert module is not None
        for part in self._kept:
            part.set_reshard_after_forward(self.reshard_after_forward and part is not module, recurse=False)
        self._kept = []
        free(module)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Without inference mode: what a unit is first gathered into would be of no use to training."""
        with torch.inference_mode(False), torch.no_grad():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().predict_step(*args, **kwargs)

    # --- save and load ---

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """In parts where a run goes on from there and `sharded_files` says so; else whole, from rank 0. Collective."""
        files, path = self.checkpoint_io, Path(filepath)
        if self.sharded_files and isinstance(files, WholeFiles) and is_of_a_run(path):
            files.save_parts(*in_parts(checkpoint, self.is_global_zero), path, storage_options)
        else:
            super().save_checkpoint(full(checkpoint, self.is_global_zero), filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The optimizer's state stays on the disk until each tensor's turn: it is twice the weights, on every rank."""
        if isinstance(self.checkpoint_io, WholeFiles):
            self.checkpoint_io.lazily = ("optimizer_states",)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Whole weights into a module that may be sharded already."""
        assert self.lightning_module is not None
        current = self.lightning_module.state_dict()
        weights = {name: like(value, current.get(name)) for name, value in checkpoint["state_dict"].items()}
        super().load_model_state_dict({"state_dict": weights}, strict)

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
        self.checkpoint_io.teardown()  # what is being written gets to the disk


def choose_format(strategy: Strategy, wanted: str | None) -> list[str]:
    """Set how checkpoints are written (`checkpoint.format`); returns a note where that cannot be as asked."""
    can = isinstance(strategy, FSDP) and isinstance(strategy.checkpoint_io, WholeFiles)
    if can:
        strategy.sharded_files = wanted != "file"  # type: ignore[attr-defined]
    if can or wanted != "sharded":
        return []
    why = "trainer.plugins has a CheckpointIO" if isinstance(strategy, FSDP) else "only the fsdp strategies have parts"
    return [f"checkpoint.format sharded: {why}, so a checkpoint is one file"]
