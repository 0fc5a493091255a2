"""The ways in which people make a project of this template, each as one function of its answers.

Everything runs on a copy of the working tree that is committed in a repository of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from slurm.local.machine import locked

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
VERSIONS = ("2.5.0", "2.6.0", "2.7.1")
NEWEST = VERSIONS[-1]
CRUFT = "2.16.0"
TAG = "v-now"
CACHE = ROOT / ".cache" / "bake"  # environments, and what mypy knows about other people's packages
Answers = dict[str, str]


def run(*command: object, cwd: Path, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    """A command's outcome with its output captured; a failure shows both streams."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"PWD": str(cwd), "MYPY_CACHE_DIR": str(CACHE / "mypy")} | more,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0 or not check, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def git(cwd: Path, *arguments: object) -> str:
    return run("git", *arguments, cwd=cwd).stdout


def tools(version: str = NEWEST) -> Path:
    """The bin folder of a virtual environment with that cookiecutter; the newest has cruft and setuptools too."""
    folder = CACHE / version
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):  # `make bake-quick` runs tests in two processes
        if not (folder / "done").exists():
            run(sys.executable, "-m", "venv", "--clear", folder, cwd=ROOT)
            more = (f"cruft=={CRUFT}", "setuptools>=77") if version == NEWEST else ()
            pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            run(*pip, f"cookiecutter=={version}", *more, cwd=ROOT)
            (folder / "done").touch()
    return folder / "bin"


def publish(folder: Path) -> Path:
    """The working tree, uncommitted work included, as the newest commit of a repository with all its history."""
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, folder, cwd=ROOT)
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        source, target = ROOT / name, folder / name
        if not name:
            continue
        target.unlink(missing_ok=True)
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            run("cp", "--no-dereference", "--preserve=mode", source, target, cwd=ROOT)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "The working tree")
    git(folder, "tag", "--force", TAG)
    return folder


def cookiecutter(
    template: object, out: Path, answers: Answers, *options: object, version: str = NEWEST, cwd: Path | None = None
) -> Path:
    """The project that `cookiecutter TEMPLATE --no-input` makes in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    given = [f"{key}={value}" for key, value in answers.items()]
    run(
        *(tools(version) / "cookiecutter", template, "--no-input", "--output-dir", out, *options, *given),
        cwd=cwd or out,
    )
    (project,) = out.iterdir()
    return project


def relative(repo: Path, out: Path, answers: Answers, version: str) -> Path:
    return cookiecutter(f"./{repo.name}", out, answers, version=version, cwd=repo.parent)


def absolute(repo: Path, out: Path, answers: Answers, version: str = NEWEST) -> Path:
    return cookiecutter(repo, out, answers, version=version)


def inside(repo: Path, out: Path, answers: Answers, version: str) -> Path:
    return cookiecutter(".", out, answers, version=version, cwd=repo)


def clone(repo: Path, out: Path, answers: Answers, version: str) -> Path:
    return cookiecutter(repo.as_uri(), out, answers, version=version)


def tag(repo: Path, out: Path, answers: Answers, version: str) -> Path:
    """By a tag, while the default branch has moved on to something that cannot be baked."""
    moved = out.parent / "moved.git"
    run("git", "clone", "--quiet", repo, moved, cwd=out.parent)
    git(moved, "rm", "--quiet", "-r", "hooks", "src")
    git(moved, "commit", "--quiet", "--message", "Later")
    return cookiecutter(moved.as_uri(), out, answers, "--checkout", TAG, version=version)


def archive(repo: Path, out: Path, answers: Answers, version: str) -> Path:
    file = out.parent / "template.zip"
    git(repo, "archive", "--format=zip", "--prefix=template/", "--output", file, "HEAD")
    return cookiecutter(file, out, answers, version=version)


def replay(repo: Path, out: Path, answers: Answers, version: str) -> Path:
    first = out.parent / "first"
    cookiecutter(repo, first, answers, version=version)
    out.mkdir()
    run(tools(version) / "cookiecutter", repo, "--replay", "--output-dir", out, cwd=out)
    (project,) = out.iterdir()
    return project


def without_links(repo: Path, out: Path, answers: Answers, version: str) -> Path:
    """A clone on a file system without symbolic links, named relatively: the hardest to repair."""
    plain = out.parent / "plain"
    run("git", "clone", "--quiet", "-c", "core.symlinks=false", repo, plain, cwd=out.parent)
    return cookiecutter("plain", out, answers, version=version, cwd=out.parent)


def cruft(repo: Path, out: Path, answers: Answers, *options: object) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    given = ("--extra-context", json.dumps(answers))
    run(*(tools() / "cruft", "create", repo.as_uri(), "--no-input", "--output-dir", out, *given, *options), cwd=out)
    (project,) = out.iterdir()
    return project


def tree(project: Path) -> dict[str, tuple[bytes, bool]]:
    """Every file's content and whether it is executable, without git's and cruft's own; a link is an error."""
    found = {}
    for path in sorted(project.rglob("*")):
        name = str(path.relative_to(project))
        assert not path.is_symlink(), f"{name} is a symbolic link"
        if path.is_file() and not name.startswith(".git/") and name != ".cruft.json":
            found[name] = (path.read_bytes(), os.access(path, os.X_OK))
    return found


def two_steps(project: Path, run_root: Path, *arguments: str, python: Path = PYTHON) -> None:
    """Train for two steps with what plain `fit` means there."""
    steps = ("--trainer.max_steps", "2", "--trainer.limit_val_batches", "1")
    command = (python, "-m", "src.cli", "fit", "--config", "configs/cpu.yaml", *steps, *arguments)
    run(*command, cwd=project, RUN_ROOT=str(run_root))
