"""Decide after each start of a job: it is done, it is requeued, or it ends with the exit code of what happened.

The batch script is the only one that requeues, once, when srun has returned: ranks that were signalled at different
moments, and submitit and Lightning, which requeue from inside a signal handler, cannot know how the others ended.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm.node import failed_rank, history

# Only Slurm knows whether a job is preempted. It requeues one that still runs at the end of its grace time.
GRACE_SECONDS = 900
# Exit codes that point to a fault of the machine, besides SIGKILL and a hang: SIGABRT, SIGBUS, SIGSEGV. Any other is
# the experiment's own, and would come again in another start.
FROM_OUTSIDE = (128 + 6, 128 + 7, 128 + 11)
NOT_LAUNCHED = re.compile(r"srun: error: (Task launch|Unable to create step|Application launch failed)")
# A controller that restarts is back in a minute or two; Slurm's signal leaves up to five.
ASK_SECONDS, AGAIN_SECONDS = 120, 5
# Only these answers are final. A controller that is away, `scontrol requeue` calls "Unexpected message received".
REFUSED = re.compile(r"no scontrol|Invalid job id|denied|disabled|already")
# How these signals end a rank that has no handler yet: SIGHUP, SIGUSR1, SIGUSR2, SIGTERM. With one it saves instead.
UNHEARD = tuple(128 + number for number in (1, 10, 12, 15))


@dataclass(frozen=True)
class Limits:
    """How often a job is started again by itself.

    Args:
        restarts: starts after the first; None: no limit, Slurm's own restarts alone
        seconds: of allocated time over all starts; None: no limit
        crash_retries: restarts after a rank was lost as by a broken machine

    """

    restarts: int | None = None
    seconds: int | None = None
    crash_retries: int = 0

    def used_up(self, run: Path, job: str, restarts: int) -> str | None:
        """Return why start number `restarts` (the first is 0) is refused; None if it is allowed."""
        if self.restarts is not None and restarts > self.restarts:
            return f"--max-restarts {self.restarts} is reached"
        if self.seconds is not None and (spent := _spent(run, job)) >= self.seconds:
            return f"{spent / 3600:.1f} of the {self.seconds / 3600:.1f} hours of --total-time are used"
        return None


def _spent(run: Path, job: str) -> float:
    return sum(history.spans(history.read(run, job), run, running=True))


def saved_step(run: Path) -> int:
    """Return the step in the newest checkpoint's name, -1 if there is none. Training checks whether it is whole."""
    from src.engine.checkpoint.names import ours, step_in_name

    return max(map(step_in_name, ours(run / "checkpoints", "newest")), default=-1)


def stuck(run: Path, job: str) -> str | None:
    """Return why another start would come no further: the last two restarts began at the step the run has now."""
    starts = [entry for entry in history.read(run, job) if entry["event"] == "start"]
    step = saved_step(run)
    if len(starts) >= 3 and all(entry.get("step") == step for entry in starts[-2:]):
        return f"two restarts have made no step beyond {max(step, 0)}: look at the logs, or save more often"
    return None


def verdict(run: Path, code: int, batch: str) -> tuple[int, str | None]:
    """Return the job's exit code, and why it should be started again; None if it should not."""
    from src.engine import exit_codes, stopped

    code = failed_rank.job_exit_code(batch, code)
    if (run / "DONE").exists():
        return code, None
    if mark := stopped.read(run):
        return exit_codes.STOPPED, f"stopped by {mark['signal']} at step {mark['step']}, saved"
    if "Out Of Memory" in " ".join(failed_rank.ends(batch).values()):
        return exit_codes.OUT_OF_MEMORY, None
    if code == exit_codes.BUSY:
        return code, "the run was in use or could not be saved (exit code 75)"
    if code and not failed_rank.ends(batch) and NOT_LAUNCHED.search(batch):
        return code, f"Slurm could not start the ranks (exit code {code})"
    if code in UNHEARD:
        return code, f"a signal came before training could save (exit code {code})"
    lost = code in (exit_codes.HUNG, exit_codes.KILLED, exit_codes.LOST_A_RANK, *FROM_OUTSIDE)
    return code, f"a rank was lost (exit code {code})" if lost else None


def decide(run: Path, limits: Limits, code: int, batch: str, say: Callable[[str], None]) -> int:
    """Requeue the job if it should be started again and may; return its exit code if it ends here."""
    from src.engine import stopped

    job, number = history.own_job(os.environ), int(os.environ.get("SLURM_RESTART_COUNT", 0))
    code, why = verdict(run, code, batch)
    mark = stopped.read(run)
    lost = why is not None and mark is None and code not in UNHEARD
    against = limits.used_up(run, job, number + 1) if why else None
    if why and limits.restarts is None:
        against = "only training is started again"
    elif lost and sum(bool(event.get("lost")) for event in history.read(run, job)) >= limits.crash_retries:
        against = f"--max-crash-retries {limits.crash_retries}"
    history.note(run, job, "end", code=code, lost=lost, why="; ".join(reason for reason in (why, against) if reason))
    if why and against:
        say(f"{why}. Not requeued ({against}): python slurm/jobs.py resume {run.name} resumes it")
    elif why and not requeue(run, why, say) and mark and mark["signal"] == "SIGTERM":
        # A job that ends in the grace time of its preemption counts as done.
        say(f"if Slurm preempts this job, Slurm requeues it: waiting for that, {GRACE_SECONDS} s at most")
        time.sleep(GRACE_SECONDS)
    return code


def requeue(run: Path, why: str, say: Callable[[str], None]) -> bool:
    """Ask Slurm to start this job again, and return whether it does. It then ends the batch script itself.

    Any answer but a clear refusal is asked again, for two minutes.
    """
    say(f"{why}: asks Slurm for another start, from step {max(saved_step(run), 0)}")
    # Slurm ends the batch script by SIGTERM as soon as it requeues the job: its answer must still be printed.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    end = time.monotonic() + ASK_SECONDS
    while (refusal := _requeue()) and time.monotonic() < end and not REFUSED.search(refusal):
        say(f"Slurm does not answer ({refusal}), asked again in {AGAIN_SECONDS} s")
        time.sleep(AGAIN_SECONDS)
    if refusal:
        say(f"requeueing failed ({refusal}): python slurm/jobs.py resume {run.name} resumes it")
    elif "JobState=CANCELLED" in scontrol("job", os.environ["SLURM_JOB_ID"]):
        say("not requeued: the job was cancelled")
    else:
        say("requeued")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return refusal is None


def _requeue() -> str | None:
    """Requeue this job; return why Slurm refuses. `incomplete`: a job that was cancelled during its save stays so."""
    done = _scontrol("requeue", "incomplete", os.environ["SLURM_JOB_ID"])
    return None if done.returncode == 0 else " ".join(done.stderr.split()) or f"exit code {done.returncode}"


def scontrol(*what: str) -> str:
    """Return what `scontrol show` prints; "" if it is missing, refuses, or does not answer."""
    done = _scontrol("show", *what)
    return done.stdout if done.returncode == 0 else ""


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60)
    except OSError:
        problem = "no scontrol on this node"
    except subprocess.TimeoutExpired:
        problem = "scontrol does not answer"
    return subprocess.CompletedProcess(arguments, 1, "", problem)
