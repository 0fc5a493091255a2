"""`cruft update` brings what the template changed and keeps what the user did."""

import shutil
from pathlib import Path

import pytest

from template_tests.bake.baking import Answers, cruft, git, run, tools, tree, two_steps

ENGINE, MODEL, TASK = "src/engine/signals.py", "src/models/gpt.py", "src/tasks/vision/module.py"
FIRST_SHIPPED = "8845b8e"  # before src/engine/: batching.py and others lay in src/
ANSWERS: Answers = {"project_name": "Ada's run", "task": "vision"}


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)


@pytest.fixture
def older(repo: Path, tmp_path: Path) -> Path:
    """The template with an older commit in front: without slurm/, other first lines of three files, one file more."""
    template = tmp_path / "template.git"
    run("git", "clone", "--quiet", repo, template, cwd=tmp_path)
    now = git(template, "rev-parse", "HEAD").strip()
    shutil.rmtree(template / "slurm")
    (template / "{{cookiecutter.project_slug}}/slurm").unlink()
    answers = (template / "cookiecutter.json").read_text().replace('    "slurm",\n', "")
    (template / "cookiecutter.json").write_text(answers)
    for name in (ENGINE, MODEL, TASK):
        text = (template / name).read_text()
        (template / name).write_text(text.replace(text.split("\n", 1)[0], '"""As the template had it before."""', 1))
    (template / "configs/old.yaml").write_text("trainer:\n")
    module = template / "src/tasks/language/module.py"
    module.write_text("# Older.\n" + module.read_text())
    commit(template, "Older")
    git(template, "tag", "older")
    git(template, "revert", "--no-edit", "HEAD")
    assert git(template, "diff", now) == ""
    return template


@pytest.fixture
def project(older: Path, tmp_path: Path) -> Path:
    """A user's project of the older template, committed, with work of their own."""
    made = cruft(older, tmp_path / "out", ANSWERS, "--checkout", "older")
    assert not (made / "slurm").exists()
    git(made, "init", "--quiet")
    commit(made, "From the template")
    (made / "configs/mine_too.yaml").write_text("trainer:\n  max_epochs: 3\n")
    (made / "src/tasks/speech").mkdir()
    (made / "src/tasks/speech/__init__.py").write_text("# mine\n")
    (made / "README.md").write_text((made / "README.md").read_text() + "\nMy own words.\n")
    git(made, "rm", "--quiet", "-r", "src/tasks/language", "configs/tasks/language.yaml", "tests/tasks/language")
    return made


def update(project: Path) -> str:
    commit(project, "Work")
    # A checkout of the newest branch, as the first `cruft create` named a tag.
    return run(tools() / "cruft", "update", "--skip-apply-ask", "--checkout", "main", cwd=project).stdout


def test_an_update_keeps_the_users_work(project: Path) -> None:
    """New folders arrive, deleted files go, edits of both sides merge, what the user deleted stays deleted."""
    text = (project / ENGINE).read_text()
    (project / ENGINE).write_text(text + "\n\nMINE = 1\n")
    update(project)
    merged = (project / ENGINE).read_text()
    assert merged.endswith("\n\nMINE = 1\n")
    assert "As the template had it before" not in merged
    assert "<<<<<<<" not in merged
    assert (project / "slurm/cluster.py").exists()
    assert not (project / "configs/old.yaml").exists()
    assert (project / "configs/mine_too.yaml").read_text() == "trainer:\n  max_epochs: 3\n"
    assert (project / "src/tasks/speech/__init__.py").read_text() == "# mine\n"
    assert (project / "README.md").read_text().endswith("\nMy own words.\n")
    assert (project / "README.md").read_text().startswith("# Ada's run\n")
    assert not (project / "src/tasks/language").exists()
    assert 'name = "ada-s-run"' in (project / "pyproject.toml").read_text()
    assert not list(project.rglob("*.rej"))
    assert "up to date" in run(tools() / "cruft", "check", "--checkout", "main", cwd=project).stdout


def test_what_is_yours_is_left_alone(project: Path) -> None:
    """Tasks and models get no later version of the template's examples, whether they were edited or not."""
    (project / TASK).write_text((project / TASK).read_text() + "\n\nMINE = 1\n")
    before = {name: (project / name).read_text() for name in (MODEL, TASK)}
    assert all("As the template had it before" in text for text in before.values())
    update(project)
    assert {name: (project / name).read_text() for name in (MODEL, TASK)} == before
    assert not list(project.rglob("*.rej"))


def test_work_on_files_that_have_moved_goes_with_them(repo: Path, tmp_path: Path) -> None:
    """Of a project from before src/engine/: an edited task, two edited files of the machinery, a deleted example.

    An edit is found in the file's new place; where the template has changed the same line, git shows both.
    """
    made = cruft(repo, tmp_path / "out", {}, "--checkout", FIRST_SHIPPED)
    git(made, "init", "--quiet")
    commit(made, "From the template")
    for name in ("src/tasks/language/module.py", "src/batching.py"):
        (made / name).write_text((made / name).read_text() + "\n\nMINE = 1\n")
    seeding = (made / "src/seeding.py").read_text()
    (made / "src/seeding.py").write_text(seeding.replace('"""', '"""Mine. ', 1))
    git(made, "rm", "--quiet", "-r", "src/tasks/vision", "configs/tasks/vision.yaml", "tests/tasks/vision")
    update(made)
    for name in ("src/tasks/language/module.py", "src/engine/data/loader.py"):
        assert (made / name).read_text().endswith("\n\nMINE = 1\n"), name
    moved = (made / "src/engine/data/seeding.py").read_text()
    assert '"""Mine. ' in moved
    assert not (made / "src/batching.py").exists()
    assert not (made / "src/tasks/vision").exists()
    if "<<<<<<< ours" in moved:  # what a user does with it
        git(made, "checkout", "--ours", "--", "src/engine/data/seeding.py")
    two_steps(made, tmp_path / "runs")


def test_a_conflict_is_shown_and_nothing_is_lost(project: Path) -> None:
    """Where both changed one line, the user's line is still there and the template's is beside it."""
    text = (project / ENGINE).read_text()
    (project / ENGINE).write_text(text.replace("As the template had it before", "As I want it"))
    update(project)
    after = (project / ENGINE).read_text()
    assert "As I want it" in after
    rejected = project / f"{ENGINE}.rej"
    assert "<<<<<<<" in after or rejected.exists()
    template = text.replace('"""As the template had it before."""', "")
    shown = after + (rejected.read_text() if rejected.exists() else "")
    assert template.split("\n")[3] in shown


def test_a_project_of_plain_cookiecutter_can_be_linked(older: Path, tmp_path: Path) -> None:
    """`cruft link --checkout COMMIT`, as the README has it, gives an existing project its updates."""
    made = cruft(older, tmp_path / "out", {}, "--checkout", "older")
    (made / ".cruft.json").unlink()
    git(made, "init", "--quiet")
    commit(made, "From the template")
    linked = (tools() / "cruft", "link", older.as_uri(), "--checkout", "older", "--no-input")
    run(*linked, cwd=made)
    update(made)
    assert (made / "slurm/cluster.py").exists()


def test_the_first_published_template_updates_to_this_one(repo: Path, tmp_path: Path) -> None:
    """A project of the oldest commit that was a template becomes, by an update, what a new one would be."""
    history = ("log", "--diff-filter=A", "--format=%H", "--", "cookiecutter.json")
    first = git(repo, *history).split()[-1]
    made = cruft(repo, tmp_path / "out", {}, "--checkout", first)
    git(made, "init", "--quiet")
    commit(made, "From the template")
    update(made)
    assert tree(made) == tree(cruft(repo, tmp_path / "new", {}))
