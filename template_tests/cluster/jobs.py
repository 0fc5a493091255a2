"""Slurm's commands as tests need them, on the cluster that the plain commands find."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts and ends daemons: needs root")
NODES = ["n1", "n2", "n3", "n4"]
FOUR_GPUS = "gpu:a100:4"


def slurm(*command: str, stdin: str = "") -> str:
    """What a command prints, outside of any job; a failure shows what it says."""
    foreign = re.compile("(SLURM_(?!CONF$)|SBATCH_|SRUN_)")
    clean = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    done = subprocess.run(command, env=clean, input=stdin, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def found() -> bool:
    """Whether the plain commands find the local cluster's four nodes."""
    if shutil.which("sinfo") is None:
        return False
    try:
        told = slurm("sinfo", "--noheader", "--Node", "--partition=a100", "--format=%N %G")
    except AssertionError:  # no slurm.conf, or nobody answers
        return False
    return told.splitlines() == [f"{name} {FOUR_GPUS}" for name in NODES]


def sbatch(script: str, *options: str) -> str:
    """Submit the lines of a bash script; returns the job's number."""
    return slurm("sbatch", "--parsable", *options, stdin=f"#!/bin/bash\n{script}\n").strip()


def field(job: str, name: str) -> str:
    """What `scontrol show job` says of one job, such as JobState or Restarts."""
    shown = re.search(rf"\b{name}=(\S*)", slurm("scontrol", "show", "job", job))
    assert shown, f"scontrol says no {name} of job {job}"
    return shown[1]


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return as soon as the condition holds; `seconds` are patience, not a measure of speed."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds:.0f} s still not: {what}"
        time.sleep(0.3)


def signal_step(job: str, name: str) -> None:
    """Signal a job's ranks as soon as Slurm has launched all: until then it answers `Job step not running`."""
    command = ("scancel", f"--signal={name}", f"{job}.0")
    wait_for(lambda: subprocess.run(command, capture_output=True).returncode == 0, 30, "its step takes signals")


def start_now(job: str) -> None:
    """Let a requeued job start, which Slurm holds until nodes have forgotten its last start.

    One that is started in the second in which that has ended is refused there: "Job credential revoked", FAILED.
    """
    wait_for(lambda: field(job, "JobState") == "PENDING", 120, f"job {job} waits for its next start")
    time.sleep(2)
    slurm("scontrol", "update", f"jobid={job}", "StartTime=now")


def leave(jobs: list[str]) -> None:
    """Cancel jobs, if they still run, and wait until their nodes are free of them."""
    if not jobs:
        return
    slurm("scancel", *jobs)
    names = ",".join(jobs)
    gone = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={names}")
    ends = {"PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED", "CONFIGURING"}
    wait_for(lambda: not ends & set(slurm(*gone).split()), 120, f"jobs {names} have left")
