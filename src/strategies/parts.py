"""What FSDP does to a module's parameters and buffers before and between the passes."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from src.errors import AgreedError


def refuse_what_cannot_be_cut(module: nn.Module) -> None:
    """Every parameter needs a value, a dimension to be cut along, and real numbers; gradients must be dense.

    Raises:
        AgreedError: names those that have none.

    """
    parameters = dict(module.named_parameters())
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    reasons = {
        "has no value yet; give it its sizes (lazy modules: run one batch in __init__)": [
            name for name, value in parameters.items() if isinstance(value, UninitializedParameter) or value.is_meta
        ],
        "has no dimension to be cut along: make it a vector of one number (torch.zeros(1))": [
            name
            for name, value in parameters.items()
            if not isinstance(value, UninitializedParameter) and not value.dim()
        ],
        "is complex: keep it as real numbers (torch.view_as_real)": [
            name for name, value in parameters.items() if value.is_complex()
        ],
        "has sparse gradients: leave sparse=True out": sparse,
    }
    for reason, names in reasons.items():
        if names:
            raise AgreedError(f"fsdp: {', '.join(names[:3])} {reason}, or use --trainer.strategy ddp")


def start_equal(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's weights, as DDP does, one after the other: all may not fit on the device.

    What the module has sharded by itself is left as it is.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if isinstance(tensor, DTensor):
            continue
        there = tensor.detach().to(device).contiguous()
        torch.distributed.broadcast(there, 0)
        tensor.detach().copy_(there)
        tensor.data = tensor.data.contiguous()  # fully_shard refuses transposed or channels-last parameters


def kept_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the buffers are that a checkpoint keeps; the others are tables that every rank has alike."""
    return [
        (part, name)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    ]


def sharded(module: nn.Module) -> list[FSDPModule]:
    """The units and the root."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def free(module: nn.Module) -> None:
    """Leave each rank its part of every unit and of the root.

    An evaluation ends with the root gathered, for a backward pass that does not come. What was gathered is another
    parameter than the part: an optimizer that was given it trained nothing of the root.
    """
    for part in sharded(module):
        part.reshard()
