"""One training through all that a cluster does to it, on a real Slurm: it ends as if nothing had happened."""

from pathlib import Path

import pytest

from slurm.local.__main__ import LocalCluster, chosen_folder
from src.checkpoint.compare import differences, outcome
from template_tests.cluster.interruptions import (
    begun,
    kill,
    kill_node,
    last_node,
    limit,
    of,
    preempt,
    requeued,
    said,
    steps,
)
from template_tests.cluster.jobs import field, needs_root, slurm, start_now
from template_tests.cluster.project import Project
from template_tests.cluster.unhurried import Unhurried
from tests.commands import CPU, ROOT, TASK, train

MODEL = [*TASK, "--model", f"{Unhurried.__module__}.{Unhurried.__name__}", "--model.folder"]
SETTINGS = [
    *("--trainer.max_steps", "600", "--trainer.log_every_n_steps", "1", "--trainer.val_check_interval", "7"),
    *("--trainer.limit_val_batches", "2", "--trainer.num_sanity_val_steps", "0", "--checkpoint.every_n_steps", "5"),
]


def spoil(checkpoint: Path) -> None:
    """Some bytes in its middle are others, its length is the same."""
    with checkpoint.open("r+b") as file:
        file.seek(checkpoint.stat().st_size // 2)
        file.write(bytes(64))


@needs_root
@pytest.mark.usefixtures("partition")
def test_a_run_through_every_interruption_ends_in_the_same_bits(project: Project, tmp_path: Path) -> None:
    """Time limit, preemptions with and without grace, a spoilt checkpoint, a dead node, a lost rank: nobody looks."""
    project.root, run = ROOT, project.runs / "gpt"
    options = ["--nodes", "2", "--gpus-per-node", "1", "--time", "5:00", "--max-crash-retries", "1", "--name", "gpt"]
    (job,) = project.submit("--no-snapshot", *options, "--", *MODEL, str(project.runs), *SETTINGS)

    def trains() -> None:
        begun(project, steps(project) + 5)

    def starts_again(restarts: int) -> None:
        requeued(job, restarts)
        limit(job, 5)
        start_now(job)
        trains()

    trains()
    limit(job, 1)
    starts_again(1)

    preempt(project, job)
    requeued(job, 2)
    newest = max(run.glob("checkpoints/step=*.ckpt"))
    spoil(newest)
    starts_again(2)
    assert (run / "checkpoints/quarantine" / newest.name).exists()

    slurm("scontrol", "update", "partitionname=a100", "GraceTime=0")
    preempt(project, job)
    starts_again(3)

    kill(*of(SLURM_JOB_ID=job, SLURM_PROCID="1"))
    starts_again(4)

    cluster = LocalCluster(chosen_folder())
    try:
        kill_node(cluster, last_node(job))
        starts_again(5)
    finally:
        cluster.up()

    (project.runs / "go").touch()
    project.wait(job, "COMPLETED")
    assert field(job, "ExitCode") == "0:0", said(project, job)
    train(
        tmp_path / "whole", "fit", *CPU, *MODEL, str(project.runs), *SETTINGS, "--trainer.devices", "2", "--run", "gpt"
    )
    assert list(differences(outcome(run), outcome(tmp_path / "whole/gpt"))) == []
