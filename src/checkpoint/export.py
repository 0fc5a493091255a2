"""`export`: the weights of a checkpoint alone, under the names that the plain network has for them."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from src.checkpoint.contents import average_in
from src.checkpoint.entries import Entry, candidates, look, restart_from, run_of, steps_there
from src.checkpoint.files import fault
from src.checkpoint.shards import load
from src.checkpoint.units import size
from src.errors import UserError
from src.files import replacing

FORMATS = (".safetensors", ".pt")
# What wrappers put into the name of every parameter below them.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass
class Wish:
    """What to export, and to where."""

    source: Path  # a run directory or a checkpoint file
    out: Path
    step: int | None = None
    best: bool = False
    prefix: str | None = None  # None: what all names begin with
    force: bool = False
    trained: bool = False  # the optimizer's weights, also where their average is kept


def export(wish: Wish) -> None:
    """Write the weights to `out`, whole or not at all, and say what they are.

    Raises:
        UserError: `out` cannot be, there is no such state, or no such names.

    """
    _check(wish)
    entry = _chosen(wish)
    content = load(entry.path, ("state_dict", "callbacks"))
    if not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{entry.path} holds no state_dict: give a checkpoint that training wrote")
    average = {} if wish.trained else average_in(content)
    named, dropped = _under(_unwrapped(_averaged(content["state_dict"], average)), wish.prefix)
    run = run_of(entry.path)
    facts = {"run": run, "step": str(entry.step), "epoch": str(entry.epoch), "checkpoint": entry.path.name}
    _write(named, wish.out, facts)
    print(
        f"step {entry.step} of run {run} ({entry.path.name}): {len(named)} tensors, {size(wish.out.stat().st_size)}, "
        f"in {wish.out}"
    )
    if average:
        print("it is the average of the weights (EMA), which validation measures; --trained gives the optimizer's own")
    if dropped and wish.prefix is None:
        print(
            f"all names began with {dropped!r}, which is dropped, so that they load into that network itself; "
            "--prefix '' keeps it"
        )
    elif dropped:
        print(f"only what is under {dropped!r}, which is dropped from the names")
    elif wish.prefix is None and len(parts := _first_components(named)) > 1:
        print(f"the names are those of the whole module ({_some(parts)}); --prefix NAME. exports one part of it")


def _check(wish: Wish) -> None:
    """Refuse what cannot be written before anything large is read."""
    if wish.out.suffix not in FORMATS:
        raise UserError(
            f"{wish.out} ends in {wish.out.suffix or 'nothing'!r}; give a name that ends in .safetensors or .pt"
        )
    if wish.out.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise UserError(
            f"{wish.out} needs a package that is not installed: pip install safetensors, "
            f"or give {wish.out.with_suffix('.pt')}, which needs none"
        )
    if wish.out.is_dir():
        raise UserError(f"{wish.out} is a folder; give the name of a file")
    if wish.out.exists() and not wish.force:
        raise UserError(f"{wish.out} exists already and is left as it is; give another name, or --force to replace it")
    if not wish.out.absolute().parent.is_dir():
        raise UserError(f"the folder {wish.out.absolute().parent} does not exist; make it, or give another name")
    if wish.source.is_file() and (wish.best or wish.step is not None):
        raise UserError(f"{wish.source} is a file, so there is no choice: leave out --step and --best, or give a run")


def _chosen(wish: Wish) -> Entry:
    """The state to export; every byte of it has been read."""
    run = wish.source
    if run.is_file():
        fitting = [entry for entry in [look(run)] if entry]
    elif wish.best:
        fitting = [entry for entry in candidates(run) if entry.kind == "best"]
        if not fitting:
            raise UserError(f"run {run.name} keeps no best checkpoint: give --step or neither; {steps_there(run)}")
    elif wish.step is not None:
        fitting = [entry for entry in candidates(run) if entry.step == wish.step]
        if not fitting:
            raise UserError(f"run {run.name} has no checkpoint of step {wish.step}; {steps_there(run)}")
    else:
        found, damaged = restart_from(run)
        print("".join(f"note: {line}\n" for line in damaged), end="")
        if found is None:
            raise UserError(f"run {run.name} has no checkpoint yet: train it first")
        fitting = [entry for entry in [look(found[0])] if entry]
    reasons = {}
    for entry in fitting:
        reason = fault(entry.path)
        if reason is None:
            return entry
        reasons[entry.path] = reason
    said = "; ".join(f"{path} is damaged ({reason})" for path, reason in reasons.items())
    raise UserError(
        f"{said or f'{run}: the checkpoint has just gone'}: give another step, `verify` says which are whole"
    )


def _averaged(weights: dict[str, Any], average: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The weights with their average in the place of what is averaged, in the weights' own type."""
    return {
        name: average[name].to(value.dtype) if name in average and isinstance(value, torch.Tensor) else value
        for name, value in weights.items()
    }


def _unwrapped(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights under the names that a model has without wrappers."""
    names = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in weights}
    if names and all(name.startswith("module.") for name in names.values()):
        names = {old: name.removeprefix("module.") for old, name in names.items()}
    if len(set(names.values())) < len(names):
        twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
        raise UserError(f"with and without a wrapper the checkpoint has {_some(twice)}, so they cannot be unwrapped")
    return {names[old]: value for old, value in weights.items()}


def _under(weights: dict[str, Any], prefix: str | None) -> tuple[dict[str, Any], str]:
    """The weights under a prefix without it, and the prefix: the given one, or the component that all names share."""
    first = _first_components(weights)
    if prefix is None:
        prefix = first[0] if len(first) == 1 and first[0].endswith(".") else ""
    elif prefix and not prefix.endswith("."):
        prefix += "."
    chosen = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not chosen:
        raise UserError(
            f"nothing is under --prefix {prefix!r}; names begin with {_some(first) or 'nothing: no weights'}"
        )
    return chosen, prefix


def _first_components(weights: dict[str, Any]) -> list[str]:
    """What the names begin with: with the dot where more follows, as --prefix takes it."""
    return sorted({name.split(".")[0] + "." * ("." in name) for name in weights})


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "")


def _write(weights: dict[str, Any], out: Path, facts: dict[str, str]) -> None:
    try:
        with replacing(out) as temporary:
            if out.suffix == ".pt":
                torch.save(_copies(weights, share=True), temporary)
            else:
                _write_safetensors(weights, temporary, facts)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise UserError(f"{out} cannot be written ({error}): make room or give another place") from error


def _write_safetensors(weights: dict[str, Any], path: Path, facts: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if others := sorted(name for name, value in weights.items() if not isinstance(value, torch.Tensor)):
        raise UserError(f".safetensors holds tensors alone and {_some(others)} are none: give a name that ends in .pt")
    path.touch()
    mode = path.stat().st_mode  # save_file would let nobody but the owner read it
    try:
        # Tied weights are there under each of their names, without which they would not load with strict=True.
        save_file(_copies(weights, share=False), path, metadata={"format": "pt", **facts})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def _copies(weights: dict[str, Any], *, share: bool) -> dict[str, Any]:
    """Contiguous copies of the tensors, without the rest of a storage that they are a view of; tied ones stay tied."""
    made: dict[Any, torch.Tensor] = {}
    copies: dict[str, Any] = {}
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            copies[name] = value
            continue
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if share and value.numel() else name
        if place not in made:
            made[place] = value.detach().clone(memory_format=torch.contiguous_format)
        copies[name] = made[place]
    return copies
