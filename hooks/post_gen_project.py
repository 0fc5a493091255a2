"""Finishes a new project: links that came out as text, the name in pyproject.toml, caches; then the next steps.

May run any number of times on the same folder (cruft does), needs no network and no git, asks nothing.
"""

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
LEFTOVERS = ("__pycache__", "*.py[co]", "*.egg-info", ".*_cache", ".ipynb_checkpoints", "clusters/mine.yaml")


def template() -> Path | None:
    """The template's root; None under cruft, which does not tell."""
    # Without a scheme a path is relative to where the command was typed, and this runs elsewhere.
    told = os.path.join(os.environ.get("PWD", ""), ANSWERS.get("_repo_dir", "?"))
    return Path(told) if os.path.isfile(os.path.join(told, "cookiecutter.json")) else None


def copied(project: Path) -> dict[str, Path]:
    """What comes from links: its name at the template's root and where it lies here."""
    names = [re.sub(r"^\W+cookiecutter.__dot\W+", ".", name) for name in ANSWERS["_copy_without_render"]]
    return {name: project / name for name in names}


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
                f"template that keep symbolic links (git config core.symlinks true; on Windows: WSL)"
            )
        item.unlink()
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy2
        copy(root / name, item)


def tidy(project: Path) -> None:
    """Caches of a template used from a working tree go; scripts become executable, which a zip forgets."""
    for item in copied(project).values():
        for pattern in LEFTOVERS:
            for path in list(item.rglob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in (item, *item.rglob("*")):
            if path.is_file() and path.open("rb").read(2) == b"#!":
                path.chmod(path.stat().st_mode | 0o111)


def name_project(project: Path) -> None:
    """Name, description, author and licence in pyproject.toml."""
    path = project / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    quoted = {key: json.dumps(value, ensure_ascii=False) for key, value in ANSWERS.items()}  # as TOML writes strings
    author, license_ = ANSWERS["author"].strip(), ANSWERS["license"]
    fields = {
        "name": quoted["project_slug"],
        "description": quoted["description"],
        "authors": "[{ name = " + quoted["author"] + " }]" if author else "",
        "license": quoted["license"] if license_ != "none" else "",
    }
    head, table, rest = text.partition("[project]\n")
    own, following, tail = rest.partition("\n[")
    for key, value in fields.items():
        line = f"{key} = {value}\n" if value else ""
        own = re.sub(rf"(?m)^{key} = .*\n", line.replace("\\", r"\\"), own)
    path.write_text(head + table + own + following + tail, encoding="utf-8")


def next_steps(project: Path) -> None:
    """What to type now; silent in the folders that cruft compares."""
    if "_repo_dir" not in ANSWERS and project.is_relative_to(Path(tempfile.gettempdir()).resolve()):
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
    name_project(here)
    next_steps(here)
