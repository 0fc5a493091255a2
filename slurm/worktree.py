"""What git knows of a project's folder: the files it tracks, as they lie here. It reads and writes nothing.

Submodules that are checked out are part of the folder: their files are listed with the others. All names are relative
to the project, in the form of `os.fsdecode`, so that names that are not UTF-8 survive.
"""

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from slurm.errors import LaunchError

AROUND = "or --no-snapshot: the job then runs the files as they lie here when it starts"
# A hook of git's sets GIT_DIR and GIT_INDEX_FILE for its own repository; of these variables only what is about finding
# and trusting a repository is meant for us.
KEPT = ("GIT_CONFIG_", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH")
SETTINGS = {
    "core.fsmonitor": "false",  # it would start a process that stays
    "status.renames": "false",
    "diff.renames": "false",  # what status goes by before git 2.18
    "diff.relative": "false",
}
# To compare, git would call git-lfs, which copies the file into .git/lfs.
NO_LFS = {"filter.lfs.clean": "", "filter.lfs.process": "", "filter.lfs.required": "false"}
GITLINK = b"160000"  # the mode under which git tracks a submodule


@dataclass
class Worktree:
    """The files of a project, each by its name relative to the project."""

    commit: str = ""  # HEAD's hash
    tracked: list[str] = field(default_factory=list)  # and there
    changed: list[str] = field(default_factory=list)  # differ from HEAD, or are gone; a submodule at another commit
    untracked: list[str] = field(default_factory=list)  # not ignored; a repository of its own ends in "/"
    warnings: list[str] = field(default_factory=list)


def shown(name: str) -> str:
    """A file's name as it can be printed: one line, and text even where the name itself is not UTF-8."""
    return name if name.isprintable() else repr(name)


def about(names: Sequence[str], what: str) -> list[str]:
    """One line of warning about files that share a fate, however many; none about none."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{shown(names[0])}{more}: {what}"] if names else []


def read_worktree(root: Path) -> Worktree:
    """List the files below `root`, an absolute path.

    Raises:
        LaunchError: there is no git, no repository or no commit, or the repository ignores `root`.

    """
    prefix = os.fsdecode(git(root, "rev-parse", "--show-prefix")).removesuffix("\n")
    if prefix and git(root, "check-ignore", "--no-index", "--", ".", fine=(0, 1)):
        raise LaunchError(
            f"no snapshot of {shown(str(root))}: the git repository around it ignores it; run git init there, {AROUND}"
        )
    worktree = Worktree()
    _read(root, "", prefix, worktree)
    if not worktree.tracked:
        raise LaunchError(
            f"no snapshot of {shown(str(root))}: git tracks no file in it; git add and commit them, {AROUND}"
        )
    return worktree


def _read(root: Path, place: str, prefix: str, worktree: Worktree) -> None:
    """Add the repository at root/place; git's own names there begin with `prefix` where it is not the whole of it."""
    folder = root / place
    options = ("--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--ignore-submodules=dirty")
    gone = set()
    for record in _records(git(folder, "status", *options, "--", ".", settings=NO_LFS)):
        kind, _, rest = record.partition(b" ")
        if record.startswith(b"# branch.oid ") and not place:
            worktree.commit = os.fsdecode(record.removeprefix(b"# branch.oid "))
            if worktree.commit == "(initial)":
                raise LaunchError(
                    f"no snapshot of {shown(str(root))}: its git repository has no commit yet; git commit, {AROUND}"
                )
        elif kind in (b"1", b"u"):
            fields = rest.split(b" ", 7 if kind == b"1" else 9)
            name = place + os.fsdecode(fields[-1]).removeprefix(prefix)
            worktree.changed.append(name)
            if fields[0].endswith(b"D") and kind == b"1":
                gone.add(name)
            if kind == b"u":
                worktree.warnings.append(f"{shown(name)}: has a merge conflict; travels as it is")
        elif kind == b"?":
            worktree.untracked.append(place + os.fsdecode(rest).removeprefix(prefix))
    submodules = []
    tracked = {}  # a file in conflict stands several times
    for record in _records(git(folder, "ls-files", "-z", "-s", "-v")):
        facts, _, path = record.partition(b"\t")
        name = place + os.fsdecode(path)
        if facts.split()[1] == GITLINK:
            submodules.append(name)
        elif name not in gone:
            tracked[name] = facts[:1]
    _add_tracked(root, tracked, worktree)
    away = [name for name in submodules if not (root / name / ".git").exists()]
    worktree.warnings += about(away, "submodule, not checked out (git submodule update --init); its files stay behind")
    for name in submodules:
        if name not in away:
            _read(root, f"{name}/", "", worktree)


def _add_tracked(root: Path, tracked: dict[str, bytes], worktree: Worktree) -> None:
    """Take what is there; a letter that is S or lower case says that git was told not to look at the file."""
    absent, odd, unseen = [], [], []
    for name, letter in tracked.items():
        try:
            mode = (root / name).lstat().st_mode
        except OSError:
            absent.append(name)
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            odd.append(name)
            continue
        worktree.tracked.append(name)
        if letter == b"S" or letter.islower():
            unseen.append(name)
    worktree.warnings += [
        *about(absent, "tracked, but not checked out here; stays behind"),
        *about(odd, "tracked, but now neither a file nor a link; stays behind"),
        *about(unseen, "git was told to take it for unchanged; travels as it is, but an edit is in no patch"),
    ]


def matching(root: Path, ignore_file: Path, names: Iterable[str]) -> set[str]:
    """The `names` that the patterns in `ignore_file` match, files of submodules too; git itself reads the patterns."""
    # git lets its ignore file be chosen, but .gitignore files rank higher. So it looks at the names as if they lay in
    # a folder that has none, and says of each the pattern that decided and the file that holds it. (Only
    # .git/info/exclude still ranks higher: a file that it matches too is not found, and travels.)
    common = root / os.fsdecode(git(root, "rev-parse", "--git-common-dir")).removesuffix("\n")
    place = (f"--git-dir={common}", f"--work-tree={common / 'objects'}")
    output = git(
        root,
        *(*place, "check-ignore", "--no-index", "--stdin", "-z", "--verbose"),
        settings={"core.excludesFile": str(ignore_file)},
        fine=(0, 1),
        text=b"\0".join(b"./" + os.fsencode(name) for name in names),  # else `:(…` would be a pattern
    )
    answers = iter(_records(output))
    found = set()
    for source, _, pattern, name in zip(answers, answers, answers, answers, strict=True):
        if os.fsdecode(source) == str(ignore_file) and not pattern.startswith(b"!"):
            found.add(os.fsdecode(name).removeprefix("./"))
    return found


def patch(root: Path, commit: str, changed: Sequence[str]) -> Iterator[bytes]:
    """What makes `commit` into the `changed` files as they are here, for `git apply` in the repository's top folder.

    A submodule's part is against the commit checked out in it.
    """
    if not changed:
        return
    prefix = os.fsdecode(git(root, "rev-parse", "--show-prefix")).removesuffix("\n")
    repositories: dict[str, list[str]] = {}
    for name in changed:
        folders = (parent for parent in Path(name).parents if parent.name and (root / parent / ".git").exists())
        repositories.setdefault(str(next(folders, "")), []).append(name)
    submodules = ("--submodule=short", "--ignore-submodules=dirty")  # their edits have a part of their own
    for place, names in repositories.items():
        start = f"{prefix}{place}/" if place else ""  # git writes `prefix` itself
        options = ("--binary", "--unified=3", "--no-ext-diff", "--no-textconv", "--no-color")
        prefixes = (f"--src-prefix=a/{start}", f"--dst-prefix=b/{start}")
        rest = iter(os.path.relpath(name, place or ".") for name in names)
        while some := list(islice(rest, 500)):  # a command line has a limit
            base = "HEAD" if place else commit
            command = ("--literal-pathspecs", "diff", *options, *prefixes, *submodules, base, "--", *some)
            yield git(root / place, *command)


def _records(output: bytes) -> list[bytes]:
    return output.split(b"\0")[:-1]


def git(
    folder: Path,
    *arguments: str,
    settings: dict[str, str] | None = None,
    fine: tuple[int, ...] = (0,),
    text: bytes | None = None,
) -> bytes:
    """The output of git in `folder`; nothing but the command writes, not even git's own index.

    Raises:
        LaunchError: there is no git, or it ends with a code that is not `fine`; the line holds git's own words.

    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(KEPT)}
    own |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    given = [part for name, value in {**SETTINGS, **(settings or {})}.items() for part in ("-c", f"{name}={value}")]
    command = ["git", "-C", str(folder), *given, *arguments]
    try:
        done = subprocess.run(command, input=text or b"", env=own, capture_output=True, check=False)
    except OSError as error:
        raise LaunchError(
            f"no snapshot of {shown(str(folder))}: git cannot be run ({error.strerror}); install it, {AROUND}"
        ) from None
    if done.returncode not in fine:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise LaunchError(
            f"no snapshot of {shown(str(folder))}: git says: {words[0].removeprefix('fatal: ')}; mend that, {AROUND}"
        )
    return done.stdout
