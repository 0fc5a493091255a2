"""Each way out of the command has an exit code of its own, at whatever moment it is taken."""

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from src.cli import main
from src.engine import exit_codes, signals
from tests.commands import CPU, SMALL, STEPS, fit, only_run, read_json, train
from tests.small_task import SmallModule

WAYS: dict[str, Callable[[], Any]] = {
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
    "sys.exit(5)": lambda: sys.exit(5),
    "sys.exit(text)": lambda: sys.exit("the licence server is gone"),
}


class Leaves(SmallModule):
    """SmallModule that leaves in one of `WAYS` in the step that is named."""

    def __init__(self, way: str = "", step: str = "", **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.way, self.step = way, step

    def _leave(self, step: str) -> None:
        if step == self.step:
            WAYS[self.way]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._leave("fit")
        return super().training_step(batch, batch_idx)

    def evaluate(self, batch: Tensor, split: str) -> None:
        self._leave({"val": "validate"}.get(split, split))
        super().evaluate(batch, split)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._leave("predict")
        return super().predict_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("way", "code"),
    [("SIGTERM", exit_codes.STOPPED), ("Ctrl-C", 130), ("sys.exit(5)", 5), ("sys.exit(text)", 1)],
    ids=list(WAYS),
)
@pytest.mark.parametrize("step", ["fit", "validate"])
def test_training_is_left(step: str, way: str, code: int, run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a step, or in the look at the validation before the first one: the code, a summary and how to go on."""
    leaves = ["--model", f"{__name__}.Leaves", "--model.way", way, "--model.step", step]
    sanity = ["--trainer.num_sanity_val_steps", "1", "--run", "left"]
    assert main(["fit", *CPU, *SMALL, *leaves, *sanity]) == code
    said = "".join(capsys.readouterr())
    assert "continue with: python -m src.cli fit" in said
    assert ("the licence server is gone" in said) == (way == "sys.exit(text)")
    reason = "interrupted"
    if way == "SIGTERM" or (way, step) == ("Ctrl-C", "fit"):  # before training nothing is there to be saved
        reason = f"stopped by {'SIGTERM' if way == 'SIGTERM' else 'SIGINT'}"
    assert read_json(run_root / "left/summary.json")["exit_reason"] == reason


@pytest.mark.parametrize("nothing", ["--trainer.enable_checkpointing false", "--trainer.fast_dev_run true"])
def test_a_training_that_saves_nothing_is_left_at_sigterm(nothing: str, run_root: Path) -> None:
    """At once, with 143: there is nothing to wait for."""
    leaves = ["--model", f"{__name__}.Leaves", "--model.way", "SIGTERM", "--model.step", "fit"]
    assert main(["fit", *CPU, *SMALL, *leaves, *nothing.split(), "--run", "left"]) == 143
    assert not (run_root / "left/STOPPED").exists()


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_evaluation_is_left_at_sigterm(command: str, run_root: Path) -> None:
    """It ends with 143 and not with the 0 of an evaluation that is done."""
    model = ["--model", f"{__name__}.Leaves"]
    fit(run_root, "mine", *SMALL, *model)
    checkpoint = sorted((run_root / "mine/checkpoints").glob("step=*.ckpt"))[-1]
    leaves = [*model, "--model.way", "SIGTERM", "--model.step", command, "--ckpt_path", str(checkpoint)]
    assert main([command, *CPU, *SMALL, *leaves]) == 143
    assert not (run_root / f"mine/{command}.json").exists()


def test_torchrun_starts_the_run_again_that_it_has_lost(tmp_path: Path) -> None:
    """Without --run, --max-restarts continues the run of the process that was killed, from its newest checkpoint."""
    once = [
        "--model",
        "template_tests.crash.KilledAtStep",
        "--model.markers",
        json.dumps({"3": str(tmp_path / "killed")}),
    ]
    data = ["--data", "tests.small_task.SmallData", "--global_batch_size", "8", "--checkpoint.monitor", "val/accuracy"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=1", "-m", "--")
    done = train(
        tmp_path / "runs", "fit", *CPU, *once, *data, *STEPS, "--checkpoint.every_n_steps", "1", launcher=launcher
    )
    run = only_run(tmp_path / "runs")
    assert f"{run} (continues from step " in done.stdout
    assert (run / "DONE").read_text() == "4\n"


def test_the_first_ctrl_c_is_noted_while_training_and_the_second_leaves(capfd: pytest.CaptureFixture[str]) -> None:
    """Before training one is enough: there is nothing to save."""
    signals.listen()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signals.listen(saves=True)
    signal.raise_signal(signal.SIGINT)
    assert signals.pending() == signal.SIGINT
    assert "saving after this step; once more leaves at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_before_training_is_no_traceback(monkeypatch: pytest.MonkeyPatch, run_root: Path) -> None:
    """While a configured class is built, `main` returns 130."""
    monkeypatch.setattr(Leaves, "__init__", lambda self, **_: signal.raise_signal(signal.SIGINT))
    assert main(["fit", *CPU, *SMALL, "--model", f"{__name__}.Leaves"]) == exit_codes.INTERRUPTED
    assert not run_root.exists()


def test_a_script_has_its_own_handlers_back(run_root: Path) -> None:
    """After `main([...])`, however it ended."""
    own = {number: signal.signal(number, lambda *_: None) for number in signals.STOPS}
    mine = {number: signal.getsignal(number) for number in own}
    try:
        fit(run_root, "mine", *SMALL)
        assert main(["fit", "--no_such_option"]) == 2
        assert {number: signal.getsignal(number) for number in own} == mine
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)


def test_the_last_line_says_what_came_of_it(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The deciding metric, last and best, and EarlyStopping where that ended training; a trial run says what it did."""
    stop = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/loss"]
    stop += ["--trainer.callbacks.patience", "1", "--trainer.callbacks.min_delta", "99"]
    fit(run_root, "early", *SMALL, *stop, "--trainer.max_steps", "40")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"run {run_root}")]
    assert "ended by EarlyStopping: Monitored metric val/loss did not improve in the last 1 records" in line
    assert re.search(r"; val/accuracy 0\.\d+ \(best 0\.\d+ at step \d+\)", line)
    assert main(["fit", *CPU, *SMALL, "--trainer.fast_dev_run", "2"]) == 0
    assert "fast_dev_run: 2 batch(es)" in capsys.readouterr().out


def test_a_profiler_prints_its_report(run_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of where the time went, as in Lightning by itself."""
    with caplog.at_level(logging.NOTSET, "lightning.pytorch.profilers.profiler"):
        fit(run_root, "profiled", *SMALL, "--trainer.profiler", "simple")
    assert "run_training_batch" in caplog.text
