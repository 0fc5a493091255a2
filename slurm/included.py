"""Files that a snapshot takes along by name, though git does not track them, ignores them or has them elsewhere."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from slurm.errors import LaunchError
from slurm.worktree import shown

OUTSIDE = ".included"  # where files from outside of the project travel
NEVER = (".git", "__pycache__")  # of an included folder: they change by themselves, and no job needs them


def present_in(files: Mapping[str, Path]) -> set[str]:
    """The names of all files and folders in the snapshot."""
    return {*files, *(str(parent) for name in files for parent in PurePath(name).parents)}


def include_path(root: Path, path: Path, files: dict[str, Path], notes: list[str]) -> None:
    """Add to `files` what `path`, a file or a folder, shows; what cannot travel is noted.

    Raises:
        LaunchError: there is no such path, it holds the whole project, or its name is taken.

    """
    given = Path(os.path.abspath(root / path))
    if not given.exists():
        raise LaunchError(f"--include {shown(str(path))}: there is no such file or folder in {shown(str(root))}")
    real, real_root = given.resolve(), root.resolve()
    if real_root.is_relative_to(real):
        raise LaunchError(f"--include {shown(str(path))}: holds the whole project; name files or folders in it")
    if given.is_relative_to(root):
        name = str(given.relative_to(root))
    elif real.is_relative_to(real_root):
        name = str(real.relative_to(real_root))
    else:
        name = f"{OUTSIDE}/{given.name}"
        if name in present_in(files):
            raise LaunchError(f"--include {shown(str(path))}: the name {shown(name)} is taken by another file")
    if behind := [str(parent) for parent in PurePath(name).parents if str(parent) in files]:
        raise LaunchError(f"--include {shown(str(path))}: lies behind the link {shown(behind[0])}; include that")
    found = list(_walk(name, given, (), notes))
    if not found:
        notes.append(f"--include {shown(str(path))}: no file is in it")
    for inner, source in found:
        for parent in (inner, *map(str, PurePath(inner).parents)):
            files.pop(parent, None)  # a tracked link gives way to what it shows
        files[inner] = source


def _walk(name: str, path: Path, above: tuple[Path, ...], notes: list[str]) -> Iterator[tuple[str, Path]]:
    """Each file in `path`, links followed, as its name in the snapshot and the file to read."""
    real = path.resolve()
    if real.is_file():
        yield name, real
    elif real.is_dir() and real not in above:
        for entry in sorted(os.listdir(path)):
            if entry not in NEVER:
                yield from _walk(f"{name}/{entry}", path / entry, (*above, real), notes)
    else:
        notes.append(f"{shown(name)}: a dead or circular link, or no file; stays behind")
