"""Each way out of the command has an exit code of its own, at whatever moment it is taken."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from src import exit_codes
from src.cli import main
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
    reason = "stopped by SIGTERM" if way == "SIGTERM" else "interrupted"
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
    once = ["--model", "tests.crash.KilledAtStep", "--model.markers", json.dumps({"3": str(tmp_path / "killed")})]
    data = ["--data", "tests.small_task.SmallData", "--global_batch_size", "8", "--checkpoint.monitor", "val/accuracy"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=1", "-m", "--")
    done = train(
        tmp_path / "runs", "fit", *CPU, *once, *data, *STEPS, "--checkpoint.every_n_steps", "1", launcher=launcher
    )
    run = only_run(tmp_path / "runs")
    assert f"{run} (continues from step " in done.stdout
    assert (run / "DONE").read_text() == "4\n"
