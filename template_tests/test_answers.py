"""Every answer gives a project that is what was asked for, or one line that says why not."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from template_tests.baking import PYTHON, ROOT, Answers, absolute, git, run, tools, tree, two_steps

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text())
CHOICES = [{key: value} for key in ("license", "task", "cluster") for value in QUESTIONS[key]]
TEXTS = {
    "quotes": """Ada's "best" run""",
    "backslashes": r"C:\new\table \\ end\\",
    "braces": "{a} {0} }} %} #} ${HOME} $(pwd) `id`",
    "unicode": "模型 Ünïcode 🚀 Ω",
    "long": "long " * 60,
    "dash": "--no-input -rf",
    "spaces": "  spaced   out  ",
    "markup": "# <b>&amp;</b> [x](y) | *a* _b_",
    "digits": "007",
    "yaml": "yes: {no}, - ~ null",
}
HOSTILE = [{"project_name": text, "description": text, "author": text} for text in TEXTS.values()]
SLURM = [{"account_partition": text} for text in ("proj-1:gpu", "proj_1", ":a100,h100", " proj : gpu ", ":")]
EVERY = [{}, *CHOICES, *HOSTILE, *SLURM]
LICENSE_FIRST_LINES = {"MIT": "MIT License", "Apache-2.0": "Apache License", "BSD-3-Clause": "BSD 3-Clause License"}


def name(answers: Answers) -> str:
    return next((f"{key}={value}"[:40] for key, value in answers.items()), "defaults")


def quick(answers: Answers) -> object:
    """Defaults and one hostile set run for every change, the others where there is time."""
    often = answers in ({}, HOSTILE[0], {"task": "vision"})
    return pytest.param(answers, id=name(answers), marks=[] if often else [pytest.mark.exhaustive])


@pytest.mark.parametrize("answers", [quick(answers) for answers in EVERY])
def test_a_project_is_what_was_asked_for(answers: Answers, repo: Path, tmp_path: Path) -> None:
    """The shared files byte for byte, the answers in their places, a valid package, and a clean first commit."""
    project = absolute(repo, tmp_path / "out", answers)
    check_files(project, repo)
    check_answers(project, answers)
    check_package(project, answers)
    shown = run(PYTHON, "slurm/cluster.py", cwd=project, check=False).stdout.split("\n", 1)[0].split()
    assert shown == ["cluster", answers.get("cluster", QUESTIONS["cluster"][0]), "project.yaml"]
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "First")
    assert set(git(project, "-c", "core.quotePath=false", "ls-files").splitlines()) == set(tree(project))
    two_steps(project, tmp_path / "runs")
    (trained,) = (tmp_path / "runs").iterdir()
    assert trained.name.startswith(answers.get("task", QUESTIONS["task"][0]) + "-")


def check_files(project: Path, repo: Path) -> None:
    """The project holds the copied files as they are in the repository, its own three, and nothing else."""
    theirs = tree(project)
    ours: dict[str, tuple[bytes, bool]] = {}
    for item in (item.replace("{{cookiecutter.__dot}}", ".") for item in QUESTIONS["_copy_without_render"]):
        folder = (repo / item).is_dir()
        found = tree(repo / item) if folder else {"": ((repo / item).read_bytes(), os.access(repo / item, os.X_OK))}
        ours |= {f"{item}/{key}".rstrip("/"): value for key, value in found.items()}
    for key in ours.keys() - {"pyproject.toml"}:
        assert theirs[key] == ours[key], key
    assert theirs.keys() - ours.keys() in ({"README.md", "LICENSE", "project.yaml"}, {"README.md", "project.yaml"})
    for key, (content, _) in theirs.items():
        assert b"{{ cookiecutter" not in content, key
        assert b"{{cookiecutter" not in content, key


def check_answers(project: Path, answers: Answers) -> None:
    """Name and description in the README, task and cluster in project.yaml, the licence in its file."""
    heading, _, rest = (project / "README.md").read_text().partition("\n")
    assert heading == f"# {answers.get('project_name', QUESTIONS['project_name'])}"
    assert answers.get("description", QUESTIONS["description"]) in rest
    account, _, partition = answers.get("account_partition", "").partition(":")
    assert yaml.safe_load((project / "project.yaml").read_text()) == {
        "task": answers.get("task", QUESTIONS["task"][0]),
        "cluster": answers.get("cluster", QUESTIONS["cluster"][0]),
        "account": account.strip(),
        "partition": partition.strip(),
    }
    licence = answers.get("license", "MIT")
    assert (project / "LICENSE").exists() == (licence != "none")
    if licence != "none":
        text = (project / "LICENSE").read_text()
        assert text.strip().startswith(LICENSE_FIRST_LINES[licence])
        assert licence == "Apache-2.0" or answers.get("author", "the authors of My Experiment").strip() in text


def check_package(project: Path, answers: Answers) -> None:
    """setuptools accepts pyproject.toml and finds in it what was answered."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert table["name"] == project.name
    assert table["description"] == answers.get("description", QUESTIONS["description"])
    assert table.get("authors", []) == ([{"name": answers["author"]}] if answers.get("author") else [])
    licence = answers.get("license", "MIT")
    assert table.get("license", "none") == licence
    build = "import setuptools.build_meta, sys; setuptools.build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    made = project.parent.parent / "metadata"
    made.mkdir()
    run(tools() / "python", "-c", build, made, cwd=project)
    (metadata,) = made.rglob("METADATA")
    assert f"\nName: {project.name}\n" in metadata.read_text()
    for leftover in project.glob("*.egg-info"):
        run("rm", "-r", leftover, cwd=project)


@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ({"project_slug": "-rf"}, "project_slug '-rf' is no folder and distribution name"),
        ({"project_slug": "a b"}, "project_slug 'a b'"),
        ({"project_slug": "../elsewhere"}, "project_slug '../elsewhere'"),
        ({"project_slug": "modèle"}, "project_slug 'modèle'"),
        ({"project_slug": "x" * 120}, "up to 100 of A-Z"),
        ({"project_name": "Lightning"}, "'lightning' is the name of a package"),
        ({"project_slug": "Scikit_Learn"}, "'Scikit_Learn' is the name of a package"),
        ({"project_name": "two\nlines"}, "one line of at most 500"),
        ({"description": "two\nlines"}, "description 'two\\nlines'"),
        ({"author": "bell\a"}, "author 'bell\\x07'"),
        ({"description": "x" * 501}, "at most 500"),
        ({"project_name": " ", "project_slug": "x"}, "project_name is empty"),
        ({"account_partition": "a:b:c"}, "ACCOUNT:PARTITION"),
        ({"account_partition": "a\nb"}, "ACCOUNT:PARTITION"),
        ({"account_partition": "$(id)"}, "ACCOUNT:PARTITION"),
    ],
    ids=lambda value: name(value) if isinstance(value, dict) else None,
)
def test_what_cannot_work_is_refused_in_one_line(answers: Answers, part: str, repo: Path, tmp_path: Path) -> None:
    """The line says what was got and what is allowed, and nothing stays behind."""
    out = tmp_path / "out"
    out.mkdir()
    given = [f"{key}={value}" for key, value in answers.items()]
    done = run(tools() / "cookiecutter", repo, "--no-input", "--output-dir", out, *given, cwd=out, check=False)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert part in line
    assert list(out.iterdir()) == []
    assert not (tmp_path / "elsewhere").exists()


def test_an_old_answer_that_is_gone_is_refused(repo: Path, tmp_path: Path) -> None:
    """A replay that names a task which no longer exists says which there are."""
    answers = {key: value[0] if isinstance(value, list) else value for key, value in QUESTIONS.items()}
    answers |= {"project_slug": "old", "task": "speech"}
    replayed = tmp_path / "old.json"
    replayed.write_text(json.dumps({"cookiecutter": answers}))
    done = run(
        *(tools() / "cookiecutter", repo, "--replay-file", replayed, "--output-dir", tmp_path / "out"),
        cwd=tmp_path,
        check=False,
    )
    assert "error: task 'speech' does not exist: language, vision" in done.stderr
    assert done.returncode != 0


def test_typed_answers_are_taken_literally(repo: Path, tmp_path: Path) -> None:
    """Someone who types braces at the prompts gets braces; Enter takes the default."""
    typed = ["""It's {{ 7 * 7 }} "x" {% raw %}""", "typed", "", "", "2", "vision", "", ""]
    asked = [key for key in QUESTIONS if not key.startswith("_")]
    typed[asked.index("task")] = str(QUESTIONS["task"].index("vision") + 1)
    done = subprocess.run(
        [tools() / "cookiecutter", repo, "--output-dir", tmp_path],
        input="\n".join(typed) + "\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PWD": str(tmp_path)},
    )
    project = tmp_path / "typed"
    assert (project / "README.md").read_text().startswith(f"# {typed[0]}\n")
    assert yaml.safe_load((project / "project.yaml").read_text())["task"] == "vision"
    assert (project / "LICENSE").read_text().strip().startswith("Apache License")
    for text in QUESTIONS["__prompts__"].values():
        assert (text["__prompt__"] if isinstance(text, dict) else text).split("(")[0] in " ".join(done.stdout.split())
    assert f"cd {project}" in done.stdout
    assert "make train" in done.stdout
