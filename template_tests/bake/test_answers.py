"""Every answer gives a project that is what was asked for, or one line that says why not."""

import hashlib
import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from template_tests.bake.baking import PYTHON, ROOT, Answers, absolute, git, run, tools, tree, two_steps

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
HOSTILE = [
    # What CI sees of all this, so everything that is not the default at once.
    {
        "project_name": r"""Ada's "best" \run""",
        "description": r"""It's "{quoted}" \ 模型""",
        "author": r"""O'Neill "\n" <x>""",
        "license": "BSD-3-Clause",
        "task": "vision",
        "cluster": "generic",
        "account_partition": "proj-1:gpu",
    },
    *({"project_name": text, "description": text, "author": text} for text in TEXTS.values()),
]
SLURM = [{"account_partition": text} for text in ("proj-1:gpu", "proj_1", ":a100,h100", " proj : gpu ", ":")]
EVERY = [{}, *CHOICES, *HOSTILE, *SLURM]
# SHA-256 of each licence's text, which was read word by word, without its copyright line and with single spaces.
LICENSES = {
    "MIT": "7c9b48b52decb9837c70f608678129e1ac79e056829c8d1e82e8cdd8aed562f8",
    "Apache-2.0": "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645",
    "BSD-3-Clause": "77bebd765dc6e78c3feb4e9856b5d733a736a0ce9621764f9a604daf488d6941",
}


def name(answers: Answers) -> str:
    return next((f"{key}={value}"[:40] for key, value in answers.items()), "defaults")


def quick(answers: Answers) -> object:
    """Defaults and one hostile set run for every change, the others where there is time."""
    often = answers in ({}, HOSTILE[0])
    return pytest.param(answers, id=name(answers), marks=[] if often else [pytest.mark.exhaustive])


@pytest.mark.parametrize("answers", [quick(answers) for answers in EVERY])
def test_a_project_is_what_was_asked_for(answers: Answers, repo: Path, tmp_path: Path) -> None:
    """The shared files byte for byte, the answers in their places, a valid package, and a clean first commit."""
    project = absolute(repo, tmp_path / "out", answers)
    check_files(project, repo)
    check_answers(project, answers)
    check_package(project, answers)
    shown = run(PYTHON, "slurm/cluster.py", cwd=project, check=False).stdout.split("\n", 1)[0].split()
    assert shown == ["cluster", answers.get("cluster", QUESTIONS["cluster"][0])]
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
        if item.endswith("_cache"):  # may lie in a used template, never in a project
            continue
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
    assert heading == f"# {answers.get('project_name', QUESTIONS['project_name']).strip()}"
    assert answers.get("description", QUESTIONS["description"]).strip() in rest
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
        lines = text.splitlines()
        own = [line for line in lines if line.startswith("Copyright (c)")]
        words = " ".join(" ".join(line for line in lines if line not in own).split())
        assert hashlib.sha256(words.encode()).hexdigest() == LICENSES[licence]
        holder = answers.get("author", "").strip() or f"the authors of {answers.get('project_name', 'My Experiment')}"
        assert own == ([] if licence == "Apache-2.0" else [f"Copyright (c) {holder}"])


def check_package(project: Path, answers: Answers) -> None:
    """setuptools accepts pyproject.toml and finds in it what was answered."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert table["name"] == project.name
    assert table["description"] == answers.get("description", QUESTIONS["description"]).strip()
    assert table.get("authors", []) == ([{"name": answers["author"].strip()}] if answers.get("author") else [])
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
        ({"project_slug": "pytorch_lightning"}, "'pytorch_lightning' is the name of a package"),
        ({"project_slug": "ends-"}, "project_slug 'ends-'"),
        ({"account_partition": "yes:gpu"}, "'yes' is no name of an account"),
        ({"account_partition": ":null"}, "'null' is no name of an account"),
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
    answers = {key: value[0] if key in ("license", "cluster") else value for key, value in QUESTIONS.items()}
    answers |= {"project_slug": "old", "task": "speech"}
    replayed = tmp_path / "old.json"
    replayed.write_text(json.dumps({"cookiecutter": answers}))
    done = run(
        *(tools() / "cookiecutter", repo, "--replay-file", replayed, "--output-dir", tmp_path / "out"),
        cwd=tmp_path,
        check=False,
    )
    assert "error: task 'speech' does not exist: language, vision" in done.stderr
    assert not (tmp_path / "out/old").exists()
    assert done.returncode != 0


def test_typed_answers_are_taken_literally(repo: Path, tmp_path: Path) -> None:
    """Someone who types braces at the prompts gets braces; Enter takes the default."""
    answers = {
        "project_name": """It's {{ 7 * 7 }} "x" {% raw %}""",
        "project_slug": "typed",
        "license": "2",
        "task": "2",
        "cluster": "2",
    }
    typed = [answers.get(key, "") for key in QUESTIONS if not key.startswith("_")]
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
    assert (project / "README.md").read_text().startswith(f"# {answers['project_name']}\n")
    assert yaml.safe_load((project / "project.yaml").read_text())["task"] == "vision"
    assert (project / "LICENSE").read_text().strip().startswith("Apache License")
    for text in QUESTIONS["__prompts__"].values():
        assert (text["__prompt__"] if isinstance(text, dict) else text).split("(")[0] in " ".join(done.stdout.split())
    assert f"cd {project}" in done.stdout
    assert "make train" in done.stdout
    assert "python slurm/cluster.py" in done.stdout
