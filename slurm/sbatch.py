"""Slurm's own commands, and submitit's executor as this project uses it."""

import contextlib
import io
import os
import re
import shutil
import subprocess
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from slurm import render
from slurm.errors import LaunchError
from slurm.render import Job

SECONDS = 60  # that a command of Slurm may take; a controller that is down lets sbatch try for a while
# Of the allocation that this command may run in (salloc, a notebook, a job): sbatch takes SBATCH_* and SLURM_* for
# options of the new job, and its tasks would take the old one's ranks and addresses.
FOREIGN = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SUBMITIT|PMI|PMIX|OMPI)_|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE)$")
FOREIGN_TOO = re.compile(r"(LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES)$")
KEPT = ("SLURM_CONF",)
# What sbatch says -> what to do about it.
HINTS = (
    (
        r"account/partition combination|Invalid account",
        "account and partition must belong together: sacctmgr show assoc user=$USER lists yours",
    ),
    (r"invalid partition", "sinfo -s lists the partitions"),
    (r"[Ii]nvalid qos", "sacctmgr show assoc user=$USER format=account,partition,qos lists yours; or drop qos"),
    (
        r"QOS\w*Limit|AssocGrp|job violates accounting/QOS policy|MaxSubmit",
        "a limit of your account or QOS: fewer nodes, a shorter --time, or wait for your other jobs",
    ),
    (
        r"[Ii]nvalid generic resource|gres",
        "gpu_type or gpu_request of the cluster file do not fit: sinfo -o '%P %G' shows what nodes have",
    ),
    (
        r"time limit is invalid|exceeds partition time limit|PartitionTimeLimit",
        "the partition allows less time: sinfo -o '%P %l'",
    ),
    (r"[Nn]ode count", "the partition has not so many nodes: sinfo -s"),
    (
        r"node configuration is not available|More processors requested|Memory specification",
        "no node has that many GPUs, CPUs or that much memory: sinfo -o '%P %G %c %m'",
    ),
    (
        r"configuration source|DNS SRV",
        "Slurm's programs are here but know no cluster: submit on a login node, or try `make cluster-up`",
    ),
    (r"wckey", "the site wants a wckey of its own: ask its support"),
    (
        r"Unable to contact|[Cc]onnection refused|Socket timed out|slurmctld.*not responding|Zero Bytes",
        "the controller does not answer: scontrol ping; try again later",
    ),
)


def scrub() -> list[str]:
    """Take a surrounding allocation's variables out of this process's environment; their names."""
    foreign = [name for name in os.environ if (FOREIGN.match(name) or FOREIGN_TOO.match(name)) and name not in KEPT]
    for name in foreign:
        del os.environ[name]
    return foreign


def ask(*command: str, given: str | None = None, seconds: int = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands.

    Raises:
        LaunchError: there is none of that name here, or it did not answer in time.

    """
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"no {command[0]} here: Slurm's commands are on a cluster's login node (or `make cluster-up`)"
        )
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} did not answer within {seconds} s: is the controller up? scontrol ping"
        ) from None


def advice(text: str) -> str:
    """What Slurm said, in one line, with a hint where one is known."""
    said = " ".join(text.split()) or "nothing"
    hints = [hint for pattern, hint in HINTS if re.search(pattern, said)]
    return f"{said} ({hints[0]})" if hints else said


class Executor(SlurmExecutor):
    """Renders and submits a `Job`. The script runs `src.cli` itself: there is no pickle, and nobody else's signals."""

    def __init__(self, job: Job) -> None:
        super().__init__(folder=job.folder, python=job.python)
        self.update_parameters(**render.sbatch_parameters(job))
        if len(job.commands) > 1:
            self.parameters["map_count"] = len(job.commands)

    @classmethod
    def affinity(cls) -> int:
        """Also where there is no Slurm: a dry run renders anywhere."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = super()._make_submission_file_text(command, uid)
        return re.sub(r"#SBATCH --signal=.*\n|export SUBMITIT_EXECUTOR=.*\n", "", text)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["timeout", "--kill-after=5", str(SECONDS), "sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string.decode() if isinstance(string, bytes) else string
        # JOBID or JOBID;CLUSTER on a line of its own, whatever a site's plugin prints before it.
        lines = [line for line in text.splitlines() if re.fullmatch(r"[0-9]+(;\S+)?", line.strip())]
        if not lines:
            raise FailedSubmissionError(f"sbatch said {text!r}, which has no job number in it")
        return lines[-1].strip().split(";")[0]


def script(job: Job) -> str:
    """The text that is submitted."""
    return Executor(job)._make_submission_file_text(render.command(job), "")


def submit(job: Job) -> str:
    """Submit once; the job's number.

    Where sbatch fails without a clear answer the queue is asked whether it holds the job after all.

    Raises:
        LaunchError: Slurm refused; its own words, with a hint.

    """
    if shutil.which("sbatch") is None:
        raise LaunchError("no sbatch here: submit on a cluster's login node, or try --dry-run or `make cluster-up`")
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what its error says
            return str(Executor(job)._submit_command(render.command(job)).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        cause = error.__cause__
        late = isinstance(cause, subprocess.CalledProcessError) and cause.returncode in (124, 137)
        said = f"no answer within {SECONDS} s: Socket timed out" if late else str(error)
        if re.search(r"timed out|Zero Bytes|[Cc]ommunication", said) and (found := with_token(job.token)):
            return found
        raise LaunchError(f"sbatch refused {job.name}: {advice(said)}") from error


def with_token(token: str) -> str | None:
    """The number of the queued job that carries this comment; None where there is none or nobody answers."""
    try:
        rows = ask("squeue", "--me", "--noheader", "--format=%A %k").stdout.splitlines()
    except LaunchError:
        return None
    return next(
        (number for number, _, comment in (row.partition(" ") for row in rows) if comment.strip() == token), None
    )


def start_estimate(job: Job) -> str | None:
    """When the job would start, in Slurm's words; None without Slurm."""
    if shutil.which("sbatch") is None:
        return None
    try:
        done = ask("sbatch", "--test-only", given=script(job), seconds=10)
    except LaunchError as error:
        return str(error)
    return advice((done.stderr or done.stdout).replace("sbatch: ", ""))
