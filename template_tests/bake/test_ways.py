"""Every way of making a project gives the same project, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from template_tests.bake import baking
from template_tests.bake.baking import NEWEST, VERSIONS, Answers, absolute, cookiecutter, run, tools, tree, two_steps
from template_tests.bake.test_answers import EVERY, HOSTILE, name

Way = Callable[[Path, Path, Answers, str], Path]
WAYS: list[Way] = [
    *(baking.relative, baking.absolute, baking.inside, baking.clone, baking.tag),
    *(baking.archive, baking.replay, baking.without_links),
]


def cases() -> list[ParameterSet]:
    """Ways × versions × answers; for every change a zip and a clone with the newest version."""
    found = []
    for way in WAYS:
        for version in VERSIONS:
            for answers in EVERY:
                often = way in (baking.archive, baking.clone) and version == NEWEST and answers in ({}, HOSTILE[0])
                marks = [] if often else [pytest.mark.exhaustive]
                found.append(
                    pytest.param(way, version, answers, id=f"{way.__name__}-{version}-{name(answers)}", marks=marks)
                )
    return found


@pytest.fixture(scope="session")
def expected(
    repo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Answers], dict[str, tuple[bytes, bool]]]:
    """What a local path and the newest version give for some answers, baked once."""
    known: dict[str, dict[str, tuple[bytes, bool]]] = {}

    def look_up(answers: Answers) -> dict[str, tuple[bytes, bool]]:
        key = repr(answers)
        if key not in known:
            known[key] = tree(absolute(repo, tmp_path_factory.mktemp("expected") / "out", answers))
        return known[key]

    return look_up


@pytest.mark.parametrize(("way", "version", "answers"), cases())
def test_the_project_is_the_same(
    way: Way, version: str, answers: Answers, repo: Path, tmp_path: Path, expected: Callable[[Answers], object]
) -> None:
    """Same files, same bytes, same executable bits, no link; with the defaults it also trains for two steps."""
    project = way(repo, tmp_path / "out", answers, version)
    assert tree(project) == expected(answers)
    if version == NEWEST and not answers:
        two_steps(project, tmp_path / "runs")


@pytest.mark.parametrize("answers", [pytest.param(answers, id=name(answers)) for answers in ({}, HOSTILE[0])])
def test_cruft_makes_the_same_project(
    answers: Answers, repo: Path, tmp_path: Path, expected: Callable[[Answers], object]
) -> None:
    """`cruft create` gives the same files, and `cruft check` finds the project up to date."""
    project = baking.cruft(repo, tmp_path / "out", answers)
    assert tree(project) == expected(answers)
    assert "up to date" in run(tools() / "cruft", "check", cwd=project).stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_hooks_may_be_refused(
    version: str, repo: Path, tmp_path: Path, expected: Callable[[Answers], dict[str, tuple[bytes, bool]]]
) -> None:
    """Without hooks only pyproject.toml keeps the template's name; task, licence and README are the project's."""
    answers = {"task": "vision", "license": "BSD-3-Clause"}
    project = cookiecutter(repo, tmp_path / "out", answers, "--accept-hooks", "no", version=version)
    found, wanted = tree(project), expected(answers)
    assert found.keys() == wanted.keys()
    assert {key for key in found if found[key] != wanted[key]} == {"pyproject.toml"}
    if version == NEWEST:
        two_steps(project, tmp_path / "runs")


def test_a_used_working_tree_leaves_no_trace(
    repo: Path, tmp_path: Path, expected: Callable[[Answers], dict[str, tuple[bytes, bool]]]
) -> None:
    """Caches, a linter's beside the links too, and the user's own cluster file stay where they are."""
    used = tmp_path / "used"
    run("cp", "-r", repo, used, cwd=tmp_path)
    leftovers = ("src/__pycache__/cli.cpython-311.pyc", "src/x.egg-info/PKG-INFO", "tests/.pytest_cache/README.md")
    more = ("configs/clusters/mine.yaml", "src/models/.ipynb_checkpoints/a.py", "src/cli.py~", "configs/.DS_Store")
    for leftover in (*leftovers, *more, "{{cookiecutter.project_slug}}/.ruff_cache/0.1/1234"):
        (used / leftover).parent.mkdir(parents=True, exist_ok=True)
        (used / leftover).write_bytes(b"account: somebody's\n\x89")
    assert tree(absolute(used, tmp_path / "out", {})) == expected({})


def test_links_that_cannot_be_restored_are_an_error(repo: Path, tmp_path: Path) -> None:
    """cruft does not say where the template lies; a project of broken links is not left behind."""
    plain = tmp_path / "plain.git"
    run("git", "clone", "--quiet", repo, plain, cwd=tmp_path)
    given = (tools() / "cruft", "create", plain.as_uri(), "--no-input", "--output-dir", tmp_path / "out")
    more = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.symlinks", "GIT_CONFIG_VALUE_0": "false"}
    done = run(*given, cwd=tmp_path, check=False, **more)
    assert done.returncode != 0
    assert "is a symbolic link that arrived as text" in done.stderr
    assert not list((tmp_path / "out").glob("*"))
