"""The README promises only what is there."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from src.cli import ProjectCLI

DEMOS = "lightning.pytorch.demos"
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TEXT = README[README.find("\n    make ") :]  # above the first command stand the project's own words
DOCS = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
COMMANDS = sorted(set(re.findall(r"python -m src\.cli ((?:fit|validate|test|predict) --[^#`\n;&…]*)", TEXT + DOCS)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `python -m src.cli …` names files that exist and settings that the parser knows, whatever the task."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as done:
        ProjectCLI([*shlex.split(command), "--model", f"{DEMOS}.boring_classes.BoringModel", "--print_config"])
    assert done.value.code == 0


def test_every_make_target_exists() -> None:
    """`make <target>` as the README writes it is a target of the Makefile."""
    for target in set(re.findall(r"(?:`|    |; )make ([\w-]+)", TEXT)):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_every_path_exists() -> None:
    """Files and folders that the README names are there."""
    examples = {"configs/tasks/", "src/tasks/", "tests/tasks/"}  # all of them may have been deleted
    for path in set(re.findall(r"(?:configs|src|slurm|tests)/[\w/.]*", TEXT)) - examples:
        assert (ROOT / path).exists(), path
