"""Submitting: check, snapshot, sbatch, and a record beside the run that jobs.py reads."""

import datetime
import getpass
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm import race, sbatch, snapshot
from slurm.cluster import ROOT
from slurm.errors import LaunchError
from slurm.render import Job, plain_command
from slurm.shared_root import refuse_shared

if TYPE_CHECKING:
    from slurm.plan import Submission


def submit_all(submission: "Submission", *, check: bool) -> int:
    """Submit every job of it; 0 where at least one is in the queue.

    Raises:
        LaunchError: refused by src.cli, the run root or Slurm, or the run has a job already.

    """
    first = submission.jobs[0]
    _refuse_second(first)
    if check:
        _check(first)
    first.run_root.mkdir(parents=True, exist_ok=True)
    if not submission.trust:
        refuse_shared(first.run_root)
    if submission.snapshot:
        snapshot.take(submission.snapshot, first.run_root / ".snapshots", submission.trust)
    first.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    submitted: list[str] = []
    refused: list[LaunchError] = []
    for job in submission.jobs:
        if job.race and (winner := race.holder(job.folder, job.race)):
            print(f"job {winner} has started already: {job.shape} is not submitted")
            break
        try:
            number = sbatch.submit(job)
        except LaunchError as error:
            refused.append(error)
            continue
        submitted.append(number)
        _write(submission, job, number)
        print(f"job {number}: {job.name}" + (f", {len(job.runs)} runs" if submission.points else ""), flush=True)
        if job.race and (winner := race.holder(job.folder, job.race)) not in (None, number):
            sbatch.ask("scancel", number)  # the other one started meanwhile, and could not know this one
    if not submitted:
        raise refused[0]
    for refusal in refused:
        print(f"warning: {refusal}; the other shape stays in the queue", file=sys.stderr)
    jobs = "python slurm/jobs.py"
    print(f"watch: {jobs} list; {jobs} logs {first.name} -f; {jobs} cancel {first.name}")
    # Bound to localhost: on a login node everybody could read along otherwise.
    name = socket.getfqdn() if "." in socket.getfqdn() else socket.gethostname()
    here, folder = f"{getpass.getuser()}@{name}", shlex.quote(str(first.run_root))
    print(f"curves: tensorboard --host localhost --port 6006 --logdir {folder}")
    print(f"        and, where you sit: ssh -N -L 6006:localhost:6006 {here}")
    return 0


def _check(job: Job) -> None:
    """Let src.cli read its settings now: a typo must not wait in the queue."""
    arguments = [*job.commands[0], "--print_config"]
    done = subprocess.run(
        [job.python, "-m", "src.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RUN_ROOT": str(job.run_root)},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        said = errors[-1].removeprefix("error: ") if errors else done.stderr[-2000:]
        raise LaunchError(f"{said} (found by {plain_command(['fit', '…', '--print_config'])}; --no-check goes without)")


def _refuse_second(job: Job) -> None:
    """Two jobs of one run would wait for each other, or train it twice."""
    known = {number for run in {job.name, *job.runs} for number in _numbers(job.run_root / run / "slurm")}
    if not known:
        return
    rows = sbatch.ask("squeue", "--me", "--noheader", "--format=%A %T").stdout.splitlines()
    live = [row for row in rows if row.split()[0] in known]
    if live:
        number, state = live[0].split()[:2]
        raise LaunchError(
            f"run {job.name} has job {number} already ({state}): python slurm/jobs.py cancel {job.name} ends it, "
            "another --name starts another run"
        )


def _numbers(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.json"):
        yield path.stem


def _write(submission: "Submission", job: Job, number: str) -> None:
    """A record of the job. It holds no environment, which may hold secrets."""
    content: dict[str, Any] = {
        "job": number,
        "name": job.name,
        "runs": list(job.runs),
        "points": [dict(point.settings) for point in submission.points],
        "race": job.race,
        "token": job.token,
        "submitted": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cluster": job.cluster.name,
        "nodes": job.shape.nodes,
        "gpus_per_node": job.shape.gpus_per_node,
        "time_seconds": int(job.time.total_seconds()),
        "cost_per_gpu_hour": job.cluster.cost_per_gpu_hour,
        "code": str(job.code),
        "commit": submission.snapshot.commit if submission.snapshot else None,
        "command": plain_command(job.commands[0]),
        "argv": list(submission.argv),
        "folder": os.getcwd(),
    }
    path = job.folder / f"{number}.json"
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
