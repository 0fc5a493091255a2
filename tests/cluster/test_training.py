"""Real training through the launcher on a real Slurm: every shape gives the same losses and ends well."""

import csv
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import field, leave, wait_for
from tests.commands import ROOT, SMALL

SHAPES = [(1, 1), (1, 4), (2, 2), (4, 1)]
# By hand `LAUNCHES=10 pytest tests/cluster/test_training.py`: a run that ends well must do so every time.
LAUNCHES = int(os.environ.get("LAUNCHES", "1"))


def submit(runs: Path, name: str, nodes: int, gpus: int) -> str:
    """Submit a short training to the local cluster; the job's number."""
    options = ["--cluster", "local", "--no-snapshot", "--no-check", "--name", name]
    command = [sys.executable, "slurm/submit.py", *options, "--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    done = subprocess.run(
        [*command, "--", *SMALL], cwd=ROOT, env=os.environ | {"RUN_ROOT": str(runs)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^job (\d+): ", done.stdout, re.MULTILINE)[0]


def ended(job: str) -> bool:
    return field(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING")


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.mark.parametrize("launch", range(LAUNCHES))
@pytest.mark.usefixtures("_turn")
def test_every_shape_trains_the_same_and_ends_well(tmp_path: Path, launch: int) -> None:
    """One, four, two by two and four nodes: the same losses at the same global batch, COMPLETED, exit code 0."""
    jobs = {shape: submit(tmp_path, f"n{shape[0]}_gpu{shape[1]}", *shape) for shape in SHAPES}
    try:
        for job in jobs.values():
            wait_for(functools.partial(ended, job), 600, f"job {job} has ended")
        for shape, job in jobs.items():
            log = tmp_path / f"n{shape[0]}_gpu{shape[1]}/slurm/{job}_0_log.out"
            assert (field(job, "JobState"), field(job, "ExitCode")) == ("COMPLETED", "0:0"), log.read_text()
    finally:
        leave(list(jobs.values()))
    curves = {shape: losses(tmp_path / f"n{shape[0]}_gpu{shape[1]}") for shape in SHAPES}
    assert len(curves[1, 1]) == 4
    for shape in SHAPES:
        assert curves[shape] == pytest.approx(curves[1, 1], abs=1e-5), shape
