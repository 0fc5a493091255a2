"""When an allocation has failed: looks who held what, and lets the other ranks know.

The others notice only that a rank has gone. What they know of it stands in the process group's store, which outlives
the collective that failed.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from src.callbacks.throughput import peak_memory
from src.memory import GIB, Usage, asked_for, is_on_host, is_out_of_memory, unusable

FIRST, SAID = "out_of_memory", "out_of_memory_said"  # keys of the store
PATIENCE = timedelta(seconds=30)  # for the first rank to say it; Lightning takes the model off the device before that


class OutOfMemory(Callback):
    """Keeps the facts of the moment, before Lightning takes the model off the device."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.first = True  # no other rank has run out of memory before

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: D102
        if not is_out_of_memory(exception):
            return
        self.first = announce(trainer.global_rank)
        with suppress(RuntimeError):  # a card in that state may refuse to answer; the error itself must get through
            self.usage = measure(trainer, pl_module, exception)


def measure(trainer: Trainer, module: LightningModule, error: BaseException) -> Usage:
    """Who holds what on the device that has no more memory."""
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
    }
    text, peak = str(error), round(peak_memory(device) * GIB)
    if device.type != "cuda":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Usage("this machine", total, **amounts, peak=peak, asked=asked_for(text))
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    # The message is from the moment itself; since then Python has let go of some tensors.
    gap = unusable(text)
    return Usage(
        torch.cuda.get_device_name(device),
        total,
        **amounts,
        peak=peak,
        fragmented=reserved - torch.cuda.memory_allocated(device) if gap is None else gap,
        others=max(0, total - free - reserved),
        asked=asked_for(text),
    )


def _bytes(tensors: Iterable[object], device: torch.device) -> int:
    """What these take on the device; of a sharded one, this rank's part."""
    once = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}.values()
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in once]
    return sum(part.numel() * part.element_size() for part in parts if part.device.type == device.type)


def announce(rank: int) -> bool:
    """Write down that this rank is out of memory; True where it is the first to say so."""
    if not torch.distributed.is_initialized():
        return True
    with suppress(RuntimeError):  # rank 0 has gone, and the store with it
        return _store().compare_set(FIRST, "", str(rank)) == str(rank).encode()
    return True


def announced() -> int | None:
    """The rank that ran out of memory first; None as far as this one knows."""
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):
            if _store().check([FIRST]):
                return int(_store().get(FIRST))
    return None


def say_it_is_said() -> None:
    """The first rank has explained itself: the others may leave, with which a launcher may end it."""
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):
            _store().set(SAID, "")


def wait_until_said() -> None:
    """For as long as the first rank may need to explain itself."""
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):
            _store().wait([SAID], PATIENCE)


def _store() -> torch.distributed.Store:
    return torch.distributed.distributed_c10d._get_default_store()
