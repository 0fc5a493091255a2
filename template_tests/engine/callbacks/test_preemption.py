"""Where a signal would come too late to save, training says so at its start."""

import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from src.engine import signals
from src.engine.callbacks import preemption
from src.engine.callbacks.preemption import Preemption
from src.engine.errors import UserError
from tests.tiny import Line, loaders, quiet_trainer


@pytest.mark.parametrize(
    ("step", "save", "lead", "said"),
    [
        (70.0, None, "60", "a step takes 70.0 s, more than the 60 s"),
        (40.0, 30.0, "60", "a step takes 40.0 s and a save 30.0 s, more than the 60 s"),
        (40.0, None, "60", None),
        (20.0, 30.0, "60", None),
        (20.0, 15.0, None, "a step takes 20.0 s and a save 15.0 s, more than the 30 s"),
    ],
)
def test_a_step_and_a_save_are_measured_against_the_lead(
    step: float,
    save: float | None,
    lead: str | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, by the time that the batch script names, else by what is usual; validation and compilation do not count."""
    if lead:
        monkeypatch.setenv("STOP_LEAD_SECONDS", lead)
    now = [0.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])

    class Ticking(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            now[0] += step + 500 * (self.global_step == 0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            now[0] += 100

    call = Preemption(lambda: save, saves=True)
    trainer = quiet_trainer(callbacks=[call], max_steps=12, val_check_interval=1)
    trainer.fit(Ticking(), *loaders(trainer, torch.ones(24, 1), 2))
    out = capsys.readouterr().out
    assert out.count("warning: ") == (said is not None)
    assert said is None or said in out


def test_the_handler_stays_ours() -> None:
    """A module that sets its own loses it; Lightning, whose handler would talk to other ranks, sets none at all."""
    seen = []

    class Looking(Line):
        def on_train_start(self) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def train_dataloader(self) -> Any:  # when Lightning has set up its signals, and before training starts
            seen.append(signal.getsignal(signal.SIGTERM))
            return loaders(self.trainer, torch.ones(8, 1), 2)[0]

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen.append(signal.getsignal(signal.SIGTERM))
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(callbacks=[Preemption(saves=True)], max_steps=1, limit_val_batches=0)
    trainer.fit(Looking())
    assert seen == [signals._note] * 2
    assert signal.getsignal(signal.SIGTERM) is signals._note


def test_a_lead_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, before anything starts."""
    monkeypatch.setenv("STOP_LEAD_SECONDS", "2m")
    with pytest.raises(UserError, match="STOP_LEAD_SECONDS=2m: expected a number of seconds"):
        Preemption(saves=True)
