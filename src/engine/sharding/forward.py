"""Run a LightningModule's steps as FSDP's forward pass."""

import functools
from typing import Any, cast

from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def wrap_as_forward(module: nn.Module, name: str) -> None:
    """Gather the root's parameters before the method `name` and prepare the backward pass after it.

    PyTorch's `register_fsdp_forward_method`, but for steps that call `self(x)`: that is a forward pass inside of one,
    at whose end the root would be freed, to be gathered again at once for the backward pass. Where a step does its
    backward passes by itself, each `self(x)` is a forward pass of its own.
    """
    step, state = getattr(module, name), cast(FSDPModule, module)._get_fsdp_state()

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state._pre_forward(module, args, kwargs)
        if name == "training_step" and not cast(LightningModule, module).automatic_optimization:
            return state._post_forward(module, args, step(*args, **kwargs))
        state._training_state = TrainingState.PRE_BACKWARD  # in which FSDP's hooks around forward do nothing
        try:
            output = step(*args, **kwargs)
        finally:
            state._training_state = TrainingState.FORWARD
        return state._post_forward(module, args, output)

    setattr(module, name, run)


def before_backward(module: FSDPModule, loss: Tensor) -> None:
    """Have gradients reduced in the backward pass of `loss`, of the root too."""
    module._get_fsdp_state()._register_pre_backward_hook(loss)
