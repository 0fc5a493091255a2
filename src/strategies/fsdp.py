"""Train any LightningModule fully sharded (PyTorch's FSDP2, `fully_shard`), on GPUs and on CPUs."""

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
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from src.engine.checkpoint.files import is_of_a_run
from src.engine.checkpoint.write import WholeFiles
from src.engine.distributed import gather_objects
from src.engine.errors import AgreedError, UserError
from src.engine.resolve.precision import keep_scale_on_host
from src.engine.sharding.clipping import install_clipping
from src.engine.sharding.forward import before_backward, wrap_as_forward
from src.engine.sharding.placement import broadcast_from_rank_zero, persistent_buffers, reshard_all, sharded_modules
from src.engine.sharding.whole_tensors import local_rows, optimizer_like, shard_like, to_full
from src.engine.sharding.wrapping import find_units, norms_in_fp32
from src.strategies.ddp import DDP

# What Lightning calls on a module directly, where hooks on its forward would not see it.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Reduce = Literal["float32", "bfloat16", "float16"]
SMALL = 100_000  # parameters; a unit of fewer is gathered in less time than it takes to ask for it


class FSDP(DDP):
    """Shard parameters, gradients and optimizer state over the ranks; gather each unit while it is used.

    In fp32 the mathematics is DDP's. Under mixed precision it is DDP's up to half-precision rounding: embeddings, norms
    and bare parameters, which autocast leaves in fp32, are gathered in 16 bits too. Gradients are averaged over ranks
    in fp32 whatever the parameters are computed in, and the weights that the optimizer sees are fp32.

    Checkpoints have DDP's names and whole tensors' shapes: each resumes the other's, on any number of processes.
    Where `sharded_files` is set, each rank writes its rows of them (src/engine/checkpoint/shards.py).

    Lightning's FSDPStrategy cannot run on CPUs, cannot clip by norm and reduces gradients in half precision.

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
        """Shard the module, then let it make its optimizers of this rank's rows."""
        assert self.accelerator is not None
        self.refuse_sync_batchnorm(trainer)
        self.accelerator.setup(trainer)
        module: nn.Module | None = self.lightning_module
        assert module is not None
        # What a unit is gathered into in inference mode could not be used in training.
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop.inference_mode = False
        trainer.predict_loop.inference_mode = False
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            module = self._layer_sync.apply(module)
        module = self.precision_plugin.convert_module(module)
        install_clipping(self.precision_plugin)
        if self._offloads():
            keep_scale_on_host(self.precision_plugin)
        if not isinstance(module, FSDPModule):
            try:
                self._shard(module)
            except (ValueError, NotImplementedError) as error:  # lazy, on the meta device, without a dimension
                reason = str(error).splitlines()[0]
                raise AgreedError(f"fsdp cannot shard this module: {reason}; or use --trainer.strategy ddp") from error
        reshard_all(module)  # an optimizer must get this rank's rows
        self.model, self._buffers = module, persistent_buffers(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> None:
        mesh = self.mesh()
        broadcast_from_rank_zero(module, self.root_device)
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": self._policy()}
        settings["offload_policy"] = CPUOffloadPolicy() if self._offloads() else OffloadPolicy()
        units = find_units(module)
        for note in self._notes(module, units) if self.is_global_zero else ():
            print(note, flush=True)
        if settings["mp_policy"].param_dtype is not None:
            in_fp32 = MixedPrecisionPolicy(None, self.reduce_dtype, cast_forward_inputs=False)
            for norm in norms_in_fp32(module, self.root_device.type):
                fully_shard(norm, reshard_after_forward=False, **settings | {"mp_policy": in_fp32})
        for name, unit in units:
            fully_shard(unit, reshard_after_forward=self.reshard_after_forward, **settings)
            self.units.append(name)
        # What is left is the root's, needed at the start and at the end of a pass: never worth gathering twice.
        fully_shard(module, reshard_after_forward=False, **settings)
        for step in STEPS:
            wrap_as_forward(module, step)
        self._move_rest(module)

    def _offloads(self) -> bool:
        return self.cpu_offload and self.root_device.type != "cpu"  # it pins memory, which takes an accelerator

    def _move_rest(self, module: nn.Module) -> None:
        """Move buffers, states of torchmetrics and what `module.device` says to the device."""
        for part in module.modules():
            if next(part.parameters(), None) is None:
                part.to(self.root_device)
            for buffer in part.buffers(recurse=False):
                buffer.data = buffer.data.to(self.root_device)
        _update_properties(module, device=self.root_device)

    def mesh(self) -> DeviceMesh:
        """Return the ranks to shard over. A `configure_model` that shards parts by itself uses this mesh."""
        kind, world = self.root_device.type, self.world_size
        size = world if self.ranks_per_shard is None else self.ranks_per_shard
        size = self.num_processes if size == "node" else size
        if size == world:
            return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        if not isinstance(size, int) or size < 1 or world % size:
            raise AgreedError(f"ranks_per_shard is {size!r}: use a divisor of the {world} ranks, or node")
        return init_device_mesh(kind, (world // size, size), mesh_dim_names=("replicate", "shard"))

    def _notes(self, module: nn.Module, units: list[tuple[str, nn.Module]]) -> list[str]:
        """Return what the units are, and warnings where such a division does not help."""
        sizes = [sum(parameter.numel() for parameter in unit.parameters()) for _, unit in units]
        if not units:
            notes = [
                "warning: fsdp found no blocks, so all parameters are gathered at once: memory is saved for gradients "
                "and optimizer state only, and nothing overlaps; give the network `BLOCKS = (YourBlock,)`"
            ]
        elif len(units) > 1 and max(sizes) < SMALL:
            notes = [
                f"warning: fsdp's {len(units)} units have at most {max(sizes):,} parameters: starting a transfer takes "
                "longer than the transfer; name larger blocks in BLOCKS, or use --trainer.strategy ddp"
            ]
        else:
            kinds = " and ".join(dict.fromkeys(type(unit).__name__ for _, unit in units))
            notes = [f"note: fsdp gathers {len(units)} x {kinds}, of at most {max(sizes):,} parameters, one by one"]
        if self.ranks_per_shard == "node" and self.num_nodes == 1:
            notes.append("note: on one node fsdp_hybrid_shard is fsdp_full_shard")
        if self.precision_plugin.precision == "64-true" and self.reduce_dtype != torch.float32:
            notes.append(f"warning: reduce_dtype {self.reduce_dtype} has no effect: 64-true adds gradients in 64 bits")
        return notes

    def _policy(self) -> MixedPrecisionPolicy:
        """Gather and compute units in half precision under autocast, and leave inputs alone.

        Casting inputs would turn a step's targets into bf16 as well (1234.567 became 1232.0).
        """
        precision = str(self.precision_plugin.precision)
        reduce = None if precision == "64-true" else self.reduce_dtype
        return MixedPrecisionPolicy(HALVES.get(precision), reduce, cast_forward_inputs=False)

    # --- train ---

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep the gradients of a step's earlier micro batches on each rank; the last pass reduces them."""
        module = self.lightning_module
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(self.sync_every_micro_batch)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepare a backward pass that a step does by itself, before FSDP has seen the step's output."""
        module = self.lightning_module
        assert isinstance(module, FSDPModule)
        if not module.automatic_optimization:
            before_backward(module, closure_loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Give every rank rank 0's buffers, such as BatchNorm's, as DDP does."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        buffers = [getattr(module, name) for module, name in self._buffers]
        if buffers and self.world_size > 1:
            world = torch.distributed.group.WORLD
            assert world is not None
            torch.distributed._broadcast_coalesced(world, buffers, 2**28, 0)

    # --- evaluate ---

    def on_validation_start(self) -> None:
        """Gather all units before the first batch where ranks have different numbers of batches.

        All ranks must gather a unit together; what is gathered here is kept to the end of the evaluation.
        """
        module = self.lightning_module
        assert module is not None
        self._share_buffers()
        reshard_all(module)  # a step without a backward pass has left the root gathered, and rows may have changed
        loop: Any = module.trainer._active_loop
        counts = gather_objects(list(loop.max_batches))
        if all(count == counts[0] for count in counts):
            return
        self._kept = sharded_modules(module)
        for unit in self._kept:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def on_validation_end(self) -> None:
        """Leave each rank its rows, the root's too, for whoever asks for parameters after an evaluation."""
        module = self.lightning_module
        assert module is not None
        for unit in self._kept:
            unit.set_reshard_after_forward(self.reshard_after_forward and unit is not module, recurse=False)
        self._kept = []
        reshard_all(module)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # --- save and load ---

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Let each rank write its rows where `sharded_files` says so; else rank 0 writes whole tensors. Collective."""
        files, path = self.checkpoint_io, Path(filepath)
        if self.sharded_files and isinstance(files, WholeFiles) and is_of_a_run(path):
            files.save_parts(*local_rows(checkpoint, self.is_global_zero), path, storage_options)
        else:
            super().save_checkpoint(to_full(checkpoint, self.is_global_zero), filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Leave the optimizer's state on the disk until each tensor's turn: whole, it is twice the weights."""
        if isinstance(self.checkpoint_io, WholeFiles):
            self.checkpoint_io.lazily = ("optimizer_states",)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights into a module that may be sharded already."""
        assert self.lightning_module is not None
        current = self.lightning_module.state_dict()
        weights = {name: shard_like(value, current.get(name)) for name, value in checkpoint["state_dict"].items()}
        super().load_model_state_dict({"state_dict": weights}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load of the whole state this rank's rows."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(optimizer_like(state, optimizer))

    def teardown(self) -> None:
        """Tear down as DDP does, but leave the rows where they are."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()  # what is being written gets to the disk


def choose_format(strategy: Strategy, wanted: str | None) -> list[str]:
    """Set how checkpoints are written (`checkpoint.format`); return a note where that cannot be as asked."""
    can = isinstance(strategy, FSDP) and isinstance(strategy.checkpoint_io, WholeFiles)
    if can:
        strategy.sharded_files = wanted != "file"  # type: ignore[attr-defined]
    if can or wanted != "sharded":
        return []
    why = "trainer.plugins has a CheckpointIO" if isinstance(strategy, FSDP) else "only the fsdp strategies shard"
    return [f"checkpoint.format sharded: {why}, so a checkpoint is one file"]
