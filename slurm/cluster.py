"""One Slurm site, read from configs/clusters/<name>.yaml, with project.yaml and your own mine.yaml laid over it.

    python slurm/cluster.py [NAME]      # what a job would ask for

Which site: the NAME given, else configs/clusters/mine.yaml, else `cluster:` in project.yaml, else `local`.
mine.yaml is yours alone (git ignores it). Starting with `base: NAME` it needs only the keys that differ there;
`constraint: null` takes away what the base sets (single keys; of a table, name the entry).
"""

import dataclasses
import os
import sys
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

if not __package__:  # run as a script, Python puts slurm/ on the path, where its files would shadow others' modules
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

from slurm import nccl, times
from slurm.cluster_file import (
    Absolute,
    Capability,
    Command,
    Count,
    Limit,
    Line,
    Memory,
    NodeMemory,
    Option,
    Price,
    Word,
    nearest,
    read_file,
)
from slurm.errors import LaunchError, Parser

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "project.yaml"
MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")
NEEDS = {
    "account": "sacctmgr show assoc user=$USER lists yours",
    "partition": "sinfo -s lists them",
}


@dataclass(frozen=True)
class Gpu:
    """What a card holds and computes; precision is chosen by its capability."""

    memory_gib: Count
    capability: Capability

    def __str__(self) -> str:
        return f"{self.memory_gib} GiB, compute capability {'.'.join(map(str, self.capability))}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A site. Each field but the last two is a key of its file, written as its type says; None leaves it to Slurm."""

    accelerator: Literal["gpu", "cpu"]  # what the Trainer computes on
    gpu_request: Literal["gpus-per-node", "gres"] | None = None  # None: asks for no GPUs
    gpu_type: Word | None = None  # Slurm's name for the card, as in gres=gpu:volta:2; None: any
    gpu: Word | None = None  # the card, an entry of `gpus`
    gpus_per_node: Count  # what --nodes alone takes of each; on a CPU, processes
    cpus_per_gpu: Count  # with one process per GPU this is --cpus-per-task
    mem: NodeMemory | None = None  # main memory per node; "0" is all of it
    mem_per_cpu: Memory | None = None
    mem_per_gpu: Memory | None = None
    time: Limit
    needs: tuple[Literal["account", "partition"], ...] = ()  # what sbatch may refuse to go without
    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    exclude: Word | None = None  # nodes, as in n[01-03],n07
    mail: Word | None = None  # where Slurm writes when a job ends or fails
    container: Command | None = None  # in front of python: apptainer exec --nv /path/image.sif
    sbatch: tuple[Option, ...] = ()  # what has no key here: --wckey=x, --exclusive
    scratch: Absolute | None = None  # a folder that all nodes share
    setup: tuple[Line, ...] = ()  # run before training: module load, source, export
    cost_per_gpu_hour: Price | None = None  # in whatever the site bills
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    nccl: Mapping[Literal["nvlink", "infiniband"], Mapping[str, Line]] = field(
        default_factory=dict
    )  # nvlink, infiniband -> environment
    name: str = ""
    files: tuple[str, ...] = ()  # what was read, the file that counts most last

    @property
    def warnings(self) -> list[str]:
        """One line for each of NCCL's variables that does nothing or harms."""
        return [
            f"{self.files[-1]}: nccl.{section}.{name}: {value}: {warning}"
            for section, variables in self.nccl.items()
            for name, value in variables.items()
            for warning in nccl.warnings(section, name, value)
        ]

    def missing(self) -> str | None:
        """Return one line on the account or partition that this site needs and nobody has set."""
        keys = [key for key in self.needs if getattr(self, key) is None]
        if not keys:
            return None
        hints = "; ".join(NEEDS[key] for key in keys)
        settings = " and ".join(f"{key}:" for key in keys)
        return (
            f"cluster {self.name} needs {' and '.join(keys)}: set {settings} in {PROJECT} (with cluster: {self.name}) "
            f"or in {self.files[-1]} ({hints})"
        )

    def scratch_folder(self) -> Path | None:
        """Return `scratch` with ~ and variables filled in, as they are for the user who submits."""
        if self.scratch is None:
            return None
        folder = os.path.expanduser(os.path.expandvars(self.scratch))
        if "$" in folder or not os.path.isabs(folder):
            raise LaunchError(f"cluster {self.name}: scratch: {self.scratch!r} names something not set here")
        return Path(folder)


KEYS = typing.get_type_hints(Cluster, include_extras=True)
del KEYS["name"], KEYS["files"]
OF_PROJECT = {"task": Word, "cluster": Word, **{key: KEYS[key] for key in NEEDS}}
REQUIRED = [entry.name for entry in dataclasses.fields(Cluster) if entry.default is entry.default_factory is MISSING]


def load_cluster(name: str | None = None, root: Path = ROOT) -> Cluster:
    """Read the site that `name`, mine.yaml or project.yaml chooses, else `local`.

    project.yaml's account and partition belong to the cluster named there: they lie over that cluster's file, whichever
    way it was chosen, and over no other's. mine.yaml lies over both. A missing account is no error here: ask
    `Cluster.missing()`.
    """
    names = sorted(file.stem for file in (root / "configs/clusters").glob("[!.]*.yaml"))
    project = read_file(root, PROJECT, OF_PROJECT) if (root / PROJECT).exists() else {}
    own = project.get("cluster")
    if own is not None:
        _check_name(own, names, f"{PROJECT}: cluster")
    chosen = name if name is not None else "mine" if "mine" in names else own or "local"
    _check_name(chosen, names, "cluster")
    file = _file(chosen)
    layers = [(file, read_file(root, file, {"base": Word, **KEYS} if chosen == "mine" else KEYS))]
    base = layers[0][1].pop("base", None)
    if base is not None:
        _check_name(base, [other for other in names if other != "mine"], f"{file}: base")
        layers.insert(0, (_file(base), read_file(root, _file(base), KEYS)))
    if own is not None and own in (chosen, base):
        of_project = {key: project[key] for key in NEEDS if project.get(key) is not None}
        layers.insert(-1 if chosen == "mine" else 1, (PROJECT, of_project))
    settings: dict[str, Any] = {}
    for _, values in layers:
        settings = _lay_over(settings, values)
    _check(settings, file)
    settings["gpus"] = {card: Gpu(**row) for card, row in settings.get("gpus", {}).items()}
    return Cluster(**settings, name=base or chosen, files=tuple(file for file, _ in layers if file != PROJECT))


def _file(name: str) -> str:
    return f"configs/clusters/{name}.yaml"


def _check_name(name: str, names: list[str], place: str) -> None:
    if name not in names:
        allowed = f"the name of a file in configs/clusters ({', '.join(names) or 'it has none'})"
        raise LaunchError(f"{place}: got {name!r}; expected {allowed}{nearest(name, names)}")


def _lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, `above` on top and tables entry by entry; None takes away."""
    # Slurm takes one form of memory: setting another one on top replaces the one below.
    replaced = MEMORY if any(above.get(form) for form in MEMORY) else ()
    merged = {key: value for key, value in below.items() if key not in replaced}
    for key, value in above.items():
        merged[key] = _lay_over(merged.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}


def _check(settings: Mapping[str, Any], file: str) -> None:
    """Refuse what only the whole can show; `file` is the one to mend."""
    if absent := [key for key in REQUIRED if key not in settings]:
        start = "; or start the file with `base: NAME`" if file == _file("mine") else ""
        raise LaunchError(f"{file}: not set: {', '.join(absent)}{start}")
    forms = [form for form in MEMORY if form in settings]
    if len(forms) != 1:
        raise LaunchError(f"{file}: set exactly one of {', '.join(MEMORY)}; got {' and '.join(forms) or 'none'}")
    if settings["accelerator"] == "gpu" and "gpu_request" not in settings:
        raise LaunchError(f"{file}: accelerator gpu needs gpu_request: gpus-per-node or gres")
    cards = settings.get("gpus", {})
    for card, row in cards.items():
        if absent := [entry.name for entry in dataclasses.fields(Gpu) if entry.name not in row]:
            raise LaunchError(f"{file}: gpus.{card}: {absent[0]} is not set")
    card = settings.get("gpu")
    if card is not None and card not in cards:
        allowed = f"an entry of gpus: ({', '.join(cards) or 'it has none'})"
        raise LaunchError(f"{file}: gpu: got {card!r}; expected {allowed}{nearest(card, cards)}")
    for section, variables in settings.get("nccl", {}).items():
        for name in variables:
            if refusal := nccl.refusal(section, name):
                raise LaunchError(f"{file}: nccl.{section}.{name}: {refusal}")


def describe(cluster: Cluster) -> list[str]:
    """Return the site as aligned lines of key and value."""
    rows = [("cluster", cluster.name), ("read from", ", then ".join(cluster.files))]
    for key in KEYS:
        value = getattr(cluster, key)
        if key in cluster.needs and value is None:
            rows.append((key, "not set, and needed"))
        elif isinstance(value, timedelta):
            rows.append((key, times.format_time(value)))
        elif isinstance(value, tuple):
            rows += [(key, line) for line in value]
        elif key == "gpus":
            rows += [(f"gpus.{card}", str(gpu)) for card, gpu in cluster.gpus.items()]
        elif key == "nccl":
            rows += [
                (f"nccl.{section}", f"{n}={v}") for section, table in cluster.nccl.items() for n, v in table.items()
            ]
        elif value is not None:
            rows.append((key, str(value)))
    wide = max(len(key) for key, _ in rows)
    return [f"{key:<{wide}}  {value}" for key, value in rows]


def main(arguments: list[str] | None = None) -> int:
    """Print the site; 2 when something needed is missing or wrong."""
    parser = Parser(description="Show a Slurm site: what a job would ask for.")
    parser.add_argument("name", nargs="?", help="a file in configs/clusters, without .yaml")
    try:
        cluster = load_cluster(parser.parse_args(arguments).name)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*describe(cluster), *(f"warning: {warning}" for warning in cluster.warnings)]), flush=True)
    if missing := cluster.missing():
        print(f"error: {missing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
