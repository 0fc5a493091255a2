"""The batch script of a job: what Slurm is asked for, what runs before training, training, what runs after it.

submitit writes its head; everything in it is decided here. The same job gives the same text.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm import syntax
from slurm.cluster import Cluster
from slurm.errors import LaunchError
from slurm.training import Shape

# Lightning takes jobs of these names for interactive ones and starts a single process (Lightning 2.6.6, slurm.py).
INTERACTIVE = ("bash", "interactive")
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
        """Seconds before the limit at which training is told to save and stop; None: the limit ends it.

        Slurm may signal up to a minute early, and a lead of the whole limit at once, again and again.
        """
        if not (self.trains and self.restarts and self.time >= SHORTEST):
            return None
        return int(min(LONGEST_LEAD, self.time.total_seconds() * 0.2))

    @property
    def trains(self) -> bool:
        """Whether the run has no more work for it when it is finished; else it evaluates what was trained."""
        return self.commands[0][0] == "fit"

    def __post_init__(self) -> None:
        if self.name.lower() in INTERACTIVE:
            raise LaunchError(f"--name {self.name}: a job of that name counts as interactive; use another name")


def sbatch_parameters(job: Job) -> dict[str, Any]:
    """What sbatch is asked for, as submitit's parameters; nothing stands for what is not set.

    Never --ntasks, which would leave it to Slurm how many land on a node, and no binding of GPUs to tasks: it hides a
    GPU's peers from NCCL, which then goes without NVLink.
    """
    from src import exit_codes

    cluster, shape = job.cluster, job.shape
    typed = f"{cluster.gpu_type}:{shape.gpus_per_node}" if cluster.gpu_type else str(shape.gpus_per_node)
    more = {
        "time": syntax.format_time(job.time),
        "output": str(job.folder / ("%A_%a_batch.out" if len(job.commands) > 1 else "%j_batch.out")),
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
        more[name] = value if equals else True
    return {
        "job_name": job.name,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.gpus_per_node,
        "stderr_to_stdout": True,  # one file per rank
        "wckey": None,  # many sites refuse submitit's
        "array_parallelism": job.parallel,
        "additional_parameters": {key: value for key, value in more.items() if value},
        "srun_args": [
            # Slurm 22.05 to 23.02 does not hand sbatch's down to srun, and every rank gets one core.
            f"--cpus-per-task={cluster.cpus_per_gpu}",
            "--kill-on-bad-exit=1",
            f"--wait={WAIT_SECONDS}",
        ],
        "signal_delay_s": job.lead or 0,
        "setup": [*before(job)],
        "teardown": [
            "code=$?",
            *(["kill $guard 2>/dev/null"] if job.lead else []),
            "# Requeues the job, or says what it ends with: slurm/requeue.py.",
            'ended=$("$python" -m slurm.job --ended "$code" "${limits[@]}" '
            f'--logs {shlex.quote(str(job.folder))} "$RUN_ROOT/$run")',
            'if [ -z "$ended" ] && [ -e "$RUN_ROOT/$run/STOPPED" ]; then',
            '  echo "saved, and not requeued, as slurm/job.py failed: python slurm/jobs.py resume $run goes on" >&2',
            f"  ended={exit_codes.STOPPED}",
            "fi",
            'exit "${ended:-$code}"',
        ],
    }


def environment(job: Job) -> dict[str, str]:
    """What the script exports."""
    from src import stopped

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


def before(job: Job) -> list[str]:
    """Lines of shell in front of srun."""
    # A site's line may have set -e, which would end the script with training, before it can be requeued.
    lines = [*job.cluster.setup, *(["set +eu"] if job.cluster.setup else [])]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment(job).items()]
    # In front of what the user's environment or a site's modules have in it.
    lines.append(f'export PYTHONPATH={shlex.quote(str(job.code))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    if job.cluster.accelerator == "gpu":  # less is lost to fragmentation; the user's own setting stays
        default = "${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"
        lines.append(f'export PYTORCH_ALLOC_CONF="{default}"')
        lines.append('export PYTORCH_CUDA_ALLOC_CONF="$PYTORCH_ALLOC_CONF"  # its older name')
    lines += [f"cd {shlex.quote(str(job.code))} || exit", f"python={shlex.quote(job.python)}"]
    if len(job.commands) == 1:
        lines.append(_assignment(job.runs[0], job.commands[0]))
    else:
        lines.append('case "$SLURM_ARRAY_TASK_ID" in')
        pairs = zip(job.runs, job.commands, strict=True)
        lines += [f"{index}) {_assignment(run, command)} ;;" for index, (run, command) in enumerate(pairs)]
        lines.append("esac")
    options = f"--tasks {job.shape.world_size}" + (f" --race {shlex.quote(job.race)}" if job.race else "")
    options += "" if job.trains else " --evaluate"
    lines += [
        f"limits=({limits(job)})",
        "# Where to meet, or `exit 0` where there is nothing to do: slurm/job.py.",
        f'found=$("$python" -m slurm.job {options} "${{limits[@]}}" "$RUN_ROOT/$run") || exit',
        'eval "$found"',
    ]
    if job.lead:
        guard = f'"$python" -m slurm.guard --lead {job.lead} "${{limits[@]}}" "$RUN_ROOT/$run"'
        lines += [f"{guard} & guard=$!  # for steps that outlast the signal"]
    return lines


def limits(job: Job) -> str:
    """How often it goes on by itself, as options of slurm/job.py."""
    if not job.trains:
        return ""
    total = f" --total-seconds {int(job.total.total_seconds())}" if job.total else ""
    return f"--max-restarts {job.restarts}{total} --max-crash-retries {job.crash_retries}"


def _assignment(run: str, command: Sequence[str]) -> str:
    return f"run={shlex.quote(run)} arguments=({shlex.join(command)})"


def command(job: Job) -> str:
    """What srun starts in every task, as a line of shell."""
    start = ["python"] if job.cluster.container else ['"$python"']
    image = shlex.split(job.cluster.container) if job.cluster.container else []
    return " ".join([*map(shlex.quote, image), *start, '-u -m src.cli "${arguments[@]}"'])


def plain_command(arguments: Sequence[str]) -> str:
    """The training command as a user would type it."""
    return f"python -m src.cli {shlex.join(arguments)}"


def describe_environment(variables: Mapping[str, str]) -> list[str]:
    """A line per variable."""
    return [f"{name}={value}" for name, value in variables.items()]
