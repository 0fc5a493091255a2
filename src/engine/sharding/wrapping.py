"""Find a model's blocks and change them from outside; the model knows nothing of it.

A model names its repeated blocks: `BLOCKS = (Block,)` on any of its modules. Parameter names stay as they are, so
checkpoints load with and without these settings.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from src.engine.errors import AgreedError, UserError

UNIT = 1_000_000  # parameters; gathering fewer costs more in starting than in sending


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return every instance of the classes that some module of `model` lists in BLOCKS."""
    classes = tuple({cls for module in model.modules() for cls in _listed(module)})
    return [module for module in model.modules() if isinstance(module, classes)]


def _listed(module: nn.Module) -> tuple[type, ...]:
    blocks = getattr(module, "BLOCKS", ())
    if isinstance(blocks, tuple | list) and all(isinstance(cls, type) for cls in blocks):
        return tuple(blocks)
    raise AgreedError(
        f"BLOCKS of {type(module).__name__} is {blocks!r}: list the blocks' classes themselves, BLOCKS = (YourBlock,)"
    )


def find_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules to gather one by one, with their names, inner ones first.

    They are the model's BLOCKS; where it names none, what a Hugging Face model says must not be split; else modules
    with a million parameters or more that are in no smaller such one. A module that shares a parameter with another
    part of the model is left to the root, and what the model has sharded by itself as it is.
    """
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    chosen = find_blocks(model) or [module for module in model.modules() if type(module).__name__ in named]
    chosen = chosen or _by_size(model)
    names = {module: name for name, module in model.named_modules()}
    sharded = {part for module in model.modules() if isinstance(module, FSDPModule) for part in module.modules()}
    units = [unit for unit in reversed(chosen) if unit is not model and unit not in sharded]
    return [(names[unit], unit) for unit in units if not _shares(unit, model)]


def norms_in_fp32(model: nn.Module, device: str) -> list[nn.Module]:
    """Return norms whose kernels refuse weights of 16 bits beside statistics or inputs of 32.

    On GPUs those with running statistics; autocast feeds the others 32 bits there, but not on CPUs.
    """
    kinds = (_NormBase,) if device == "cuda" else (_NormBase, nn.LayerNorm, nn.GroupNorm)
    sharded = {part for module in model.modules() if isinstance(module, FSDPModule) for part in module.modules()}
    norms = [module for module in model.modules() if isinstance(module, kinds) and module not in sharded]
    return [norm for norm in norms if next(norm.parameters(), None) is not None and not _shares(norm, model)]


def _by_size(model: nn.Module) -> list[nn.Module]:
    """Return units by their size, outer ones first.

    Attention reads its projection's weights without calling it, and a list is never called at all.
    """
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return how many parameters are left to what holds `module`."""
        inner = [] if isinstance(module, nn.MultiheadAttention) else list(module.children())
        within = {id(parameter) for child in inner for parameter in child.parameters()}
        own = [parameter for parameter in module.parameters() if id(parameter) not in within]
        left = sum(parameter.numel() for parameter in own) + sum(visit(child) for child in inner)
        if left < UNIT or isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            return left
        units.append(module)
        return 0

    visit(model)
    return units[::-1]


def _shares(unit: nn.Module, model: nn.Module) -> bool:
    inside = {id(parameter) for parameter in unit.parameters()}
    within = set(unit.modules())
    outside = [module for module in model.modules() if module not in within]
    return any(id(parameter) in inside for module in outside for parameter in module.parameters(recurse=False))


def _blocks_or_refuse(model: nn.Module, setting: str) -> list[nn.Module]:
    blocks = find_blocks(model)
    if not blocks:
        raise UserError(
            f"--{setting} works on a model's blocks and {type(model).__name__} names none: "
            "give its network a line `BLOCKS = (YourBlock,)`"
        )
    return blocks


def checkpoint_activations(model: nn.Module) -> int:
    """Recompute each block's activations in the backward pass; return how many blocks. Non-reentrant, as DDP needs."""
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
    """Compile each block, and a `loss` method beside them (head and loss), in place; return how many blocks.

    Block by block lets the gradient all-reduce overlap the backward pass, which a whole compiled network does not.
    """
    blocks = _blocks_or_refuse(model, "compile")
    for block in blocks:
        block.compile(dynamic=False)
    for module in model.modules():
        loss = getattr(module, "loss", None)
        if getattr(module, "BLOCKS", ()) and callable(loss):
            object.__setattr__(module, "loss", torch.compile(loss, dynamic=False))
    return len(blocks)
