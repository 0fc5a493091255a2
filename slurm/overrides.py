"""What stands behind `--`, and what a grid adds to it: options of `src.cli` that the launcher has to look at."""

import re
from collections.abc import Mapping, Sequence

from slurm.errors import LaunchError


def take_run(overrides: Sequence[str], name: str | None) -> tuple[list[str], str | None, list[str]]:
    """Take `--run NAME` as --name, as the launcher has to know the run's folder.

    Returns:
        The other overrides, the run's name, and warnings.
    """
    rest: list[str] = []
    found: list[str] = []
    parts = iter(overrides)
    for part in parts:
        if part == "--run":
            found.append(next(parts, ""))
        elif part.startswith("--run="):
            found.append(part.removeprefix("--run="))
        else:
            rest.append(part)
    names = {*found, *([name] if name is not None else [])}
    if len(names) > 1:
        given = [f"--name {name}"] if name is not None else []
        said = " and ".join([*given, *(f"--run {run}" for run in found)])
        raise LaunchError(f"{said} contradict each other: leave all but one of them out")
    return rest, next(iter(names), None), [f"--run {run} is taken as --name {run}" for run in found[:1]]


def refuse_config(overrides: Sequence[str]) -> None:
    """Refuse a --config behind `--`: it would neither travel nor say how many nodes there are. Nor a dictionary."""
    for index, part in enumerate(overrides):
        name, equals, value = part.partition("=")
        value = value if equals else "".join(overrides[index + 1 : index + 2])
        if name in ("--config", "-c"):
            raise LaunchError("--config belongs before `--`: submit.py takes the file along and reads nodes from it")
        if name == "--trainer" and re.search("num_nodes|devices", value):
            raise LaunchError(
                "--trainer {…} holds nodes or devices: give them as --nodes and --gpus-per-node before `--`"
            )


def refuse_fresh(overrides: Sequence[str], settings: Mapping[str, object]) -> None:
    """Refuse --fresh: each restart would take the run's folder, which the launcher makes, for another run's."""
    if settings.get("fresh") or any(part.partition("=")[0] == "--fresh" for part in overrides):
        raise LaunchError(
            "--fresh cannot be submitted, as each restart of the job would begin another run: leave it out, a "
            "submission without --name is a run of its own"
        )


def refuse_secrets(overrides: Sequence[str]) -> None:
    """Refuse what looks like a key, token or password, without repeating it: overrides stand in scripts and logs."""
    from src.secret import secret_option

    if name := secret_option(overrides):
        raise LaunchError(
            f"{name} holds a key, token or password, which would stand in scripts and logs: let the "
            "environment hold it (the job gets yours), or a line of `setup` that reads a file; a word that is no "
            "secret can stand in a --config file"
        )
