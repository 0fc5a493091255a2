"""Word the lines at the top of a start's output, and the command that resumes its run."""

import os
import shlex
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from src.engine import stopped
from src.engine.errors import UserError
from src.engine.resolve.resolution import Resolution, class_name
from src.engine.run.directory import Run

RESUME = "python slurm/jobs.py resume"


def refuse_without_data(command: str, model: LightningModule, data: LightningDataModule | None) -> None:
    """Refuse a command that has no data, before there is a run folder."""
    hook = {"fit": "train", "validate": "val"}.get(command, command) + "_dataloader"
    sources = [source for source in (data, model) if source is not None]
    if not any(is_overridden(hook, source) for source in sources):
        names = " and ".join(type(source).__name__ for source in sources)
        lack = f"{names} {'have' if len(sources) > 1 else 'has'} no {hook}"
        raise UserError(f"{command} needs data, and {lack}: give --data my.Data, or write that method")


def refuse_missing(command: str, checkpoint: str | None) -> None:
    """Refuse a --ckpt_path that is no file; Lightning would train on, or evaluate, without it."""
    if checkpoint and not Path(checkpoint).is_file():
        use = "is continued by its name alone, --run" if command == "fit" else "has its best: --run NAME"
        raise UserError(f"--ckpt_path {checkpoint}: no such file; a run {use}")


def task_name(model: LightningModule) -> str:
    """Return `vision` for src.tasks.vision.VisionModule, the class's name for any other module."""
    path = type(model).__module__.split(".")
    return path[2] if path[:2] == ["src", "tasks"] else type(model).__name__


def strategy_name(strategy: object) -> str:
    """Return the strategy's name, or the class of an object with what it was given."""
    if strategy == "auto":
        return "one device, no process group"
    if isinstance(strategy, Namespace):  # as a configuration has it
        given = {key: value for key, value in (strategy.get("init_args") or {}).items() if value not in (None, False)}
        return f"{class_name(strategy)}({', '.join(f'{key}={value}' for key, value in given.items())})"
    return strategy if isinstance(strategy, str) else type(strategy).__name__


def resume_command(argv: list[str], run: Run) -> str:
    """Return the command that resumes this run; of a job, the one that submits it again."""
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
    """Return a resume command behind which options of training can be put."""
    return f"{command} --" if command.startswith(RESUME) else command


def finished_text(run: Run, argv: list[str]) -> str:
    """Return what to print where there is nothing to do, with how to train on if the configuration has changed."""
    lines = [f"run {run.name} is finished (step {run.step}), nothing to do: {run.folder}"]
    further = f"rm {shlex.quote(str(run.path / 'DONE'))} && {resume_command(argv, run)}"
    return "\n".join(lines + [f"note: {note}; to train it further: {further}" for note in run.notes])


def manifest_fields(
    model: LightningModule, resolved: Resolution, trainer: Trainer, settings: Namespace
) -> dict[str, Any]:
    """Return what manifest.json holds beside code and machine."""
    plan = resolved.plan
    return {
        "task": task_name(model),
        "model": type(model).__qualname__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "global_batch_size": plan.global_batch_size if plan else None,
        "micro_batch_size": plan.micro_batch_size if plan else None,
        "accumulation": trainer.accumulate_grad_batches,
        "precision": resolved.precision.value,
        "precision_reason": resolved.precision.reason,
        "strategy": strategy_name(resolved.strategy),
        "seed_everything": settings.seed_everything,
        "world_size": resolved.shape.world_size,
    }


def start_lines(
    run: Run, facts: dict[str, Any], resolved: Resolution, settings: Namespace, saves: str | None, resume: str
) -> list[tuple[str, str]]:
    """Return the lines of the start as (name, text)."""
    state = f"continues from step {run.step}: {Path(run.checkpoint or '').name}, {run.place}" if run.step else "new"
    if run.checkpoint and not run.step:
        state += f", starts from {run.checkpoint}"
    plan, shape = resolved.plan, resolved.shape
    return [
        ("run", f"{run.folder} ({state})"),
        ("task", f"{facts['task']}: {facts['model']}, {facts['parameters'] / 1e6:.2f} M parameters"),
        ("devices", f"{shape}, world size {shape.world_size}"),
        ("strategy", facts["strategy"]),
        ("precision", f"{resolved.precision.value} ({resolved.precision.reason})"),
        ("global batch", str(plan) if plan else f"as {class_name(settings.data or settings.model)}'s loaders say"),
        *([("saves", saves)] if saves else []),
        ("continue", resume),
        *(("note", note) for note in resolved.notes + run.notes),
    ]
