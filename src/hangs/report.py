"""Says which rank holds up the others, and where the others are."""

import socket
from collections.abc import Iterable, Sequence

from src.hangs.heartbeats import Beat, is_here, process_state

MOST = 8  # lines about the ranks that wait


def explain(beats: Sequence[Beat | None], silent: Iterable[int], limit: float) -> str:
    """One line that names the ranks at fault, and one for each place where others wait.

    At fault are the ranks that give no sign of life; where all do, those of which the fewest events are known, which
    have not come to where the others wait; and all where all are equally far.

    Args:
        beats: the newest sign of every rank
        silent: the ranks whose sign has not changed for a while
        limit: seconds without an event after which it is a hang

    """
    never = [rank for rank, beat in enumerate(beats) if beat is None]
    known = [beat for beat in beats if beat is not None]
    gone = [beat for beat in known if beat.rank in set(silent)]
    living = [beat for beat in known if beat not in gone]
    last, furthest = min((beat.events for beat in living), default=0), max((beat.events for beat in living), default=0)
    behind = [beat for beat in living if not (gone or never) and (beat.events == last or last == furthest)]
    faults = [silence(beat) for beat in gone]
    if never:
        faults.append(f"{ranks_text(never)} never gave a sign of life")
    faults += _places(behind)
    lines = [f"error: nothing has happened for {_time(limit)} (watchdog.minutes): " + "; ".join(faults)]
    waiting = _places([beat for beat in living if beat not in behind])
    lines += [f"  {place}" for place in waiting[:MOST]]
    if len(waiting) > MOST:
        lines.append(f"  and {len(waiting) - MOST} more")
    return "\n".join(lines)


def silence(beat: Beat) -> str:
    """What is known of a rank whose sign has not changed."""
    if beat.doing.startswith("ended"):
        return f"rank {beat.rank} on {beat.host} {beat.doing} after step {beat.step}"
    here = beat.host == socket.gethostname() and beat.born
    state = process_state(beat.pid)[0] if is_here(beat) else ""
    if not here:
        why = "it has died or was stopped, or its machine is gone"
    elif state in ("", "Z", "X"):  # none, or ended and nobody has asked for its exit code
        why = f"its process {beat.pid} is gone"
    elif state in "Tt":
        why = f"its process {beat.pid} is stopped (SIGSTOP)"
    else:
        why = f"its process {beat.pid} is there (state {state}) and runs none of its Python threads"
    where = f"{beat.doing} after step {beat.step}"
    return f"rank {beat.rank} on {beat.host} gives no sign of life: when last heard of, it was in {where}; {why}"


def _places(beats: list[Beat]) -> list[str]:
    """One sentence for the ranks that are at the same place."""
    groups: dict[tuple[int, str, str], list[Beat]] = {}
    for beat in beats:
        groups.setdefault((beat.step, beat.doing, beat.place), []).append(beat)
    return [
        f"{ranks_text([beat.rank for beat in group])}{f' on {group[0].host}' if len(group) == 1 else ''} "
        f"{'is' if len(group) == 1 else 'are'} in {doing} after step {step}, for {_time(group[0].quiet)}, at {place}"
        for (step, doing, place), group in groups.items()
    ]


def ranks_text(numbers: list[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
