"""What becomes of a run whose job meets its limit, a preemption, a dead node, an impatient user: on a real Slurm.

With a stand-in for training (template_tests/launching.py) that saves each step; with real training: test_survive.py.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slurm.local.__main__ import LocalCluster, chosen_folder
from slurm.node import history
from src.engine import exit_codes
from template_tests.cluster.interruptions import begun, kill_node, last_node, limit, of, preempt, requeued, said, steps
from template_tests.cluster.jobs import field, needs_root, signal_step, slurm, start_now, wait_for
from template_tests.cluster.project import PATIENCE, Project
from tests.commands import ROOT, SMALL, losses

TWO = ("--nodes", "2", "--gpus-per-node", "1", "--name", "gpt", "--no-check")
ONE = ("--nodes", "1", "--gpus-per-node", "1", "--name", "gpt", "--no-check")
TRAIN = ("--act", "train")


def test_at_its_time_limit_a_job_goes_on_in_another_start(project: Project) -> None:
    """Signalled before the limit, saved, requeued once by the batch script; it ends COMPLETED, and the list tells."""
    (job,) = project.submit(*TWO, "--time", "5:00", "--", *TRAIN)
    begun(project)
    limit(job, 1)
    requeued(job)
    stopped_at = steps(project)
    told = f"stopped by SIGUSR2 at step {stopped_at}, saved: asks Slurm for another start, from step {stopped_at}"
    assert told in said(project, job)
    assert "\nrequeued\n" in said(project, job)
    listed = project.command("jobs.py", "list").stdout
    assert re.search(rf"gpt +{job} +PENDING +BeginTime", listed), listed
    limit(job, 5)
    start_now(job)
    begun(project, stopped_at)
    (project.runs / "gpt/go").touch()
    project.wait(job, "COMPLETED")
    assert field(job, "ExitCode") == "0:0"
    assert f"resumes from step {stopped_at}, " in said(project, job)
    assert (project.runs / "gpt/STOPPED.previous").exists()
    assert not (project.runs / "gpt/STOPPED").exists()
    environments = [facts["environment"] for facts in project.seen("gpt").values()]
    assert {found["STOP_LEAD_SECONDS"] for found in environments} == {"60"}
    listed = project.command("jobs.py", "list").stdout
    assert re.search(rf"gpt +{job} +FINISHED .* 1 ", listed), listed


@pytest.mark.parametrize("mode", ["REQUEUE", "CANCEL"])
def test_a_preempted_job_requeues_itself_within_its_grace(project: Project, partition: None, mode: str) -> None:
    """Whatever the site does with preempted jobs: saved, it waits for its next start. A second signal is no news."""
    slurm("scontrol", "update", "partitionname=a100", f"PreemptMode={mode}", "GraceTime=20")
    (job,) = project.submit(*TWO, "--", *TRAIN, "--save", "2")
    begun(project)
    preempt(project, job)
    wait_for((project.runs / "gpt/saving").exists, PATIENCE, "it saves")
    slurm("scancel", "--signal=TERM", f"{job}.0")
    requeued(job)
    assert "stopped by SIGTERM" in said(project, job)
    assert "signals SIGTERM SIGTERM" in (project.runs / f"gpt/slurm/{job}_0_log.out").read_text()
    start_now(job)
    begun(project, steps(project))


def test_a_job_that_is_preempted_without_grace_goes_on_from_what_it_saved(project: Project, partition: None) -> None:
    """Slurm requeues it by itself."""
    slurm("scontrol", "update", "partitionname=a100", "GraceTime=0")
    (job,) = project.submit(*TWO, "--", "--act", "deaf")
    begun(project)
    preempt(project, job)
    requeued(job)
    before = steps(project)
    start_now(job)
    begun(project, before)
    assert f"resumes from step {before}, " in said(project, job)


def test_what_the_site_cancels_without_grace_is_resumed_by_hand(project: Project, partition: None) -> None:
    """Slurm does not start it again: the list says what to do, and that can be done at once."""
    slurm("scontrol", "update", "partitionname=a100", "PreemptMode=CANCEL", "GraceTime=0")
    (job,) = project.submit(*TWO, "--", "--act", "deaf")
    begun(project)
    preempt(project, job)
    project.wait(job, "PREEMPTED")
    before = steps(project)
    listed = project.command("jobs.py", "list").stdout
    assert re.search(rf"gpt +{job} +PREEMPTED", listed), listed
    assert "PREEMPTED: the site cancels what it preempts: jobs.py resume RUN resumes it" in listed
    done = project.command("jobs.py", "resume", "gpt")
    (again,) = re.findall(r"^job (\d+): gpt", done.stdout, re.MULTILINE)
    project.jobs.append(again)
    begun(project, before)
    assert f"resumes from step {before}, " in said(project, again)


def test_a_signal_before_training_listens_is_worth_a_restart(project: Project) -> None:
    """Which ends the ranks: such starts are tried again, without retries for crashes, while there is hope."""
    (job,) = project.submit(*TWO, "--max-crash-retries", "0", "--", "--act", "wait")  # it never listens
    for restart, signal_name in enumerate(("USR2", "TERM", "USR1"), start=1):
        start = project.runs / f"gpt/rank0-{job}-{restart - 1}.json"
        wait_for(start.exists, PATIENCE, "it starts")
        signal_step(job, signal_name)
        requeued(job, restart)
        start_now(job)
    project.wait(job, "FAILED")
    told = said(project, job)
    for code in (140, 143, 138):
        assert f"a signal came before training could save (exit code {code}): asks Slurm for another start" in told
    assert "not started again: two restarts have made no step" in told


@needs_root
def test_real_training_that_is_signalled_in_its_first_moment_still_runs_to_its_end(project: Project) -> None:
    """As soon as its process is there, whether Python, PyTorch or training has it in hand: requeued, then COMPLETED."""
    project.root = ROOT
    (job,) = project.submit("--no-snapshot", *ONE, "--", *SMALL)
    wait_for(lambda: of(SLURM_JOB_ID=job, SLURM_PROCID="0", SLURM_STEPID="0") != [], PATIENCE, "its process is there")
    signal_step(job, "USR2")
    requeued(job)
    start_now(job)
    project.wait(job, "COMPLETED")
    assert len(losses(project.runs / "gpt")) == 4


def test_a_python_that_goes_at_the_end_is_no_end_of_the_run(project: Project) -> None:
    """Nobody can decide then: saved, FAILED with 85, which says that it goes on, and not COMPLETED."""
    (job,) = project.submit(*ONE, "--", *TRAIN)
    begun(project)
    code = Path(project.seen("gpt")[0]["file"]).parents[1] / "slurm"
    (code / "node/start.py").chmod(0o644)
    (code / "node/start.py").write_text("raise ImportError('gone')")
    slurm("scancel", "--signal=USR2", f"{job}.0")
    project.wait(job, "FAILED")
    assert field(job, "ExitCode") == f"{exit_codes.STOPPED}:0"
    assert "python slurm/jobs.py resume gpt resumes it" in said(project, job)


def test_a_cancelled_job_stays_cancelled_also_while_it_saves(project: Project) -> None:
    """The user's word counts, though the state is saved; what it has saved is what `resume` goes on from."""
    (job,) = project.submit(*TWO, "--", *TRAIN, "--save", "2")
    begun(project)
    slurm("scancel", "--signal=USR2", f"{job}.0")
    wait_for((project.runs / "gpt/saving").exists, PATIENCE, "it saves")
    assert f"cancelled: {job}" in project.command("jobs.py", "cancel", "gpt").stdout
    project.wait(job, "CANCELLED")
    time.sleep(3)
    assert (field(job, "JobState"), field(job, "Restarts")) == ("CANCELLED", "0")
    before = steps(project)
    done = project.command("jobs.py", "resume", "gpt")
    (again,) = re.findall(r"^job (\d+): gpt", done.stdout, re.MULTILINE)
    project.jobs.append(again)
    begun(project, before)
    assert f"resumes from step {before}, " in said(project, again)


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (["--act", "raise"], exit_codes.CRASHED),
        (["--act", "exit", "--code", str(exit_codes.OUT_OF_MEMORY)], exit_codes.OUT_OF_MEMORY),
    ],
    ids=["crash", "out of memory"],
)
def test_what_would_come_again_is_not_tried_again(project: Project, act: list[str], code: int) -> None:
    """Not even with retries for lost ranks: the job fails once, with the code of what happened."""
    (job,) = project.submit(*TWO, "--", *act)
    project.wait(job, "FAILED")
    assert (field(job, "ExitCode"), field(job, "Restarts")) == (f"{code}:0", "0")


def test_a_lost_rank_is_tried_again_unless_that_is_not_wanted(project: Project) -> None:
    """SIGKILL to one rank, as by a broken machine: the job goes on from what was saved; without retries: FAILED."""
    (job,) = project.submit(*TWO, "--max-crash-retries", "0", "--", "--act", "lose-a-rank", "--at", "5")
    project.wait(job, "FAILED")
    assert field(job, "ExitCode") == f"{exit_codes.KILLED}:0"
    assert "not requeued (--max-crash-retries 0)" in said(project, job).lower()
    (project.runs / "gpt/lost").unlink()
    (again,) = project.submit(*TWO, "--", "--act", "lose-a-rank", "--at", "9")
    requeued(again)
    start_now(again)
    begun(project, steps(project))
    (project.runs / "gpt/go").touch()
    project.wait(again, "COMPLETED")


@needs_root
def test_a_job_whose_node_dies_goes_on_on_others(project: Project) -> None:
    """Its slurmd is killed, with all that it has started: Slurm requeues the job, which goes on from what was saved."""
    (job,) = project.submit(*TWO, "--", *TRAIN)
    begun(project)
    cluster = LocalCluster(chosen_folder())
    try:
        kill_node(cluster, last_node(job))
        requeued(job)
        before = steps(project)
        start_now(job)
        begun(project, before)
        (project.runs / "gpt/go").touch()
        project.wait(job, "COMPLETED")
    finally:
        cluster.up()
    assert f"resumes from step {before}, " in said(project, job)
    events = [entry["event"] for entry in history.read(project.runs / "gpt", job)]
    assert events == ["start", "start", "end"]


def test_a_restart_that_makes_no_step_is_not_tried_for_ever(project: Project) -> None:
    """After two of them the job ends, with 85 and the reason, which the list shows."""
    (job,) = project.submit(*ONE, "--", *TRAIN, "--stuck", "yes")
    for restart in range(1, 4):
        wait_for(lambda: len(project.seen("gpt")) == 1 and field(job, "JobState") == "RUNNING", PATIENCE, "it runs")
        wait_for(lambda: (project.runs / "gpt/checkpoints").exists(), PATIENCE, "it trains")
        time.sleep(1)
        slurm("scancel", "--signal=TERM", f"{job}.0")
        requeued(job, restart)
        start_now(job)
    project.wait(job, "FAILED")
    assert field(job, "ExitCode") == f"{exit_codes.STOPPED}:0"
    assert "not started again: two restarts have made no step" in said(project, job)
    assert "two restarts have made no step" in project.command("jobs.py", "list").stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--max-restarts", "0"], None),
        (["--max-restarts", "1"], "--max-restarts 1 is reached"),
        (["--time", "5:00", "--total-time", "5:00"], None),
    ],
    ids=["none", "one", "total time"],
)
def test_restarts_have_an_end(project: Project, options: list[str], reason: str | None) -> None:
    """Of none no signal comes of Slurm; after the last one the job ends with 85, saved, and says how to go on."""
    (job,) = project.submit(*ONE, *options, "--", *TRAIN)
    begun(project)
    if "--total-time" in options:  # as if the job had begun five minutes ago
        path = project.runs / f"gpt/slurm/{job}_history.jsonl"
        path.write_text(re.sub(r'"time": ([\d.]+)', lambda found: f'"time": {float(found[1]) - 301}', path.read_text()))
        reason = "0.1 of the 0.1 hours of --total-time are used"
    slurm("scancel", "--signal=TERM", f"{job}.0")
    if "1" in options:
        requeued(job)
        start_now(job)
        begun(project, steps(project))
        slurm("scancel", "--signal=TERM", f"{job}.0")
    project.wait(job, "FAILED")
    assert field(job, "ExitCode") == f"{exit_codes.STOPPED}:0"
    assert f"Not requeued ({reason or '--max-restarts 0 is reached'}): python slurm/jobs.py resume gpt" in said(
        project, job
    )


def test_without_scontrol_the_job_says_how_to_go_on(project: Project) -> None:
    """As on sites that have it on login nodes alone: after the limit's signal it ends with 85, saved."""
    text = (project.root / "configs/clusters/local.yaml").read_text()
    hidden = project.root / "bin"
    hidden.mkdir()
    for name in ("srun", "python3", "bash", "sh", "env"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
        (hidden / name).symlink_to(found)
    setup = f"setup:\n  - export PATH='{hidden}'\n"
    (project.root / "configs/clusters/local.yaml").write_text(re.sub(r"(?m)^setup:.*\n", "", text) + "\n" + setup)
    (job,) = project.submit(*ONE, "--time", "5:00", "--", *TRAIN)
    begun(project)
    slurm("scancel", "--signal=USR2", f"{job}.0")
    project.wait(job, "FAILED")
    assert field(job, "ExitCode") == f"{exit_codes.STOPPED}:0"
    assert "requeueing failed (no scontrol on this node): python slurm/jobs.py resume gpt resumes it" in said(
        project, job
    )


@needs_root
def test_a_controller_that_is_away_over_the_signal_loses_no_job(project: Project) -> None:
    """For half a minute, which scontrol alone does not wait: the job asks again, and is requeued when it is back."""
    (job,) = project.submit(*ONE, "--time", "5:00", "--", *TRAIN)
    begun(project)
    cluster = LocalCluster(chosen_folder())
    try:
        os.kill(cluster.running()["slurmctld"], signal.SIGTERM)
        wait_for(lambda: "slurmctld" not in cluster.running(), PATIENCE, "the controller has ended")
        for process in of(SLURM_JOB_ID=job, SLURM_STEPID="0"):
            os.kill(process, signal.SIGUSR2)
        time.sleep(30)
        wait_for(lambda: "asked again in 5 s" in said(project, job), PATIENCE, "it has asked in vain")
        assert "\nrequeued" not in said(project, job)
    finally:
        cluster.up()
    requeued(job)
    assert "\nrequeued\n" in said(project, job)


def test_training_that_heeds_no_signal_is_requeued_before_its_limit(project: Project) -> None:
    """A step longer than the lead: instead of TIMEOUT the job goes on from its newest checkpoint."""
    (job,) = project.submit(*TWO, "--time", "5:00", "--", "--act", "deaf")
    begun(project)
    limit(job, 2)
    requeued(job)
    assert "training has not stopped 15 s before the limit: asks Slurm for another start" in said(project, job)
    before = steps(project)
    start_now(job)
    begun(project, before)
