"""What becomes of a job after a start: it is done, it goes on in another start, or it ends with what happened.

The batch script is the only one that requeues, once, when srun has returned: ranks that were signalled at different
moments, and submitit and Lightning, which requeue from inside a signal handler, cannot know what became of the others.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm import fallen, history

# Whether a job is preempted, only Slurm knows. It takes back one that is still there when its grace is over.
GRACE_SECONDS = 900
# What a rank ends with that the machine has lost, beside SIGKILL and a hang: SIGABRT, SIGBUS, SIGSEGV. Any other is of
# the experiment's own doing, and another start would bring the same.
FROM_OUTSIDE = (128 + 6, 128 + 7, 128 + 11)
NOT_LAUNCHED = re.compile(r"srun: error: (Task launch|Unable to create step|Application launch failed)")
# A controller that restarts is back in a minute or two; Slurm's signal leaves up to five.
ASK_SECONDS, AGAIN_SECONDS = 120, 5
# Only these answers are final. A controller that is away, `scontrol requeue` calls "Unexpected message received".
REFUSED = re.compile(r"no scontrol|Invalid job id|denied|disabled|already")
# Ranks that were not listening yet end so: SIGHUP, SIGUSR1, SIGUSR2, SIGTERM. Once training listens it saves instead.
UNHEARD = tuple(128 + number for number in (1, 10, 12, 15))
STEP = re.compile(r"step=(\d+)\.ckpt")


@dataclass(frozen=True)
class Limits:
    """How often a job goes on by itself.

    Args:
        restarts: starts after the first; None: no limit, Slurm's own restarts alone
        seconds: of allocated time over all starts; None: no limit
        crash_retries: restarts after a rank was lost as by a broken machine

    """

    restarts: int | None = None
    seconds: int | None = None
    crash_retries: int = 0

    def used_up(self, run: Path, job: str, restarts: int) -> str | None:
        """Why there is no start of this number (the first is 0); None where there may be one."""
        if self.restarts is not None and restarts > self.restarts:
            return f"--max-restarts {self.restarts} is reached"
        if self.seconds is not None and (spent := _spent(run, job)) >= self.seconds:
            return f"{spent / 3600:.1f} of the {self.seconds / 3600:.1f} hours of --total-time are used"
        return None


def _spent(run: Path, job: str) -> float:
    return sum(history.spans(history.read(run, job), run, running=True))


def saved_step(run: Path) -> int:
    """Steps of the newest checkpoint by its name, -1 where there is none; which one is whole the training finds out."""
    found = (STEP.fullmatch(path.name) for path in run.glob("checkpoints/step=*.ckpt"))
    return max((int(match[1]) for match in found if match), default=-1)


def stuck(run: Path, job: str) -> str | None:
    """Why another start would come no further: the last two restarts began where the run is now."""
    starts = [entry for entry in history.read(run, job) if entry["event"] == "start"]
    step = saved_step(run)
    if len(starts) >= 3 and all(entry.get("step") == step for entry in starts[-2:]):
        return f"two restarts have made no step beyond {max(step, 0)}: look at the logs, or save more often"
    return None


def verdict(run: Path, code: int, batch: str) -> tuple[int, str | None]:
    """The job's exit code, and why it should go on in another start; None: it should not.

    Args:
        run: the run directory
        code: what srun has ended with
        batch: what stands in batch.out

    """
    from src import exit_codes, stopped

    code = fallen.job_exit_code(batch, code)
    if (run / "DONE").exists():
        return code, None
    if said := stopped.read(run):
        return exit_codes.STOPPED, f"stopped by {said['signal']} at step {said['step']}, saved"
    if "Out Of Memory" in " ".join(fallen.ends(batch).values()):
        return exit_codes.OUT_OF_MEMORY, None
    if code == exit_codes.BUSY:
        return code, "the run was in use or could not be saved (exit code 75)"
    if code and not fallen.ends(batch) and NOT_LAUNCHED.search(batch):
        return code, f"Slurm could not start the ranks (exit code {code})"
    if code in UNHEARD:
        return code, f"a signal came before training could save (exit code {code})"
    lost = code in (exit_codes.HUNG, exit_codes.KILLED, exit_codes.LOST_A_RANK, *FROM_OUTSIDE)
    return code, f"a rank was lost (exit code {code})" if lost else None


def decide(run: Path, limits: Limits, code: int, batch: str, say: Callable[[str], None]) -> int:
    """Requeue the job if it should go on and may; its exit code where it ends here."""
    from src import stopped

    job, number = history.own_job(os.environ), int(os.environ.get("SLURM_RESTART_COUNT", 0))
    code, why = verdict(run, code, batch)
    lost = why is not None and stopped.read(run) is None and code not in UNHEARD
    against = limits.used_up(run, job, number + 1) if why else None
    if why and limits.restarts is None:
        against = "only training goes on by itself"
    elif lost and sum(bool(entry.get("lost")) for entry in history.read(run, job)) >= limits.crash_retries:
        against = f"--max-crash-retries {limits.crash_retries}"
    history.note(run, job, "end", code=code, lost=lost, why="; ".join(part for part in (why, against) if part))
    if why and against:
        say(f"{why}. Not requeued ({against}): python slurm/jobs.py resume {run.name} goes on")
    elif why and not requeue(run, why, say) and (said := stopped.read(run)) and said["signal"] == "SIGTERM":
        # A job that ends in the grace of its preemption counts as done.
        say(f"if Slurm preempts this job it takes it back by itself: waiting for that, {GRACE_SECONDS} s at most")
        time.sleep(GRACE_SECONDS)
    return code


def requeue(run: Path, why: str, say: Callable[[str], None]) -> bool:
    """Let Slurm start this job again, and say whether it does. It then ends the batch script itself.

    Whatever is no clear refusal is asked again, for two minutes.
    """
    say(f"{why}: asks Slurm for another start, from step {max(saved_step(run), 0)}")
    # By SIGTERM Slurm ends the batch script, as soon as it requeues the job: what it answers is still said.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    end = time.monotonic() + ASK_SECONDS
    while (refusal := _requeue()) and time.monotonic() < end and not REFUSED.search(refusal):
        say(f"Slurm does not answer ({refusal}), asked again in {AGAIN_SECONDS} s")
        time.sleep(AGAIN_SECONDS)
    if refusal:
        say(f"requeueing failed ({refusal}): python slurm/jobs.py resume {run.name} goes on")
    elif "JobState=CANCELLED" in scontrol("job", os.environ["SLURM_JOB_ID"]):
        say("not requeued: the job was cancelled")
    else:
        say("requeued")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return refusal is None


def scontrol(*what: str) -> str:
    """What `scontrol show` says; "" where it is missing, refuses, or does not answer."""
    try:
        done = subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _requeue() -> str | None:
    """`incomplete`: a job that was cancelled stays so, also where that happened during its save."""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", "incomplete", os.environ["SLURM_JOB_ID"]],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        return "no scontrol on this node"
    except subprocess.TimeoutExpired:
        return "scontrol does not answer"
    return None if done.returncode == 0 else " ".join(done.stderr.split()) or f"exit code {done.returncode}"
