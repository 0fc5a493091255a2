"""A generated project lives: its own `make train`, `make test` and `make lint` pass, also without the examples."""

import re
from pathlib import Path

import pytest

from template_tests.bake.baking import PYTHON, ROOT, absolute, archive, clone, cruft, git, run, two_steps

# Tests of what is left when an example is gone.
OF_THE_PROJECT = [f"tests/test_{name}.py" for name in ("imports", "configs", "readme", "dry_run")]
TASKS = sorted(path.stem for path in (ROOT / "configs/tasks").glob("*.yaml"))


@pytest.fixture(scope="module")
def project(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The defaults, with an environment of its own as soon as one of its make targets ran."""
    folder = tmp_path_factory.mktemp("inside")
    return clone(repo, folder / "out", {}, "2.7.1")


def test_a_new_project_passes_its_own_tests(project: Path) -> None:
    """`make lint` and `make test` pass on what the defaults give, in an environment that it sets up itself."""
    run("make", "lint", cwd=project)
    assert " passed" in run("make", "test", cwd=project).stdout
    experiment = ("--config", "configs/experiments/larger_batch.yaml")
    two_steps(project, project / "runs", *experiment, python=project / ".venv/bin/python")


def test_an_edited_engine_is_tested_by_the_templates_suite(repo: Path, tmp_path: Path) -> None:
    """`make engine-tests` fetches the project's version of the tests and runs them on the project's own src/."""
    project = cruft(repo, tmp_path / "out", {})
    (project / ".venv").symlink_to(ROOT / ".venv")
    chosen = "template_tests/engine/checkpoint/test_schedule.py"
    make = ("make", "engine-tests", "--assume-old=.venv/installed")
    assert " passed" in run(*make, cwd=project, PYTEST_ADDOPTS=f"-k test_schedule {chosen}").stdout
    (project / "src/engine/checkpoint/schedule.py").write_text("raise RuntimeError('edited')\n")
    assert "edited" in run(*make, cwd=project, PYTEST_ADDOPTS=f"-k test_schedule {chosen}", check=False).stdout


@pytest.mark.exhaustive
def test_a_new_project_trains(project: Path) -> None:
    """`make train` there ends with a finished run of the default task."""
    run("make", "train", cwd=project, RUN_ROOT=str(project / "runs"))
    assert [path.parent.name.split("-")[0] for path in project.glob("runs/*/DONE")] == ["language"]


@pytest.mark.exhaustive
def test_a_project_from_a_zip_trains_what_was_chosen_and_passes_its_tests(repo: Path, tmp_path: Path) -> None:
    """The same for the other task, from a zip, under a name that nobody should choose."""
    answers = {"project_name": """Ada's "own" run""", "task": "vision", "license": "none", "cluster": "generic"}
    project = archive(repo, tmp_path / "out", answers, "2.7.1")
    run("make", "train", cwd=project, RUN_ROOT=str(project / "runs"))
    assert [path.parent.name.split("-")[0] for path in project.glob("runs/*/DONE")] == ["vision"]
    assert " passed" in run("make", "test", cwd=project).stdout


def without(tasks: list[str], repo: Path, out: Path) -> Path:
    """A new project from which examples were deleted as its README says."""
    project = absolute(repo, out, {"task": next((task for task in TASKS if task not in tasks), TASKS[0])})
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "First")
    lines = (project / "README.md").read_text().splitlines()
    (command,) = [line.strip() for line in lines if line.startswith("    T=")]
    for task in tasks:
        run("bash", "-c", re.sub("^T=[a-z]+;", f"T={task};", command), cwd=project)
        assert not (project / f"configs/tasks/{task}.yaml").exists()
    return project


@pytest.mark.parametrize("tasks", [*([task] for task in TASKS), TASKS], ids="+".join)
def test_an_example_can_be_deleted(tasks: list[str], repo: Path, tmp_path: Path) -> None:
    """Types, imports, configurations and the README hold; another task trains, or one line asks for a task."""
    project = without(tasks, repo, tmp_path / "out")
    run(PYTHON, "-m", "mypy", cwd=project)
    run(PYTHON, "-m", "pytest", "--collect-only", cwd=project)
    run(PYTHON, "-m", "pytest", *OF_THE_PROJECT, cwd=project)
    if len(tasks) < len(TASKS):
        two_steps(project, tmp_path / "runs")
    else:
        fit = (PYTHON, "-m", "src.cli", "fit", "--config", "configs/cpu.yaml")
        done = run(*fit, cwd=project, check=False)
        assert done.returncode == 2
        assert "configs/tasks has none" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", TASKS)
def test_all_tests_pass_without_an_example(task: str, repo: Path, tmp_path: Path) -> None:
    """The complete test suite of what is left, also before project.yaml names another task than the deleted one."""
    project = without([task], repo, tmp_path / "out")
    text = (project / "project.yaml").read_text()
    (project / "project.yaml").write_text(re.sub("(?m)^task: .*", f"task: {task}", text))
    done = run(PYTHON, "-m", "src.cli", "fit", "--config", "configs/cpu.yaml", cwd=project, check=False)
    assert done.returncode == 2
    assert f"task '{task}' is unknown" in done.stderr
    (workers,) = re.findall("-m pytest (--numprocesses .*)", (project / "Makefile").read_text())
    assert " passed" in run(PYTHON, "-m", "pytest", *workers.split(), cwd=project).stdout
