"""Apply the settings of the watchdog: its limit, how long a collective may wait, what PyTorch itself reports."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from src.engine.errors import UserError

COLLECTIVE_MINUTES = 30.0  # Lightning's default
QUIET = ("", "VERSION", "WARN")  # of NCCL_DEBUG; a cluster's file sets WARN, which INFO contains


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
    """Set how long a collective waits, before the process group starts, in minutes: None leaves what the strategy has.

    Return the watchdog's limit in seconds, None without one, and notes on settings without an effect.
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
    limit = collective * 2 / 3 if settings.minutes is None else settings.minutes
    if distributed and limit >= collective:
        notes.append(
            f"watchdog.minutes {limit:g} comes too late where a rank skips a collective: the others end after "
            f"{collective:g} minutes (collective_timeout_minutes), and nothing says which rank it was"
        )
    return 60 * limit, notes


def debug_collectives() -> None:
    """Have NCCL and PyTorch report at INFO, here and in the processes started here; a value that says more stays.

    Call it before there is a process group. PyTorch's own C++ messages also need TORCH_CPP_LOG_LEVEL=INFO, which it
    reads when it is imported: set that by hand. DETAIL is not set: it waits for all ranks in every collective, and
    torch 2.13 crashes with it.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() in QUIET:
        os.environ["NCCL_DEBUG"] = "INFO"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    torch.distributed.set_debug_level_from_env()
