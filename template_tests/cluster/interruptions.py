"""What happens to the job of the run `gpt`, and how far that has come."""

import contextlib
import os
import signal
from pathlib import Path

from slurm.local.__main__ import LocalCluster, chosen_folder
from template_tests.cluster.jobs import field, sbatch, slurm, wait_for
from template_tests.cluster.project import PATIENCE, Project


def steps(project: Project) -> int:
    return max((int(path.stem[5:]) for path in (project.runs / "gpt").glob("checkpoints/step=*.ckpt")), default=0)


def begun(project: Project, more: int = 0) -> None:
    """It trains."""
    wait_for(lambda: steps(project) > more, PATIENCE, f"more than {more} steps")


def said(project: Project, job: str) -> str:
    """What stands in batch.out."""
    return (project.runs / f"gpt/slurm/{job}_batch.out").read_text()


def requeued(job: str, restarts: int = 1) -> None:
    wait_for(
        lambda: (field(job, "Restarts"), field(job, "JobState")) == (str(restarts), "PENDING"), PATIENCE, "requeued"
    )


def limit(job: str, minutes: int) -> None:
    slurm("scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}")


def preempt(project: Project, job: str, seconds: int = 1) -> None:
    """Somebody more urgent takes every node, and leaves soon."""
    quiet = "--output=/dev/null"
    project.jobs.append(sbatch(f"sleep {seconds}", "--partition=urgent", "--nodes=4", "--exclusive", quiet))


def of(**variables: str) -> list[int]:
    """Find the processes of the local Slurm's jobs, of whichever node, whose environment has these variables."""
    # Other tests, and jobs of another Slurm, have processes with the same numbers.
    variables["SLURM_CONF"] = str(LocalCluster(chosen_folder()).conf)
    wanted, found = {f"{name}={value}".encode() for name, value in variables.items()}, []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def kill(*processes: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def kill_node(cluster: LocalCluster, node: str) -> None:
    """Its slurmd and all that it has started, at once and without a word: who watches the tasks goes before them."""
    watchers, tasks = [], of(SLURMD_NODENAME=node)
    for task in tasks:
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1]
            if b"slurmstepd" in Path("/proc", parent, "cmdline").read_bytes():
                watchers.append(int(parent))
    kill(cluster.running()[node], *watchers, *tasks)


def last_node(job: str) -> str:
    return slurm("scontrol", "show", "hostnames", field(job, "NodeList")).split()[-1]
