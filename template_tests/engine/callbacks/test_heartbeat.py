"""The sign of life of a run."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.engine.watchdog import callback as watchdog
from src.engine.watchdog.callback import Watchdog
from src.engine.watchdog.heartbeat import Heartbeat, Sign, rank_rows
from tests.tiny import Line, loaders, quiet_trainer


def test_it_beats_while_a_step_takes_long_and_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written anew within one step, with who and where; gone when training has ended, in order or by an error."""
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "PULSE", 0.01)
    path, signs = tmp_path / "heartbeat", []

    class Slow(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            until, began = time.monotonic() + 30, time.time()
            while (sign := json.loads(path.read_text()))["written"] < began + 0.05:
                assert time.monotonic() < until
            signs.append(sign)
            if batch_idx == 1:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(callbacks=[Watchdog(None, tmp_path)], max_steps=4)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Slow(), *loaders(trainer, torch.ones(8, 1), 2))
    assert not path.exists()
    assert len(signs) == 2
    assert signs[1]["pid"] == os.getpid()
    (row,) = signs[1]["ranks"]
    assert (row["rank"], row["step"], row["doing"]) == (0, 1, "training_step")
    trainer = quiet_trainer(callbacks=[Watchdog(None, tmp_path)], max_steps=1)
    trainer.fit(Line(), *loaders(trainer, torch.ones(8, 1), 2))
    assert not path.exists()


def sign(rank: int, clock: float = 0.0) -> Sign:
    return Sign(rank, "node1", 1, clock, step=7, doing="backward", since=3.0, events=20, line="x.py:1 (f)")


def test_a_sign_that_stays_the_same_is_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives new signs, rank 1 does not; signs that cannot be read leave the rows older."""
    now = [100.0]
    monkeypatch.setattr("src.engine.watchdog.heartbeat.time.monotonic", lambda: now[0])
    heartbeat = Heartbeat(tmp_path)
    for clock in range(5):
        heartbeat.write(7, [sign(0, clock), sign(1)])
        now[0] += 10
    heartbeat.write(7, [])
    content = json.loads((tmp_path / "heartbeat").read_text())
    rows = rank_rows(content, now=None)
    assert [(row["rank"], row["step"], row["age"], row["stale"]) for row in rows] == [
        (0, 7, 10, False),
        (1, 7, 50, True),
    ]


def test_a_link_where_the_temporary_file_goes_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write to the folder cannot have a file of the user's overwritten."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".heartbeat.tmp").symlink_to(tmp_path / "victim")
    Heartbeat(tmp_path).write(7, [])
    assert (tmp_path / "victim").read_text() == "precious"
    assert json.loads((tmp_path / "heartbeat").read_text())["step"] == 7
