"""Write a job's batch script: slurm/job.sh with the job's own values in it. The same job gives the same text.

submitit writes the lines for sbatch; what stands in them is decided here.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from slurm import times
from slurm.cluster_file import Cluster
from slurm.errors import LaunchError
from slurm.request import Shape
from src.engine import exit_codes, stopped

# Lightning takes jobs of these names for interactive ones and starts a single process (Lightning 2.6.6, slurm.py).
INTERACTIVE = ("bash", "interactive")
TEMPLATE = Path(__file__).with_name("job.sh")
# The others of a job whose rank has ended well get this long, e.g. for rank 0's last upload.
WAIT_SECONDS = 300
RESTARTS, CRASH_RETRIES = 20, 2
SHORTEST = timedelta(minutes=5)  # of a job that is restarted at its limit
LONGEST_LEAD = 300  # seconds


@dataclass(frozen=True)
class Job:
    """All that a script depends on."""

    cluster: Cluster
    shape: Shape
    time: timedelta
    name: str  # of the run, and Slurm's name of the job
    folder: Path  # where the script and the logs go, <run root>/<name>/slurm
    run_root: Path
    code: Path  # the snapshot, or the project itself
    commands: Sequence[Sequence[str]]  # arguments of `python -m src.cli`; more than one make an array
    runs: Sequence[str]  # the run of each command
    parallel: int = 256  # how many of an array run at a time
    token: str = ""  # of this submission, and of no other: Slurm's comment on the job
    race: str = ""  # what the jobs of a race have in common
    restarts: int = RESTARTS  # after the first start; 0: the job ends with that
    total: timedelta | None = None  # of allocated time over all starts
    crash_retries: int = CRASH_RETRIES
    python: str = field(default_factory=lambda: sys.executable)

    @property
    def lead(self) -> int | None:
        """Seconds before the limit at which Slurm signals training to save and stop; None: the limit ends it.

        Slurm may signal up to a minute early, and a lead of the whole limit at once, again and again.
        """
        if not (self.trains and self.restarts and self.time >= SHORTEST):
            return None
        return int(min(LONGEST_LEAD, self.time.total_seconds() * 0.2))

    @property
    def log_name(self) -> str:
        """The part of the logs' names that Slurm fills in: the job's number, in an array with the task's index."""
        return "%A_%a" if len(self.commands) > 1 else "%j"

    @property
    def trains(self) -> bool:
        """Whether the run has no more work for it when it is finished; else it evaluates what was trained."""
        return self.commands[0][0] == "fit"

    def __post_init__(self) -> None:
        if self.name.lower() in INTERACTIVE:
            raise LaunchError(f"--name {self.name}: a job of that name counts as interactive; use another name")


def sbatch_options(job: Job) -> dict[str, Any]:
    """Return what sbatch is asked for, by option; nothing stands for what is not set.

    Never --ntasks, which would leave it to Slurm how many land on a node, and no binding of GPUs to tasks: it hides a
    GPU's peers from NCCL, which then goes without NVLink.
    """
    cluster, shape = job.cluster, job.shape
    typed = f"{cluster.gpu_type}:{shape.gpus_per_node}" if cluster.gpu_type else str(shape.gpus_per_node)
    options: dict[str, Any] = {
        "job-name": job.name,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.gpus_per_node,
        "signal": f"USR2@{job.lead}" if job.lead else None,
        "time": times.format_time(job.time),
        "output": str(job.folder / f"{job.log_name}_batch.out"),
        "comment": job.token,
        "requeue": job.restarts > 0,
        "no-requeue": job.restarts == 0,
        "gpus-per-node": typed if cluster.gpu_request == "gpus-per-node" else None,
        "gres": f"gpu:{typed}" if cluster.gpu_request == "gres" else None,
        "cpus-per-task": cluster.cpus_per_gpu,
        "mem": cluster.mem,
        "mem-per-cpu": cluster.mem_per_cpu,
        "mem-per-gpu": cluster.mem_per_gpu,
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "exclude": cluster.exclude,
        "mail-user": cluster.mail,
        "mail-type": "END,FAIL" if cluster.mail else None,
    }
    for option in cluster.sbatch:
        name, equals, value = option.removeprefix("--").partition("=")
        if name in options:
            raise LaunchError(f"cluster {cluster.name}: sbatch: --{name} is what the launcher decides, or has a key")
        options[name] = value if equals else True
    return {name: value for name, value in options.items() if value}


def sbatch_lines(job: Job) -> str:
    """Return the #SBATCH lines, as submitit writes them."""
    text = _make_sbatch_string(
        command="",
        folder=job.folder,
        stderr_to_stdout=True,  # one file per rank
        wckey=None,  # type: ignore[arg-type] # many sites refuse submitit's
        map_count=len(job.commands) if len(job.commands) > 1 else None,
        array_parallelism=job.parallel,
        additional_parameters={name.replace("-", "_"): value for name, value in sbatch_options(job).items()},
    )
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    return "\n".join(line for line in lines if job.lead or not line.startswith("#SBATCH --signal="))


def environment(job: Job) -> dict[str, str]:
    """Return what the script exports."""
    cluster = job.cluster
    variables = {
        "RUN_ROOT": str(job.run_root),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # The other cores load data. Without it each rank starts a thread for every core of the node.
        "OMP_NUM_THREADS": str(max(1, cluster.cpus_per_gpu // 2)),
    }
    if job.trains:
        variables[stopped.READ_BY_SCRIPT] = "1"
    if job.lead:
        variables[stopped.LEAD] = str(job.lead)
    if cluster.accelerator == "gpu":
        variables |= cluster.nccl.get("infiniband" if job.shape.nodes > 1 else "nvlink", {})
    return variables


def script(job: Job) -> str:
    """Return the text of the batch script: job.sh with each @mark@ replaced. A line whose mark is empty is left out."""
    quoted = shlex.quote
    values = {
        "sbatch": sbatch_lines(job),
        "setup": "\n".join(job.cluster.setup),
        "environment": "\n".join(f"export {name}={quoted(value)}" for name, value in environment(job).items()),
        "project": quoted(str(job.code)),
        "python": quoted(job.python),
        "limits": limits(job),
        "run": assignments(job),
        "options": start_options(job),
        "guard": guard(job),
        "output": quoted(str(job.folder / f"{job.log_name}_%t_log.out")),
        "cpus": str(job.cluster.cpus_per_gpu),  # Slurm 22.05 to 23.02 does not hand sbatch's down to srun
        "wait": str(WAIT_SECONDS),
        "program": f"{shlex.join(job.cluster.container)} python" if job.cluster.container else '"$python"',
        "logs": quoted(str(job.folder)),
        "bad_input": str(exit_codes.BAD_INPUT),
        "stopped": str(exit_codes.STOPPED),
    }
    lines = [line for line in TEMPLATE.read_text().splitlines() if not line or values.get(line.strip("@"), line)]
    return re.sub(r"@(\w+)@", lambda mark: values[mark[1]], "\n".join(lines) + "\n")


def limits(job: Job) -> str:
    """Return how often the job is restarted by itself, as options of slurm/node/start.py."""
    if not job.trains:
        return ""
    total = f" --total-seconds {int(job.total.total_seconds())}" if job.total else ""
    return f"--max-restarts {job.restarts}{total} --max-crash-retries {job.crash_retries}"


def start_options(job: Job) -> str:
    """Return the options of slurm/node/start.py at a start."""
    race = f" --race {shlex.quote(job.race)}" if job.race else ""
    return f"--tasks {job.shape.world_size}{race}" + ("" if job.trains else " --evaluate")


def guard(job: Job) -> str:
    """Return the line that requeues a job whose training does not stop before its limit; "" where it has no signal."""
    if not job.lead:
        return ""
    options = f"--seconds {int(job.time.total_seconds())} --margin {max(5, min(30, job.lead // 4))}"
    return (
        f'"$python" -m slurm.node.guard {options} "${{limits[@]}}" "$RUN_ROOT/$run" & guard=$!'
        "  # for steps that outlast the signal"
    )


def assignments(job: Job) -> str:
    """Return the lines that set the run and its arguments; in an array, those of the task's index."""
    pairs = zip(job.runs, job.commands, strict=True)
    lines = [f"run={shlex.quote(run)} arguments=({shlex.join(command)})" for run, command in pairs]
    if len(lines) == 1:
        return lines[0]
    cases = [f"{index}) {line} ;;" for index, line in enumerate(lines)]
    return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"])


def plain_command(arguments: Sequence[str]) -> str:
    """Return the training command as a user would type it."""
    return f"python -m src.cli {shlex.join(arguments)}"
