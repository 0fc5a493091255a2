"""Where jobs stand: what was submitted (records beside the runs), what Slurm says, what the run has written.

Slurm's queue and the run's own files are enough; accounting (sacct) is asked too, and many sites have none.
"""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm import history, race, sbatch
from slurm.errors import LaunchError
from slurm.record import adopt, all_records
from slurm.syntax import format_time

DOWN = "nodes are down or reserved: sinfo -R; another partition, or a --time that ends before"
# Slurm's reason for a job that waits -> what that means and what to do.
REASONS = {
    "Resources": "waits for nodes to be free; fewer GPUs, another GPU type or a shorter --time start sooner",
    "Priority": "others are in front; a shorter --time may fill a gap",
    "Dependency": "waits for another job",
    "BeginTime": "starts again soon: Slurm holds a requeued job for about two minutes",
    "JobHeldUser": "you hold it: scontrol release",
    "JobHeldAdmin": "the site holds it: ask its support",
    "launch failed requeued held": "could not be started on its node: scontrol release JOB, or --exclude that node",
    "ReqNodeNotAvail": DOWN,
    "Nodes required for job are DOWN": DOWN,  # Slurm's older words for it
    "PartitionTimeLimit": "asks for more time than the partition gives: sinfo -o '%P %l'",
    "PartitionNodeLimit": "asks for more nodes than the partition has",
    "PartitionConfig": "asks for what the partition does not give",
    "AssocMaxJobsLimit": "your account runs as many jobs as it may",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation to begin",
    "BadConstraints": "no node has these features or that many GPUs: sinfo -o '%P %G %f'",
    "NodeDown": "a node of it is down",
    "JobArrayTaskLimit": "as many of this grid run as --parallel allows",
    # States of a job that Slurm does not start again.
    "PREEMPTED": "the site cancels what it preempts: jobs.py resume RUN goes on from the newest checkpoint",
    "NODE_FAIL": "a node died: jobs.py resume RUN goes on from the newest checkpoint",
}
MOST_ASKED = 1000  # of accounting, the newest: a command line holds no more than some ten thousand
LIMITS = ("QOS", "Assoc", "MaxGRES", "MaxCpu", "MaxNode", "MaxJobs")  # beginnings of many more reasons
# One that comes back after a preemption or a dead node is COMPLETING or REQUEUED, then PENDING, and not the last two.
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "DEADLINE",
    "BOOT_FAIL",
    "PREEMPTED",
    "NODE_FAIL",
)


def hint(reason: str) -> str:
    """What a pending job's reason means; "" where the word says it, or is not known."""
    for name, text in REASONS.items():
        if reason.strip("()").startswith(name):
            return text
    if reason.strip("()").startswith(LIMITS):
        return "a limit of your account or QOS: sacctmgr show assoc user=$USER; it goes on when other jobs end"
    return ""


@dataclass(frozen=True)
class Queued:
    """One job, or one task of an array, that Slurm has in hand or has just seen end."""

    array: str  # the number that the tasks of an array share; of another job its own
    state: str
    nodes: str
    comment: str
    reason: str
    number: str = ""  # that srun takes, also of an array's task

    @property
    def live(self) -> bool:
        """Whether Slurm may still run it."""
        return self.state not in ENDED

    @property
    def runs(self) -> bool:
        """Whether it has nodes now."""
        return self.state == "RUNNING"


@dataclass(frozen=True)
class State:
    """One run's newest job."""

    run: str
    folder: Path  # of the run
    job: str  # JOB, or JOB_INDEX in an array
    record: Mapping[str, Any]
    state: str  # Slurm's word, FINISHED, GONE where Slurm has forgotten it, UNKNOWN where Slurm does not answer
    reason: str = ""
    nodes: str = ""
    seconds: float = 0.0  # of this start, or of the last one
    restarts: int = 0  # of this job
    gpu_seconds: float = 0.0  # of all starts of all jobs of the run
    number: str = ""  # of the job while Slurm has it, one for each task of an array
    live: tuple[str, ...] = ()  # jobs of the run that Slurm may still run: in a race there are several

    @property
    def summary(self) -> Mapping[str, Any]:
        """What the run says of itself."""
        return _json(self.folder / "summary.json")

    @property
    def step(self) -> int | None:
        """Steps done: the summary of a run that hangs or was killed is older than its heartbeat."""
        told = (self.summary.get("last_step"), _json(self.folder / "heartbeat").get("step"))
        return max((step for step in told if isinstance(step, int)), default=None)

    @property
    def part_done(self) -> str:
        """Of the run's steps; "" where it has no number of them."""
        done, total = self.step, self.summary.get("total_steps")
        return f"{100 * done / total:.0f} %" if isinstance(done, int) and total else ""

    @property
    def lost(self) -> str:
        """Allocated time that led nowhere: starting, and what had to be done again."""
        allocated, useful = (self.summary.get(f"{name}_seconds") for name in ("allocated", "useful"))
        if allocated is None or useful is None:
            return ""
        return format_time(timedelta(seconds=int(max(0, allocated - useful))))

    @property
    def elapsed(self) -> str:
        """Of the limit."""
        limit = format_time(timedelta(seconds=self.record["time_seconds"]))
        return f"{format_time(timedelta(seconds=int(self.seconds)))}/{limit}"

    @property
    def checkpoint_age(self) -> str:
        """Of the newest checkpoint, in minutes."""
        times = []
        for path in (self.folder / "checkpoints").glob("*.ckpt"):
            with contextlib.suppress(OSError):  # one that goes while it is looked at
                times.append(path.stat().st_mtime)
        return f"{(time.time() - max(times)) / 60:.0f} min" if times else ""


def records(run_root: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each run, the newest last. A grid's stand under each of its points."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(all_records(run_root), key=lambda record: (record["submitted"], int(record["job"]))):
        for index, run in enumerate(record["runs"]):
            job = f"{record['job']}_{index}" if len(record["runs"]) > 1 else record["job"]
            found.setdefault(run, []).append(record | {"job": job, "array": record["job"]})
    return found


def states(run_root: Path, only: str | None = None, *, ask_slurm: bool = True) -> list[State]:
    """Every run that was submitted, the newest first; `only` is a run, or a grid with all its points.

    Without `ask_slurm` a Slurm that does not answer is no error: what the runs' files say is all there is then.

    Raises:
        LaunchError: no such run was submitted (the text names the newest), or Slurm does not answer.

    """
    queue: dict[str, Queued] = {}
    answers = True
    try:
        queue = _queue()
        adopt(run_root, {found.comment: found.array for found in queue.values()})
    except LaunchError as error:
        if ask_slurm:
            raise
        answers = False
        print(f"warning: {error}; what follows is from the runs' own files", file=sys.stderr)
    known = records(run_root)
    names = [run for run, rows in known.items() if only in (None, run, rows[-1]["name"])]
    if only is not None and not names:
        newest = ", ".join(list(known)[-5:][::-1]) or "none"
        raise LaunchError(f"no run {only!r} was submitted in {run_root}; the newest there: {newest}")
    chosen = {name: _representative(run_root / name, known[name], queue) for name in names}
    past = _accounting([row["job"] for row in chosen.values() if row["job"] not in queue])
    if not answers:
        past = {row["job"]: "UNKNOWN" for row in chosen.values()} | past
    return [_state(run_root / name, chosen[name], known[name], queue, past) for name in reversed(names)]


def _representative(folder: Path, rows: list[dict[str, Any]], queue: Mapping[str, Queued]) -> dict[str, Any]:
    """The job that stands for a run: the one that has started, else one that waits, else the newest.

    One that has lost its race is none of them.
    """
    racing = [
        row for row in rows if not row["race"] or race.holder(folder / "slurm", row["race"]) in (None, row["job"])
    ]
    rows = racing or rows  # the record of a winner may be damaged
    waiting = [row for row in rows if row["job"] in queue and queue[row["job"]].live]
    running = [row for row in waiting if queue[row["job"]].state != "PENDING"]
    return (running or waiting or rows)[-1]


def _state(
    folder: Path,
    record: dict[str, Any],
    rows: list[dict[str, Any]],
    queue: Mapping[str, Queued],
    past: Mapping[str, str],
) -> State:
    from src import exit_codes

    job = record["job"]
    here = queue.get(job)
    last = [entry for entry in history.read(folder, job)[-1:] if entry["event"] == "end"]
    ended = next((entry.get("why") or exit_codes.WORDS.get(entry.get("code") or 0, "") for entry in last), "")
    spans = [
        (seconds, row["nodes"] * row["gpus_per_node"])
        for row in rows
        for seconds in history.spans(folder, row["job"], row["job"] in queue and queue[row["job"]].runs)
    ]
    if (folder / "DONE").exists() and not (here and here.live):
        state, reason, nodes = "FINISHED", "", ""
    elif here:
        state, reason, nodes = here.state, here.reason if here.live else ended or here.reason, here.nodes
    else:
        why = str(_json(folder / "summary.json").get("exit_reason", ""))
        state, nodes = past.get(job) or "GONE", ""
        reason = ended or ("ended without a word" if why == "running" and state != "UNKNOWN" else why)
    return State(
        run=folder.name,
        folder=folder,
        job=job,
        record=record,
        state=state,
        reason=reason,
        nodes=nodes,
        seconds=spans[-1][0] if spans else 0.0,
        restarts=max(0, sum(entry["event"] == "start" for entry in history.read(folder, job)) - 1),
        gpu_seconds=sum(span * gpus for span, gpus in spans),
        number=here.number if here else "",
        live=tuple(row["job"] for row in rows if row["job"] in queue and queue[row["job"]].live),
    )


def _queue() -> dict[str, Queued]:
    """What Slurm has in hand, by JOB or JOB_INDEX; array tasks one by one.

    Raises:
        LaunchError: Slurm is not here or does not answer.

    """
    asked = "--format=%F|%K|%A|%T|%N|%k|%r"
    done = sbatch.ask("squeue", "--me", "--noheader", "--array", "--states=all", asked)
    if done.returncode:
        raise LaunchError(f"squeue: {sbatch.advice(done.stderr)}")
    found = {}
    for line in done.stdout.splitlines():
        if line.count("|") < 6:
            continue  # what a site's wrapper says
        array, index, number, state, nodes, comment, reason = line.split("|", 6)
        job = f"{array}_{index}" if index.isdigit() else number
        found[job] = Queued(array, state, nodes, comment, "" if reason == "None" else reason, number)
    return found


def _accounting(jobs: Iterable[str]) -> dict[str, str]:
    jobs = list(jobs)[-MOST_ASKED:]
    if not jobs or shutil.which("sacct") is None:
        return {}
    try:
        done = sbatch.ask("sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(jobs), seconds=20)
    except LaunchError:
        return {}
    rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    return {job: state.split()[0] for job, state, *_ in rows if state.split()}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
