"""The published template, and settings of git and cookiecutter that are nobody's."""

from pathlib import Path

import pytest

from template_tests.bake import baking

IDENTITY = """
[user]
name = Somebody
email = somebody@example.org
[init]
defaultBranch = main
[protocol "file"]
allow = always
"""


@pytest.fixture(scope="session", autouse=True)
def _nobody(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither the user's answers nor their git settings play a part."""
    home = tmp_path_factory.mktemp("home")
    (home / "gitconfig").write_text(IDENTITY)
    (home / "cookiecutter.yaml").write_text(f"cookiecutters_dir: {home}/cloned\nreplay_dir: {home}/replay\n")
    patch = pytest.MonkeyPatch()
    patch.setenv("GIT_CONFIG_GLOBAL", str(home / "gitconfig"))
    patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    patch.setenv("COOKIECUTTER_CONFIG", str(home / "cookiecutter.yaml"))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "MAKEFLAGS", "MAKELEVEL"):
        patch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def repo(_nobody: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as it would be published now."""
    return baking.publish(
        tmp_path_factory.mktemp("published") / "template.git"
    )  # cookiecutter knows a repository by its address
