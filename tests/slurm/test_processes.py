"""Which processes count as the local Slurm's, and may be killed by `down`."""

import subprocess
from pathlib import Path

import pytest

from slurm.local import processes
from slurm.local_cluster import NODES


@pytest.mark.parametrize(
    ("variables", "ours"),
    [
        ({"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1"}, True),
        ({"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1", "SLURM_CONF": "/etc/slurm/slurm.conf"}, False),
        ({"SLURMD_NODENAME": "gpu017", "SLURM_JOB_ID": "1"}, False),
        ({"SLURM_JOB_ID": "1"}, False),
        ({}, False),
    ],
    ids=["its job", "a job of another Slurm", "a shell in one", "a shell of salloc", "a shell"],
)
def test_down_kills_processes_of_its_own_jobs_only(variables: dict[str, str], ours: bool, tmp_path: Path) -> None:
    """A process that slurmd has started with this configuration counts; one that only names it does not."""
    conf = tmp_path / "slurm.conf"
    with subprocess.Popen(["sleep", "60"], env={"SLURM_CONF": str(conf)} | variables) as process:
        try:
            assert processes.of_jobs(conf, NODES) == [process.pid] * ours
        finally:
            process.kill()
