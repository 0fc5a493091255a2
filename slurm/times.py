"""Time limits as Slurm writes them, in which `24:00` is 24 minutes."""

import math
import re
from datetime import timedelta

FORMS = "a time limit M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, such as 2:59:00 for just under three hours"
LONGEST = timedelta(days=365)


def time_limit(text: str) -> timedelta:
    """Return the limit that sbatch's --time would read; a ValueError names the forms or the bounds."""
    match = re.fullmatch("(?:([0-9]{1,3})-)?([0-9]{1,6}(?::[0-9]{1,2}){0,2})", text.strip())
    if not match:
        raise ValueError(f"got {text!r}; expected {FORMS}")
    days, numbers = match[1], [int(number) for number in match[2].split(":")]
    bounds = (math.inf if days is None else 23, 59, 59)  # the first may be any number: 90 minutes, 48 hours
    if any(number > most for number, most in zip(numbers, bounds, strict=False)):
        raise ValueError(f"got {text!r}; expected {FORMS}; hours up to 23 behind days, minutes and seconds up to 59")
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    limit = timedelta(days=int(days or 0), hours=hours, minutes=minutes, seconds=seconds)
    if not timedelta() < limit <= LONGEST:
        raise ValueError(f"got {text!r}; expected a time limit from one second to 365 days")
    return limit


def format_time(limit: timedelta) -> str:
    """Return H:MM:SS or D-HH:MM:SS, in which nobody mistakes minutes for hours."""
    hours, seconds = divmod(limit.seconds, 3600)
    clock = f"{hours}:{seconds // 60:02}:{seconds % 60:02}"
    return f"{limit.days}-{clock.rjust(8, '0')}" if limit.days else clock
