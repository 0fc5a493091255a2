"""What the launcher would submit for this project: `python slurm/submit.py --dry-run`, without a Slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, TASK


def submit(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with git, and nothing else, on PATH: no Slurm is asked."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    if not (tools / "git").exists():
        (tools / "git").symlink_to(str(shutil.which("git")))
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    own |= {"PATH": str(tools), "RUN_ROOT": str(tmp_path / "runs")}
    return subprocess.run(
        [sys.executable, "slurm/submit.py", "--cluster", "local", *arguments, "--dry-run", "--", *TASK],
        cwd=ROOT,
        env=own,
        capture_output=True,
        text=True,
    )


def script(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_job_has_what_was_asked_for(tmp_path: Path) -> None:
    """Nodes, GPUs, time and the training command stand in the script that Slurm would get."""
    lines = script(submit(tmp_path, "--nodes", "2", "--gpus-per-node", "1", "--time", "1:30:00", "--name", "mine"))
    assert "2 nodes × 1" in lines[0]
    assert {"#SBATCH --nodes=2", "#SBATCH --time=1:30:00", "#SBATCH --job-name=mine"} <= set(lines)
    assert any("src.cli" in line and "fit" in line for line in lines)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """No run directory, no snapshot of the code, no job."""
    script(submit(tmp_path))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--node", "4"], "did you mean --nodes?"),
        (["--gpus-per-node", "99"], "gpus_per_node"),
        (["--time", "3h"], "2:59:00"),
    ],
    ids=["option", "shape", "time"],
)
def test_a_mistake_is_one_line(wrong: list[str], said: str, tmp_path: Path) -> None:
    """It ends with exit code 2 and what would work, without a traceback."""
    done = submit(tmp_path, *wrong)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert said in done.stderr


def test_the_launcher_loads_no_pytorch() -> None:
    """A login node answers at once: neither PyTorch nor Lightning is imported."""
    code = "import sys; import slurm.submit; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "lightning"} & set(done.stdout.split())
