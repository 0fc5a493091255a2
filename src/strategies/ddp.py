"""Train with Lightning's DDP, corrected."""

import atexit
import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from src.engine import signals
from src.engine.errors import AgreedError
from src.engine.sharding.launcher import Launcher


class DDP(DDPStrategy):
    """Lightning's DDP with exact means over ranks, with fp64 states that load as they are, and a patient launcher.

    Lightning averages the integer count of samples behind an epoch's mean too, and integers are averaged by integer
    division: with 3 and 4 validation samples on two ranks a mean of 3.0 was logged as 3.5 (Lightning 2.6.6, gloo).
    """

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(started := self._launcher, _SubprocessScriptLauncher):
            self._launcher = Launcher(started.cluster_environment, started.num_processes, started.num_nodes)

    def configure_ddp(self) -> None:
        """Wrap the module, but not in a single process: that saves a copy of the gradients and 2 to 4 % of the time."""
        if self.world_size > 1:
            assert self.lightning_module is not None
            self._parameters = dict(self.lightning_module.named_parameters())
            self._trained = self._requiring()
            super().configure_ddp()

    def _requiring(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.requires_grad]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the module again when parameters have been frozen or unfrozen, as fine-tuning does.

        PyTorch reduces the gradients of those parameters that wanted one when it wrapped: what is unfrozen later would
        differ between ranks, and of what is frozen it would miss a gradient.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return
        now = self._requiring()
        if now == self._trained or not now:
            return
        for parameter in self._parameters.values():
            if parameter.grad is None:
                continue
            parameter.grad = parameter.grad.clone()  # of earlier micro batches; it lay in the old wrap's buckets
            if not parameter.requires_grad:  # the new one will not reduce it, and the optimizer still uses it
                parameter.grad = self.reduce(parameter.grad)
        self.model = self.model.module
        self.configure_ddp()

    def setup(self, trainer: Trainer) -> None:
        self.refuse_sync_batchnorm(trainer)
        super().setup(trainer)

    def refuse_sync_batchnorm(self, trainer: Trainer) -> None:
        """Refuse to synchronize BatchNorm on CPUs: PyTorch does it on GPUs alone."""
        if not self._layer_sync or trainer.state.fn != TrainerFn.FITTING or self.root_device.type != "cpu":
            return
        if any(isinstance(module, _BatchNorm) for module in trainer.lightning_module.modules()):
            raise AgreedError(
                "trainer.sync_batchnorm works on GPUs alone and this model's BatchNorm is on CPUs: leave it out here, "
                "where each rank then normalizes by its own samples"
            )

    def on_exception(self, exception: BaseException) -> None:
        """Name the parameters without a gradient, whose numbers are in the text that Lightning replaces."""
        unused = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(exception))
        super().on_exception(exception)
        if unused:
            names = [self._trained[int(number)] for number in unused[1].split()]
            exception.add_note(f"without a gradient: {', '.join(names)}")

    # --- the process group ---

    def _get_process_group_backend(self) -> str:
        """Use gloo beside NCCL on GPUs, unless `process_group_backend` was given.

        NCCL alone refuses tensors in the host's memory (offloaded gradients, a user's rewards) and sends objects
        through the GPU's. Gloo costs a connection between every two ranks when it starts and nothing in a step: what is
        on a GPU goes through NCCL as before.
        """
        given, backend = self._process_group_backend, super()._get_process_group_backend()
        return "cpu:gloo,cuda:nccl" if given is None and backend == "nccl" else backend

    def setup_distributed(self) -> None:
        """Destroy the group before the interpreter ends, which can abort a perfect run.

        Lightning does so for a group of NCCL alone.
        """
        initialized = torch.distributed.is_initialized()
        with signals.ending_at_once():  # it waits for the other ranks
            super().setup_distributed()
        if not initialized:  # else it is somebody else's
            atexit.register(_destroy_dist_connection)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ranks; integers are averaged as floating-point numbers."""
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    # --- states ---

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load into a module of the precision's type: Lightning converts it later, which rounds 64-true to fp32."""
        if self.precision_plugin.precision == "64-true" and self.lightning_module is not None:
            self.precision_plugin.convert_module(self.lightning_module)
        super().load_model_state_dict(checkpoint, strict)
