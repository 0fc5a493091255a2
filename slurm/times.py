"""Read and write time limits as Slurm does, where `24:00` is 24 minutes."""

import re
from datetime import timedelta

FORMS = "a time limit M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, such as 2:59:00 for just under three hours"


def time_limit(text: str) -> timedelta:
    """Return the limit that sbatch's --time would read; a ValueError names the forms."""
    match = re.fullmatch("(?:([0-9]{1,3})-)?([0-9]{1,6}(?::[0-9]{1,2}){0,2})", text.strip())
    limit = timedelta()
    if match:
        numbers = [int(number) for number in match[2].split(":")]
        if match[1] is None and len(numbers) < 3:  # M or M:S
            numbers = [0, *numbers]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        limit = timedelta(days=int(match[1] or 0), hours=hours, minutes=minutes, seconds=seconds)
    if not limit:
        raise ValueError(f"got {text!r}; expected {FORMS}")
    return limit


def format_time(limit: timedelta) -> str:
    """Return H:MM:SS or D-HH:MM:SS, in which nobody mistakes minutes for hours."""
    hours, seconds = divmod(limit.seconds, 3600)
    clock = f"{hours}:{seconds // 60:02}:{seconds % 60:02}"
    return f"{limit.days}-{clock.rjust(8, '0')}" if limit.days else clock
