"""The vision task through the command, from training to predictions."""

from pathlib import Path

import torch

from src.cli import main
from tests.commands import CPU, only_run, read_json

VISION = ["--config", "configs/tasks/vision.yaml", "--model.width", "8", "--model.stages", "1"]


def test_vision_trains_and_test_takes_its_best_checkpoint(run_root: Path) -> None:
    """`test` with the same configs finds the run, which is named after the task, and its state of the best accuracy."""
    assert main(["fit", *VISION, *CPU, "--trainer.max_epochs", "3"]) == 0
    run = only_run(run_root)
    assert run.name.startswith("vision-2")
    assert read_json(run / "manifest.json")["task"] == "vision"
    best = read_json(run / "summary.json")["best"]
    assert best["metric"] == "val/accuracy"
    assert main(["test", *VISION, *CPU]) == 0
    result = read_json(run / "test.json")
    assert result["checkpoint"] == best["checkpoint"]
    assert 0 < result["metrics"]["test/accuracy"] <= 1
    assert main(["predict", *VISION, *CPU]) == 0
    assert torch.cat(torch.load(run / "predictions.pt", weights_only=True)).shape == (270,)
    assert main(["validate", *VISION, *CPU, "--run", run.name]) == 0
    assert read_json(run / "validate.json")["metrics"]["val/accuracy"] == best["value"]
