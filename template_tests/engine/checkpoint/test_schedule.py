"""When a state is saved, and when it is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.engine.checkpoint import schedule
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.errors import UserError
from tests.tiny import Line, loaders, quiet_trainer

DATA = torch.linspace(-1, 1, 24)[:, None]  # in batches of 2 an epoch is 12 steps


class Clock:
    """Seconds that pass only when a step is made; a wall clock that runs backwards is nobody's business."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_step: float) -> None:
        self.now, self.per_step = 0.0, per_step
        monkeypatch.setattr(schedule.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(schedule.time, "time", lambda: -self.now)


class Ticking(Line):
    """Each step takes the clock's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.clock.now += self.clock.per_step
        return super().training_step(batch, batch_idx)


def saved(folder: Path, module: Line | None = None, *, steps: int = 30, **settings: Any) -> list[int]:
    """The steps that a training of so many steps has saved; all of them stay unless `keep` is given."""
    saver = SaveNewest(folder, CheckpointSettings(**{"every_n_steps": 10_000, "keep": 99} | settings))
    trainer = quiet_trainer(callbacks=[saver], max_steps=steps)
    trainer.fit(module or Line(), *loaders(trainer, DATA, 2))
    return sorted(int(path.stem.removeprefix("step=")) for path in folder.glob("step=*.ckpt"))


def test_minutes_come_first_where_steps_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 12 s per step and a save per minute, each fifth step is saved, and the end."""
    clock = Clock(monkeypatch, 12.0)
    assert saved(tmp_path, Ticking(clock), steps=17, every_n_minutes=1) == [5, 10, 15, 17]


def test_the_time_is_asked_for_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0.1 s per step the save of each 20 s comes at most as late as the 2 s between two questions."""
    clock = Clock(monkeypatch, 0.1)
    steps = saved(tmp_path, Ticking(clock), steps=700, every_n_minutes=20 / 60)
    gaps = [later - earlier for earlier, later in zip([0, *steps], steps[:-1], strict=False)]
    assert len(gaps) == 3
    assert all(200 <= gap <= 221 for gap in gaps)


def test_steps_come_first_where_steps_are_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save by steps starts the minutes anew."""
    clock = Clock(monkeypatch, 12.0)
    assert saved(tmp_path, Ticking(clock), steps=17, every_n_steps=4, every_n_minutes=1) == [4, 8, 12, 16, 17]


def test_an_epoch_is_saved_at_its_end(tmp_path: Path) -> None:
    """If asked for; else it is not."""
    assert saved(tmp_path / "asked", every_epoch=True) == [12, 24, 30]
    assert saved(tmp_path / "not", every_epoch=False) == [30]


def test_every_nth_stays_for_good(tmp_path: Path) -> None:
    """Of a long run, each tenth step stays beside the last two."""
    assert saved(tmp_path, every_n_steps=4, keep=2, keep_every_n_steps=10) == [10, 20, 28, 30]


@pytest.mark.parametrize(("name", "value"), [("every_n_minutes", 0), ("keep_every_n_steps", 0)])
def test_nothing_is_no_interval(name: str, value: float) -> None:
    """It is refused by name."""
    with pytest.raises(UserError, match=f"checkpoint.{name} is {value}; it must be"):
        CheckpointSettings(**{name: value})  # type: ignore[arg-type]


def test_the_first_save_says_what_it_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once: its time, and how long training waited."""
    saved(tmp_path, every_n_steps=10)
    said = capsys.readouterr().out
    assert said.count("the first save (step 10,") == 1
    assert "s, training waited " in said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_printed_bound_is_what_a_kill_can_lose(asynchronous: bool) -> None:
    """Steps that are trained while a state is being written are lost with it; in front of training there are none."""
    said = str(CheckpointSettings(every_n_steps=40, asynchronous=asynchronous))
    assert said.startswith("every 40 steps or 10 min, whichever comes first (the most that a kill can lose")
    assert ("what is trained while a state is being written" in said) == asynchronous
