import io
import sys
from types import SimpleNamespace

import pytest
import torch

from src.engine.callbacks import progress, throughput
from src.engine.callbacks.global_batch import GlobalBatch
from src.engine.callbacks.progress import Progress
from src.engine.callbacks.throughput import Throughput
from tests.tiny import Line, loaders, quiet_trainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def fit(monkeypatch):
    """Trains 6 steps on 12 samples."""
    monkeypatch.setattr(throughput, "DATA_BOUND", 1)  # no note on waiting between the lines, on whatever machine

    def run(module=None, size=12, **settings):
        loss, speed = GlobalBatch(), Throughput()
        trainer = quiet_trainer(
            logger=False, callbacks=[loss, speed, Progress(loss, speed)], num_sanity_val_steps=1, **settings
        )
        trainer.fit(module or Line(), *loaders(trainer, torch.ones(size, 1), 2))
        return trainer

    return run


def test_a_log_file_gets_lines(fit, monkeypatch, capsys):
    """Where stderr is no terminal, each log interval is a line with step, total, loss, speed and the time left."""
    monkeypatch.setattr(progress, "LINE_EVERY", -1)
    fit(max_epochs=1, log_every_n_steps=2, limit_val_batches=0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/6", "step 4/6", "step 6/6"]
    assert all("loss " in line and " samples/s" in line and line.endswith(" left") for line in lines)
    assert lines[0].split("loss ")[1].startswith("0.82")
    assert lines[2].endswith("0:00:00 left")


def test_a_log_file_gets_a_line_only_now_and_then(fit, monkeypatch, capsys):
    """Within the same seconds there is one line, however many steps there were."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 100.0))
    fit(max_epochs=1, log_every_n_steps=1, limit_val_batches=0)
    assert capsys.readouterr().out.count("step ") == 1


def test_no_line_comes_before_the_first_step(fit, monkeypatch, capsys):
    """With accumulation, the passes before the first optimizer step print no line of a step 0."""
    monkeypatch.setattr(progress, "LINE_EVERY", -1)
    fit(max_epochs=1, log_every_n_steps=1, limit_val_batches=0, accumulate_grad_batches=2)
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ")[0] for line in lines} == {"step 1/3", "step 2/3", "step 3/3"}


def test_each_validation_is_a_line(fit, capsys):
    """Validation results are always printed, with the step; the check before training is not."""
    fit(max_epochs=1, val_check_interval=3, log_every_n_steps=50)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/6", "step 6/6"]
    assert all("val/loss 0." in line for line in lines)


def test_training_without_an_end_promises_none(fit, monkeypatch, capsys):
    """Where no number of steps is known there is a line without the time left."""

    class Stopping(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = self.global_step >= 2

    monkeypatch.setattr(progress, "LINE_EVERY", -1)
    fit(Stopping(), max_epochs=-1, limit_val_batches=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1  loss 1")
    assert "left" not in "".join(lines)


def test_a_terminal_gets_a_bar(fit, monkeypatch, capsys):
    """At a terminal there is a bar on stderr that ends full, with loss and validation, and no line on stdout."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "LINE_EVERY", -1)
    trainer = fit(max_epochs=1, val_check_interval=3)
    shown = terminal.getvalue()
    assert "6/6" in shown
    assert "100%" in shown
    last = shown.split("\r")[-1]
    assert "loss " in last
    assert f"val/loss {float(trainer.callback_metrics['val/loss']):.4g}" in last  # of after the last step
    assert "step " not in capsys.readouterr().out


def test_a_bar_is_closed_when_training_breaks(fit, monkeypatch):
    """After a crash the bar has ended its line, so that the error does not stand behind it."""

    class Breaking(Line):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(ZeroDivisionError):
        fit(Breaking(), max_epochs=1, limit_val_batches=0)
    assert "train" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
