"""Copy the code as it is at submission into a read-only folder, which the job runs whatever is edited while it waits.

What travels: tracked files as they lie here, uncommitted edits and checked-out submodules included, without what
`.launchignore` in the project's folder matches (gitignore's syntax); and what is included by name. A link to something
in the snapshot leads to the copy. Any other link becomes absolute: it leads to data, as a rule, which is read live.

The folder also holds `.snapshot/` with `commit`, `dirty.patch` (what differs from the commit) and `left_out.txt`. Its
name is a digest of commit, names, modes and contents: a run submitted after `git commit` is recorded under that commit.
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from slurm.errors import LaunchError
from slurm.permissions import make_folder, refuse_shared

IGNORE = ".launchignore"
RECORDS = ".snapshot"
OUTSIDE = ".included"  # where files from outside of the project travel
CODE = re.compile(r"(\.(pyi?|pyx|ya?ml|toml|json|cfg|ini|sh|c|cc|cpp|cxx|h|hpp|cu|cuh)|/)\Z")  # "/": a repository
# Inside a git hook, GIT_DIR and others name that hook's repository; these only say how to find and trust one.
KEPT = ("GIT_CONFIG_", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH")
# Whatever the user's configuration makes of diffs; --no-relative: the patch is for the repository's top folder.
PATCH = (
    *("diff", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/", "--binary", "--unified=3", "--no-renames"),
    *("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=untracked", "--submodule=diff"),
)


@dataclass(frozen=True)
class Plan:
    """What a snapshot holds. Names are relative to the project; `shown` makes one printable."""

    root: Path  # the project's folder
    commit: str  # full hash of HEAD
    files: dict[str, Path]  # name in the snapshot -> file to read; sorted
    links: dict[str, str]  # those that are links -> target; absolute: out of the snapshot
    changed: list[str]  # files with uncommitted edits, deleted ones too, and submodules that differ
    left_out: list[str]  # untracked, not ignored; a repository of its own ends in "/"
    warnings: list[str]  # one line each
    digest: str  # the snapshot's name


def plan(root: Path, include: Sequence[Path] = ()) -> Plan:
    """List what travels from the project's folder, which may lie in a larger repository; write nothing.

    `include` names untracked, ignored or outside files and folders. A folder travels whole, links in it as what they
    show; what lies outside of `root` travels as .included/<its name>.
    """
    root = root.resolve()
    facts = git(root, "rev-parse", "--show-prefix", "-q", "--verify", "HEAD", fine=(0, 1))
    prefix, commit = os.fsdecode(facts + b"\n").split("\n")[:2]
    if not commit:
        raise _impossible(root, "its git repository has no commit yet; git commit")
    tracked = _names(git(root, "ls-files", "--recurse-submodules", "-z"))
    if not tracked:
        raise _impossible(root, "git tracks no file in it; git add and commit them")
    # `git diff` would say the same of edits, and write git's index.
    options = ("--porcelain", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=untracked")
    status = [(line[:2], line[3:].removeprefix(prefix)) for line in _names(git(root, "status", *options, "--", "."))]
    untracked = [name for state, name in status if state == "??"]
    changed = [name for state, name in status if state != "??"]
    ignored = _ignored(root, [*tracked, *untracked, *changed])
    files = {name: root / name for name in tracked if name not in ignored and os.path.lexists(root / name)}
    odd = [name for name, path in files.items() if not (path.is_symlink() or path.is_file())]
    files = {name: path for name, path in files.items() if name not in odd}
    notes = _about(odd, "neither a file nor a submodule that is checked out (git submodule update --init)")
    try:
        for path in dict.fromkeys(include):
            files = _with_included(files, root, path, notes)
        files = dict(sorted(files.items()))
        present = {*files, *(str(folder) for name in files for folder in PurePath(name).parents)}
        links = _links(root, files, present)
        digest = _digest(commit, files, links)
    except OSError as error:
        raise LaunchError(f"{shown(str(error.filename))}: cannot be read: {error.strerror}") from None
    left_out = [name for name in untracked if name.rstrip("/") not in present and name not in ignored]
    code = [name for name in left_out if CODE.search(name)]
    outside = [name for name, target in links.items() if os.path.isabs(target)]
    warnings = [
        *_about(code, "not tracked by git (git add or --include takes it)"),
        *notes,
        *_about(outside, "leads out of the snapshot; the job sees what is there when it runs", ""),
    ]
    changed = [name for name in changed if name not in ignored]
    return Plan(root, commit, files, links, changed, left_out, warnings, digest)


def take(plan: Plan, store: Path, trust: bool = False) -> Path:
    """Make the folder store/<digest>, read-only, or find it made; it appears whole or not at all.

    The store is made for its owner alone where it is missing; `trust` takes one that others can write to.
    """
    final = store.absolute() / plan.digest
    make_folder(final.parent, 0o700)
    if not trust:
        refuse_shared(final.parent)
    try:
        if not final.exists():
            _make(plan, final)
    except OSError as error:
        raise LaunchError(f"no snapshot in {final.parent}: {error.strerror} ({error.filename})") from None
    if not _is_whole(plan, final):
        raise LaunchError(
            f"{final} was changed after it was made; when no job runs from it any more, remove it "
            "(chmod -R u+w, rm -r) and submit again"
        )
    return final


def shown(name: str) -> str:
    """Return a file's name as one printable line, also where it is not UTF-8."""
    return name if name.isprintable() else repr(name)


def _about(names: Sequence[str], what: str, fate: str = "; stays behind") -> list[str]:
    """Return one warning about all of `names`; none about none."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{shown(names[0])}{more}: {what}{fate}"] if names else []


def _ignored(root: Path, names: Sequence[str]) -> set[str]:
    """Return the names that .launchignore matches."""
    if not (root / IGNORE).exists():
        return set()
    # In the project's own repository its .gitignore files would come first; an empty one has none.
    with tempfile.TemporaryDirectory() as empty:
        git(Path(empty), "init", "--quiet", "--template=")
        command = ("-c", f"core.excludesFile={root / IGNORE}", "check-ignore", "--no-index", "--stdin", "-z")
        text = b"\0".join(b"./" + os.fsencode(name) for name in names)  # `:(x` is a name, and no pathspec
        return {name.removeprefix("./") for name in _names(git(Path(empty), *command, fine=(0, 1), text=text))}


def _links(root: Path, files: Mapping[str, Path], present: set[str]) -> dict[str, str]:
    """Return the targets of links: relative to a copy in the snapshot, absolute to anything else."""
    links = {}
    for name, path in files.items():
        if path.is_symlink():
            target = os.path.normpath(path.parent / os.readlink(path))
            inside = os.path.relpath(target, root)
            links[name] = os.path.relpath(inside, Path(name).parent) if inside in present else target
    return links


def _with_included(files: Mapping[str, Path], root: Path, path: Path, notes: list[str]) -> dict[str, Path]:
    """Return the files with those that `path`, a file or a folder, shows; note what cannot travel."""
    asked = f"--include {shown(str(path))}"
    given = Path(os.path.abspath(root / path))
    real = given.resolve()
    if root.is_relative_to(real):
        raise LaunchError(f"{asked}: holds the whole project; name files or folders in it")
    inside = (str(place.relative_to(root)) for place in (given, real) if place.is_relative_to(root))
    name = next(inside, f"{OUTSIDE}/{given.name}")
    included = dict(_walk(name, given, (), notes))
    if not included:
        raise LaunchError(f"{asked}: there is no such file in {root}, or no file in that folder")
    before = [other for other in files if f"{other}/".startswith(f"{name}/")]
    if before and name.startswith(f"{OUTSIDE}/"):
        raise LaunchError(f"{asked}: the name {shown(name)} is taken by another file")
    # A tracked link gives way to what it shows.
    return {other: path for other, path in files.items() if other not in before} | included


def _walk(name: str, path: Path, above: tuple[Path, ...], notes: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield each file in `path`, links followed, as its name in the snapshot and the file to read."""
    real = path.resolve()
    if real.is_file():
        yield name, real
    elif real.is_dir() and real not in above:
        for entry in sorted(set(os.listdir(path)) - {".git", "__pycache__"}):  # they change by themselves
            yield from _walk(f"{name}/{entry}", path / entry, (*above, real), notes)
    else:
        notes += _about([name], "a dead or circular link, or no file")


def _digest(commit: str, files: Mapping[str, Path], links: Mapping[str, str]) -> str:
    """Return 40 hexadecimal digits for a commit and the files beside it."""
    total = hashlib.sha256(commit.encode())
    for name, path in files.items():
        if name in links:
            mark = b"link " + os.fsencode(links[name])
        else:
            with path.open("rb", buffering=0) as file:
                kind = b"run " if os.fstat(file.fileno()).st_mode & stat.S_IXUSR else b"file "
                mark = kind + hashlib.file_digest(file, "sha256").digest()
        for part in (os.fsencode(name), mark):
            total.update(b"%d " % len(part) + part)
    return total.hexdigest()[:40]


def _is_whole(plan: Plan, folder: Path) -> bool:
    """Return whether the files in `folder` are those of the plan."""
    copies = {name: folder / name for name in plan.files}
    try:
        links = {name: os.readlink(copy) for name, copy in copies.items() if copy.is_symlink()}
        return _digest(plan.commit, copies, links) == plan.digest
    except OSError:
        return False


def _make(plan: Plan, final: Path) -> None:
    """Build the folder under another name and rename it when it is whole."""
    building = Path(tempfile.mkdtemp(prefix=".making-", dir=final.parent))
    try:
        _fill(plan, building)
        if not _is_whole(plan, building):
            raise LaunchError("a file was edited while the snapshot was made; submit again")
        for path in [building, *building.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
        building.rename(final)
    except BaseException as error:
        for place, _, _ in os.walk(building):
            os.chmod(place, 0o700)
        shutil.rmtree(building, ignore_errors=True)
        # Of two submissions at once the second finds the other's folder in its way, which is as good.
        if not (isinstance(error, OSError) and final.exists()):
            raise


def _fill(plan: Plan, folder: Path) -> None:
    records = folder / RECORDS
    records.mkdir()
    (records / "commit").write_text(f"{plan.commit}\n")
    (records / "left_out.txt").write_text("".join(f"{shown(name)}\n" for name in plan.left_out), encoding="utf-8")
    # The patch comes first: an edit before it is in the copies too, and one after it is seen by comparing these.
    (records / "dirty.patch").write_bytes(git(plan.root, *PATCH, plan.commit, "--", "."))
    for name, source in plan.files.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name in plan.links:
            copy.symlink_to(plan.links[name])
        else:
            # Times are not copied: a file system that purges old files would take these first.
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def _names(output: bytes) -> list[str]:
    return os.fsdecode(output).split("\0")[:-1]


def _impossible(folder: Path, why: str) -> LaunchError:
    around = "or --no-snapshot: the job then runs the files as they lie here when it starts"
    return LaunchError(f"no snapshot of {shown(str(folder))}: {why}, {around}")


def git(folder: Path, *arguments: str, fine: tuple[int, ...] = (0,), text: bytes = b"") -> bytes:
    """Return the output of git in `folder`; refuse, in git's own words, an exit code that is not `fine`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(KEPT)}
    own |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}  # do not refresh git's index
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], input=text, env=own, capture_output=True, check=False)
    except OSError as error:
        raise _impossible(folder, f"git cannot be run ({error.strerror}); install it") from None
    if done.returncode not in fine:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise _impossible(folder, f"git says: {words[0].removeprefix('fatal: ')}; mend that")
    return done.stdout
