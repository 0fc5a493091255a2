"""Real training through the launcher on a real Slurm: every shape gives the same losses and ends well."""

import functools
import os

import pytest

from template_tests.cluster.jobs import field, wait_for
from template_tests.cluster.project import Project
from tests.commands import ROOT, SMALL, losses

SHAPES = [(1, 1), (1, 4), (2, 2), (4, 1)]
# By hand `LAUNCHES=10 pytest template_tests/cluster/test_training.py`: a run that ends well must do so every time.
LAUNCHES = int(os.environ.get("LAUNCHES", "1"))


def ended(job: str) -> bool:
    return field(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING")


@pytest.mark.parametrize("launch", range(LAUNCHES))
def test_every_shape_trains_the_same_and_ends_well(project: Project, launch: int) -> None:
    """One, four, two by two and four nodes: the same losses at the same global batch, COMPLETED, exit code 0."""
    project.root = ROOT
    for nodes, gpus in SHAPES:
        shape = ["--nodes", str(nodes), "--gpus-per-node", str(gpus), "--name", f"n{nodes}_gpu{gpus}"]
        project.submit("--no-snapshot", "--no-check", *shape, "--", *SMALL)
    for job in project.jobs:
        wait_for(functools.partial(ended, job), 600, f"job {job} has ended")
    runs = [project.runs / f"n{nodes}_gpu{gpus}" for nodes, gpus in SHAPES]
    for run, job in zip(runs, project.jobs, strict=True):
        log = run / f"slurm/{job}_0_log.out"
        assert (field(job, "JobState"), field(job, "ExitCode")) == ("COMPLETED", "0:0"), log.read_text()
    first, *others = map(losses, runs)
    assert len(first) == 4
    for other in others:
        assert other == pytest.approx(first, abs=1e-5)
