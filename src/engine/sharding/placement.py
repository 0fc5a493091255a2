"""Bring a module's parameters and buffers to where FSDP wants them, before and between the passes."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def broadcast_from_rank_zero(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's weights, as DDP does, one after the other: all may not fit on the device.

    What the module has sharded by itself is left as it is.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if isinstance(tensor, DTensor):
            continue
        sent = tensor.detach().to(device).contiguous()
        torch.distributed.broadcast(sent, 0)
        tensor.detach().copy_(sent)
        tensor.data = tensor.data.contiguous()  # fully_shard refuses transposed or channels-last parameters


def persistent_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the buffers are that a checkpoint keeps; the others are tables that every rank has alike."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    ]


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the units and the root."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def reshard_all(module: nn.Module) -> None:
    """Leave each rank its rows of every unit and of the root.

    An evaluation ends with the root gathered, for a backward pass that does not come. What was gathered is another
    parameter than the rows: an optimizer that was given it trained nothing of the root.
    """
    for each in sharded_modules(module):
        each.reshard()
