"""Submit jobs: snapshot, check, sbatch, and a record beside the run that jobs.py reads.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm import race, sbatch, snapshot
from slurm.cluster_file import Cluster
from slurm.errors import LaunchError
from slurm.grid import Point
from slurm.permissions import make_folder, refuse_shared
from slurm.script import Job, plain_command
from src.engine.files import replacing

# A record without these keys, or with values of other types, is damaged.
FIELDS = {
    **dict.fromkeys(("job", "name", "race", "submitted", "code", "folder"), str),
    **dict.fromkeys(("runs", "points", "argv"), list),
    **dict.fromkeys(("nodes", "gpus_per_node", "time_seconds"), int),
    "cost_per_gpu_hour": int | float | None,
}


@dataclass(frozen=True)
class Submission:
    """What will be submitted, and what is said of it."""

    name: str
    jobs: tuple[Job, ...]  # several are a race
    snapshot: snapshot.Plan | None
    points: tuple[Point, ...]
    summary: tuple[str, ...]
    warnings: tuple[str, ...]
    finished: bool
    trust: bool  # --trust-run-root
    argv: tuple[str, ...]


def submit_all(submission: Submission, *, check: bool) -> int:
    """Submit every job of it; return 0 if at least one is in the queue."""
    first = submission.jobs[0]
    _refuse_second(first)
    make_folder(first.run_root)
    if not submission.trust:
        refuse_shared(first.run_root)
    if submission.snapshot:
        snapshot.take(submission.snapshot, first.run_root / ".snapshots", submission.trust)
    if check:
        for job in submission.jobs:
            _check(job)
    make_folder(first.folder)
    refused: list[LaunchError] = []
    for job in submission.jobs:
        try:
            number = _submit(submission, job)
        except LaunchError as error:
            refused.append(error)
            continue
        print(f"job {number}: {job.name}" + (f", {len(job.runs)} runs" if submission.points else ""), flush=True)
        if job.race:
            _leave_lost_race(job, number)
    if len(refused) == len(submission.jobs):
        raise refused[0]
    for refusal in refused:
        print(f"warning: {refusal}; the other shape stays in the queue", file=sys.stderr)
    _print_how_to_watch(first)
    return 0


def _submit(submission: Submission, job: Job) -> str:
    """Submit one job and return its number. If Slurm gives no clear answer the mark stays: the job may show up."""
    mark = _write(submission, job)
    try:
        number = sbatch.submit(job)
    except sbatch.NoClearAnswerError:
        raise
    except LaunchError:
        mark.unlink()
        raise
    _number(mark, number)
    return number


def _leave_lost_race(job: Job, number: str) -> None:
    """Cancel a job whose race was won while it was submitted: the winner could not know it. It would leave anyway."""
    with contextlib.suppress(LaunchError):
        if race.holder(job.folder, job.race) not in (None, number):
            sbatch.ask("scancel", number)


def _print_how_to_watch(job: Job) -> None:
    """Print commands to paste. TensorBoard is bound to localhost: on a login node everybody could read it otherwise."""
    jobs = "python slurm/jobs.py"
    print(f"watch: {jobs} list; {jobs} logs {job.runs[0]} -f; {jobs} cancel {job.name}")
    name = socket.getfqdn() if "." in socket.getfqdn() else socket.gethostname()
    print(f"curves: tensorboard --host localhost --port 6006 --logdir {shlex.quote(str(job.run_root))}")
    print(f"        and on your own machine: ssh -N -L 6006:localhost:6006 {getpass.getuser()}@{name}")


def _check(job: Job) -> None:
    """Let src.check resolve every command for the cluster's card, with the code of the job.

    What `fit` would refuse there must not wait in the queue, and neither must a file that is not in the snapshot.
    """
    if not (job.code / "src/check.py").is_file():
        print("check: left out, the code of this submission is from before src.check")
        return
    print("check: src.check reads the settings", flush=True)  # that takes seconds, on a network file system many
    own = {"PYTHONPATH": str(job.code), "PYTHONDONTWRITEBYTECODE": "1", "RUN_ROOT": str(job.run_root)}
    done = subprocess.run(
        [job.python, "-m", "src.check", _card(job.cluster), "-"],
        input=json.dumps([list(command) for command in job.commands]),
        cwd=job.code,
        env=os.environ | own,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        reason = errors[-1].removeprefix("error: ") if errors else " ".join(done.stderr[-2000:].split())
        if done.returncode < 0:
            reason = f"the check was killed by signal {-done.returncode}, as a login node with little memory does it"
        raise LaunchError(f"{reason} (found by `python -m src.check`; --no-check submits without it)")


def _card(cluster: Cluster) -> str:
    """Return the cluster's card as src.check reads it; one that can do everything where the file does not name it."""
    if cluster.accelerator == "cpu":
        return "cpu"
    card = cluster.gpus.get(cluster.gpu or "")
    return f"{cluster.gpu}:{card.capability}" if card else "unknown:99.0"


def _refuse_second(job: Job) -> None:
    """Refuse a run that has a job in the queue: two of them would wait for each other, or train it twice."""
    if not any(job.run_root.glob("*/slurm")):
        return
    waiting = sbatch.queued()
    adopt(job.run_root, {comment: number for number, _, comment in waiting})
    records = {record["job"]: record for record in all_records(job.run_root)}
    files = {path.name for path in job.folder.glob("*")}
    for number, index, comment in waiting:
        if number in records:
            live = records[number]["runs"][index : index + 1]
        else:  # a damaged record or mark: which of the runs the job has is not known
            live = job.runs if files & {f"{number}.json", f"{comment}.submitting"} else []
        for run in live:
            if run in job.runs:
                raise LaunchError(
                    f"run {run} has job {number} already: python slurm/jobs.py cancel {run} ends it, another "
                    "--name starts another run"
                )


def refuse_other_points(run_root: Path, points: Sequence[Point]) -> None:
    """Refuse a grid whose name belongs to one with other combinations: a run keeps its settings."""
    wanted = {point.run: point for point in points}
    for record in all_records(run_root) if points else ():
        for run, settings in itertools.zip_longest(record["runs"], record["points"]):
            if run in wanted and settings != dict(wanted[run].settings):
                before = " ".join(f"{name}={value}" for name, value in (settings or {}).items()) or "no grid"
                raise LaunchError(f"run {run} was submitted with {before}, not {wanted[run]}: give another --name")


def all_records(run_root: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of all submissions, in no order; name on stderr those that cannot be read."""
    for path in run_root.glob("*/slurm/*.json"):
        if record := _read(path):
            yield record
        else:
            print(f"warning: {path} is damaged: job {path.stem} is not shown", file=sys.stderr)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in FIELDS.items()):
        return None
    names = record["runs"] and all(isinstance(run, str) for run in record["runs"])
    settings = all(isinstance(point, dict) for point in record["points"])
    return record if record["job"].isdecimal() and names and settings else None


def adopt(run_root: Path, queue: Mapping[str, str]) -> None:
    """Give submissions that ended without an answer the number under which they are in the queue (comment -> job)."""
    for mark in run_root.glob("*/slurm/*.submitting"):
        if number := queue.get(mark.stem):
            try:
                _number(mark, number)
            except (OSError, ValueError, TypeError) as error:
                print(f"warning: {mark}: {error}; job {number} is not shown", file=sys.stderr)


def _number(mark: Path, number: str) -> None:
    """Turn the mark of a submission into the record of job `number`."""
    content = json.loads(mark.read_text(encoding="utf-8")) | {"job": number}
    _write_whole(mark.with_name(f"{number}.json"), content)
    mark.unlink(missing_ok=True)


def _write_whole(path: Path, content: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.chmod(0o644)  # whatever the umask: jobs.py resume does what it says


def _write(submission: Submission, job: Job) -> Path:
    """Write the record of a job that has no number yet. It holds no environment, which may hold secrets."""
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
