"""Tell by their names what training has saved, and after how many steps. Without PyTorch, for the launcher."""

import re
from pathlib import Path

# What training itself saves under `checkpoints/`. A ModelCheckpoint of the user's writes there too, under other names.
OURS = re.compile(r"(best-)?step=(\d{8,})")


def kind_by_name(path: Path) -> str:
    """Return `newest`, `best`, or `other` for files of anybody else, which are neither deleted nor counted as ours."""
    name = OURS.fullmatch(path.stem) if path.suffix == ".ckpt" else None
    return "other" if name is None else "best" if name[1] else "newest"


def ours(folder: Path, kind: str) -> list[Path]:
    """Return what training has saved of this kind, fewest steps first."""
    return sorted((path for path in folder.glob("*.ckpt") if kind_by_name(path) == kind), key=step_in_name)


def moved_aside(folder: Path) -> list[Path]:
    """Return what training has saved and somebody has moved to a folder in `folder`, under a number more at times."""
    return [path for path in sorted(folder.glob("*/*.ckpt")) if OURS.match(path.stem)]


def step_in_name(path: Path) -> int:
    """Return the step in the name of a file of ours."""
    name = OURS.fullmatch(path.stem)
    assert name is not None
    return int(name[2])
