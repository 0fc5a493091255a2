"""Settings of the watchdog, and how long a collective may wait."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from src.engine.errors import UserError

COLLECTIVE_MINUTES = 30.0  # Lightning's default


@dataclass
class WatchdogSettings:
    """When a run counts as hung.

    Args:
        enabled: whether a hang is ended at all
        minutes: without any event (a batch fetched, a pass, a step, a batch of a validation, a save that begins) after
            which every rank is ended; null: two thirds of the collective timeout, so that it comes first and all know
            why: 20 minutes

    """

    enabled: bool = True
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise UserError(f"watchdog.minutes is {self.minutes}; it must be above 0")


def fit_timeouts(strategy: Any, minutes: float | None, settings: WatchdogSettings) -> tuple[float | None, list[str]]:
    """Set how long collectives wait; return the watchdog's limit in seconds, and notes on settings without an effect.

    Args:
        strategy: of the trainer, before its process group starts
        minutes: for a collective; None: as the strategy has it, else 30
        settings: of the watchdog

    """
    notes, distributed = [], hasattr(strategy, "_timeout")
    if minutes is not None and distributed:
        strategy._timeout = timedelta(minutes=minutes)
    elif minutes is not None:
        notes.append("collective_timeout_minutes has no effect: one process waits for no other")
    collective = strategy._timeout.total_seconds() / 60 if distributed and strategy._timeout else COLLECTIVE_MINUTES
    if not settings.enabled:
        if settings.minutes is not None:
            notes.append("watchdog.minutes has no effect with watchdog.enabled false")
        return None, notes
    own = collective * 2 / 3 if settings.minutes is None else settings.minutes
    if distributed and own >= collective:
        notes.append(
            f"watchdog.minutes {own:g} comes too late where a rank skips a collective: the others end after "
            f"{collective:g} minutes (collective_timeout_minutes), and nothing says which rank it was"
        )
    return 60 * own, notes
