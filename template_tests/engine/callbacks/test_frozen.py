from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from src.checkpoint.compare import differences, outcome
from src.cli import main
from src.engine.callbacks.frozen import Frozen, frozen
from tests.commands import CPU, SMALL, TWO, cut_back, train
from tests.tiny import Line, loader, quiet_trainer

TUNED = [
    *SMALL,
    *(
        "--model",
        "template_tests.finetuned.Tuned",
        "--trainer.callbacks+",
        "template_tests.finetuned.Unfreezing",
        "--data.size",
        "40",
    ),
    *("--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99", "--trainer.max_steps", "12", "--run", "tuned"),
]


@pytest.mark.parametrize("step", [3, 7])
def test_fine_tuning_goes_on_where_it_was(
    step: int, run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the epoch that unfreezes a part and behind it: weights, statistics and rows end bit for bit the same."""
    assert main(["fit", *CPU, *TUNED]) == 0
    copy = cut_back(run_root / "tuned", step, tmp_path / "again")
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "again"))
    assert main(["fit", *CPU, *TUNED]) == 0
    assert list(differences(outcome(copy), outcome(run_root / "tuned"))) == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp_full_shard"])
def test_fine_tuning_on_two_processes_goes_on_where_it_was(strategy: str, tmp_path: Path) -> None:
    """Where each rank must learn of it."""
    command = ["fit", *TWO, *TUNED, "--trainer.strategy", strategy]
    train(tmp_path / "whole", *command)
    copy = cut_back(tmp_path / "whole/tuned", 7, tmp_path / "again")
    train(tmp_path / "again", *command)
    assert list(differences(outcome(copy), outcome(tmp_path / "whole/tuned"))) == []


class Two(Line):
    """A line with a bias that may be frozen from the start and is trained from batch `thaws_at` on."""

    def __init__(self, is_frozen: bool, thaws_at: int = -1) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1), requires_grad=not is_frozen)
        self.thaws_at = thaws_at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.thaws_at:
            self.bias.requires_grad_(True)


def trained(module: Two, state: dict[str, Any] | None = None) -> tuple[list[str], dict[str, Any]]:
    """What is frozen after three steps that go on from a callback's `state`, and its state then."""
    callback = Frozen()
    if state:
        callback.load_state_dict(state)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=1)
    trainer.fit(module, loader(trainer, torch.ones(3, 1), 1, train=True))
    return frozen(module), callback.state_dict()


def test_what_the_user_has_changed_since_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that began with a frozen part and goes on with a module that freezes nothing: said, and not undone."""
    _, state = trained(Two(is_frozen=True))
    assert state == {"first": ["bias"], "now": ["bias"]}
    assert trained(Two(is_frozen=True), state)[0] == ["bias"]
    assert capsys.readouterr().out == ""
    assert trained(Two(is_frozen=False), state)[0] == []
    assert "note: this start freezes other parameters" in capsys.readouterr().out


def test_a_module_that_unfreezes_by_itself_goes_on_unfrozen() -> None:
    """Over two restarts, of which neither does it again."""
    _, state = trained(Two(is_frozen=True, thaws_at=1))
    for _ in range(2):
        now, state = trained(Two(is_frozen=True), state)
        assert now == []
        assert state == {"first": ["bias"], "now": []}


def test_a_run_that_freezes_nothing_keeps_nothing() -> None:
    """Its checkpoints have no entry for it."""
    assert trained(Two(is_frozen=False))[1] == {}
