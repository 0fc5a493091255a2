"""What a job trains, read from the same YAML files as `src.cli` reads, without PyTorch: shape, batch, name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm.cluster import Cluster
from slurm.errors import LaunchError

SUBCOMMANDS = ("fit", "validate", "test", "predict")


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
        parts = text.split("x")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise LaunchError(f"{text!r} is no shape; expected NODESxGPUS, such as 4x1 for four nodes of one GPU each")
        return Shape(int(parts[0]), int(parts[1]))


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
    from src.engine.config import config_files, read_config, with_defaults
    from src.engine.errors import UserError

    subcommand, rest = "fit", list(overrides)
    if rest and rest[0] in SUBCOMMANDS:
        subcommand = rest.pop(0)
    files = [part for config in configs for part in ("--config", config)]
    try:
        command = with_defaults([subcommand, *files, *rest])
        layers = [read_config(file) for file in config_files(command)]
        own = [read_config(file) for file in configs]
    except UserError as error:
        raise LaunchError(str(error)) from error
    settings: dict[str, Any] = {}
    for layer in layers:
        settings |= _dotted(layer)
    settings |= _options(command)
    return Training(
        subcommand, tuple(configs), tuple(rest), settings, {k: v for layer in own for k, v in _dotted(layer).items()}
    )


def _dotted(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        found |= _dotted(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def _options(command: Sequence[str]) -> dict[str, str]:
    """Return the values of `--name value` and `--name=value` by name; the last one counts."""
    found = {}
    for index, argument in enumerate(command):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument[2:].partition("=")
        following = command[index + 1] if index + 1 < len(command) else ""
        found[name] = value if equals else following
    return found


def given(training: Training, name: str) -> str | None:
    """Return the value of an option behind `--`; None where it is not given."""
    return _options(training.overrides).get(name)


def choose_shape(training: Training, cluster: Cluster, nodes: int | None, gpus: int | None) -> tuple[Shape, list[str]]:
    """Return the shape, and notes: flags come before overrides and configs, these before the cluster's node."""
    given = _options(training.overrides)
    counts, notes = [], []
    for flag, key, value in (("--nodes", "num_nodes", nodes), ("--gpus-per-node", "devices", gpus)):
        name = f"trainer.{key}"
        asked = given.get(name, training.own.get(name))
        count = None if asked is None or str(asked) in ("auto", "-1") else _count(name, asked)
        if value is not None and count is not None and value != count:
            if name in given:
                raise LaunchError(f"{flag} {value} contradicts --{name} {count} behind `--`: leave one of them out")
            notes.append(f"{flag} {value} comes before {name}: {count} of {', '.join(training.configs)}")
        counts.append(count if value is None else value)
    # `--nodes N` alone takes each node whole, whatever a configuration for one node says of it.
    whole = nodes is not None and gpus is None and "trainer.devices" not in given
    asked_gpus = counts[1] if not whole or counts[1] is None else _whole(training, cluster, counts[1], nodes, notes)
    shape = Shape(counts[0] or 1, asked_gpus or cluster.gpus_per_node)
    if cluster.gpu_request and shape.gpus_per_node > cluster.gpus_per_node:
        raise LaunchError(
            f"{shape.gpus_per_node} GPUs per node: a node of cluster {cluster.name} has {cluster.gpus_per_node} "
            f"(gpus_per_node of cluster {cluster.name}); use --nodes and --gpus-per-node, such as "
            f"{_spread(shape.world_size, cluster.gpus_per_node)}"
        )
    return shape, notes


def _whole(training: Training, cluster: Cluster, devices: int, nodes: int | None, notes: list[str]) -> int:
    """Return the GPUs per node where only --nodes is given: a configuration for as many nodes means what it says."""
    if training.own.get("trainer.num_nodes", 1) == nodes:
        return devices
    if devices != cluster.gpus_per_node:
        notes.append(
            f"--nodes {nodes} alone takes nodes whole, {cluster.gpus_per_node} GPUs each; --gpus-per-node {devices} "
            f"would keep trainer.devices of {', '.join(training.configs)}"
        )
    return cluster.gpus_per_node


def _count(name: str, value: Any) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and int(text)):
        raise LaunchError(f"{name}: got {value!r}; a launched job needs a whole number from 1 up")
    return int(text)


def _spread(world_size: int, most: int) -> str:
    """Return options for the same number of GPUs, over nodes that exist."""
    per_node = next(count for count in range(min(most, world_size), 0, -1) if world_size % count == 0)
    return f"--nodes {world_size // per_node} --gpus-per-node {per_node}"


def batch_text(training: Training, world_size: int) -> str:
    """Return `global batch 64 = 4 micro × 1 accumulation × 16 devices`; "" where the data brings its own batches.

    A batch that cannot be spread over so many is refused with those that fit.
    """
    from src.engine.errors import UserError
    from src.engine.resolve.batch import plan_batches

    def number(*names: str) -> int | None:
        texts = [str(training.settings[name]) for name in names if training.settings.get(name) is not None]
        return int(texts[0]) if texts and texts[0].isascii() and texts[0].isdigit() else None

    accumulation = number("trainer.accumulate_grad_batches")
    micro = number("micro_batch_size", "data.batch_size", "data.init_args.batch_size")
    try:
        # 1 is Lightning's default and counts as not given, as it does in training.
        plan = plan_batches(world_size, number("global_batch_size"), micro, None if accumulation == 1 else accumulation)
    except UserError as error:
        raise LaunchError(str(error)) from error
    return f"global batch {plan}" if plan else ""
