"""Average the weights over the last steps, and evaluate the average in their place.

python -m src.cli fit … --trainer.callbacks+ src.engine.callbacks.ema.EMA --trainer.callbacks.decay 0.999
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor

from src.engine.checkpoint.contents import AVERAGE
from src.engine.errors import UserError
from src.engine.sharding.whole_tensors import shard_like


class EMA(Callback):
    """An exponential moving average of the weights; after each step it is decay · average + (1 - decay) · weight.

    Validation, test and prediction use it; training continues with the optimizer's weights, bit for bit as without it.
    A checkpoint holds both, the average beside the weights, and resumes under every strategy and number of processes;
    `python -m src.checkpoint export` writes the average.

    Parameters that are frozen when training starts are left out. Buffers of floating-point numbers that a checkpoint
    keeps, such as BatchNorm's statistics, are averaged, too: they belong to the weights they were measured with.

    Memory: each rank keeps one copy, in fp32 (or the parameter's type, where that is finer), of the part of the
    parameters that it has; while it evaluates another one of the weights.

    Lightning's EMAWeightAveraging copies the whole module before it is sharded, which cannot be averaged with parts,
    and puts the average in the weights' place before the last save: a run could not be resumed from its end (2.6.6).

    Args:
        decay: how much of the average stays in a step: 0.999 averages some 1000 steps
        start_step: steps before averaging begins; until then the weights themselves are evaluated

    """

    def __init__(self, decay: float = 0.999, start_step: int = 0) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"the decay of EMA is {decay}: give a number from 0 to below 1, such as 0.999")
        if start_step < 0:
            raise UserError(f"start_step of EMA is {start_step}: give a number of steps, 0 or more")
        self.decay, self.start_step = decay, start_step
        self.averages: dict[str, Tensor] = {}  # this rank's parts
        self._parameters: dict[str, Tensor] = {}
        self._buffers: list[str] = []
        self._names: dict[str, str] = {}  # every name of a tensor, of which a tied one has several, and its first
        self._loaded: dict[str, Tensor] | None = None  # whole; {}: of a file that has none
        # While the average is in their place: the weights, and where they belong.
        self._held: dict[str, Tensor] = {}
        self._replaced: dict[str, Tensor] = {}
        self._step = 0

    @property
    def state_key(self) -> str:
        """Return the key of the average in a checkpoint."""
        return AVERAGE

    # --- average ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find what is averaged, when it has been sharded and brought to its device."""
        self._step = trainer.global_step
        # Kept from here on: between two passes FSDP may have others registered, which it has gathered.
        self._parameters = {name: part for name, part in pl_module.named_parameters() if part.requires_grad}
        kept = pl_module.state_dict().keys()
        self._buffers = [name for name, part in pl_module.named_buffers() if name in kept and part.is_floating_point()]
        first = {id(part): name for name, part in self._parameters.items()}
        tied = pl_module.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(part)] for name, part in tied if id(part) in first}
        self._names |= {name: name for name in self._buffers}
        loaded, self._loaded, self.averages = self._loaded, None, {}
        if loaded:
            self._begin(pl_module)
            with torch.no_grad():
                _copy(loaded, self.averages)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Update the average once per step, of which a batch may be a part only."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._step <= self.start_step:
            return
        if not self.averages:
            self._begin(pl_module)
            return
        now = self._tensors(pl_module)
        with torch.no_grad():
            averages = [_local(part) for part in self.averages.values()]
            weights = [_local(now[name]).to(part.dtype) for name, part in self.averages.items()]
            torch._foreach_lerp_(averages, weights, 1 - self.decay)

    def _begin(self, module: LightningModule) -> None:
        for name, part in self._tensors(module).items():
            self.averages[name] = part.detach().to(torch.promote_types(part.dtype, torch.float32), copy=True)

    def _tensors(self, module: LightningModule) -> dict[str, Tensor]:
        """Return what is averaged; a module may have replaced its buffers."""
        return self._parameters | {name: module.get_buffer(name) for name in self._buffers}

    # --- evaluate ---

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average in the weights' place: the loaded file's, else this training's."""
        average: Mapping[str, Tensor] = self.averages if self._loaded is None else self._loaded
        if not average or trainer.sanity_checking:
            return
        if trainer.state.fn == TrainerFn.FITTING:
            now = self._tensors(pl_module)
        else:
            now = dict(pl_module.named_parameters(remove_duplicate=False)) | dict(pl_module.named_buffers())
            if trainer.is_global_zero:
                print("note: evaluating the EMA weights", flush=True)
        self._replaced = {name: part for name, part in now.items() if name in average}
        # Of inference tensors training could make no use.
        with torch.inference_mode(False), torch.no_grad():
            self._held = {name: _local(part).clone() for name, part in self._replaced.items()}
            _copy(average, self._replaced)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back for training."""
        self._put_back()
        if trainer.state.fn != TrainerFn.FITTING:
            self._loaded = None

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the weights back: whoever saves now must find them."""
        self._put_back()

    def _put_back(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name, held in self._held.items():
                _local(self._replaced[name]).copy_(held)
        self._held, self._replaced = {}, {}

    # --- save and load ---

    def state_dict(self) -> dict[str, Any]:
        """Return the average under the names of the weights, sharded where they are."""
        average = self.averages
        return {"weights": {name: average[first] for name, first in self._names.items()}} if average else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict["weights"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Forget what this Trainer has averaged before; the file may have no average."""
        self._loaded = {}


def _copy(values: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    for name, place in places.items():
        if name in values:
            _local(place).copy_(_local(shard_like(values[name], place)))


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
