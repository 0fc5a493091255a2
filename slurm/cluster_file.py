"""Read a cluster file: YAML in, values out, or one line that says what is allowed."""

import os
import re
import shlex
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import yaml

from slurm import nccl, times
from slurm.errors import LaunchError
from src.engine.config import read_config
from src.engine.errors import UserError
from src.engine.secret import SECRET
from src.engine.text import nearest

PROJECT = "project.yaml"
NULL = ("null", "~")  # how YAML spells "no value"
MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")
NEEDS = {
    "account": "sacctmgr show assoc user=$USER lists yours",
    "partition": "sinfo -s lists them",
}


@dataclass(frozen=True)
class Form:
    """How a value is written: a pattern for all of it, the same in words, and what makes a value of the text."""

    pattern: str
    words: str
    read: Callable[[str], Any] = str


Accelerator = Annotated[str, Form("gpu|cpu", "gpu or cpu")]
GpuRequest = Annotated[str, Form("gpus-per-node|gres", "gpus-per-node or gres")]
Need = Annotated[str, Form("account|partition", "account or partition")]
Line = Annotated[str, Form(".+", "one line of text")]
Word = Annotated[str, Form(r"\S+", "one word without spaces")]
Command = Annotated[list[str], Form(".+", "a command, such as apptainer exec --nv image.sif", shlex.split)]
# Slurm takes a bare number for megabytes, and nobody who writes `64` means those.
Memory = Annotated[str, Form("0|[1-9][0-9]*[KMGT]", "a size with its unit, such as 64G, or 0 for the whole node")]
# A relative path would mean another folder in a job.
Absolute = Annotated[str, Form("[/~$].*", "an absolute path (~ and $VARIABLES may be in it)")]
Option = Annotated[str, Form(r"--[a-z][a-z-]+(=\S.*)?", "an option of sbatch, --name=value or --name")]
Count = Annotated[int, Form("[1-9][0-9]*", "a whole number from 1 up", int)]
Price = Annotated[float, Form("[0-9]+([.][0-9]+)?", "a number from 0 up", float)]
Capability = Annotated[str, Form("[0-9]+[.][0-9]", "a compute capability such as 8.0")]
Limit = Annotated[timedelta, Form(".+", times.FORMS, times.time_limit)]


@dataclass(frozen=True)
class Gpu:
    """What a card holds and computes; precision is chosen by its capability."""

    memory_gib: Count
    capability: Capability


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A site. Each field but the last two is a key of its file, written as its type says; None leaves it to Slurm."""

    accelerator: Accelerator  # what the Trainer computes on
    gpu_request: GpuRequest | None = None  # None: asks for no GPUs
    gpu_type: Word | None = None  # Slurm's name for the card, as in gres=gpu:volta:2; None: any
    gpu: Word | None = None  # the card, an entry of `gpus`
    gpus_per_node: Count  # what --nodes alone takes of each; on a CPU, processes
    cpus_per_gpu: Count  # with one process per GPU this is --cpus-per-task
    mem: Memory | None = None  # main memory per node; "0" is all of it
    mem_per_cpu: Memory | None = None
    mem_per_gpu: Memory | None = None
    time: Limit
    needs: tuple[Need, ...] = ()  # what sbatch may refuse to go without
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
    nccl: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # nvlink, infiniband -> environment
    name: str = ""
    files: tuple[str, ...] = ()  # what was read, the file that counts most last

    @property
    def warnings(self) -> list[str]:
        """One line for each of NCCL's variables that does nothing or harms."""
        return [
            f"{self.files[-1]}: nccl.{section}.{name}: {value}: {warning}"
            for section, variables in self.nccl.items()
            for name, value in variables.items()
            for warning in nccl.warnings(name, value)
        ]

    def missing(self) -> str | None:
        """Return one line on the account or partition that this site needs and nobody has set."""
        keys = [key for key in self.needs if getattr(self, key) is None]
        if not keys:
            return None
        hints = "; ".join(NEEDS[key] for key in keys)
        lines = " and ".join(f"{key}:" for key in keys)
        return (
            f"cluster {self.name} needs {' and '.join(keys)}: set {lines} in {PROJECT} (with cluster: {self.name}) or "
            f"in {self.files[-1]} ({hints})"
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
for not_a_key in ("gpus", "nccl", "name", "files"):
    del KEYS[not_a_key]
KEYS |= {f"gpus.*.{name}": kind for name, kind in typing.get_type_hints(Gpu, include_extras=True).items()}
KEYS |= {f"nccl.{section}.*": Line for section in nccl.SECTIONS}


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by dotted name."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        found |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def read_file(root: Path, file: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one file by dotted name; those set to null are None, those left empty are absent.

    `kinds` has each key's annotation, an optional Form or a tuple of one; a `*` in a key stands for any name.
    """
    try:
        # Keep values as they were typed: to YAML 1.1, 2:59:00 is the number 10740.
        content = read_config(str(root / file), file, yaml.BaseLoader)
    except UserError as error:
        raise LaunchError(str(error)) from error
    values: dict[str, Any] = {}
    for key, value in flatten(content).items():
        if value == "":
            continue
        kind = next((kinds[known] for known in kinds if fnmatchcase(key, known)), None)
        if kind is None:
            raise LaunchError(f"{file}: unknown key {key!r}{nearest(key, kinds)}; the keys here are {', '.join(kinds)}")
        try:
            values[key] = None if value in NULL else read_value(value, kind)
        except ValueError as error:
            raise LaunchError(f"{file}: {key}: {error}") from None
    return values


def read_value(value: object, kind: Any) -> Any:
    """Return the value that a text has as this kind; a ValueError says what it got and what is allowed."""
    if type(None) in typing.get_args(kind):  # X | None
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"got {value!r:.60}; expected a list")
        return tuple(read_value(item, typing.get_args(kind)[0]) for item in value)
    if isinstance(value, str) and SECRET.search(value):  # it would stand in scripts and logs; nor is it repeated here
        raise ValueError(
            "a key, token or password in clear; keep it in a file that only you can read, and let a line of `setup` "
            "read that: export MY_TOKEN=$(cat ~/.my_token)"
        )
    form: Form = typing.get_args(kind)[1]
    if not isinstance(value, str) or not value.isprintable() or not re.fullmatch(form.pattern, value.strip()):
        raise ValueError(f"got {value!r:.60}; expected {form.words}")
    return form.read(value.strip())
