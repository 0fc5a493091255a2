"""What is done to a model's blocks from outside; the model knows nothing of it.

A model names its repeated blocks: `BLOCKS = (Block,)` on any of its modules. Parameter names stay as they are, so
checkpoints load with and without these settings.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from src.errors import UserError


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Every instance of the classes that some module of `model` lists in BLOCKS."""
    classes = tuple({cls for module in model.modules() for cls in getattr(module, "BLOCKS", ())})
    return [module for module in model.modules() if classes and isinstance(module, classes)]


def _blocks_or_refuse(model: nn.Module, setting: str) -> list[nn.Module]:
    blocks = find_blocks(model)
    if not blocks:
        raise UserError(
            f"--{setting} works on a model's blocks and {type(model).__name__} names none: "
            "give its network a line `BLOCKS = (YourBlock,)`"
        )
    return blocks


def checkpoint_activations(model: nn.Module) -> int:
    """Recompute each block's activations in the backward pass; returns how many blocks. Non-reentrant, as DDP needs.

    Raises:
        UserError: the model names no blocks.

    """
    blocks = _blocks_or_refuse(model, "activation_checkpointing")
    for block in blocks:
        block.forward = _recomputed(block)
    return len(blocks)


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def compile_blocks(model: nn.Module) -> int:
    """Compile each block, and a `loss` method beside them (head and loss), in place; returns how many blocks.

    Block by block lets the gradient all-reduce overlap the backward pass, which a whole compiled network does not.

    Raises:
        UserError: the model names no blocks.

    """
    blocks = _blocks_or_refuse(model, "compile")
    for block in blocks:
        block.compile(dynamic=False)
    for module in model.modules():
        loss = getattr(module, "loss", None)
        if getattr(module, "BLOCKS", ()) and callable(loss):
            object.__setattr__(module, "loss", torch.compile(loss, dynamic=False))
    return len(blocks)
