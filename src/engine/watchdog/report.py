"""Word the report of a hang: which rank holds up the others, and where the others are."""

from collections.abc import Collection, Sequence

from src.engine.text import duration
from src.engine.watchdog.heartbeat import Sign


def explain(signs: Sequence[Sign | None], silent: Collection[int], limit: float) -> str:
    """Return one line that names the ranks at fault, and one line for each place where others wait.

    Ranks that give no sign of life are at fault. If all do, those are that have begun the fewest events: they have not
    come to where the others wait. If all have begun equally many, all are named. `signs` are in the order of the ranks.
    """
    never = [rank for rank, sign in enumerate(signs) if sign is None]
    gone = [sign for sign in signs if sign and sign.rank in silent]
    living = [sign for sign in signs if sign and sign.rank not in silent]
    fewest = min((sign.events for sign in living), default=0)
    behind = [] if gone or never else [sign for sign in living if sign.events == fewest]
    faults = [
        f"rank {sign.rank} on {sign.host} gives no sign of life: it was last seen at {_place(sign)}; its process "
        f"{sign.pid} is stopped (SIGSTOP), dead, or its machine is gone"
        for sign in gone
    ]
    if never:
        faults.append(f"{ranks_text(never)} never gave a sign of life")
    faults += _places(behind)
    waiting = _places([sign for sign in living if sign not in behind])
    first = f"error: nothing has happened for {duration(limit)} (watchdog.minutes): " + "; ".join(faults)
    return "\n  ".join([first, *waiting])


def _place(sign: Sign) -> str:
    return f'"{sign.doing}" after step {sign.step}'


def _places(signs: list[Sign]) -> list[str]:
    """Return one sentence for all ranks that are at the same place."""
    groups: dict[tuple[str, str], list[Sign]] = {}
    for sign in signs:
        groups.setdefault((_place(sign), sign.line), []).append(sign)
    return [
        f"{ranks_text([sign.rank for sign in group])}{f' on {group[0].host}' if len(group) == 1 else ''} "
        f"{'is' if len(group) == 1 else 'are'} at {place}, for {duration(group[0].since)}, in {line}"
        for (place, line), group in groups.items()
    ]


def ranks_text(numbers: list[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2-7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
