"""What FSDP does to a module's parameters and buffers before and between the passes."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from src.errors import AgreedError


def refuse_scalars(module: nn.Module) -> None:
    """Every parameter needs a dimension to be cut along.

    Raises:
        AgreedError: names those that have none.

    """
    names = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if names:
        raise AgreedError(
            f"fsdp cuts parameters along their first dimension and {', '.join(names[:3])} has none: make it a vector "
            "of one number (torch.zeros(1)), or use --trainer.strategy ddp"
        )


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
