"""The code as it was at submission: a folder of copies that a job runs, whatever is edited while it waits.

`plan` says what would travel and writes nothing; `take` makes the folder `<store>/<digest>`, or finds it made.

What travels: tracked files as they lie here, uncommitted edits and checked-out submodules included, without what
`.launchignore` in the project's folder matches (gitignore's syntax); and what is included by name. A link to something
in the snapshot leads to the copy. Any other link becomes absolute, so that it leads where it leads now: to data, as a
rule, too large to copy. That is read live, and a warning says so. Empty folders do not travel.

The folder also holds `.snapshot/` with `commit`, `dirty.patch` (what differs from the commit) and `left_out.txt`. The
digest is over commit, names, modes and contents. The commit counts because the patch is against it: a run submitted
after `git commit` has another record than the one before it, though the files may be the same. left_out.txt does not
count: it is of the time when the snapshot was made.
"""

import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.errors import LaunchError
from slurm.included import include_path, present_in
from slurm.shared_root import make_private, refuse_shared
from slurm.worktree import Worktree, about, matching, patch, read_worktree, shown

IGNORE = ".launchignore"
RECORDS = ".snapshot"
MAKING = ".making-"  # how the name of an unfinished snapshot begins
STALE = 24 * 3600.0  # seconds after which nobody is making it any more
CODE = re.compile(r"\.(pyi?|pyx|ya?ml|toml|json|cfg|ini|sh|c|cc|cpp|cxx|h|hpp|cu|cuh)\Z")
POINTER = b"version https://git-lfs.github.com/spec/v1\n"
POINTER_SIZE = 1024  # bytes; a pointer is smaller
MANY = 20  # lines of warning about left-out files


@dataclass(frozen=True)
class Plan:
    """What a snapshot holds. Names are relative to the project; `slurm.worktree.shown` makes one printable."""

    root: Path
    commit: str  # full hash of HEAD
    changed: tuple[str, ...]  # tracked files with uncommitted edits, deleted ones too; without .launchignore's
    files: Mapping[str, Path]  # path inside the snapshot -> file to read; sorted
    left_out: tuple[str, ...]  # untracked files that nothing ignores; a repository of its own ends in "/"
    warnings: tuple[str, ...]  # one line each
    digest: str  # the snapshot's name


def plan(root: Path, include: Sequence[Path] = ()) -> Plan:
    """Say what would travel, and write nothing.

    Every file is read: git's own hashes are not of what lies here where LFS or line ends are involved.

    Args:
        root: the project's folder; it may lie in a larger repository.
        include: untracked, ignored or outside files and folders, absolute or relative to `root`. A folder travels whole
            but for .git and __pycache__, and links in it as what they show. What lies outside of `root` travels as
            .included/<its name>.

    Raises:
        LaunchError: git has no commit of this folder, or a file cannot be read or included.

    """
    root = Path(os.path.abspath(root))
    worktree = read_worktree(root)
    if (root / IGNORE).exists():
        _take_out(root, worktree)
    files = {name: root / name for name in worktree.tracked}
    notes = worktree.warnings
    for path in dict.fromkeys(include):
        try:
            include_path(root, path, files, notes)
        except OSError as error:
            raise LaunchError(f"--include {shown(str(path))}: cannot be read: {error.strerror}") from None
    files = dict(sorted(files.items()))
    if reserved := [name for name in files if name.startswith(f"{RECORDS}/")]:
        raise LaunchError(f"{shown(reserved[0])}: {RECORDS} is for the snapshot's own records; rename that folder")
    present = present_in(files)
    left_out = tuple(sorted(name for name in worktree.untracked if name.rstrip("/") not in present))
    links = _links(root, files)
    lead_out = [name for name, target in links.items() if os.path.isabs(target)]
    notes += about(lead_out, "leads out of the snapshot; the job sees what is there when it runs")
    marks, pointers = _read_all(files, links)
    notes += about(pointers, "an LFS pointer, not the file (git lfs pull fetches it); travels as it is")
    warnings = (*_about_left_out(left_out), *notes)
    changed = tuple(sorted(worktree.changed))
    return Plan(root, worktree.commit, changed, files, left_out, warnings, _digest(worktree.commit, marks))


def take(plan: Plan, store: Path, trust: bool = False) -> Path:
    """Make the folder store/<digest>, read-only, or find it made; it appears whole or not at all.

    Args:
        plan: what it holds.
        store: where snapshots lie; made for its owner alone where it is missing.
        trust: take a store that others can write to.

    Raises:
        LaunchError: a file was edited meanwhile, the store cannot be written, or the snapshot made earlier was edited.

    """
    store = Path(os.path.abspath(store))
    final = store / plan.digest
    try:
        make_private(store)
        if not trust:
            refuse_shared(store)
        _remove_stale(store)
        if not final.exists():
            _make(plan, final)
    except OSError as error:
        raise LaunchError(f"no snapshot in {shown(str(store))}: {error.strerror} ({error.filename})") from None
    if not _is_whole(plan, final):
        raise LaunchError(
            f"{shown(str(final))} was changed after it was made; when no job runs from it any more, remove it "
            "(chmod -R u+w, rm -r) and submit again"
        )
    return final


def _take_out(root: Path, worktree: Worktree) -> None:
    """Leave out, without a word, what .launchignore matches."""
    lists = (worktree.tracked, worktree.changed, worktree.untracked)
    found = matching(root, root / IGNORE, dict.fromkeys(name for names in lists for name in names))
    for names in lists:
        names[:] = [name for name in names if name not in found]


def _links(root: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Where each link leads in the snapshot; an absolute path is outside of it."""
    links = {}
    present = present_in(files)
    for name, path in files.items():
        if not path.is_symlink():
            continue
        target = os.path.normpath(path.parent / os.readlink(path))
        inside = os.path.relpath(target, root)
        if inside in present:
            links[name] = os.path.relpath(inside, os.path.dirname(name) or ".")
        else:
            links[name] = target
    return links


def _read_all(files: Mapping[str, Path], links: Mapping[str, str]) -> tuple[dict[str, bytes], list[str]]:
    """The mark of each file, and which files are LFS pointers."""
    marks, pointers = {}, []
    for name, path in files.items():
        try:
            marks[name] = _mark(path, links.get(name))
            if name not in links and _is_pointer(path):
                pointers.append(name)
        except OSError as error:
            raise LaunchError(f"{shown(name)}: cannot be read: {error.strerror}") from None
    return marks, pointers


def _mark(path: Path, link: str | None) -> bytes:
    """What makes a file another one: its kind and content; of a link, where it leads."""
    if link is not None:
        return b"link " + os.fsencode(link)
    with path.open("rb", buffering=0) as file:
        kind = b"run " if os.fstat(file.fileno()).st_mode & stat.S_IXUSR else b"file "
        return kind + hashlib.file_digest(file, "sha256").digest()


def _digest(commit: str, marks: Mapping[str, bytes]) -> str:
    """40 hexadecimal digits for a commit and the files beside it."""
    total = hashlib.sha256(commit.encode())
    for name, mark in marks.items():
        for part in (os.fsencode(name), mark):
            total.update(b"%d " % len(part) + part)
    return total.hexdigest()[:40]


def _is_pointer(path: Path) -> bool:
    if path.stat().st_size >= POINTER_SIZE:
        return False
    with path.open("rb", buffering=0) as file:
        return file.read(len(POINTER)) == POINTER


def _about_left_out(names: Sequence[str]) -> list[str]:
    """Warnings for what a job may miss; a list too long to read ends in a count."""
    lines = []
    for name in names:
        if name.endswith("/"):
            lines.append(f"{shown(name)}: a git repository of its own, no submodule; stays behind (--include takes it)")
        elif CODE.search(name):
            lines.append(f"{shown(name)}: untracked; stays behind (git add or --include takes it)")
    more = [f"and {len(lines) - MANY} more such files stay behind"] if len(lines) > MANY else []
    return lines[:MANY] + more


def _make(plan: Plan, final: Path) -> None:
    """Build the folder under another name and rename it when it is whole."""
    building = Path(tempfile.mkdtemp(prefix=MAKING, dir=final.parent))
    try:
        _fill(plan, building)
        if not _is_whole(plan, building):
            raise LaunchError("a file was edited while the snapshot was made; submit again")
        _make_read_only(building)
        building.rename(final)
    except BaseException as error:
        _remove(building)
        # Of two submissions at once the second finds the other's folder in its way, which is as good.
        if not (isinstance(error, OSError) and final.exists()):
            raise


def _fill(plan: Plan, folder: Path) -> None:
    records = folder / RECORDS
    records.mkdir()
    (records / "commit").write_text(f"{plan.commit}\n")
    (records / "left_out.txt").write_text("".join(f"{shown(name)}\n" for name in plan.left_out), encoding="utf-8")
    # The patch comes first: an edit before it is in the copies too, and one after it is seen by comparing these.
    with (records / "dirty.patch").open("wb") as file:
        file.writelines(patch(plan.root, plan.commit, plan.changed))
    links = _links(plan.root, plan.files)
    for name, source in plan.files.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name in links:
            copy.symlink_to(links[name])
        else:
            # Times are not copied: a file system that purges old files would take these first.
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def _is_whole(plan: Plan, folder: Path) -> bool:
    """Whether the files in `folder` are those of the plan."""
    try:
        marks = {}
        for name in plan.files:
            copy = folder / name
            marks[name] = _mark(copy, os.readlink(copy) if copy.is_symlink() else None)
    except OSError:
        return False
    return _digest(plan.commit, marks) == plan.digest


def _make_read_only(folder: Path) -> None:
    for place, _, names in os.walk(folder, topdown=False):
        for path in (*(os.path.join(place, name) for name in names), place):
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


def _remove(folder: Path) -> None:
    """Remove an unfinished snapshot, as far as it can be."""
    for place, _, _ in os.walk(folder):
        os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(store: Path) -> None:
    """Remove what killed submissions have left."""
    for folder in store.glob(f"{MAKING}*"):
        try:
            if folder.stat().st_mtime < time.time() - STALE:
                _remove(folder)
        except FileNotFoundError:
            continue  # another submission was faster
