import subprocess
import sys

import pytest

from tests.commands import ROOT

MODULES = ("src.cli", "src.checkpoint", "src.doctor", "src.selftest", "src.batch_size")
SCRIPTS = ("slurm/submit.py", "slurm/jobs.py", "slurm/cluster.py")


@pytest.mark.parametrize("command", [*(("-m", module) for module in MODULES), *((script,) for script in SCRIPTS)])
def test_a_python_without_the_packages_is_told_in_one_line(command: tuple[str, ...]) -> None:
    """Who forgets to activate the environment learns that, and not where an import failed; -S hides the packages."""
    done = subprocess.run([sys.executable, "-S", *command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"error: {sys.executable} has no ")
    assert "source .venv/bin/activate" in done.stderr
