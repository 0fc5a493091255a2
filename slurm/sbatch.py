"""Ask Slurm by its own commands, and read their answers."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from slurm.errors import LaunchError
from slurm.script import Job, script

LATE = (124, 137)  # what `timeout` ends with
SECONDS = 60  # that a command of Slurm may take; a controller that is down lets sbatch try for a while
# Of the allocation that this command may run in (salloc, a notebook, a job): sbatch takes SBATCH_* and SLURM_* for
# options of the new job, and its tasks would take the old one's ranks and addresses.
FOREIGN = re.compile(
    r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SACCT|SINFO|SUBMITIT|PMI|PMIX|OMPI|TORCHELASTIC)_"
    r"|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|CUDA_VISIBLE_DEVICES)$"
)
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # which Slurm is meant
# What sbatch says, in whatever case -> what to do about it.
HINTS = (
    (
        r"account/partition combination|Invalid account",
        "account and partition must belong together: sacctmgr show assoc user=$USER lists yours",
    ),
    (r"invalid partition", "sinfo -s lists the partitions"),
    (r"invalid qos", "sacctmgr show assoc user=$USER format=account,partition,qos lists yours; or drop qos"),
    (
        r"QOS\w*Limit|AssocGrp|job violates accounting/QOS policy|MaxSubmit",
        "a limit of your account or QOS: fewer nodes, a shorter --time, or wait for your other jobs",
    ),
    (
        r"invalid generic resource|gres",
        "gpu_type or gpu_request of the cluster file do not fit: sinfo -o '%P %G' shows what nodes have",
    ),
    (
        r"time limit is invalid|exceeds partition time limit|PartitionTimeLimit",
        "the partition allows less time: sinfo -o '%P %l'",
    ),
    (r"node count", "the partition has not so many nodes: sinfo -s"),
    (
        r"node configuration is not available|More processors requested|Memory specification",
        "no node has that many GPUs, CPUs or that much memory: sinfo -o '%P %G %c %m'",
    ),
    (
        r"configuration source|DNS SRV",
        "Slurm's programs are here but know no cluster: submit on a login node, or try `make cluster-up`",
    ),
    (r"wckey", "the site wants a wckey: ask its support which, and set sbatch: [--wckey=NAME] in the cluster file"),
    (
        r"Unable to contact|connection refused|Socket timed out|slurmctld.*not responding|Zero Bytes",
        "the controller does not answer: scontrol ping; try again later",
    ),
)


# After these words the job may be in the queue: the controller was late with its answer.
UNCLEAR = re.compile(r"timed out|Zero Bytes|[Cc]ommunication")


class NoClearAnswerError(LaunchError):
    """sbatch ended without saying whether the job was accepted."""


def scrub() -> list[str]:
    """Remove a surrounding allocation's variables from this process's environment, and return their names."""
    foreign = [name for name in os.environ if FOREIGN.match(name) and name not in KEPT]
    for name in foreign:
        del os.environ[name]
    return foreign


def ask(*command: str, given: str | None = None, seconds: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; refuse one that is not here or did not answer in time."""
    seconds = seconds or SECONDS
    done = _run(command, seconds, given)
    if done.returncode in LATE:
        raise LaunchError(f"{command[0]} did not answer within {seconds} s: is the controller up? scontrol ping")
    return done


def _run(command: Sequence[str], seconds: int, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command, and end it with all that it has started when it is late."""
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"no {command[0]} here: Slurm's commands are on a cluster's login node (or `make cluster-up`)"
        )
    late = ["timeout", "--kill-after=5", str(seconds)]
    return subprocess.run([*late, *command], input=given, capture_output=True, text=True, errors="replace")


def advice(text: str) -> str:
    """Return what Slurm said in one line, with a hint where one is known."""
    said = " ".join(text.split()) or "nothing"
    hints = [hint for pattern, hint in HINTS if re.search(pattern, said, re.IGNORECASE)]
    return f"{said} ({hints[0]})" if hints else said


def submit(job: Job) -> str:
    """Submit once, and return the job's number. What sbatch says beside it goes to stderr.

    Where sbatch fails without a clear answer the queue is asked whether it holds the job after all; where that does not
    show it (yet), the error is a NoClearAnswerError.
    """
    # A quote that is left open would end somewhere in the script, and show itself after hours in the queue.
    setup = "\n".join(job.cluster.setup)
    if error := subprocess.run(["bash", "-n"], input=setup, capture_output=True, text=True).stderr:
        raise LaunchError(f"cluster {job.cluster.name}: setup: bash cannot read it ({' '.join(error.split())})")
    path = job.folder / f".{job.token}_submission.sh"
    path.write_text(script(job), encoding="utf-8")
    done = _run(["sbatch", "--parsable", str(path)], SECONDS)
    # JOBID or JOBID;CLUSTER on a line of its own, whatever a site's plugin prints around it.
    numbers = re.findall(r"^\s*([0-9]+)(?:;\S+)?\s*$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and numbers:
        print(done.stderr, end="", file=sys.stderr)
        number = str(numbers[-1])
    else:
        number = _after_all(job, done)
    path.replace(job.folder / f"{number}_submission.sh")
    return number


def _after_all(job: Job, done: subprocess.CompletedProcess[str]) -> str:
    """Return the number of a job that Slurm may have accepted though sbatch does not say so."""
    late = done.returncode in LATE
    said = f"no answer within {SECONDS} s: Socket timed out" if late else advice(done.stderr or done.stdout)
    if done.returncode and not UNCLEAR.search(said):
        raise LaunchError(f"sbatch refused {job.name}: {said}")
    if found := with_token(job.token):
        return found
    raise NoClearAnswerError(
        f"sbatch gave no clear answer for {job.name}: {said}; the job may be in the queue all the same: "
        "python slurm/jobs.py list shows it then, and while it is there this run is not submitted again"
    )


def with_token(token: str) -> str | None:
    """Return the number of the queued job that carries this comment; None where none does or nobody answers."""
    try:
        return next((number for number, _, comment in queued() if comment == token), None)
    except LaunchError:
        return None


def queued() -> list[tuple[str, int, str]]:
    """Return number, index and comment of each of your jobs in the queue; of an array each task, else index 0."""
    done = ask("squeue", "--me", "--noheader", "--array", "--format=%F %K %k")
    if done.returncode:
        raise LaunchError(f"squeue: {advice(done.stderr)}")
    rows = (re.match(r"\s*(\d+) +(\S+) ?(.*)", line) for line in done.stdout.splitlines())
    return [(row[1], int(row[2]) if row[2].isdigit() else 0, row[3].strip()) for row in rows if row]


def start_estimate(job: Job) -> str | None:
    """Return when the job would start, in Slurm's words; None without Slurm."""
    if shutil.which("sbatch") is None:
        return None
    try:
        done = ask("sbatch", "--test-only", given=script(job), seconds=10)
    except LaunchError as error:
        return str(error)
    return advice((done.stderr or done.stdout).replace("sbatch: ", ""))
