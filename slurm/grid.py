"""Grids: `"trainer.max_steps=100,200 model.lr=1e-3,3e-4"` is four runs, as one Slurm array."""

import itertools
import shlex
from dataclasses import dataclass

from slurm.errors import LaunchError

MOST = 1000  # Slurm's MaxArraySize is 1001 unless a site says otherwise


@dataclass(frozen=True)
class Point:
    """One combination."""

    run: str
    settings: tuple[tuple[str, str], ...]  # (name, value)

    @property
    def overrides(self) -> list[str]:
        """As options of `src.cli`."""
        return [part for name, value in self.settings for part in (f"--{name}", value)]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings)


def points(grid: str, name: str) -> list[Point]:
    """Every combination, the last name varying fastest; runs are called NAME-0, NAME-1, …, all equally long.

    Commas separate values unless they stand in brackets or quotes: `model.sizes=[1,2],[3,4]` has two.

    Raises:
        LaunchError: it is not of that form, names something twice, or has too many points.

    """
    form = f'--grid {grid!r}: expected "name=value,value name=value", such as "model.lr=1e-3,3e-4 seed_everything=1,2"'
    try:
        parts = [part for part in shlex.split(grid.replace("[", "'[").replace("]", "]'")) if part]
    except ValueError as error:
        raise LaunchError(form) from error
    axes: dict[str, list[str]] = {}
    for part in parts:
        key, equals, text = part.partition("=")
        key = key.removeprefix("--")
        values = _split(text)
        if not equals or not key or not all(values):
            raise LaunchError(form)
        if key in axes or len(set(values)) < len(values):
            raise LaunchError(f"--grid {grid!r}: {key} has the same {'name' if key in axes else 'value'} twice")
        axes[key] = values
    if not axes:
        raise LaunchError(form)
    combinations = list(itertools.product(*axes.values()))
    if len(combinations) > MOST:
        raise LaunchError(f"--grid has {len(combinations)} points; a Slurm array takes {MOST}")
    wide = len(str(len(combinations) - 1))
    return [
        Point(f"{name}-{index:0{wide}}", tuple(zip(axes, values, strict=True)))
        for index, values in enumerate(combinations)
    ]


def _split(text: str) -> list[str]:
    values, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values
