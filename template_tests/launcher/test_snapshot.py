"""Snapshots: what travels, what stays behind and is said to, and that a job runs the code as it was at submission."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm import snapshot
from slurm.cluster import ROOT
from slurm.errors import LaunchError
from slurm.snapshot import Plan, plan, take

ODD = ["with space", 'it\'s "quoted"', "new\nline", "grüße", os.fsdecode(b"latin-\xfc"), "-n", ":(odd)*", "*"]


@pytest.fixture(autouse=True)
def _git_of_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests mean the same on every machine and inside git's hooks."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(tmp_path / "home"),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig"),
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "gitconfig").write_text(
        '[user]\nname = a\nemail = a@example.org\n[init]\ndefaultBranch = main\n[protocol "file"]\nallow = always\n'
    )


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")
    return git(folder, "rev-parse", "HEAD")


def repository(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    write(folder, files)
    commit(folder)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project of three files and an ignored folder."""
    files = {"src/train.py": "print(1)\n", "configs/a.yaml": "a: 1\n", ".gitignore": "runs\n*.log\n"}
    return repository(tmp_path / "project", files)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "snapshots"


@pytest.fixture
def submodule(root: Path, tmp_path: Path) -> Path:
    """A submodule lib/outer of the project, with a submodule `inner` of its own."""
    repository(tmp_path / "inner", {"deep.py": "deep\n"})
    outer = repository(tmp_path / "outer", {"wide.py": "wide\n", "notes.pdf": "pdf\n"})
    git(outer, "submodule", "--quiet", "add", str(tmp_path / "inner"), "inner")
    commit(outer)
    git(root, "submodule", "--quiet", "add", str(outer), "lib/outer")
    git(root, "submodule", "--quiet", "update", "--init", "--recursive")
    commit(root)
    return root / "lib/outer"


def names(folder: Path) -> set[str]:
    """All files and links in a snapshot but its own records."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    return {name for name in found if not name.startswith(".snapshot/")}


def refused(root: Path, *include: str) -> str:
    """The one line that planning ends with."""
    with pytest.raises(LaunchError) as caught:
        plan(root, [Path(path) for path in include])
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What travels


def test_tracked_files_travel_as_they_lie_here(root: Path, store: Path) -> None:
    """Edits, staged or not, and new files that are staged; not what is deleted, nor what is untracked."""
    write(root, {"src/train.py": "print(2)\n", "src/new.py": "new\n", "src/gone.py": "gone\n"})
    commit(root)
    write(root, {"src/train.py": "print(3)\n", "src/staged.py": "staged\n", "src/left.py": "left\n"})
    (root / "src/gone.py").unlink()
    git(root, "add", "src/staged.py")
    planned = plan(root)
    assert planned.commit == git(root, "rev-parse", "HEAD")
    assert planned.changed == ["src/gone.py", "src/staged.py", "src/train.py"]
    assert planned.left_out == ["src/left.py"]
    assert list(planned.files) == [".gitignore", "configs/a.yaml", "src/new.py", "src/staged.py", "src/train.py"]
    assert planned.files["src/train.py"] == root / "src/train.py"
    folder = take(planned, store)
    assert names(folder) == set(planned.files)
    assert (folder / "src/train.py").read_text() == "print(3)\n"
    assert (folder / "src/staged.py").read_text() == "staged\n"


def test_what_stays_behind_though_it_looks_needed_is_warned_about(root: Path) -> None:
    """Untracked code and configuration is warned about, in one line; notes and data are listed only."""
    write(root, {"configs/b.yaml": "", "src/b.py": "", "kernel.cu": "", "notes.txt": "", "runs/x.py": ""})
    planned = plan(root)
    assert planned.left_out == ["configs/b.yaml", "kernel.cu", "notes.txt", "src/b.py"]
    line = "configs/b.yaml and 2 more: not tracked by git (git add or --include takes it); stays behind"
    assert planned.warnings == [line]


def test_a_repository_inside_that_is_no_submodule_is_warned_about(root: Path) -> None:
    """git lists it as one folder, and its files neither as tracked nor as untracked."""
    repository(root / "cloned", {"x.py": "x\n"})
    planned = plan(root)
    assert planned.left_out == ["cloned/"]
    assert planned.warnings[0].startswith("cloned/: not tracked by git (git add or --include takes it)")
    assert "cloned/x.py" in plan(root, [Path("cloned")]).files
    assert plan(root, [Path("cloned")]).left_out == []


@pytest.mark.parametrize("name", ODD)
def test_odd_names_travel(name: str, root: Path, store: Path) -> None:
    """Spaces, quotes, newlines, other scripts, names that are not UTF-8, and what git takes for a pattern."""
    (root / "a b").mkdir()
    for file in (root / "a b" / name, root / name):
        file.write_text("1")
    commit(root)
    (root / name).write_text("2")
    (root / f"left {name}.py").touch()
    planned = plan(root)
    assert planned.changed == [name]
    assert planned.left_out == [f"left {name}.py"]
    assert all(line.isprintable() for line in planned.warnings)
    folder = take(planned, store)
    assert {name, f"a b/{name}"} < names(folder)
    assert (folder / name).read_text() == "2"
    assert len((folder / ".snapshot/left_out.txt").read_text().splitlines()) == 1
    assert (folder / ".snapshot/dirty.patch").read_text(errors="surrogateescape").count("diff --git") == 1


def test_executable_bits_travel(root: Path, store: Path) -> None:
    """A script that could be run can be run."""
    write(root, {"run.sh": "#!/bin/sh\n"})
    (root / "run.sh").chmod(0o755)
    commit(root)
    folder = take(plan(root), store)
    assert (folder / "run.sh").stat().st_mode & 0o777 == 0o555
    assert (folder / "src/train.py").stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize(
    ("target", "arrives"),
    [
        ("a.yaml", "a.yaml"),
        ("../src", "../src"),
        ("{root}/src/train.py", "../src/train.py"),
        ("..", ".."),
        ("../../elsewhere", "{root}/../elsewhere"),
        ("/data/imagenet", "/data/imagenet"),
        ("../runs", "{root}/runs"),
        ("nothing", "{root}/configs/nothing"),
    ],
)
def test_a_link_leads_to_the_copy_or_where_it_led(target: str, arrives: str, root: Path, store: Path) -> None:
    """What is in the snapshot is found there, never in the live tree; all else where it is, with a warning."""
    (root / "configs/link").symlink_to(target.format(root=root))
    commit(root)
    planned = plan(root)
    expected = arrives.format(root=root)
    link = take(planned, store) / "configs/link"
    assert os.readlink(link) == (os.path.normpath(expected) if os.path.isabs(expected) else expected)
    warning = "configs/link: leads out of the snapshot; the job sees what is there when it runs"
    assert planned.warnings == ([warning] if os.path.isabs(expected) else [])


def test_a_tracked_file_that_is_a_pipe_now_stays_behind(root: Path) -> None:
    """Reading it would wait for ever."""
    (root / "configs/a.yaml").unlink()
    os.mkfifo(root / "configs/a.yaml")
    planned = plan(root)
    assert "configs/a.yaml" not in planned.files
    assert planned.warnings[0].startswith("configs/a.yaml: neither a file nor a submodule that is checked out ")


# Submodules


def test_submodules_travel_with_their_edits(root: Path, submodule: Path, store: Path) -> None:
    """Submodules of submodules too, also where the configuration tells git not to look into them."""
    git(root, "config", "submodule.lib/outer.ignore", "all")
    write(submodule, {"wide.py": "wider\n", "new.py": "new\n", "inner/deep.py": "deeper\n"})
    planned = plan(root)
    assert planned.changed == ["lib/outer"]
    folder = take(planned, store)
    assert (folder / "lib/outer/wide.py").read_text() == "wider\n"
    assert (folder / "lib/outer/inner/deep.py").read_text() == "deeper\n"
    assert not list(folder.rglob(".git"))


def test_a_submodule_that_is_not_checked_out_is_warned_about(root: Path, submodule: Path) -> None:
    """Its folder is there, and empty."""
    git(submodule, "submodule", "--quiet", "deinit", "--force", "inner")
    warnings = plan(root).warnings
    assert warnings[0].startswith("lib/outer/inner: neither a file nor a submodule that is checked out (git submodule ")


def test_a_submodule_s_patch_applies(root: Path, submodule: Path, store: Path, tmp_path: Path) -> None:
    """dirty.patch brings a clone of the commit and its submodules to what travels."""
    write(submodule, {"wide.py": "wider\n", "inner/deep.py": "deeper\n"})
    write(root, {"src/train.py": "print(2)\n"})
    folder = take(plan(root), store)
    git(tmp_path, "clone", "-q", "--recurse-submodules", str(root), "again")
    git(tmp_path / "again", "apply", str(folder / ".snapshot/dirty.patch"))
    for name in ("src/train.py", "lib/outer/wide.py", "lib/outer/inner/deep.py"):
        assert (tmp_path / "again" / name).read_text() == (folder / name).read_text()


def test_a_submodule_at_another_commit_is_a_change(root: Path, submodule: Path, store: Path) -> None:
    """The patch has what differs from the commit that the project names."""
    write(submodule, {"wide.py": "wider\n"})
    commit(submodule)
    write(submodule, {"wide.py": "widest\n"})
    planned = plan(root)
    assert planned.changed == ["lib/outer"]
    assert "-wide\n+widest\n" in (take(planned, store) / ".snapshot/dirty.patch").read_text()


# Included by name


def test_included_files_travel(root: Path, store: Path, tmp_path: Path) -> None:
    """Untracked, ignored and outside ones, alone or as folders; they are not left out any more."""
    write(root, {"configs/b.yaml": "b", "runs/keep/c.log": "c", "runs/other.log": "d", "left.py": ""})
    write(tmp_path, {"outside/e/f.txt": "f", "vocabulary.json": "g"})
    include = ["configs/b.yaml", "runs/keep", str(tmp_path / "outside"), "../vocabulary.json", str(root / "runs/keep")]
    planned = plan(root, [Path(path) for path in include])
    assert planned.left_out == ["left.py"]
    more = {"configs/b.yaml", "runs/keep/c.log", ".included/outside/e/f.txt", ".included/vocabulary.json"}
    assert planned.files.keys() - plan(root).files.keys() == more
    assert list(planned.files) == sorted(planned.files)
    folder = take(planned, store)
    assert (folder / ".included/outside/e/f.txt").read_text() == "f"
    assert names(folder) == set(planned.files)


def test_links_in_an_include_travel_as_what_they_show(root: Path, store: Path, tmp_path: Path) -> None:
    """A cache of linked blobs is whole; a dead link and a circle are warned about."""
    write(tmp_path, {"blobs/1": "blob", "elsewhere/x": "x"})
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").symlink_to("../blobs/1")
    (model / "folder").symlink_to("../elsewhere")
    (model / "dead").symlink_to("nothing")
    (model / "circle").symlink_to(".")
    planned = plan(root, [model])
    folder = take(planned, store) / ".included/model"
    assert names(folder) == {"weights", "folder/x"}
    assert not (folder / "weights").is_symlink()
    assert [line.split(":")[0] for line in planned.warnings] == [".included/model/circle", ".included/model/dead"]


def test_a_tracked_link_can_be_included_as_what_it_shows(root: Path, store: Path, tmp_path: Path) -> None:
    """Its name is a folder then, and no warning is left."""
    write(tmp_path, {"data/x": "x"})
    (root / "data").symlink_to(tmp_path / "data")
    commit(root)
    planned = plan(root, [Path("data")])
    assert planned.warnings == []
    assert (take(planned, store) / "data/x").read_text() == "x"
    assert not (take(planned, store) / "data").is_symlink()


def test_what_no_job_needs_is_not_included(root: Path) -> None:
    """Histories and bytecode change by themselves, and would make equal code unequal."""
    repository(root / "cloned", {"x.py": "x\n"})
    write(root, {"cloned/__pycache__/x.pyc": "", "cloned/y/z": ""})
    assert {name for name in plan(root, [Path("cloned")]).files if name.startswith("cloned")} == {
        "cloned/x.py",
        "cloned/y/z",
    }


@pytest.mark.parametrize(
    ("include", "reason"),
    [
        (["nothing"], "--include nothing: there is no such file in "),
        (["empty"], "--include empty: there is no such file in "),
        (["."], "--include .: holds the whole project"),
        ([".."], "--include ..: holds the whole project"),
        (["../x/same", "../y/same"], "--include ../y/same: the name .included/same is taken by another file"),
    ],
)
def test_an_include_that_cannot_be_had_is_an_error(include: list[str], reason: str, root: Path, tmp_path: Path) -> None:
    """Missing, empty, the project itself (with its runs and environments), or two of one name."""
    (root / "empty").mkdir()
    write(tmp_path, {"x/same": "x", "y/same": "y"})
    assert refused(root, *include).startswith(reason)


# .launchignore


def test_launchignore_takes_tracked_files_out(root: Path, submodule: Path) -> None:
    """Without a warning; in submodules too; a pattern with a slash is about the project's folder; `!` takes back in."""
    files = {"docs/a.md": "a", "docs/keep.md": "a", "src/docs/b.md": "b", "big.bin": "big"}
    write(root, files)
    commit(root)
    write(root, {"docs/a.md": "edited", "scratch/x.py": "", "kept.py": ""})
    (root / "configs/a.yaml").unlink()
    patterns = "# no code\n/docs/*\n!keep.md\n*.pdf\n/lib/outer/inner/\n*.bin\nscratch/\nconfigs\n.launchignore\n"
    (root / ".launchignore").write_text(patterns)
    planned = plan(root)
    assert list(planned.files) == [
        *(".gitignore", ".gitmodules", "docs/keep.md", "lib/outer/.gitmodules", "lib/outer/wide.py"),
        *("src/docs/b.md", "src/train.py"),
    ]
    assert planned.changed == []
    assert planned.left_out == ["kept.py"]
    assert len(planned.warnings) == 1


def test_launchignore_alone_decides(root: Path) -> None:
    """What .gitignore says of a tracked file does not count, nor does .git/info/exclude."""
    write(root, {"forced.log": "x", "out.log": "x"})
    git(root, "add", "--force", "forced.log", "out.log")
    (root / ".git/info/exclude").write_text("src\n")
    (root / ".launchignore").write_text("configs/\nout.log\n")
    assert list(plan(root).files) == [".gitignore", "forced.log", "src/train.py"]


def test_launchignore_gives_way_to_an_include(root: Path) -> None:
    """The command line is nearer than a file."""
    (root / ".launchignore").write_text("/configs\n")
    assert "configs/a.yaml" in plan(root, [Path("configs/a.yaml")]).files


@pytest.mark.parametrize("name", ODD)
def test_launchignore_reads_odd_names(name: str, root: Path) -> None:
    """Each is a name, not a pattern, and stays behind with its folder."""
    (root / "out").mkdir()
    (root / "out" / name).touch()
    (root / name).touch()
    (root / ".launchignore").write_text("out\n")
    git(root, "add", "-A")
    files = plan(root).files
    assert name in files
    assert f"out/{name}" not in files


# Where the project lies


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """A project in a subfolder of a larger repository, which has files of its own."""
    top = tmp_path / "top"
    repository(top, {"README": "top", "projects/mine/src/train.py": "1\n", "projects/mine/README": "mine"})
    return top / "projects/mine"


def test_a_project_in_a_larger_repository(inner: Path, store: Path, tmp_path: Path) -> None:
    """Only its own files, named from its own folder; the patch is for the repository's top folder."""
    with (tmp_path / "gitconfig").open("a") as file:
        file.write("[diff]\nrelative = true\n")
    repository(tmp_path / "library", {"wide.py": "wide\n"})
    git(inner, "submodule", "--quiet", "add", str(tmp_path / "library"), "lib")
    commit(inner)
    (inner / "lib/wide.py").write_text("wider\n")
    (inner / "src/train.py").write_text("2\n")
    (inner / "new.py").touch()
    (inner.parent / "other.py").touch()
    (inner.parent.parent / "README").write_text("edited")
    (inner / ".launchignore").write_text("/README\n")
    planned = plan(inner)
    assert list(planned.files) == ["lib/wide.py", "src/train.py"]
    assert planned.changed == ["lib", "src/train.py"]
    assert planned.left_out == [".launchignore", "new.py"]
    folder = take(planned, store)
    git(tmp_path, "clone", "-q", "--recurse-submodules", str(inner.parent.parent), "again")
    git(tmp_path / "again", "apply", str(folder / ".snapshot/dirty.patch"))
    assert (tmp_path / "again/projects/mine/src/train.py").read_text() == "2\n"
    assert (tmp_path / "again/projects/mine/lib/wide.py").read_text() == "wider\n"
    assert (tmp_path / "again/README").read_text() == "top"


def test_a_linked_worktree_is_as_good(root: Path, store: Path, tmp_path: Path) -> None:
    """Its .git is a file."""
    git(root, "worktree", "add", "-q", str(tmp_path / "linked"))
    write(tmp_path / "linked", {"src/train.py": "2\n", ".launchignore": "configs\n"})
    planned = plan(tmp_path / "linked")
    assert (list(planned.files), planned.changed) == ([".gitignore", "src/train.py"], ["src/train.py"])
    assert "+2" in (take(planned, store) / ".snapshot/dirty.patch").read_text()


def test_the_current_folder_does_not_matter(
    root: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from another repository, by a relative path and through a link it is the same project."""
    (root / "src/train.py").write_text("2\n")
    expected = plan(root)
    monkeypatch.chdir(repository(tmp_path / "another", {"x": "x"}))
    assert plan(Path("../project")) == expected
    (tmp_path / "alias").symlink_to(root)
    assert plan(tmp_path / "alias").digest == expected.digest
    write(root, {"b.log": "b"})
    assert "b.log" in plan(tmp_path / "alias", [root / "b.log"]).files
    assert take(expected, Path("store")) == tmp_path / "another/store" / expected.digest


def test_the_environment_of_a_hook_does_not_mislead(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git sets GIT_DIR, GIT_INDEX_FILE and more for its own repository, which may be another one."""
    (root / "src/train.py").write_text("2\n")
    expected = plan(root)
    other = repository(tmp_path / "another", {"x": "x"})
    for name, value in {
        "GIT_DIR": other / ".git",
        "GIT_WORK_TREE": other,
        "GIT_INDEX_FILE": other / ".git/index",
        "GIT_PREFIX": "x/",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_EXTERNAL_DIFF": "false",
    }.items():
        monkeypatch.setenv(name, str(value))
    assert plan(root) == expected


def test_the_user_s_git_settings_do_not_mislead(root: Path, store: Path, tmp_path: Path) -> None:
    """Untracked files are seen, a renamed file is two changes, and the patch applies."""
    settings = "[status]\nshowUntrackedFiles = no\nrenames = copies\nrelativePaths = true\nbranch = true\n"
    settings += "[diff]\nnoprefix = true\nrelative = true\nrenames = true\ncontext = 0\nexternal = false\n"
    settings += "[color]\nui = always\n[core]\nquotePath = true\n"
    with (tmp_path / "gitconfig").open("a") as file:
        file.write(settings)
    write(root, {"src/train.py": "1\n2\n3\n4\n5\n"})
    commit(root)
    git(root, "mv", "configs/a.yaml", "configs/z.yaml")
    write(root, {"src/train.py": "1\n2\nthree\n4\n5\n"})
    (root / "new.txt").touch()
    planned = plan(root)
    assert planned.changed == ["configs/a.yaml", "configs/z.yaml", "src/train.py"]
    assert planned.left_out == ["new.txt"]
    folder = take(planned, store)
    git(tmp_path, "clone", "-q", str(root), "again")
    git(tmp_path / "again", "apply", str(folder / ".snapshot/dirty.patch"))
    assert names(folder) == {".gitignore", "configs/z.yaml", "src/train.py"}
    assert "three" in (tmp_path / "again/src/train.py").read_text()
    assert not (tmp_path / "again/configs/a.yaml").exists()


# No snapshot


def test_without_git_there_is_a_way_round(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line."""
    monkeypatch.setenv("PATH", "")
    line = refused(root)
    assert "git cannot be run (No such file or directory)" in line
    assert "or --no-snapshot: the job then runs the files as they lie here when it starts" in line


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("none", "git says: not a git repository"),
        ("no commit", "its git repository has no commit yet"),
        ("ignored", "git tracks no file in it"),
        ("untracked", "git tracks no file in it"),
    ],
)
def test_without_a_commit_of_the_project_there_is_a_way_round(state: str, reason: str, tmp_path: Path) -> None:
    """One line with what is amiss: also where a repository of the home folder ignores or does not know the project."""
    project = tmp_path / "home" / "project"
    write(project, {"src/train.py": "1\n"})
    if state == "no commit":
        git(project, "init", "-q")
        git(project, "add", "-A")
    elif state != "none":
        git(project.parent, "init", "-q")
        (project.parent / ".gitignore").write_text("*\n" if state == "ignored" else "")
        git(project.parent, "add", "--force", ".gitignore")
        git(project.parent, "commit", "-qm", "x")
    line = refused(project)
    assert line.startswith(f"no snapshot of {project}: ")
    assert reason in line
    assert "--no-snapshot" in line


# A plan leaves no trace


def trace(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Name, mode, time and content of everything in `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        found[str(path.relative_to(folder))] = (info.st_mode, info.st_mtime_ns, content)
    return found


def test_a_plan_writes_nothing(root: Path, submodule: Path, tmp_path: Path) -> None:
    """Where `git status` would write a newer index."""
    (root / ".launchignore").write_text("configs\n")
    for name in ("src/train.py", "lib/outer/wide.py"):
        os.utime(root / name, (1, 1))
    write(root, {"left.py": "", "runs/x": ""})
    before = trace(tmp_path)
    planned = plan(root, [Path("runs")])
    assert trace(tmp_path) == before
    git(root, "status")
    assert before["project/.git/index"] != trace(tmp_path)["project/.git/index"]
    assert "src/train.py" not in planned.changed


def test_importing_is_light() -> None:
    """The launcher starts at once."""
    code = "import sys, slurm.snapshot; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    top = {module.split(".")[0] for module in done.stdout.split()}
    assert "slurm" in top
    assert not top & {"torch", "lightning", "src", "jsonargparse", "submitit", "numpy", "yaml"}


# Equal content, equal snapshot


def test_edits_after_submission_do_not_reach_the_snapshot(root: Path, store: Path) -> None:
    """Edited in place, replaced or deleted: the job finds what was there, under its own folder."""
    (root / "src/more.py").write_text("1\n")
    commit(root)
    first = take(plan(root), store)
    with (root / "src/train.py").open("r+") as file:
        file.write("other")
    (root / "src/more.py").unlink()
    second = take(plan(root), store)
    assert first != second
    assert (first / "src/train.py").read_text() == "print(1)\n"
    assert (first / "src/more.py").read_text() == "1\n"
    assert (second / "src/train.py").read_text().startswith("other")


def test_equal_content_is_one_snapshot(root: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs share it, and it is made once; new times, staged edits and untracked files do not count."""
    (root / "src/train.py").write_text("2\n")
    first = plan(root)
    folder = take(first, store)
    inode = (folder / "src/train.py").stat().st_ino
    os.utime(root / "configs/a.yaml", (1, 1))
    git(root, "add", "-A")
    (root / "left.py").touch()
    monkeypatch.setattr(snapshot, "_fill", None)  # would fail
    assert take(plan(root), store) == folder == store / first.digest
    assert (folder / "src/train.py").stat().st_ino == inode
    assert os.listdir(store) == [first.digest]


@pytest.mark.parametrize("change", ["content", "mode", "name", "link", "include", "commit"])
def test_another_content_is_another_snapshot(change: str, root: Path) -> None:
    """So is another commit: a run submitted after `git commit` is recorded under it, not under the one before."""
    (root / "link").symlink_to("src")
    commit(root)
    before = plan(root)
    include = []
    if change == "content":
        (root / "src/train.py").write_text("print(2)\n")
    elif change == "mode":
        (root / "src/train.py").chmod(0o755)
    elif change == "name":
        git(root, "mv", "src/train.py", "src/brain.py")
    elif change == "link":
        (root / "link").unlink()
        (root / "link").symlink_to("configs")
    elif change == "include":
        write(root, {"b.log": ""})
        include = [Path("b.log")]
    else:
        git(root, "commit", "-q", "--allow-empty", "-m", "y")
    assert plan(root, include).digest != before.digest


def test_the_record_makes_the_content_again(root: Path, store: Path, tmp_path: Path) -> None:
    """`commit` and `dirty.patch` together: text, new, deleted, executable and large binary files."""
    write(root, {"gone.py": "gone\n", "old.bin": "old", "run.sh": "x\n"})
    commit(root)
    (root / "gone.py").unlink()
    (root / "old.bin").write_bytes(os.urandom(3_000_000))
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("src")
    write(root, {"src/train.py": "print(2)\n", "src/new.py": "new\n"})
    git(root, "add", "link", "src/new.py")
    (root / "left.txt").touch()
    folder = take(plan(root), store)
    records = folder / ".snapshot"
    assert (records / "commit").read_text() == git(root, "rev-parse", "HEAD") + "\n"
    assert (records / "left_out.txt").read_text() == "left.txt\n"
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(root), "again")
    git(again, "checkout", "-q", (records / "commit").read_text().strip())
    git(again, "apply", str(records / "dirty.patch"))
    git(again, "add", "-A")
    assert set(git(again, "ls-files").splitlines()) == names(folder)
    for name in names(folder) - {"link"}:
        assert (again / name).read_bytes() == (folder / name).read_bytes()
        assert (again / name).stat().st_mode & 0o100 == (folder / name).stat().st_mode & 0o100


def test_without_edits_the_patch_is_empty(root: Path, store: Path) -> None:
    """It is there all the same."""
    assert (take(plan(root), store) / ".snapshot/dirty.patch").read_bytes() == b""


# The folder


def test_nothing_in_a_snapshot_can_be_written(root: Path, store: Path) -> None:
    """Files, folders and records are read-only, whatever the umask; nobody else enters the store."""
    before = os.umask(0)
    try:
        folder = take(plan(root), store)
    finally:
        os.umask(before)
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 8
    assert [path for path in paths if path.lstat().st_mode & 0o222] == []
    assert store.stat().st_mode & 0o777 == 0o700
    assert store.parent.stat().st_mode & 0o022 == 0


def test_a_store_that_others_can_write_to_is_refused(root: Path, store: Path) -> None:
    """Unless it is trusted by name."""
    store.mkdir(parents=True)
    store.chmod(0o777)
    with pytest.raises(LaunchError, match=r"could change what your jobs execute: chmod o-w .*--trust-run-root"):
        take(plan(root), store)
    assert os.listdir(store) == []
    assert take(plan(root), store, trust=True).is_dir()


def test_times_are_those_of_the_submission(root: Path, store: Path) -> None:
    """A file system that purges old files would take copies of old files first."""
    os.utime(root / "src/train.py", (1, 1))
    assert (take(plan(root), store) / "src/train.py").stat().st_mtime > 1e9


def during(monkeypatch: pytest.MonkeyPatch, what: Callable[[Plan, Path], object]) -> None:
    """Do something when the copies are there and the folder has not got its name yet."""
    fill = snapshot._fill

    def and_then(planned: Plan, folder: Path) -> None:
        fill(planned, folder)
        what(planned, folder)

    monkeypatch.setattr(snapshot, "_fill", and_then)


def test_two_submissions_at_once_end_with_the_same_folder(
    root: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both build, one of them comes second, and nothing is left over."""
    both = threading.Barrier(2)
    during(monkeypatch, lambda planned, folder: both.wait(30))
    planned = plan(root)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(take(planned, store))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [store / planned.digest] * 2
    assert os.listdir(store) == [planned.digest]
    assert names(found[0]) == set(planned.files)


def test_a_snapshot_has_its_name_only_when_it_is_whole(
    root: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that is stopped meanwhile leaves nothing, and the next one makes it."""

    def stop(planned: Plan, folder: Path) -> None:
        assert os.listdir(store) == [folder.name]
        assert folder.name.startswith(".making-")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        during(patched, stop)
        with pytest.raises(KeyboardInterrupt):
            take(plan(root), store)
    assert os.listdir(store) == []
    assert take(plan(root), store).is_dir()


def test_an_edit_while_the_snapshot_is_made_is_an_error(
    root: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an edit is nobody's code; nothing is left over."""
    planned = plan(root)
    (root / "src/train.py").write_text("print(2)\n")
    with pytest.raises(LaunchError, match="a file was edited while the snapshot was made; submit again"):
        take(planned, store)
    assert os.listdir(store) == []


@pytest.mark.parametrize("damage", ["edit", "loss"])
def test_a_snapshot_that_was_changed_is_not_used(damage: str, root: Path, store: Path) -> None:
    """Edited in spite of its modes, or purged in part by the file system."""
    folder = take(plan(root), store)
    file = folder / "src/train.py"
    if damage == "edit":
        file.chmod(0o644)
        file.write_text("print(2)\n")
        file.chmod(0o444)
    else:
        file.parent.chmod(0o755)
        file.unlink()
    with pytest.raises(LaunchError, match=f"{folder} was changed after it was made"):
        take(plan(root), store)


def test_a_store_that_cannot_be_made_is_an_error(root: Path, tmp_path: Path) -> None:
    """One line with the system's word."""
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"/file/snapshots cannot be made \(Not a directory\): set RUN_ROOT"):
        take(plan(root), tmp_path / "file/snapshots")
