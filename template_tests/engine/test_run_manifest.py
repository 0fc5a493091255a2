import subprocess
import sys
from pathlib import Path

import pytest
import torch

from src.engine.run import manifest as module
from src.engine.run.directory import Run
from src.engine.run.manifest import describe_start


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A git repository of its own that plays the project."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "run.py").write_text("one = 1\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    monkeypatch.setattr(module, "__file__", str(folder / "src" / "run.py"))
    return folder


def test_the_manifest_says_which_code_ran(tmp_path, repository):
    """A clean tree is a commit; a dirty one is the commit, a diff beside the manifest, and the names of new files."""
    run = Run(str(tmp_path), "new")
    clean = describe_start(run, ["CPU"])
    assert len(clean["commit"]) == 40
    assert (clean["dirty"], clean["diff"], clean["untracked"]) == (False, None, [])
    assert not (tmp_path / "code.diff").exists()
    (repository / "src" / "run.py").write_text("one = 2\n")
    (repository / "new.py").touch()
    dirty = describe_start(run, ["CPU"])
    assert dirty["commit"] == clean["commit"]
    assert (dirty["dirty"], dirty["diff"], dirty["untracked"]) == (True, "code.diff", ["new.py"])
    assert "+one = 2" in (tmp_path / "code.diff").read_text()


def test_a_huge_diff_is_not_kept(tmp_path, repository, monkeypatch):
    """A diff over the limit is replaced by its size."""
    monkeypatch.setattr(module, "DIFF_LIMIT", 1000)
    (repository / "src" / "run.py").write_text("x" * 2000)
    describe_start(Run(str(tmp_path), "new"), [])
    assert "too large to keep" in (tmp_path / "code.diff").read_text()


def test_the_manifest_needs_no_repository(tmp_path, monkeypatch):
    """Outside of git the manifest has no commit, and the rest is there."""
    monkeypatch.setattr(module, "__file__", str(tmp_path / "run.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(sys, "argv", ["cli", "fit"])
    facts = describe_start(Run(str(tmp_path), "new"), ["CPU", "CPU"])
    assert (facts["commit"], facts["dirty"], facts["argv"], facts["cards"]) == (
        None,
        False,
        ["cli", "fit"],
        ["CPU"] * 2,
    )
    assert facts["packages"]["torch"].startswith(torch.__version__.split("+")[0])


def test_a_snapshot_says_its_own_commit(tmp_path, repository, monkeypatch):
    """Code that was copied for a job has the commit and the diff it was copied with, whatever is around it now."""
    records = repository / "runs/.snapshots/0123/.snapshot"
    records.mkdir(parents=True)
    for name, text in (("commit", f"{'a' * 40}\n"), ("dirty.patch", "+one = 3\n"), ("left_out.txt", "notes.md\n")):
        (records / name).write_text(text)
    monkeypatch.setattr(module, "__file__", str(records.parent / "src/engine/run/manifest.py"))
    facts = describe_start(Run(str(tmp_path), "new"), [])
    assert (facts["commit"], facts["dirty"], facts["untracked"]) == ("a" * 40, True, ["notes.md"])
    assert (tmp_path / "code.diff").read_text() == "+one = 3\n"
