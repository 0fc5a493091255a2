"""A LightningModule's steps as FSDP's forward pass."""

import functools
from typing import Any, cast

from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor


def as_forward(module: nn.Module, name: str) -> None:
    """Gather the root's parameters before the method `name` and prepare the backward pass after it.

    PyTorch's `register_fsdp_forward_method`, but for steps that call `self(x)`: that is a forward pass inside of one,
    at whose end the root would be freed, to be gathered again at once for the backward pass. Where a step does its
    backward passes by itself, each `self(x)` is a forward pass of its own.
    """
    step, state = getattr(module, name), cast(FSDPModule, module)._get_fsdp_state()
    lost = LostWrites(module)

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state._pre_forward(module, args, kwargs)
        lost.begin()
        if name == "training_step" and not cast(LightningModule, module).automatic_optimization:
            output = step(*args, **kwargs)
            lost.look()
            return state._post_forward(module, args, output)
        state._training_state = TrainingState.PRE_BACKWARD  # in which FSDP's hooks around forward do nothing
        try:
            output = step(*args, **kwargs)
        finally:
            state._training_state = TrainingState.FORWARD
        lost.look()
        return state._post_forward(module, args, output)

    setattr(module, name, run)


class LostWrites:
    """Warns once of what a step writes into the root's weights while they are gathered: only the parts are kept."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._gathered: dict[str, Tensor] | None = None
        self._before: list[tuple[int, bool]] = []

    def begin(self) -> None:
        """When the root is gathered. Walking over the module takes long, but the tensors stay the same."""
        if self._gathered is None:
            parameters = self._module.named_parameters()
            self._gathered = {name: value for name, value in parameters if not isinstance(value, DTensor)}
        self._before = self._states()

    def look(self) -> None:
        """At the end of the step."""
        assert self._gathered is not None
        pairs = zip(self._gathered, self._before, self._states(), strict=True)
        if names := [name for name, before, after in pairs if before != after]:
            self._gathered = {}
            if cast(LightningModule, self._module).global_rank == 0:
                print(
                    "warning: fsdp throws away what a step writes into weights, or freezes "
                    f"({', '.join(names[:3])}): do that in on_train_batch_start or on_train_batch_end",
                    flush=True,
                )

    def _states(self) -> list[tuple[int, bool]]:
        assert self._gathered is not None
        return [(value._version, value.requires_grad) for value in self._gathered.values()]


def before_backward(module: FSDPModule, loss: Tensor) -> None:
    """Have gradients reduced in the backward pass of `loss`, of the root too."""
    module._get_fsdp_state()._register_pre_backward_hook(loss)
