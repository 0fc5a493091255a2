"""Tests on a real Slurm: the four nodes of slurm/local/, started here if they are not up and can be.

All tests in this folder share the cluster, which may have two cores for sixteen pretended GPUs. So one of them runs at
a time, whichever process of pytest-xdist it is in and from whichever copy of the project. A fixture of a wider scope
than the test must not submit anything, it would not wait for its turn.

`make test-cluster` runs them; `make test` does not. They fail where there is no cluster and none can be started.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.local.__main__ import chosen_folder
from slurm.local.machine import locked
from template_tests.cluster.jobs import found, leave, sbatch, slurm
from template_tests.cluster.project import Project
from tests.commands import ROOT

HERE = Path(__file__).resolve().parent
STATE = chosen_folder()
STARTED_BY_TESTS = STATE / "run/started-by-tests"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder is marked, so that `-m cluster` and `-m "not cluster"` choose."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def _cluster() -> Iterator[None]:
    """The four nodes. Whoever is last to need nodes that tests have started stops them."""
    if not found():
        if os.geteuid() != 0:
            pytest.fail("the local Slurm is not up: `sudo make cluster-up` starts it", pytrace=False)
        (STATE / "run").mkdir(parents=True, exist_ok=True)
    with locked(STATE / "run", fcntl.LOCK_SH):
        if not found():
            STARTED_BY_TESTS.touch()
            done = _local_cluster("up")
            if done.returncode or not found():
                reason = done.stderr.strip() or "sinfo does not show its nodes"
                pytest.fail(f"the local Slurm is not up: {reason}", pytrace=False)
        yield
    if STARTED_BY_TESTS.exists():
        with contextlib.suppress(BlockingIOError), locked(STATE / "run", fcntl.LOCK_EX | fcntl.LOCK_NB):
            _local_cluster("down")


def _local_cluster(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurm.local", command], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(autouse=True)
def _turn(_cluster: None) -> Iterator[None]:
    with locked(STATE):
        yield


@pytest.fixture
def submit(_turn: None) -> Iterator[Callable[..., str]]:
    """`submit(script, *options)` gives the script to sbatch and returns the job's number; after the test it is gone."""
    submitted: list[str] = []

    def one(script: str, *options: str) -> str:
        submitted.append(sbatch(script, *options))
        return submitted[-1]

    yield one
    leave(submitted)


@pytest.fixture
def project(_turn: None, tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    leave(made.jobs)


@pytest.fixture
def partition(project: Project) -> Iterator[None]:
    """A test may change how the partition is preempted."""
    yield
    leave(project.jobs)
    slurm("scontrol", "update", "partitionname=a100", "GraceTime=10", "PreemptMode=REQUEUE")
