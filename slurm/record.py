"""Submitting: snapshot, check, sbatch, and a record beside the run that jobs.py reads.

A record is written before sbatch is called, as TOKEN.submitting, and gets the job's number afterwards: a submission
that was interrupted, or that Slurm never answered, is found again in the queue by its comment, which is the token.
"""

import contextlib
import datetime
import getpass
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm import race, sbatch, snapshot
from slurm.errors import LaunchError
from slurm.render import Job, plain_command
from slurm.shared_root import make_folder, refuse_shared

if TYPE_CHECKING:
    from slurm.grid import Point
    from slurm.plan import Submission

# Without these keys a record says nothing.
REQUIRED = {"job", "name", "runs", "points", "race", "submitted", "nodes", "gpus_per_node", "time_seconds", "argv"}


def submit_all(submission: "Submission", *, check: bool) -> int:
    """Submit every job of it; 0 where at least one is in the queue.

    Raises:
        LaunchError: refused by src.cli, the run root or Slurm, or the run has a job already.

    """
    first = submission.jobs[0]
    _refuse_second(first)
    make_folder(first.run_root)
    if not submission.trust:
        refuse_shared(first.run_root)
    if submission.snapshot:
        snapshot.take(submission.snapshot, first.run_root / ".snapshots", submission.trust)
    if check:
        _check(first, submission.points)
    make_folder(first.folder)
    submitted: list[str] = []
    refused: list[LaunchError] = []
    for job in submission.jobs:
        if job.race and (winner := race.holder(job.folder, job.race)):
            print(f"job {winner} has started already: {job.shape} is not submitted")
            break
        mark = _write(submission, job)
        try:
            number = sbatch.submit(job)
        except sbatch.NoClearAnswerError as error:
            refused.append(error)  # its mark stays: the job may show up
            break
        except LaunchError as error:
            mark.unlink()
            refused.append(error)
            continue
        _number(mark, number)
        submitted.append(number)
        print(f"job {number}: {job.name}" + (f", {len(job.runs)} runs" if submission.points else ""), flush=True)
        if job.race and (winner := race.holder(job.folder, job.race)) not in (None, number):
            with contextlib.suppress(LaunchError):  # it leaves by itself when it starts
                sbatch.ask("scancel", number)  # the other one started meanwhile, and could not know this one
    if not submitted:
        raise refused[0]
    for refusal in refused:
        print(f"warning: {refusal}; the other shape stays in the queue", file=sys.stderr)
    _say_how_to_watch(first)
    return 0


def _say_how_to_watch(job: Job) -> None:
    """What to paste next. TensorBoard is bound to localhost: on a login node everybody could read along otherwise."""
    jobs = "python slurm/jobs.py"
    print(f"watch: {jobs} list; {jobs} logs {job.runs[0]} -f; {jobs} cancel {job.name}")
    name = socket.getfqdn() if "." in socket.getfqdn() else socket.gethostname()
    print(f"curves: tensorboard --host localhost --port 6006 --logdir {shlex.quote(str(job.run_root))}")
    print(f"        and, where you sit: ssh -N -L 6006:localhost:6006 {getpass.getuser()}@{name}")


def _check(job: Job, points: Sequence["Point"]) -> None:
    """Let src.cli read its settings now, with the code of the job: a typo must not wait in the queue.

    Nor may a file that was left out of the snapshot. Of a grid each value is read, in one command: of an option that is
    repeated the last one counts, and all are looked at.
    """
    values = dict.fromkeys(setting for point in points for setting in point.settings)
    arguments = [*job.commands[0], *(part for name, value in values for part in (f"--{name}", value)), "--print_config"]
    print("check: src.cli reads the settings", flush=True)  # that takes seconds, on a network file system many
    own = {"PYTHONPATH": str(job.code), "PYTHONDONTWRITEBYTECODE": "1", "RUN_ROOT": str(job.run_root)}
    done = subprocess.run(
        [job.python, "-m", "src.cli", *arguments],
        cwd=job.code,
        env=os.environ | own,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        said = errors[-1].removeprefix("error: ") if errors else " ".join(done.stderr[-2000:].split())
        if done.returncode < 0:
            said = f"the check was killed by signal {-done.returncode}, as a login node with little memory does it"
        raise LaunchError(f"{said} (found by `python -m src.cli {arguments[0]} … --print_config`; see --no-check)")


def _refuse_second(job: Job) -> None:
    """Two jobs of one run would wait for each other, or train it twice."""
    if not any(job.run_root.glob("*/slurm")):
        return
    queue = sbatch.queued()
    adopt(job.run_root, {comment: number for number, _, comment in queue})
    for record in all_records(job.run_root):
        indexes = {index for number, index, _ in queue if number == record["job"]}
        live = {run for index, run in enumerate(record["runs"]) if index in indexes}
        for run in sorted(live & set(job.runs)):
            raise LaunchError(
                f"run {run} has job {record['job']} already: python slurm/jobs.py cancel {run} ends it, another "
                "--name starts another run"
            )


def refuse_other_points(run_root: Path, points: Sequence["Point"]) -> None:
    """A run of a grid keeps its settings, also where another grid of that name has other combinations.

    Raises:
        LaunchError: one was submitted with others.

    """
    wanted = {point.run: point for point in points}
    for record in all_records(run_root) if points else ():
        for run, settings in itertools.zip_longest(record["runs"], record["points"]):
            if run in wanted and settings != dict(wanted[run].settings):
                said = " ".join(f"{name}={value}" for name, value in (settings or {}).items()) or "no grid"
                raise LaunchError(f"run {run} was submitted with {said}, not {wanted[run]}: give another --name")


def all_records(run_root: Path) -> Iterator[dict[str, Any]]:
    """What was submitted, in no order. A record that cannot be read is named on stderr."""
    for path in run_root.glob("*/slurm/*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            whole = isinstance(record, dict) and record.keys() >= REQUIRED and str(record["job"]).isdigit()
        except (OSError, ValueError):
            whole = False
        if whole:
            yield record
        else:
            print(f"warning: {path} is damaged: job {path.stem} is not shown", file=sys.stderr)


def adopt(run_root: Path, queue: Mapping[str, str]) -> None:
    """Give submissions that ended without an answer the number under which they are in the queue (comment -> job)."""
    for mark in run_root.glob("*/slurm/*.submitting"):
        if number := queue.get(mark.stem):
            _number(mark, number)


def _number(mark: Path, number: str) -> None:
    try:
        content = json.loads(mark.read_text(encoding="utf-8")) | {"job": number}
    except (OSError, ValueError, TypeError) as error:
        print(f"warning: {mark} is damaged ({error}): job {number} is not shown", file=sys.stderr)
        return
    _write_whole(mark.with_name(f"{number}.json"), content)
    mark.unlink()


def _write_whole(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.chmod(0o644)  # jobs.py resume does what it says
    temporary.replace(path)


def _write(submission: "Submission", job: Job) -> Path:
    """A record of the job, which has no number yet. It holds no environment, which may hold secrets."""
    content: dict[str, Any] = {
        "job": None,
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
    mark = job.folder / f"{job.token}.submitting"
    _write_whole(mark, content)
    return mark
