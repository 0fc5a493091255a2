"""A gloo group of processes of this machine, as torchrun starts it."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch
from lightning.pytorch.loops import utilities


@contextmanager
def in_group(rank: int, world: int, meeting: str) -> Iterator[None]:
    """This process as one of `world`, which meet over the file `meeting`. Quiet, and on one core each."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # Lightning leaves inference mode out under gloo; NCCL has it, and a strategy must bear it.
    utilities.dist = SimpleNamespace(get_backend=lambda: "nccl")  # type: ignore[assignment]
    shape = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in shape.items()}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=90)
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
