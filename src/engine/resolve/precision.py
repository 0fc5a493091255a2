"""Choose the precision for this hardware."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.plugins.precision import Precision as Plugin
from torch import Tensor
from torch.optim import Optimizer

from src.engine.errors import UserError

# What Lightning also accepts, as the name it stands for.
ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
CHOICES = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


@dataclass(frozen=True)
class Card:
    """One accelerator: its name and CUDA compute capability."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True)
class Precision:
    """A Lightning precision name and the reason for it."""

    value: str
    reason: str


def resolve_precision(requested: str | int, cards: list[Card]) -> Precision:
    """Choose by compute capability; `cards` are the devices of this process's node, empty on a CPU.

    `torch.cuda.is_bf16_supported()` is no guide: it answers True on a V100, which only emulates bf16 (its default is
    `including_emulation=True`, see torch/cuda/__init__.py).
    """
    asked = ALIASES.get(str(requested), str(requested))
    if asked not in CHOICES:
        raise UserError(f"trainer.precision {requested!r} is unknown; use one of {', '.join(CHOICES)}")
    refuse_mixed_cards([card.name for card in cards])
    if asked == "auto":
        return _automatic(cards)
    if not cards and asked.startswith("16"):
        raise UserError(f"trainer.precision {asked} needs a GPU; on a CPU use 32-true or bf16-mixed")
    if asked.startswith("bf16") and cards and cards[0].capability < (8, 0):
        raise UserError(
            f"trainer.precision {asked}: {cards[0]} has no bf16 units and emulates it, slower than fp32; "
            "use auto, which is 16-mixed or 32-true there"
        )
    return Precision(asked, "as asked")


def low_note(precision: str) -> str | None:
    """Return a note on what a `true` precision of 16 bits loses, which mixed precision keeps in fp32; else None."""
    kind, _, extent = precision.partition("-")
    if extent != "true" or "16" not in kind:
        return None
    return (
        f"under {precision} the optimizer's weights are of 16 bits and lose small updates, and a batch's floats, "
        f"targets too, are rounded to 16 bits; {kind}-mixed computes in 16 bits as well and keeps both in fp32"
    )


def _automatic(cards: list[Card]) -> Precision:
    if not cards:
        return Precision("32-true", "CPU")
    card, major = cards[0], cards[0].capability[0]
    if major >= 8:
        return Precision("bf16-mixed", str(card))
    if major == 7:
        return Precision("16-mixed", f"{card}: no bf16 units before 8.0")
    return Precision("32-true", f"{card}: no tensor cores before 7.0")


def refuse_mixed_cards(names: list[str]) -> None:
    """Refuse cards of several kinds in one job: the slowest sets the pace, and `auto` would differ between ranks."""
    kinds = sorted(set(names))
    if len(kinds) > 1:
        found = ", ".join(f"{names.count(kind)} × {kind}" for kind in kinds)
        raise UserError(
            f"mixed cards in one job: {found}. Ask Slurm for one kind (--gres=gpu:<type>:N or --constraint), "
            "or pick them with CUDA_VISIBLE_DEVICES"
        )


class BF16Mixed(MixedPrecision):
    """Lightning's bf16-mixed, which may clip the gradients of a fused optimizer as well.

    Lightning 2.6.6 refuses that because with fp16 a fused optimizer unscales gradients itself, after they are clipped;
    bf16 has no scale.
    """

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        Plugin.clip_gradients(self, optimizer, *args, **kwargs)


def keep_scale_on_host(plugin: Plugin) -> None:
    """Keep the loss scale in the host's memory, for gradients that are there.

    A GradScaler keeps it on the loss's device and divides gradients on another one by a copy for which it does not wait
    (`_MultiDeviceReplicator` of torch 2.11 to 2.13: `.to(device, non_blocking=True)`, into pinned memory): offloaded
    gradients were divided by whatever was in that memory before.
    """
    scaler = getattr(plugin, "scaler", None)
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return
    if scaler._scale is None or scaler._growth_tracker is None:
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    else:  # of an earlier training
        scaler._scale, scaler._growth_tracker = scaler._scale.cpu(), scaler._growth_tracker.cpu()


def current_scale(trainer: Trainer) -> Tensor | None:
    """Return the loss scale, as a tensor where the scaler keeps it; None in a precision without a loss scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if not isinstance(scaler, torch.amp.GradScaler):
        return None
    # `_scale` is that tensor; the public get_scale() would wait for the device in every step.
    return scaler._scale
