"""Expand a grid: `"trainer.max_steps=100,200 model.lr=1e-3,3e-4"` is four runs, as one Slurm array."""

import itertools
import re
from dataclasses import dataclass

import yaml

from slurm.errors import LaunchError

MOST = 1000  # Slurm's MaxArraySize is 1001 unless a site says otherwise
# The same in all runs of a grid, as one array has one shape; a run's name follows from the grid's.
FIXED = ("trainer.num_nodes", "trainer.devices", "run", "config", "fresh")


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
    """Return every combination, the last name varying fastest; runs are called NAME-0, NAME-1, …, all equally long.

    The values of a name are a YAML list without its brackets: `model.sizes=[1,2],[3,4]` has two.
    """
    axes: dict[str, list[str]] = {}
    for axis in re.split(r"\s+(?=(?:--)?\w[\w.]*=)", grid.strip()):
        key, _, text = axis.removeprefix("--").partition("=")
        values = _values(text)
        if not key or not values:
            raise LaunchError(
                f'--grid {grid!r}: expected "name=value,value name=value", such as '
                '"model.lr=1e-3,3e-4 seed_everything=1,2"; close every bracket and quote'
            )
        if key in FIXED:
            raise LaunchError(f"--grid {grid!r}: {key} is the same in all runs of a grid: submit one for each value")
        if key in axes or len(set(values)) < len(values):
            raise LaunchError(f"--grid {grid!r}: {key} has the same {'name' if key in axes else 'value'} twice")
        axes[key] = values
    combinations = list(itertools.product(*axes.values()))
    if len(combinations) > MOST:
        raise LaunchError(f"--grid has {len(combinations)} points; a Slurm array takes {MOST}")
    wide = len(str(len(combinations) - 1))
    return [
        Point(f"{name}-{index:0{wide}}", tuple(zip(axes, values, strict=True)))
        for index, values in enumerate(combinations)
    ]


def _values(text: str) -> list[str]:
    """Return the values as they were typed, without a value's own quotes; [] where this is no list."""
    listed = f"[{text}]"
    try:
        node = yaml.compose(listed, yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(listed):
        return []
    # YAML's own reading of a number, 10740 for 2:59:00, is not what src.cli makes of it.
    return [
        value.value
        if getattr(value, "style", None) in ("'", '"')
        else listed[value.start_mark.index : value.end_mark.index]
        for value in node.value
    ]
