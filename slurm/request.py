"""Read what a job trains from the YAML files that `src.cli` reads, without PyTorch: shape, batch, name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm.cluster_file import Cluster, flatten
from slurm.errors import LaunchError
from src.engine.config import SUBCOMMANDS, config_files, read_config, with_defaults
from src.engine.errors import UserError
from src.engine.resolve.batch import plan_batches
from src.engine.secret import secret_option

# Options of `src.cli` that cannot stand behind `--`, where the launcher does not act on them.
REFUSED = {
    "run": "--run belongs before `--`, as --name: the launcher has to know the run's folder",
    "config": "--config belongs before `--`: submit.py takes the file along and reads nodes from it",
    "fresh": "--fresh cannot be submitted, as each restart of the job would begin another run: leave it out, a "
    "submission without --name is a run of its own",
}


@dataclass(frozen=True)
class Shape:
    """Processes of a job, one per GPU: `gpus_per_node` on each of `nodes`."""

    nodes: int
    gpus_per_node: int

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}"

    @staticmethod
    def read(text: str) -> "Shape":
        """Read `4x1`: nodes × GPUs per node."""
        match = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", text)
        if not match:
            raise LaunchError(f"{text!r} is no shape; expected NODESxGPUS, such as 4x1 for four nodes of one GPU each")
        return Shape(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Training:
    """A command for `src.cli`, and what its configuration says."""

    subcommand: str
    configs: tuple[str, ...]  # as given, in order
    overrides: tuple[str, ...]  # as given
    settings: Mapping[str, Any]  # what defaults, task, configs and overrides set, by dotted name
    own: Mapping[str, Any]  # the same of --config files alone

    @property
    def experiment(self) -> str:
        """The last --config's name, else the task's, to name a run by."""
        return Path(self.configs[-1]).stem if self.configs else str(self.settings.get("task") or "run")


def read_training(configs: Sequence[str], overrides: Sequence[str]) -> Training:
    """Read the configuration files of a training command."""
    for name in _options(overrides):
        if name in REFUSED:
            raise LaunchError(REFUSED[name])
    subcommand, rest = "fit", list(overrides)
    if rest and rest[0] in SUBCOMMANDS:
        subcommand = rest.pop(0)
    files = [part for config in configs for part in ("--config", config)]
    settings: dict[str, Any] = {}
    own: dict[str, Any] = {}
    try:
        command = with_defaults([subcommand, *files, *rest])
        for file in config_files(command):
            settings |= flatten(read_config(file))
        for file in configs:
            own |= flatten(read_config(file))
    except UserError as error:
        raise LaunchError(str(error)) from error
    return Training(subcommand, tuple(configs), tuple(rest), settings | _options(command), own)


def refuse_secrets(arguments: Sequence[str]) -> None:
    """Refuse what looks like a key, token or password, without repeating it: arguments stand in scripts and logs."""
    if name := secret_option(arguments):
        raise LaunchError(
            f"{name} holds a key, token or password, which would stand in scripts and logs: let the environment hold "
            "it (the job gets yours), or a line of `setup` that reads a file"
        )


def _options(command: Sequence[str]) -> dict[str, str]:
    """Return the values of `--name value` and `--name=value` by name; the last one counts."""
    found = {}
    for index, argument in enumerate(command):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            found[name] = value if equals else "".join(command[index + 1 : index + 2])
    return found


def given(training: Training, name: str) -> str | None:
    """Return the value of an option behind `--`; None where it is not given."""
    return _options(training.overrides).get(name)


def choose_shape(training: Training, cluster: Cluster, nodes: int | None, gpus: int | None) -> tuple[Shape, list[str]]:
    """Return the shape, and notes: flags come before overrides and configs, these before the cluster's node."""
    asked_nodes = _asked(training, "trainer.num_nodes", nodes, "--nodes")
    asked_gpus = _asked(training, "trainer.devices", gpus, "--gpus-per-node")
    configured = Shape(asked_nodes or 1, asked_gpus or cluster.gpus_per_node)
    if nodes and not gpus and nodes != configured.nodes and not given(training, "trainer.devices"):
        gpus = cluster.gpus_per_node  # `--nodes N` alone takes each node whole
    shape = Shape(nodes or configured.nodes, gpus or configured.gpus_per_node)
    notes = []
    if shape != configured and (asked_nodes or asked_gpus):
        notes = [f"{shape} (nodes x GPUs of each) is used, not {configured} of {', '.join(training.configs)}"]
    if cluster.gpu_request and shape.gpus_per_node > cluster.gpus_per_node:
        raise LaunchError(
            f"{shape.gpus_per_node} GPUs per node: a node of cluster {cluster.name} has {cluster.gpus_per_node} "
            "(gpus_per_node in its file); take more nodes with fewer GPUs of each: --nodes and --gpus-per-node"
        )
    return shape, notes


def _asked(training: Training, name: str, value: int | None, flag: str) -> int | None:
    """Return what overrides or configs ask for; None where they leave it open."""
    option = given(training, name)
    asked = training.own.get(name) if option is None else option
    if str(asked) in ("None", "auto", "-1"):
        return None
    if not re.fullmatch("[1-9][0-9]*", str(asked)):
        raise LaunchError(f"{name}: got {asked!r}; a launched job needs a whole number from 1 up")
    if option and value and value != int(option):
        raise LaunchError(f"{flag} {value} contradicts --{name} {option} behind `--`: leave one of them out")
    return int(str(asked))


def batch_text(training: Training, world_size: int) -> str:
    """Return `global batch 64 = 4 micro × 1 accumulation × 16 devices`; "" where the data brings its own batches.

    A batch that cannot be spread over so many is refused with those that fit.
    """

    def number(*names: str) -> int | None:
        values = [training.settings[name] for name in names if training.settings.get(name) is not None]
        return int(values[0]) if values and str(values[0]).isdecimal() else None

    accumulation = number("trainer.accumulate_grad_batches")
    micro = number("micro_batch_size", "data.batch_size", "data.init_args.batch_size")
    try:
        # 1 is Lightning's default and counts as not given, as it does in training.
        plan = plan_batches(world_size, number("global_batch_size"), micro, None if accumulation == 1 else accumulation)
    except UserError as error:
        raise LaunchError(str(error)) from error
    return f"global batch {plan}" if plan else ""
