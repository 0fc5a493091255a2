"""The command as users type it, on one process: what a run leaves, that it repeats itself, what settings do."""

import os
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.cli import ProjectCLI, main
from tests.commands import BORING, CPU, SMALL, TASK, fit, losses, only_run, read_json, rows, weights
from tests.small_task import SmallModule

pytestmark = pytest.mark.usefixtures("run_root")


def test_a_run_leaves_what_its_directory_promises(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, manifest, metrics, TensorBoard, checkpoints, summary and DONE, in a folder named by model and date."""
    assert main(["fit", *CPU, *SMALL]) == 0
    run = only_run(run_root)
    assert run.name.startswith("SmallModule-2")
    names = {path.name for path in run.iterdir()}
    promised = {"config.yaml", "manifest.json", "metrics.csv", "tensorboard", "checkpoints", "summary.json", "DONE"}
    assert promised <= names
    manifest = read_json(run / "manifest.json")
    assert manifest["task"] == "SmallModule"
    assert manifest["global_batch_size"] == 8
    assert manifest["precision"] == "32-true"
    assert manifest["world_size"] == 1
    assert manifest["packages"]["lightning"]
    assert "python -m src.cli fit" in manifest["command"]
    assert [int(row["step"]) for row in rows(run)] == [0, 1, 2, 3]
    output = capsys.readouterr().out
    for text in ("global batch  8 = 8 micro × 1 accumulation × 1 device", "32-true (CPU)", "world size 1", str(run)):
        assert text in output
    for text in ("GPU available", "litlogger", "Tip", "num_workers"):
        assert text not in output


def test_metrics_of_one_step_share_a_row_and_reach_tensorboard(run_root: Path) -> None:
    """Loss, speed, learning rate and validation of a step stand in one row, and TensorBoard has the same values."""
    run = fit(run_root, "rows", *SMALL)
    row = rows(run)[1]
    for key in ("train/loss", "perf/samples_per_sec", "perf/tokens_per_sec", "perf/data_wait", "lr", "val/accuracy"):
        assert float(row[key]) >= 0, key
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(losses(run))
    assert "global_batch_size: 8" in (run / "tensorboard" / "hparams.yaml").read_text()


def test_the_summary_tells_how_it_ended_and_how_to_go_on(run_root: Path) -> None:
    """After success: reason, last step, best checkpoint by the configured metric, speed, memory and the command."""
    run = fit(run_root, "done", *SMALL)
    summary = read_json(run / "summary.json")
    assert summary["exit_reason"] == "finished"
    assert summary["last_step"] == 4
    assert summary["best"]["metric"] == "val/accuracy"
    assert Path(summary["best"]["checkpoint"]).exists()
    assert summary["samples_per_sec"] > 0
    assert summary["peak_memory_gib"] > 0
    assert summary["wall_time_seconds"] > 0
    assert "--run done" in summary["continue_command"]


def test_training_learns(run_root: Path) -> None:
    """Forty steps take the small task from one letter guessed in eight to the nine in ten that can be known."""
    run = fit(run_root, "learns", *TASK, "--trainer.max_steps", "40", "--trainer.val_check_interval", "20")
    assert read_json(run / "summary.json")["best"]["value"] > 0.88


def test_one_seed_gives_the_same_weights_twice_and_another_seed_others(run_root: Path) -> None:
    """Bit-identical on the CPU; also with `trainer.deterministic`, which sets what cuBLAS needs."""
    runs = [fit(run_root, name, *SMALL, "--model.dropout", "0.1") for name in ("a", "b")]
    other = fit(run_root, "c", *SMALL, "--model.dropout", "0.1", "--seed_everything", "1")
    first, second, third = map(weights, [*runs, other])
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], third[key]) for key in first)


def test_deterministic_sets_what_cublas_needs(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.deterministic exports CUBLAS_WORKSPACE_CONFIG before the first kernel."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fit(run_root, "exact", *SMALL, "--trainer.deterministic", "true")
    torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_accumulation_is_the_same_mathematics(run_root: Path) -> None:
    """Micro batches of 2 accumulated to 8 give the curve and the weights of one batch of 8."""
    whole = fit(run_root, "whole", *SMALL)
    parts = fit(run_root, "parts", *SMALL, "--micro_batch_size", "2")
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    for key, value in weights(whole).items():
        assert torch.allclose(value, weights(parts)[key], atol=1e-4), key


def test_bf16_autocast_has_no_loss_scaler(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An explicit bf16-mixed is taken as asked and trains without a scaler in its checkpoint."""
    run = fit(run_root, "bf16", *SMALL, "--trainer.precision", "bf16-mixed")
    (path,) = run.glob("checkpoints/step=*.ckpt")
    assert "MixedPrecision" not in torch.load(path, weights_only=True)
    assert "bf16-mixed (as asked)" in capsys.readouterr().out


def test_one_device_makes_no_process_group(run_root: Path) -> None:
    """One device trains without torch.distributed."""
    fit(run_root, "alone", *SMALL)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--trainer.accumulate_grad_batches", "2"], "8 = 4 micro × 2 accumulation × 1 device"),
        (["--global_batch_size", "96", "--micro_batch_size", "24"], "96 = 24 micro × 4 accumulation × 1 device"),
        (["--data.batch_size", "2"], "8 = 2 micro × 4 accumulation × 1 device"),
    ],
)
def test_batch_overrides_take_effect_and_are_printed(
    arguments: list[str], printed: str, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accumulation, micro batch and the data module's own batch size are one plan, printed at start."""
    fit(run_root, "batch", *SMALL, "--trainer.max_steps", "1", *arguments)
    assert printed in capsys.readouterr().out


def test_overrides_reach_the_configuration(tmp_path: Path) -> None:
    """Epochs and learning rate given on the command line are what the run uses, whatever a file says."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model:\n  class_path: tests.small_task.SmallModule\n  init_args:\n    lr: 4.0e-3\n    depth: 3\n"
        "trainer:\n  max_epochs: 2\n"
    )
    cli = ProjectCLI(["fit", *CPU, "--config", str(path), "--trainer.max_epochs", "32", "--model.lr", "5e-4"])
    assert cli.trainer.max_epochs == 32
    assert isinstance(cli.model, SmallModule)
    assert cli.model.lr == 5e-4
    assert len(cli.model.model.blocks) == 3


def test_the_debug_preset_is_short(run_root: Path) -> None:
    """Fifty steps with an evaluation every ten, two samples per device."""
    run = fit(run_root, "debug", *TASK, "--config", "configs/presets/debug.yaml")
    table = rows(run)
    assert len(table) == 50
    assert [int(row["step"]) for row in table if row["val/accuracy"]] == [9, 19, 29, 39, 49]
    assert read_json(run / "manifest.json")["micro_batch_size"] == 2


@pytest.mark.parametrize(
    ("arguments", "epochs"),
    [([], 1), (["--trainer.max_steps", "5"], -1), (["--trainer.max_epochs", "3"], 3)],
)
def test_one_epoch_unless_told_otherwise(arguments: list[str], epochs: int) -> None:
    """A module without limits trains one epoch; steps alone lift the epochs, as in Lightning."""
    assert ProjectCLI(["fit", *CPU, *BORING, *arguments]).trainer.max_epochs == epochs


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--trainer.limit_val_batches", "1.5"], "limit_val_batches"),
        (["--trainer.max_steps", "-5"], "max_steps"),
        (["--trainer.val_check_interval", "0"], "val_check_interval 0: give a number above 0"),
        (["--trainer.check_val_every_n_epoch", "0"], "check_val_every_n_epoch 0: give"),
        (["--model.depth", "0"], "depth is 0"),
        (["--data.num_workers", "-1"], "num_workers is -1"),
        (["--checkpoint.keep", "0"], "checkpoint.keep is 0"),
        (["--run", "x" * 300], "no folder name"),
        (["--ckpt_path", "nope.ckpt"], "no such file"),
    ],
)
def test_a_wrong_value_is_one_line(
    arguments: list[str], part: str, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that parse and cannot be are refused like typos: one line, exit code 2."""
    assert main(["fit", *CPU, *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert part in error.strip().splitlines()[-1]
