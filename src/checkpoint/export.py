"""`export`: the weights of a checkpoint alone, under the names that the plain network has for them."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.checkpoint.entries import FOLDER, Entry, candidates, known_steps, look, restart_from
from src.engine.checkpoint.contents import average_in
from src.engine.checkpoint.files import fault
from src.engine.checkpoint.shards import load
from src.engine.errors import UserError
from src.engine.files import replacing
from src.engine.text import shorten, size

FORMATS = (".safetensors", ".pt")
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what wrappers add to the name of every parameter below them


def export(
    source: Path,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    prefix: str | None = None,
    force: bool = False,
    trained: bool = False,
) -> None:
    """Write the weights to `out`, whole or not at all, and print what they are."""
    _check(source, out, chosen=best or step is not None, force=force)
    entry = _choose(source, step, best)
    content = load(entry.path, ("state_dict", "callbacks"))
    if not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{entry.path} holds no state_dict: give a checkpoint that training wrote")
    average = {} if trained else average_in(content)
    named = {
        _unwrapped(name): average[name].to(value.dtype) if name in average else value
        for name, value in content["state_dict"].items()
    }
    weights, dropped = _under(named, prefix)
    run = entry.path.parent.parent if entry.path.parent.name == FOLDER else entry.path.parent
    facts = {"run": run.name, "step": str(entry.step), "epoch": str(entry.epoch), "checkpoint": entry.path.name}
    _write(weights, out, facts)
    print(
        f"step {entry.step} of run {run.name} ({entry.path.name}): {len(weights)} tensors, "
        f"{size(out.stat().st_size)}, in {out}"
    )
    if average:
        print("it is the average of the weights (EMA), which validation measures; --trained gives the optimizer's own")
    if dropped and prefix is None:
        print(f"all names began with {dropped!r}, which is dropped; --prefix '' keeps it")


def _check(source: Path, out: Path, *, chosen: bool, force: bool) -> None:
    """Refuse what cannot be done before anything large is read."""
    if out.suffix not in FORMATS:
        raise UserError(f"{out} ends in {out.suffix or 'nothing'!r}; give a name that ends in .safetensors or .pt")
    if out.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise UserError(f"{out} needs `pip install safetensors`; {out.with_suffix('.pt')} needs no package")
    if out.exists() and not force:
        raise UserError(f"{out} exists already and is left as it is; give another name, or --force to replace it")
    if source.is_file() and chosen:
        raise UserError(f"{source} is a file, so there is no choice: leave out --step and --best, or give a run")


def _choose(source: Path, step: int | None, best: bool) -> Entry:
    """Return the checkpoint to export, after every byte of it has been read."""
    wanted = "best checkpoint" if best else "checkpoint yet" if step is None else f"checkpoint of step {step}"
    if source.is_file():
        paths = [source]
    elif best or step is not None:
        known = candidates(source)
        paths = [entry.path for entry in known if (entry.kind == "best" if best else entry.step == step)]
    else:
        newest, damaged = restart_from(source)
        print("".join(f"note: {line}\n" for line in damaged), end="")
        paths = [] if newest is None else [newest[0]]
    if not paths:
        raise UserError(f"run {source.name} has no {wanted}; {known_steps(source)}")
    for path in paths:
        reason = fault(path)
        if reason is None and (entry := look(path)):
            return entry
    raise UserError(f"{path} is damaged ({reason}): give another step, `verify` says which are whole")


def _unwrapped(name: str) -> str:
    """Return the name that a weight has in the model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _under(weights: dict[str, Any], prefix: str | None) -> tuple[dict[str, Any], str]:
    """Return the weights under a prefix, without it, and the prefix: the given one, or what all names begin with."""
    first = sorted({name.split(".")[0] + "." * ("." in name) for name in weights})
    if prefix is None:
        prefix = first[0] if len(first) == 1 and first[0].endswith(".") else ""
    elif prefix and not prefix.endswith("."):
        prefix += "."
    chosen = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not chosen:
        raise UserError(f"nothing is under --prefix {prefix!r}; names begin with {shorten(', '.join(first), 300)}")
    return chosen, prefix


def _write(weights: dict[str, Any], out: Path, facts: dict[str, str]) -> None:
    try:
        with replacing(out) as temporary:
            if out.suffix == ".pt":
                torch.save(weights, temporary)  # tied weights are stored once
            else:
                _write_safetensors(weights, temporary, facts)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise UserError(f"{out} cannot be written ({error}): make room or give another place") from error


def _write_safetensors(weights: dict[str, Any], path: Path, facts: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise UserError(f".safetensors holds tensors alone, and {others[0]} is none: give a name that ends in .pt")
    mode = path.stat().st_mode  # save_file would let nobody but the owner read it
    try:
        # Tied weights are there under each of their names, without which they would not load with strict=True.
        copies = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
        save_file(copies, path, metadata={"format": "pt", **facts})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)
