"""Exchange objects between ranks, and recognise the error of a rank whose peer is gone."""

import re
from typing import Any

import torch
from torch import Tensor

from src.engine.nested import rebuild

# What gloo, NCCL and the store say where a connection to another process has ended.
GONE = re.compile(r"Connection (closed|reset) by|Broken pipe|ncclRemoteError|failed to recv, got 0 bytes")


def lost_a_rank(error: BaseException) -> bool:
    """Return whether a collective operation failed because another rank's process is gone; only that one knows why."""
    among_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return among_ranks and isinstance(error, RuntimeError) and GONE.search(str(error)) is not None


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's `value`, in the order of the ranks. Collective; a single process gets its own.

    It travels pickled and, under this project's strategies, over gloo from one host's memory to the other's: a large
    state takes no GPU memory on the way. Tensors on a GPU, also in dictionaries, lists and tuples, come in the host's
    memory: pickled as they are, each would claim memory on its sender's GPU from every rank.
    """
    value = rebuild(value, lambda _, leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
