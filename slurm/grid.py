"""Grids: `"trainer.max_steps=100,200 model.lr=1e-3,3e-4"` is four runs, as one Slurm array."""

import itertools
from dataclasses import dataclass

from slurm.errors import LaunchError

MOST = 1000  # Slurm's MaxArraySize is 1001 unless a site says otherwise
# The same in all runs of a grid, as one array has one shape; a run's name follows from the grid's.
FIXED = ("trainer.num_nodes", "trainer.devices", "run", "config", "fresh")
CLOSING = {"[": "]", "{": "}", "(": ")", '"': '"', "'": "'"}


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

    Commas separate values, and spaces names, but not in brackets or quotes: `model.sizes=[1,2],[3,4]` has two values.

    Raises:
        LaunchError: it is not of that form, names something twice or what cannot differ, or has too many points.

    """
    form = f'--grid {grid!r}: expected "name=value,value name=value", such as "model.lr=1e-3,3e-4 seed_everything=1,2"'
    axes: dict[str, list[str]] = {}
    for part in filter(None, _split(grid, " \t\n", form)):
        key, equals, text = part.partition("=")
        key = key.removeprefix("--")
        values = [_unquoted(value) for value in _split(text, ",", form)]
        if not equals or not key or not all(values):
            raise LaunchError(form)
        if key in FIXED:
            raise LaunchError(f"--grid {grid!r}: {key} is the same in all runs of a grid: submit one for each value")
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


def _split(text: str, separators: str, form: str) -> list[str]:
    """Parts between separators that stand outside of brackets and quotes."""
    parts, closing = [""], ""
    for letter in text:
        if not closing and letter in separators:
            parts.append("")
            continue
        parts[-1] += letter
        if closing and letter == closing[-1]:
            closing = closing[:-1]
        elif letter in CLOSING and closing[-1:] not in ('"', "'"):
            closing += CLOSING[letter]
    if closing:
        raise LaunchError(f"{form}; {closing[-1]} is missing")
    return parts


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
