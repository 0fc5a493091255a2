"""Measure how fast the processes of a group all-reduce tensors."""

import statistics
import time
from itertools import pairwise

import torch

from src.engine.errors import UserError

SIZES = {"gloo": (2**16, 2**20, 2**24), "nccl": (2**20, 2**25, 2**28)}  # bytes
REPEATS = {"gloo": 4, "nccl": 20}  # all-reduces between two looks at the clock
ROUNDS = 5  # of which the median counts


def measure(backend: str, device: torch.device) -> list[tuple[int, float]]:
    """Return bytes and seconds of one all-reduce of fp32, for each size, after a check of a sum. Collective."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    total = torch.full((1000,), rank + 1.0, device=device)
    torch.distributed.all_reduce(total)
    if not bool((total == world_size * (world_size + 1) / 2).all()):
        raise UserError(f"rank {rank}: an all-reduce over {backend} gives a wrong sum, {total[0].item():g}")
    return [(size, _seconds(size, REPEATS[backend], device)) for size in SIZES[backend]]


def _seconds(size: int, repeats: int, device: torch.device) -> float:
    tensor = torch.zeros(size // 4, device=device)
    moments = []
    for _ in range(ROUNDS + 1):  # the first round makes connections
        for _ in range(repeats):
            torch.distributed.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moments.append(time.perf_counter())
    return statistics.median(end - begin for begin, end in pairwise(moments)) / repeats


def bus_bandwidth(size: int, seconds: float, world_size: int) -> float:
    """Return GB/s (10⁹ bytes) as nccl-tests has it: what every link carries, whatever the number of ranks."""
    return 2 * (world_size - 1) / world_size * size / seconds / 1e9
