"""Which rank fell first, by what srun says at the end of a step: the others are ended with it."""

import re
import signal
from collections.abc import Mapping

SAID = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
CODE = re.compile(r"Exited with exit code (\d+)")
SIGNALS = {signal.strsignal(number): 128 + number for number in signal.valid_signals()}  # `Killed`, as srun says it
START = re.compile(r"^job \S+, .*start", re.MULTILINE)  # slurm/job.py begins every start with such a line
ENDED_WITH_IT = (137, 143)  # SIGKILL and SIGTERM: what a rank gets when another one has fallen


def ends(batch: str) -> dict[int, str]:
    """How ranks ended badly in the last start, in the order in which srun says so: `on n1: Exited with exit code 1`."""
    starts = [match.end() for match in START.finditer(batch)]
    found: dict[int, str] = {}
    for match in SAID.finditer(batch, starts[-1] if starts else 0):
        for rank in task_numbers(match["tasks"]):
            found.setdefault(rank, f"on {match['node']}: {match['how']}")
    return found


def first(found: Mapping[int, str], outputs: Mapping[int, str]) -> int | None:
    """The rank whose own fault it was, as far as can be told; None where none fell.

    One that says why in its output comes before one that only exited, that before one that was killed, that before one
    that only says that it has lost another.
    """
    from src.exit_codes import LOST_A_RANK

    with_it = (*ENDED_WITH_IT, LOST_A_RANK)
    alone = [rank for rank, how in found.items() if (code := exit_code(how)) and code not in with_it]
    speaking = [rank for rank in alone if re.search(r"^(Traceback|error: )", outputs.get(rank, ""), re.MULTILINE)]
    killed = [rank for rank, how in found.items() if exit_code(how) != LOST_A_RANK]
    return next(iter([*speaking, *alone, *killed, *found]), None)


def exit_code(how: str) -> int | None:
    """Of a rank, 128 + the signal where that has ended it; None where srun says something else."""
    if match := CODE.search(how):
        return int(match[1])
    return SIGNALS.get(how.partition(": ")[2].removesuffix(" (core dumped)"))


def task_numbers(tasks: str) -> list[int]:
    """From Slurm's `0-2,5`."""
    found: list[int] = []
    for part in tasks.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def job_exit_code(batch: str, code: int) -> int:
    """What the job should end with: srun reports the highest code, which is that of a rank that was ended with it."""
    found = ends(batch)
    fell = first(found, {})
    return (exit_code(found[fell]) if fell is not None else None) or code
