"""Remember which parameters are frozen, which no state_dict does."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Frozen(Callback):
    """Freeze and unfreeze, in a resumed run, what had been frozen and unfrozen when the state was saved.

    Fine-tuning unfreezes a part after some epochs. Lightning's BaseFinetuning freezes it again in every start, and a
    run that was resumed behind that epoch trained the rest alone, without a word (Lightning 2.6.6).

    Where a start freezes other parameters than the run's first start did, the user has changed that, and it stays.
    """

    def __init__(self) -> None:
        self._first: list[str] | None = None  # in the run's first start, before its first step
        self._saved: list[str] | None = None
        self._module: LightningModule | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._module, names = pl_module, frozen(pl_module)
        if self._saved is None:
            self._first = names
        elif names == self._first:
            freeze(pl_module, self._saved)
        elif names != self._saved:
            self._first = names
            if trainer.is_global_zero:
                print(
                    "note: this start freezes other parameters than the run's first did; they are left so", flush=True
                )

    def state_dict(self) -> dict[str, Any]:
        if self._module is None or self._first is None:
            return {}
        now = frozen(self._module)
        return {} if now == self._first == [] else {"first": self._first, "now": now}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first, self._saved = state_dict["first"], state_dict["now"]


def frozen(module: nn.Module) -> list[str]:
    """Return the names of the parameters without a gradient, and of the BatchNorms that take no statistics."""
    names = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return names + [name for name, norm in _norms(module) if not norm.track_running_stats]


def freeze(module: nn.Module, names: list[str]) -> None:
    """Freeze these alone."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)
    for name, norm in _norms(module):
        norm.track_running_stats = name not in names


def _norms(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return the BatchNorms that have statistics; BaseFinetuning stops them where it freezes."""
    parts = module.named_modules()
    return [(name, part) for name, part in parts if isinstance(part, _BatchNorm) and part.running_mean is not None]
