"""Read a Slurm site from configs/clusters/<name>.yaml, with project.yaml and your own mine.yaml laid over it.

    python slurm/cluster.py [NAME]      # what a job would ask for

Which site: the NAME given, else configs/clusters/mine.yaml, else `cluster:` in project.yaml, else `local`.
mine.yaml is yours alone (git ignores it). Starting with `base: NAME` it needs only the keys that differ there;
`constraint: null` takes away what the base sets (single keys; of a table, name the entry).
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import MISSING
from datetime import timedelta
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, Python puts slurm/ on the path, where its files would shadow others' modules
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

from slurm import nccl, times
from slurm.cluster_file import KEYS, MEMORY, NEEDS, PROJECT, Cluster, Gpu, Word, flatten, read_file
from slurm.errors import LaunchError, Parser
from src.engine.text import nearest, table

ROOT = Path(__file__).resolve().parent.parent
MINE = "mine"
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
    chosen = name if name is not None else MINE if MINE in names else own or "local"
    _check_name(chosen, names, "cluster")
    file = _file(chosen)
    values = read_file(root, file, {"base": Word, **KEYS} if chosen == MINE else KEYS)
    base = values.pop("base", None)
    files, settings = [file], {}
    if base is not None:
        _check_name(base, [other for other in names if other != MINE], f"{file}: base")
        files = [_file(base), file]
        settings = read_file(root, _file(base), KEYS)
    is_own = own is not None and own in (chosen, base)
    of_project = {key: project[key] for key in NEEDS if is_own and project.get(key) is not None}
    for layer in (of_project, values) if chosen == MINE else (values, of_project):
        if any(layer.get(form) for form in MEMORY):  # Slurm takes one form: another one replaces that of the base
            settings = {key: value for key, value in settings.items() if key not in MEMORY}
        settings |= layer
    tables = _nest({key: value for key, value in settings.items() if value is not None})
    _check(tables, file)
    tables["gpus"] = {card: Gpu(**row) for card, row in tables.get("gpus", {}).items()}
    return Cluster(**tables, name=base or chosen, files=tuple(files))


def _file(name: str) -> str:
    return f"configs/clusters/{name}.yaml"


def _check_name(name: str, names: list[str], place: str) -> None:
    if name not in names:
        allowed = f"the name of a file in configs/clusters ({', '.join(names) or 'it has none'})"
        raise LaunchError(f"{place}: got {name!r}; expected {allowed}{nearest(name, names)}")


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted name as nested tables."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *above, key = name.split(".")
        table = nested
        for part in above:
            table = table.setdefault(part, {})
        table[key] = value
    return nested


def _check(settings: Mapping[str, Any], file: str) -> None:
    """Refuse what only the whole can show; `file` is the one to mend."""
    if absent := [key for key in REQUIRED if key not in settings]:
        raise LaunchError(f"{file}: not set: {', '.join(absent)}; a {MINE}.yaml may begin with `base: NAME` instead")
    forms = [form for form in MEMORY if form in settings]
    if len(forms) != 1:
        raise LaunchError(f"{file}: set exactly one of {', '.join(MEMORY)}; got {' and '.join(forms) or 'none'}")
    if settings["accelerator"] == "gpu" and "gpu_request" not in settings:
        raise LaunchError(f"{file}: accelerator gpu needs gpu_request: gpus-per-node or gres")
    cards = settings.get("gpus", {})
    for card, row in cards.items():
        if len(row) < 2:
            raise LaunchError(f"{file}: gpus.{card}: set both memory_gib and capability")
    card = settings.get("gpu")
    if card is not None and card not in cards:
        allowed = f"an entry of gpus: ({', '.join(cards) or 'it has none'})"
        raise LaunchError(f"{file}: gpu: got {card!r}; expected {allowed}{nearest(card, cards)}")
    for section, variables in settings.get("nccl", {}).items():
        for name in variables:
            if refusal := nccl.refusal(section, name):
                raise LaunchError(f"{file}: nccl.{section}.{name}: {refusal}")


def describe(cluster: Cluster) -> list[str]:
    """Return the site as aligned lines of key and value; what is not set is left out."""
    rows = [("cluster", cluster.name), ("read from", ", then ".join(cluster.files))]
    for key, value in flatten(dataclasses.asdict(cluster)).items():
        if isinstance(value, timedelta):
            value = times.format_time(value)
        if value is not None and key not in ("name", "files"):
            rows += [(key, str(item)) for item in (value if isinstance(value, tuple) else [value])]
    return table(rows).splitlines()


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
