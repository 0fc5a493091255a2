"""Write and read STOPPED in a run directory: a signal came, the state is saved, the next start resumes.

The job's batch script reads it. It names the start that wrote it: one that an earlier start has left means nothing.
Without PyTorch, as the launcher reads it.
"""

import contextlib
import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from src.engine import exit_codes
from src.engine.files import read_json, write_text

MARKER = "STOPPED"
# Set by the batch script, which then reads the marker: ranks end with 0, as srun ends all others when one does not.
READ_BY_SCRIPT = "STOPPED_IS_READ"
LEAD = "STOP_LEAD_SECONDS"  # set by the batch script: between the signal and the end of the job


def this_start(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return which start of which Slurm job this is."""
    job = environment.get("SLURM_JOB_ID")
    return {"job": job, "start": int(environment.get("SLURM_RESTART_COUNT", 0)) if job else None}


def mark(run: Path, step: int, signal: str) -> None:
    """Write that the state of `step` is saved because of `signal`, such as SIGUSR2. Raises OSError."""
    time = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    write_text(run / MARKER, json.dumps({"step": step, "signal": signal, "time": time} | this_start()) + "\n")


def read(run: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return what this start has written; None where it has not stopped, or the marker is another start's."""
    content, own = read_json(run / MARKER), this_start(environment)
    return content if content and {name: content.get(name) for name in own} == own else None


def exit_code(reason: str, rank: int) -> int:
    """Return the exit code of a rank that has stopped with its state saved.

    srun, torchrun and Lightning end all ranks when one does not end with 0: so only rank 0 says 85, and not even that
    where a batch script reads the marker.
    """
    if reason == "SIGINT" and rank == 0:
        return exit_codes.INTERRUPTED  # a shell loop that restarts after 85 must end with Ctrl-C
    saved = reason.startswith("SIG") and rank == 0 and READ_BY_SCRIPT not in os.environ
    return exit_codes.STOPPED if saved else exit_codes.DONE


def rotate(run: Path) -> None:
    """Keep what the start before has left as STOPPED.previous, for people, as a new start begins."""
    with contextlib.suppress(FileNotFoundError):
        (run / MARKER).replace(run / f"{MARKER}.previous")
