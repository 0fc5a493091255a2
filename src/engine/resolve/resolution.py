"""Resolve what depends on the machine, before anything is built: processes, precision, strategy, batches."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment

from src.engine.config import CONFIGS, class_parameters
from src.engine.errors import UserError
from src.engine.resolve.batch import BatchPlan, divisors, plan_batches
from src.engine.resolve.hardware import (
    Shape,
    check_shape,
    local_cards,
    other_card_note,
    process_environment,
    read_shape,
)
from src.engine.resolve.precision import Card, Precision, low_note, resolve_precision


@dataclass
class Resolution:
    """What was resolved; `plan` is None where the data brings its own batch size."""

    shape: Shape
    environment: ClusterEnvironment
    precision: Precision
    strategy: object
    plan: BatchPlan | None
    smaller_batch: list[str]  # options for half of the micro batch in the same global batch; [] where there is none
    notes: list[str] = field(default_factory=list)
    can_shard: bool = False  # the strategy that was built is of src/strategies/, where fsdp can take its place


def resolve(
    config: Namespace,
    files: list[str],
    resolve_strategy: Callable[[object, int], object],
    cards: list[Card] | None = None,
) -> Resolution:
    """Resolve a subcommand's merged configuration.

    Args:
        config: of the subcommand
        files: the --config arguments, whose names label shapes
        resolve_strategy: turns a strategy's setting and the number of processes into what the Trainer is given
        cards: the GPUs of a node of another machine, [] for its CPUs; None: this machine

    """
    trainer = config.trainer
    _refuse_impossible(trainer)
    shape = read_shape(trainer.accelerator, trainer.num_nodes, trainer.devices)
    environment: ClusterEnvironment = LightningEnvironment()
    if cards is None:
        check_shape(shape, files, CONFIGS)
        environment, cards = process_environment(shape), local_cards(shape)
    precision = resolve_precision(trainer.precision, cards)
    strategy = resolve_strategy(trainer.strategy, shape.world_size)
    plan = plan_of(config, shape.world_size)
    if cards and precision.value == "32-true":
        # fp32 matrix products on TF32 units; without this they do not use tensor cores at all.
        torch.set_float32_matmul_precision("high")
    root = "trainer.default_root_dir has no effect: runs go to $RUN_ROOT" if trainer.default_root_dir else None
    notes = [note for note in (other_card_note(files, cards), low_note(precision.value), root) if note]
    return Resolution(shape, environment, precision, strategy, plan, _half(config, plan), notes)


def _refuse_impossible(trainer: Namespace) -> None:
    """Refuse numbers that Lightning accepts and that mean nothing."""
    clip = trainer.gradient_clip_val
    if clip is not None and not clip >= 0:
        raise UserError(f"trainer.gradient_clip_val {clip}: give a number above 0, or null for no clipping")
    for name in ("val_check_interval", "check_val_every_n_epoch"):
        if isinstance(every := trainer[name], int | float) and not every > 0:
            raise UserError(f"trainer.{name} {every}: give a number above 0; limit_val_batches 0 validates nothing")


def _half(config: Namespace, plan: BatchPlan | None) -> list[str]:
    if plan is None or plan.micro_batch_size == 1:
        return []
    fits = [size for size in divisors(plan.share) if size <= plan.micro_batch_size / 2]
    return batch_options(config, plan, fits[-1])


def batch_options(config: Namespace, plan: BatchPlan, micro_batch_size: int) -> list[str]:
    """Return options that set another micro batch and keep the plan's global batch, whatever `config` has."""
    values = {}
    if config.data.init_args.batch_size != _batch_size_default(config.data):
        values["data.batch_size"] = micro_batch_size  # both, as its default counts as not given
    values["micro_batch_size"] = micro_batch_size
    if config.global_batch_size is None:
        values["global_batch_size"] = plan.global_batch_size
    if config.trainer.accumulate_grad_batches != 1:
        values["trainer.accumulate_grad_batches"] = plan.share // micro_batch_size
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def plan_of(config: Namespace, world_size: int) -> BatchPlan | None:
    """Return the batch plan; None where the data brings its own batches and nobody asked for others."""
    default = _batch_size_default(config.data)
    if default is None:
        if asked := asked_batch(config):
            name = class_name(config.data or config.model)
            raise UserError(
                f"{asked} cannot be enforced: {name} brings its own loaders and takes no batch_size: leave it out, or "
                "let the data module take batch_size"
            )
        return None
    micro, own = config.micro_batch_size, config.data.init_args.batch_size
    if own != default:  # set by the user, and the same thing
        if micro not in (None, own):
            raise UserError(f"micro_batch_size {micro} contradicts data.batch_size {own}: leave one of them out")
        micro = own
    if micro is None and config.global_batch_size is None:
        micro = own
    accumulation = config.trainer.accumulate_grad_batches
    accumulation = None if accumulation == 1 else accumulation  # Lightning's default is "not given" here
    return plan_batches(world_size, config.global_batch_size, micro, accumulation)


def asked_batch(config: Namespace) -> str | None:
    """Return the setting that asks for a batch, as "global_batch_size 64"; None where there is none."""
    asked = ((name, config[name]) for name in ("global_batch_size", "micro_batch_size"))
    return next((f"{name} {value}" for name, value in asked if value), None)


def _batch_size_default(data: Namespace | None) -> int | None:
    """Return the default of the data module's batch_size; None where it has no such argument."""
    if data is None or "batch_size" not in (data.get("init_args") or {}):
        return None
    parameter = class_parameters(data.class_path).get("batch_size")
    return parameter.default if parameter and isinstance(parameter.default, int) else 0


def class_name(config: Namespace) -> str:
    """Return the last part of a class_path."""
    return str(config.class_path).rsplit(".", 1)[-1]
