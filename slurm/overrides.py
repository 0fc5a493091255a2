"""What stands behind `--`, and what a grid adds to it: options of `src.cli` that the launcher has to look at."""

import re
from collections.abc import Mapping, Sequence

from slurm.errors import LaunchError


def refuse_misplaced(overrides: Sequence[str]) -> None:
    """Refuse a --run or --config behind `--`, where the launcher does not see it, and nodes inside a dictionary."""
    for index, part in enumerate(overrides):
        name, equals, value = part.partition("=")
        value = value if equals else "".join(overrides[index + 1 : index + 2])
        if name == "--run":
            raise LaunchError("--run belongs before `--`, as --name: the launcher has to know the run's folder")
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
    from src.engine.secret import secret_option

    if name := secret_option(overrides):
        raise LaunchError(
            f"{name} holds a key, token or password, which would stand in scripts and logs: let the "
            "environment hold it (the job gets yours), or a line of `setup` that reads a file; a word that is no "
            "secret can stand in a --config file"
        )
