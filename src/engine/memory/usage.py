"""Recognize an out-of-memory error, and say in a table who held the memory."""

import re
import resource
import sys
from dataclasses import dataclass

import torch

from src.engine.text import table

GIB = 2**30
STATE_BYTES = 16  # of a parameter in training: itself, its gradient and Adam's two moments, 4 each
HOST = "DefaultCPUAllocator: can't allocate memory"
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# What CUDA's libraries say, which take their memory beside PyTorch's allocator.
CARD = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the card or on the host; also where the compiler has wrapped that."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause) if isinstance(cause, RuntimeError) else ""
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or any(words in text for words in (HOST, *CARD)):
            return True
        cause = cause.__cause__
    return False


def is_on_host(error: BaseException) -> bool:
    """Return whether it was the host's memory that an out-of-memory error is about."""
    return isinstance(error, MemoryError) or HOST in str(error)


def unusable(text: str) -> int | None:
    """Return the bytes that PyTorch's message says are reserved and not allocated, at the moment of the failure."""
    match = re.search(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated", text)
    return round(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else None


@dataclass(frozen=True)
class Usage:
    """Who held what when an allocation failed, in bytes."""

    device: str  # the card's name, or "this machine"
    total: int  # of the device
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    peak: int  # of this process
    state: int  # parameters, gradients and Adam's moments when training is under way, whatever the batch
    fragmented: int | None = None  # reserved by PyTorch and not usable; None on a host
    others: int | None = None  # other processes, CUDA and NCCL; None on a host

    @property
    def on_host(self) -> bool:
        """Whether it is the host's memory."""
        return self.fragmented is None

    @property
    def rest(self) -> int:
        """Activations and other temporary memory: what is not accounted for at the peak."""
        return max(0, self.peak - self.parameters - self.gradients - self.optimizer - self.buffers)

    def lines(self) -> list[str]:
        """Return a table, one amount per line."""
        rest = "the rest: data, activations, libraries" if self.on_host else "activations and the like, estimated"
        amounts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "buffers": self.buffers,
            f"{rest} (peak {gib(self.peak)} − these)": self.rest,
            "fragmentation: reserved by PyTorch, not allocated": self.fragmented,
            "other processes, CUDA and NCCL": self.others,
        }
        rows = [(f"  {name}", gib(amount)) for name, amount in amounts.items() if amount is not None]
        lines = table(rows, right=(1,)).splitlines()
        too_large = f"parameters, gradients and Adam alone take {gib(self.state)}, whatever the batch"
        return [*lines, too_large] if self.state > self.total else lines


def gib(amount: int) -> str:
    """Return an amount of bytes as text."""
    return f"{amount / GIB:.2f} GiB"


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: allocated on the GPU, or resident in RAM on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
