"""Finishes a new project: links that came out as text, the name in pyproject.toml, caches; then the next steps.

Needs no network and no git, and asks nothing. (cruft runs it on two fresh folders for every update.)
"""

from __future__ import annotations  # cookiecutter may run on an older Python than the project

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
# What a used working tree holds beside its code, and what belongs to the person who used it.
LEFTOVERS = (
    *("__pycache__", "*.py[co]", "*.egg-info", ".*_cache", ".ipynb_checkpoints", "clusters/mine.yaml"),
    *(".DS_Store", ".*.sw[op]", "*~", ".venv", "runs"),
)


def template() -> Path | None:
    """Return the template's root; None under cruft, which does not tell."""
    # Without a scheme a path is relative to where the command was typed, and this runs elsewhere.
    told = os.path.join(os.environ.get("PWD", ""), ANSWERS.get("_repo_dir", "?"))
    return Path(told) if os.path.isfile(os.path.join(told, "cookiecutter.json")) else None


def copied(project: Path) -> dict[str, Path]:
    """Return what comes from links: its name at the template's root and where it lies here."""
    # In the template .gitignore has another name, or git would heed it there, and refuses to: it is a link.
    names = [re.sub(r"^\W+cookiecutter.__dot\W+", ".", name) for name in ANSWERS["_copy_without_render"]]
    return {name: project / name for name in names if not name.endswith("_cache")}


def restore_links(project: Path) -> None:
    """Without symbolic links (zip, core.symlinks=false) they came out as files that hold a path."""
    for name, item in copied(project).items():
        target = "../" * (name.count("/") + 1) + name
        if not item.is_file() or item.read_text(errors="replace").strip() != target:
            continue
        root = template()
        if root is None:
            sys.exit(
                f"error: {name} is a symbolic link that arrived as text: use a git, a file system and a copy of the "
                f"template that keep symbolic links (git config core.symlinks true; on Windows: WSL), or name the "
                f"template by its absolute path"
            )
        item.unlink()
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy2
        copy(root / name, item)


def tidy(project: Path) -> None:
    """Remove what a template that is used from a working tree brings along."""
    for folder in (project, *(item for item in copied(project).values() if item.is_dir())):
        for pattern in LEFTOVERS:
            for path in list(folder.glob(pattern) if folder == project else folder.rglob(pattern)):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def complaint(project: Path) -> str | None:
    """Return which answer cannot work with the files that have come."""
    for key, folder in (("task", "configs/tasks"), ("cluster", "configs/clusters")):
        names = sorted(path.stem for path in (project / folder).glob("*.yaml"))
        if ANSWERS[key] not in names:
            return f"{key} {ANSWERS[key]!r} does not exist: {', '.join(names)}"
    # A project of this name would stand in for the package in its own environment.
    lines = (project / "constraints.txt").read_text(encoding="utf-8").splitlines()
    taken = {distribution(line.split("==")[0]) for line in lines if "==" in line}
    if distribution(ANSWERS["project_slug"]) in taken | {"pip", "setuptools", "wheel"}:
        return f"project_slug {ANSWERS['project_slug']!r} is the name of a package that the project installs"
    return None


def distribution(name: str) -> str:
    """Return a distribution's name as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_project(project: Path) -> None:
    """Name, description, author and licence in pyproject.toml."""
    path = project / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    quoted = {  # as TOML writes strings
        key: json.dumps(ANSWERS[key].strip(), ensure_ascii=False)
        for key in ("project_slug", "description", "author", "license")
    }
    fields = {
        "name": quoted["project_slug"],
        "description": quoted["description"],
        "authors": "[{ name = " + quoted["author"] + " }]" if ANSWERS["author"].strip() else "",
        "license": quoted["license"] if ANSWERS["license"] != "none" else "",
    }
    head, table, rest = text.partition("[project]\n")
    own, following, tail = rest.partition("\n[")
    for key, value in fields.items():
        line = f"{key} = {value}\n" if value else ""
        own = re.sub(rf"(?m)^{key} = .*\n", line.replace("\\", r"\\"), own)
    path.write_text(head + table + own + following + tail, encoding="utf-8")


def next_steps(project: Path) -> None:
    """Print what to type now; nothing in the folders that cruft compares."""
    under_cruft = "_repo_dir" not in ANSWERS
    if under_cruft and Path(tempfile.gettempdir()).resolve() in project.parents:
        return
    cluster = (
        "    python slurm/cluster.py    # what a job would ask for there\n" if ANSWERS["cluster"] != "local" else ""
    )
    print(
        f"\n{project.name} is made. Next:\n"
        f"    cd {shlex.quote(str(project))}\n"
        f"    git init && git add -A && git commit -m 'From the template'\n"
        f"    make train    # sets up .venv, then trains `{ANSWERS['task']}`\n"
        f"    make test\n{cluster}"
        f"README.md says the rest; project.yaml holds the task and the cluster.\n"
    )


if __name__ == "__main__":
    here = Path.cwd()
    restore_links(here)
    tidy(here)
    if message := complaint(here):
        sys.exit(f"error: {message}")
    name_project(here)
    next_steps(here)
