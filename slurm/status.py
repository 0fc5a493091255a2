"""Tell how runs are doing: what was submitted (records beside the runs), what Slurm says, what the run has written.

Slurm's queue and the run's own files are enough; accounting (sacct) is asked too, and many sites have none.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm import race
from slurm.errors import LaunchError
from slurm.node import history
from slurm.sbatch import advice, ask
from slurm.submission import adopt, all_records
from slurm.times import format_time
from src.engine import exit_codes
from src.engine.files import read_json

DOWN = "nodes are down or reserved: sinfo -R; another partition, or a --time that ends before"
# Slurm's reason for a job that waits -> what that means and what to do.
REASONS = {
    "Resources": "waits for nodes to be free; fewer GPUs, another GPU type or a shorter --time start sooner",
    "Priority": "others are in front; a shorter --time may fill a gap",
    "BeginTime": "starts again soon: Slurm holds a requeued job for about two minutes",
    "JobHeldUser": "you hold it: scontrol release",
    "JobHeldAdmin": "the site holds it: ask its support",
    "launch failed requeued held": "could not be started on its node: scontrol release JOB, or --exclude that node",
    "ReqNodeNotAvail": DOWN,
    "Nodes required for job are DOWN": DOWN,  # Slurm's older words for it
    "PartitionTimeLimit": "asks for more time than the partition gives: sinfo -o '%P %l'",
    "PartitionNodeLimit": "asks for more nodes than the partition has",
    "BadConstraints": "no node has these features or that many GPUs: sinfo -o '%P %G %f'",
    "JobArrayTaskLimit": "as many of this grid run as --parallel allows",
    # States of a job that Slurm does not start again.
    "PREEMPTED": "the site cancels what it preempts: jobs.py resume RUN resumes it from the newest checkpoint",
    "NODE_FAIL": "a node died: jobs.py resume RUN resumes it from the newest checkpoint",
}
LIMITS = ("QOS", "Assoc", "MaxGRES", "MaxCpu", "MaxNode", "MaxJobs")  # beginnings of many more reasons
# A job that is started again after a preemption or a dead node is COMPLETING or REQUEUED, then PENDING.
ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"),
    *("PREEMPTED", "NODE_FAIL"),
)
MOST_ASKED = 1000  # jobs of accounting, the newest: a command line holds some ten thousand at most


def hint(reason: str) -> str:
    """Return what a pending job's reason means; "" where the word says it, or is not known."""
    for name, text in REASONS.items():
        if reason.strip("()").startswith(name):
            return text
    if reason.strip("()").startswith(LIMITS):
        return "a limit of your account or QOS: sacctmgr show assoc user=$USER; it starts when other jobs end"
    return ""


@dataclass(frozen=True)
class Queued:
    """One job, or one task of an array, that is in Slurm's queue or has ended a short while ago."""

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


@dataclass(frozen=True)
class State:
    """One run's newest job."""

    run: str
    folder: Path  # of the run
    job: str  # JOB, or JOB_INDEX in an array
    record: Mapping[str, Any]
    summary: Mapping[str, Any]  # what the run says of itself
    state: str  # Slurm's word, FINISHED, GONE where Slurm has forgotten it, UNKNOWN where Slurm does not answer
    reason: str = ""
    nodes: str = ""
    seconds: float = 0.0  # of this start, or of the last one
    restarts: int = 0  # of this job
    allocated: float = 0.0  # seconds of all starts of all jobs of the run
    gpu_seconds: float = 0.0  # of the same
    number: str = ""  # of the job while Slurm has it, one for each task of an array
    live: tuple[str, ...] = ()  # jobs of the run that Slurm may still run: in a race there are several

    @property
    def step(self) -> int | None:
        """Steps done: the summary of a run that hangs or was killed is older than its heartbeat."""
        steps = (self.summary.get("last_step"), _json(self.folder / "heartbeat").get("step"))
        return max((step for step in steps if isinstance(step, int)), default=None)

    @property
    def part_done(self) -> str:
        """Percent of the run's steps; "" where it has no number of them."""
        done, total = self.step, self.summary.get("total_steps")
        return f"{100 * done / total:.0f} %" if done is not None and isinstance(total, int) and total else ""

    @property
    def lost(self) -> str:
        """Allocated time that led to no saved state: starting, what was repeated, and what is not saved yet."""
        useful = self.summary.get("useful_seconds")
        if not isinstance(useful, int | float):
            return ""
        return format_time(timedelta(seconds=int(max(0, self.allocated - useful))))

    @property
    def elapsed(self) -> str:
        """Time of this start, and the limit."""
        limit = format_time(timedelta(seconds=self.record["time_seconds"]))
        return f"{format_time(timedelta(seconds=int(self.seconds)))}/{limit}"

    @property
    def checkpoint_age(self) -> str:
        """Of the newest checkpoint, in minutes."""
        times = []
        for path in (self.folder / "checkpoints").glob("*.ckpt"):
            with contextlib.suppress(OSError):  # one that is deleted meanwhile
                times.append(path.stat().st_mtime)
        return f"{(time.time() - max(times)) / 60:.0f} min" if times else ""


def records(run_root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each run, the newest last. A grid's are under each of its points."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(all_records(run_root), key=lambda record: (record["submitted"], int(record["job"]))):
        for index, run in enumerate(record["runs"]):
            job = f"{record['job']}_{index}" if len(record["runs"]) > 1 else record["job"]
            by_run.setdefault(run, []).append(record | {"job": job})
    return by_run


def states(run_root: Path, only: str | None = None, *, ask_slurm: bool = True) -> list[State]:
    """Return the state of every run that was submitted, the newest first.

    Args:
        run_root: the folder of the runs
        only: a run, or a grid with all its points; None: all
        ask_slurm: whether a Slurm that does not answer is an error; else the runs' own files are all there is

    """
    queue: dict[str, Queued] = {}
    answers = True
    try:
        queue = _queue()
        adopt(run_root, {queued.comment: queued.array for queued in queue.values()})
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
    """Return the job that stands for a run: one that has started, else one that waits, else the newest.

    One that has lost its race is none of them.
    """
    racing = [row for row in rows if _winner(folder, row["race"]) in (None, row["job"])]
    rows = racing or rows  # the record of a winner may be damaged
    waiting = [row for row in rows if row["job"] in queue and queue[row["job"]].live]
    running = [row for row in waiting if queue[row["job"]].state != "PENDING"]
    return (running or waiting or rows)[-1]


def _winner(folder: Path, name: str) -> str | None:
    try:
        return race.holder(folder / "slurm", name) if name else None
    except (OSError, LaunchError) as error:
        print(f"warning: {error}", file=sys.stderr)
        return None


def _state(
    folder: Path,
    record: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    queue: Mapping[str, Queued],
    past: Mapping[str, str],
) -> State:
    job = record["job"]
    queued = queue.get(job)
    events = {row["job"]: history.read(folder, row["job"]) for row in rows}
    seconds = {}
    for name in events:
        running = name in queue and queue[name].state == "RUNNING"
        seconds[name] = history.spans(events[name], folder, running)
    summary = _json(folder / "summary.json")
    nodes, ended = "", _why_ended(events[job])
    if queued and queued.live:
        state, reason, nodes = queued.state, queued.reason, queued.nodes
    elif (folder / "DONE").exists():
        state, reason = "FINISHED", ""
    elif queued:
        state, reason, nodes = queued.state, ended or queued.reason, queued.nodes
    else:
        state, reason = past.get(job, "GONE"), ended or str(summary.get("exit_reason", ""))
        if reason == "running" and state != "UNKNOWN":
            reason = "ended without a word"
    return State(
        run=folder.name,
        folder=folder,
        job=job,
        record=record,
        summary=summary,
        state=state,
        reason=reason,
        nodes=nodes,
        seconds=seconds[job][-1] if seconds[job] else 0.0,
        restarts=max(0, len(seconds[job]) - 1),
        allocated=sum(sum(starts) for starts in seconds.values()),
        gpu_seconds=sum(sum(seconds[row["job"]]) * row["nodes"] * row["gpus_per_node"] for row in rows),
        number=queued.number if queued else "",
        live=tuple(row["job"] for row in rows if row["job"] in queue and queue[row["job"]].live),
    )


def _why_ended(events: Sequence[Mapping[str, Any]]) -> str:
    """Return why a job's last start has ended, by its own note; "" where it has made none."""
    if not events or events[-1]["event"] != "end":
        return ""
    code = events[-1].get("code")
    return str(events[-1].get("why") or (exit_codes.WORDS.get(code, "") if isinstance(code, int) else ""))


def _queue() -> dict[str, Queued]:
    """Return what Slurm has in its queue, by JOB or JOB_INDEX; array tasks one by one."""
    asked = "--format=%F|%K|%A|%T|%N|%k|%r"
    done = ask("squeue", "--me", "--noheader", "--array", "--states=all", asked)
    if done.returncode:
        raise LaunchError(f"squeue: {advice(done.stderr)}")
    queue = {}
    for line in done.stdout.splitlines():
        if line.count("|") < 6:
            continue  # what a site's wrapper says
        array, index, number, state, nodes, comment, reason = line.split("|", 6)
        job = f"{array}_{index}" if index.isdigit() else number
        queue[job] = Queued(array, state, nodes, comment, "" if reason == "None" else reason, number)
    return queue


def _accounting(jobs: Sequence[str]) -> dict[str, str]:
    """Return the states of jobs that have left the queue; none without accounting."""
    jobs = jobs[-MOST_ASKED:]
    if not jobs or shutil.which("sacct") is None:
        return {}
    try:
        done = ask("sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(jobs), seconds=20)
    except LaunchError:
        return {}
    rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    return {job: state.split()[0] for job, state, *_ in rows if state.split()}


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a file; {} also where it may not be read, as another user's."""
    with contextlib.suppress(OSError):
        return read_json(path)
    return {}
