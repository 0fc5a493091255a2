"""Find the rank that failed first from srun's error lines: srun ends the others with it."""

import re
import signal
from collections.abc import Mapping

SAID = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
CODE = re.compile(r"Exited with exit code (\d+)")
SIGNALS = {signal.strsignal(number): 128 + number for number in signal.valid_signals()}  # `Killed`, as srun writes it
START = re.compile(r"^job \S+, .*start", re.MULTILINE)  # slurm/node/start.py begins every start with such a line
ENDED_WITH_IT = (137, 143)  # SIGKILL and SIGTERM: what a rank gets when another one has failed


def ends(batch: str) -> dict[int, str]:
    """Return how ranks failed in the last start, in srun's order: `on n1: Exited with exit code 1`."""
    starts = [match.end() for match in START.finditer(batch)]
    failed: dict[int, str] = {}
    for match in SAID.finditer(batch, starts[-1] if starts else 0):
        for rank in task_numbers(match["tasks"]):
            failed.setdefault(rank, f"on {match['node']}: {match['how']}")
    return failed


def first(failed: Mapping[int, str], outputs: Mapping[int, str]) -> int | None:
    """Return the rank that most likely failed by itself; None if none failed.

    A rank that prints why comes before one that only exited, that before one that was killed, and that before one that
    only reports the loss of another.
    """
    from src.engine.exit_codes import LOST_A_RANK

    with_it = (*ENDED_WITH_IT, LOST_A_RANK)
    alone = [rank for rank, how in failed.items() if (code := exit_code(how)) and code not in with_it]
    speaking = [rank for rank in alone if re.search(r"^(Traceback|error: )", outputs.get(rank, ""), re.MULTILINE)]
    killed = [rank for rank, how in failed.items() if exit_code(how) != LOST_A_RANK]
    return next(iter([*speaking, *alone, *killed, *failed]), None)


def exit_code(how: str) -> int | None:
    """Return a rank's exit code, 128 + the signal that ended it; None if srun writes something else."""
    if match := CODE.search(how):
        return int(match[1])
    return SIGNALS.get(how.partition(": ")[2].removesuffix(" (core dumped)"))


def task_numbers(tasks: str) -> list[int]:
    """Return the numbers in Slurm's `0-2,5`."""
    numbers: list[int] = []
    for span in tasks.split(","):
        low, _, high = span.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return numbers


def job_exit_code(batch: str, code: int) -> int:
    """Return the code of the rank that failed first; srun's `code` is the highest, of a rank that was ended with it."""
    failed = ends(batch)
    rank = first(failed, {})
    return (exit_code(failed[rank]) if rank is not None else None) or code
