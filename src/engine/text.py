"""Word numbers, tables and likely misspellings for people."""

import difflib
import time
from collections.abc import Iterable, Sequence


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows as lines with aligned columns; the columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: int | None) -> str:
    """Return a count as text, '-' if it is not known."""
    return "-" if value is None else str(value)


def size(count: float) -> str:
    """Return bytes as text, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age(moment: float | None) -> str:
    """Return how long ago a moment was, '-' if there is none."""
    return "-" if moment is None else duration(time.time() - moment)


def duration(seconds: float) -> str:
    """Return seconds as text; a negative number, of a moment in the future, counts as 0."""
    seconds = max(0, int(seconds))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def shorten(text: str, limit: int) -> str:
    """Return text as one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean …?)`; a key under the wrong parent is found by its last part."""
    candidates = list(candidates)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if not near:
        last = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(candidates)}
        near = [last[key] for key in difflib.get_close_matches(name.rsplit(".", 1)[-1], last, n=1, cutoff=0.75)]
    return f" (did you mean {near[0]}?)" if near else ""
