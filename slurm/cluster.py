"""One Slurm site, read from configs/clusters/<name>.yaml, with project.yaml and your own mine.yaml laid over it.

    python slurm/cluster.py [NAME]      # what a job would ask for

Which site: the NAME given, else configs/clusters/mine.yaml, else `cluster:` in project.yaml, else `local`.
mine.yaml is yours alone (git ignores it). Starting with `base: NAME` it needs only the keys that differ there;
`constraint: null` takes away what the base sets (single keys; of a table, name the entry).
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, Python puts slurm/ on the path, where its files would shadow others' modules
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

from slurm import nccl, syntax
from slurm.errors import LaunchError, Parser

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "project.yaml"
MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")
# What sbatch may refuse to go without: how it is said, and what lists the values.
NEEDS = {
    "account": ("an account", "sacctmgr show assoc user=$USER lists yours"),
    "partition": ("a partition", "sinfo -s lists them"),
}


def _setting(read: syntax.Reader, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class Gpu:
    """What a card holds and computes."""

    memory_gib: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A site. Each field with a reader is a key of its file; None leaves the matter to Slurm."""

    name: str
    accelerator: str = _setting(syntax.gpu_or_cpu)  # what the Trainer computes on
    gpu_request: str | None = _setting(syntax.gpu_request, None)  # None: asks for no GPUs
    gpu_type: str | None = _setting(syntax.word, None)  # Slurm's name for the card, as in gres=gpu:volta:2; None: any
    gpu: str | None = _setting(syntax.word, None)  # the card, an entry of `gpus`
    gpus_per_node: int = _setting(syntax.count)  # what --nodes alone takes of each; on a CPU, processes
    cpus_per_gpu: int = _setting(syntax.count)  # with one process per GPU this is --cpus-per-task
    mem: str | None = _setting(syntax.node_memory, None)  # main memory per node; "0" is all of it
    mem_per_cpu: str | None = _setting(syntax.memory, None)
    mem_per_gpu: str | None = _setting(syntax.memory, None)
    time: timedelta = _setting(syntax.time_limit)  # noqa: RUF009 it makes a field
    needs: tuple[str, ...] = _setting(syntax.choices(*NEEDS), ())
    account: str | None = _setting(syntax.word, None)
    partition: str | None = _setting(syntax.word, None)
    qos: str | None = _setting(syntax.word, None)
    constraint: str | None = _setting(syntax.word, None)
    reservation: str | None = _setting(syntax.word, None)
    exclude: str | None = _setting(syntax.word, None)  # nodes, as in n[01-03],n07
    mail: str | None = _setting(syntax.word, None)  # where Slurm writes when a job ends or fails
    container: str | None = _setting(syntax.command, None)  # in front of python: apptainer exec --nv /path/image.sif
    sbatch: tuple[str, ...] = _setting(syntax.sbatch_options, ())  # what has no key here: --wckey=x, --exclusive
    scratch: str | None = _setting(syntax.path, None)  # a folder that all nodes share
    setup: tuple[str, ...] = _setting(syntax.shell_lines, ())  # run before training: module load, source, export
    cost_per_gpu_hour: float | None = _setting(syntax.price, None)  # in whatever the site bills
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    nccl: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # nvlink, infiniband -> environment
    warnings: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # what was read, the file that counts most last
    where: str = ""  # the files in which a missing account or partition can be set

    def missing(self) -> str | None:
        """One line on the account or partition that this site needs and nobody has set."""
        keys = [key for key in self.needs if getattr(self, key) is None]
        if not keys:
            return None
        what, hints = (" and ".join(NEEDS[key][0] for key in keys), "; ".join(NEEDS[key][1] for key in keys))
        return (
            f"cluster {self.name} needs {what}: set {' and '.join(f'{key}:' for key in keys)} in {self.where} ({hints})"
        )

    def scratch_folder(self) -> Path | None:
        """`scratch` with ~ and variables filled in, as they are for the user who submits.

        Raises:
            LaunchError: a variable in it is not set here.

        """
        if self.scratch is None:
            return None
        folder = os.path.expanduser(os.path.expandvars(self.scratch))
        if "$" in folder or not os.path.isabs(folder):
            raise LaunchError(f"cluster {self.name}: scratch: {self.scratch!r} names something not set here")
        return Path(folder)


READERS = {entry.name: entry.metadata["read"] for entry in fields(Cluster) if entry.metadata}
REQUIRED = [entry.name for entry in fields(Cluster) if entry.metadata and entry.default is MISSING]
SITE: syntax.Schema = {
    **READERS,
    "gpus": {"*": {"memory_gib": syntax.count, "capability": syntax.capability}},
    "nccl": {section: {"*": syntax.text} for section in nccl.SECTIONS},
}


def load_cluster(name: str | None = None, root: Path = ROOT) -> Cluster:
    """Read the site that `name`, mine.yaml or project.yaml chooses, else `local`.

    project.yaml's account and partition belong to the cluster named there: they lie over that cluster's file, whichever
    way it was chosen, and over no other's. mine.yaml lies over both.

    Raises:
        LaunchError: a file is missing or wrong. A missing account is no error here: ask `Cluster.missing()`.

    """
    names = sorted(file.stem for file in (root / "configs/clusters").glob("[!.]*.yaml"))
    project = _read_project(root, names)
    own = project.get("cluster")
    chosen = name if name is not None else "mine" if "mine" in names else own or "local"
    _check_name(chosen, names, "cluster")
    is_mine = chosen == "mine"
    file = _file(chosen)
    layers = [(file, syntax.read_file(root, file, {"base": syntax.word, **SITE} if is_mine else SITE))]
    base = layers[0][1].pop("base", None)
    if base is not None:
        _check_name(base, [other for other in names if other != "mine"], f"{file}: base")
        layers.insert(0, (_file(base), syntax.read_file(root, _file(base), SITE)))
    given = {key: value for key, value in project.items() if key in NEEDS}
    is_own = own is not None and own in (chosen, base)
    if is_own:
        layers.insert(-1 if is_mine else 1, (PROJECT, given))
    where = [_file("mine" if name is None else chosen)]
    if is_own or not is_mine:
        where.insert(0, PROJECT if is_own else f"{PROJECT} (with cluster: {chosen})")
    settings: dict[str, Any] = {}
    for _, values in layers:
        settings = _lay_over(settings, values)
    _check(settings, file)
    settings |= {"gpus": _gpus(settings.get("gpus", {}), file), "nccl": settings.get("nccl", {})}
    notes = [f"{PROJECT}: {key}: not used, `cluster:` does not say whose it is" for key in given if own is None]
    notes += [note for place, values in layers for note in _nccl_notes(place, values, settings["nccl"])]
    files = tuple(place for place, _ in layers)
    return Cluster(name=base or chosen, **settings, warnings=tuple(notes), files=files, where=" or ".join(where))


def _read_project(root: Path, names: list[str]) -> dict[str, str]:
    """Return what project.yaml sets; nothing where the file is missing."""
    if not (root / PROJECT).exists():
        return {}
    values = syntax.read_file(root, PROJECT, dict.fromkeys(("task", "cluster", *NEEDS), syntax.word))
    project = {key: value for key, value in values.items() if value is not None}
    if "cluster" in project:
        _check_name(project["cluster"], names, f"{PROJECT}: cluster")
    return project


def _file(name: str) -> str:
    return f"configs/clusters/{name}.yaml"


def _check_name(name: str, names: list[str], place: str) -> None:
    if name not in names:
        allowed = f"the name of a file in configs/clusters ({', '.join(names) or 'it has none'})"
        raise LaunchError(f"{place}: {syntax.refusal(name, allowed)}{syntax.nearest(name, names)}")


def _lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, `above` on top and tables entry by entry; None takes away."""
    # Slurm takes one form of memory: setting another one on top replaces the one below.
    replaced = MEMORY if any(above.get(form) for form in MEMORY) else ()
    merged = {key: value for key, value in below.items() if key not in replaced}
    for key, value in above.items():
        merged[key] = _lay_over(merged.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}


def _gpus(table: Mapping[str, Mapping[str, Any]], file: str) -> dict[str, Gpu]:
    for card, row in table.items():
        for entry in fields(Gpu):
            if row and entry.name not in row:
                raise LaunchError(f"{file}: gpus.{card}: {entry.name} is not set")
    return {card: Gpu(**row) for card, row in table.items() if row}


def _nccl_notes(file: str, values: Mapping[str, Any], used: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Refuse a variable that does not belong into its section; return warnings about those that are in use."""
    notes = []
    for section, variables in values.get("nccl", {}).items():
        for name, value in variables.items():
            if value is not None and (refusal := nccl.refusal(section, name)):
                raise LaunchError(f"{file}: nccl.{section}.{name}: {refusal}")
            if value is not None and used[section].get(name) == value:
                notes += [f"{file}: nccl.{section}.{name}: {value}: {w}" for w in nccl.warnings(section, name, value)]
    return notes


def _check(settings: Mapping[str, Any], file: str) -> None:
    """What only the whole can show; `file` is the one to mend."""
    absent = [key for key in REQUIRED if key not in settings]
    if absent:
        start = "; or start the file with `base: NAME`" if file == _file("mine") else ""
        raise LaunchError(f"{file}: not set: {', '.join(absent)}{start}")
    forms = [form for form in MEMORY if form in settings]
    if len(forms) != 1:
        raise LaunchError(f"{file}: set exactly one of {', '.join(MEMORY)}; got {' and '.join(forms) or 'none'}")
    if settings["accelerator"] == "gpu" and "gpu_request" not in settings:
        raise LaunchError(f"{file}: accelerator gpu needs gpu_request: gpus-per-node or gres")
    card = settings.get("gpu")
    if card is not None and card not in settings["gpus"]:
        cards = list(settings["gpus"])
        allowed = f"an entry of gpus: ({', '.join(cards) or 'it has none'})"
        raise LaunchError(f"{file}: gpu: {syntax.refusal(card, allowed)}{syntax.nearest(card, cards)}")


def describe(cluster: Cluster) -> list[str]:
    """Return the site as aligned lines of key and value."""
    rows = [("cluster", cluster.name), ("read from", ", then ".join(cluster.files))]
    for key in READERS:
        value = getattr(cluster, key)
        if key in cluster.needs and value is None:
            rows.append((key, "not set, and needed"))
        elif isinstance(value, timedelta):
            rows.append((key, syntax.format_time(value)))
        elif isinstance(value, tuple):
            rows += [(key, line) for line in value]
        elif value is not None:
            rows.append((key, str(value)))
    for card, gpu in cluster.gpus.items():
        text = f"{gpu.memory_gib} GiB, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        rows.append((f"gpus.{card}", text))
    for section, variables in cluster.nccl.items():
        rows += [(f"nccl.{section}", f"{name}={setting}") for name, setting in variables.items()]
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
    lines = describe(cluster) + [f"warning: {warning}" for warning in cluster.warnings]
    print("\n".join(lines), flush=True)
    if missing := cluster.missing():
        print(f"error: {missing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
