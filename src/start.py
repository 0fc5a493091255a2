"""What a start says about itself: the block at the top of its output, and the command that goes on with its run."""

import os
import shlex
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from src import stopped
from src.errors import UserError
from src.resolution import Resolution, class_name
from src.run import Run

RESUME = "python slurm/jobs.py resume"


def refuse_without_data(command: str, model: LightningModule, data: LightningDataModule | None) -> None:
    """Refuse a command that has no data, before there is a run folder.

    Raises:
        UserError: neither the data module nor the model has the command's loader.

    """
    hook = {"fit": "train", "validate": "val"}.get(command, command) + "_dataloader"
    sources = [source for source in (data, model) if source is not None]
    if not any(is_overridden(hook, source) for source in sources):
        names = " and ".join(type(source).__name__ for source in sources)
        raise UserError(f"{command} needs data, and {names} has no {hook}: give --data my.Data, or write that method")


def task_name(model: LightningModule) -> str:
    """`vision` for src.tasks.vision.VisionModule, the class's name for any other module."""
    path = type(model).__module__.split(".")
    return path[2] if path[:2] == ["src", "tasks"] else type(model).__name__


def strategy_name(strategy: object) -> str:
    """Its name where it has one, else its class and what it was given."""
    if strategy == "auto":
        return "one device, no process group"
    if isinstance(strategy, Namespace):  # as a configuration has it
        given = {key: value for key, value in (strategy.get("init_args") or {}).items() if value not in (None, False)}
        return f"{class_name(strategy)}({', '.join(f'{key}={value}' for key, value in given.items())})"
    return strategy if isinstance(strategy, str) else type(strategy).__name__


def continue_command(argv: list[str], run: Run) -> str:
    """The command that goes on with this run, which is no fresh one then; of a job, the one that submits it again."""
    if stopped.READ_BY_SCRIPT in os.environ:
        return f"{RESUME} {shlex.quote(run.name)}"
    kept, skip = [], False
    for arg in argv:
        option, _, value = arg.partition("=")
        if skip:
            skip = False
        elif option == "--run":
            skip = not value  # the next one is its value
        elif option not in ("--fresh", "--no_fresh"):
            kept.append(arg)
    return shlex.join(["python", "-m", "src.cli", *kept, "--run", run.name])


def with_options(command: str) -> str:
    """A command that goes on with a run, such that options for training can be put behind it."""
    return f"{command} --" if command.startswith(RESUME) else command


def facts(model: LightningModule, here: Resolution, trainer: Trainer, settings: Namespace) -> dict[str, Any]:
    """What manifest.json says beside code and machine."""
    plan = here.plan
    return {
        "task": task_name(model),
        "model": type(model).__qualname__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "global_batch_size": plan.global_batch_size if plan else None,
        "micro_batch_size": plan.micro_batch_size if plan else None,
        "accumulation": trainer.accumulate_grad_batches,
        "precision": here.precision.value,
        "precision_reason": here.precision.reason,
        "strategy": strategy_name(here.strategy),
        "seed_everything": settings.seed_everything,
        "world_size": here.shape.world_size,
    }


def block(
    run: Run, facts: dict[str, Any], here: Resolution, settings: Namespace, saves: str | None, again: str
) -> list[tuple[str, str]]:
    """The lines, as (name, text)."""
    state = f"continues from step {run.step}: {Path(run.checkpoint or '').name}, {run.place}" if run.step else "new"
    if run.checkpoint and not run.step:
        state += f", starts from {run.checkpoint}"
    batch = str(here.plan) if here.plan else f"as {class_name(settings.data or settings.model)}'s loaders say"
    return [
        ("run", f"{run.folder} ({state})"),
        ("task", f"{facts['task']}: {facts['model']}, {facts['parameters'] / 1e6:.2f} M parameters"),
        ("devices", f"{here.shape}, world size {here.shape.world_size}"),
        ("strategy", facts["strategy"]),
        ("precision", f"{here.precision.value} ({here.precision.reason})"),
        ("global batch", batch),
        *([("saves", saves)] if saves else []),
        ("continue", again),
        *(("note", note) for note in here.notes + run.notes),
    ]
