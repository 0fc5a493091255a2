"""The sign of life of a run."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.callbacks import heartbeat
from src.callbacks.heartbeat import Heartbeat
from tests.tiny import Line, loaders, quiet_trainer


def test_it_beats_while_a_step_takes_long_and_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written anew within one step, with who and where; gone when training has ended, in order or by an error."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.01)
    path, signs = tmp_path / "heartbeat", []

    class Slow(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            signs.append(json.loads(path.read_text()))
            until = time.monotonic() + 30
            while json.loads(path.read_text())["written"] == signs[-1]["written"]:
                assert time.monotonic() < until
            if batch_idx == 1:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(callbacks=[Heartbeat(tmp_path)], max_steps=4)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Slow(), *loaders(trainer, torch.ones(8, 1), 2))
    assert not path.exists()
    assert len(signs) == 2
    assert signs[1]["pid"] == os.getpid()
    trainer = quiet_trainer(callbacks=[Heartbeat(tmp_path)], max_steps=1)
    trainer.fit(Line(), *loaders(trainer, torch.ones(8, 1), 2))
    assert not path.exists()
