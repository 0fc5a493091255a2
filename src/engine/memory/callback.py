"""Measure who holds the memory at the moment an allocation fails."""

import os
from collections.abc import Iterable
from contextlib import suppress

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from src.engine.memory.usage import GIB, Usage, is_on_host, is_out_of_memory, peak_memory, unusable


class OutOfMemory(Callback):
    """Keep what was measured until the command ends; Lightning takes the model off the device before that."""

    def __init__(self) -> None:
        self.usage: Usage | None = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if is_out_of_memory(exception):
            with suppress(RuntimeError):  # a card in that state may refuse to answer; the error itself must get through
                self.usage = measure(trainer, pl_module, exception)


def measure(trainer: Trainer, module: LightningModule, error: BaseException) -> Usage:
    """Return who holds what on the device that has no more memory."""
    device = torch.device("cpu") if is_on_host(error) else trainer.strategy.root_device
    trained = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    # FSDP may have put whole parameters in the place of its parts; the optimizer always has the parts.
    frozen = [p for p in module.parameters() if not p.requires_grad]
    parameters = [*trained, *frozen] if trained else list(module.parameters())
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    amounts = {
        "parameters": _bytes(parameters, device),
        "gradients": _bytes([p.grad for p in parameters if p.grad is not None], device),
        "optimizer": _bytes([value for state in states for value in state.values()], device),
        "buffers": _bytes(module.buffers(), device),
        "peak": round(peak_memory(device) * GIB),
        "state": _bytes(parameters, device) + 3 * _bytes(trained, device),
    }
    if device.type != "cuda":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Usage("this machine", total, **amounts)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    # The message is from the moment itself: since then tensors may have gone (6 GiB of 28 in one of eight tries).
    gap = unusable(str(error))
    return Usage(
        torch.cuda.get_device_name(device),
        total,
        **amounts,
        fragmented=reserved - torch.cuda.memory_allocated(device) if gap is None else gap,
        others=max(0, total - free - reserved),
    )


def _bytes(tensors: Iterable[object], device: torch.device) -> int:
    """Return what these take on the device; of a sharded one, this rank's part."""
    once = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}.values()
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in once]
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.device.type == device.type)
