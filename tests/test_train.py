"""The command as users type it, on one process: what a run leaves, how it goes on, that it repeats itself."""

import csv
import fcntl
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.cli import ProjectCLI, main
from src.command_line import CONFIGS
from src.tasks.language import LanguageModule
from tests.commands import CPU, SMALL, losses, only_run, read_json, rows

DEMOS = "lightning.pytorch.demos"
BORING = ["--model", f"{DEMOS}.boring_classes.BoringModel"]
VISION = ["--config", "configs/tasks/vision.yaml", "--model.width", "8", "--model.stages", "1"]

Fit = Callable[..., Path]


@pytest.fixture(autouse=True)
def _in_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path))


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint's weights."""
    newest = sorted(run.glob("checkpoints/step=*.ckpt"))[-1]
    return torch.load(newest, weights_only=True)["state_dict"]


def fit(run_root: Path, name: str, *arguments: str) -> Path:
    """Train in this process; returns the run directory."""
    assert main(["fit", *CPU, *arguments, "--run", name]) == 0
    return run_root / name


def test_a_run_leaves_what_its_directory_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, manifest, metrics, TensorBoard, checkpoints, summary and DONE, in a folder named by task and date."""
    assert main(["fit", *CPU, *SMALL]) == 0
    run = only_run(tmp_path)
    assert run.name.startswith("language-2")
    names = {path.name for path in run.iterdir()}
    assert {
        "config.yaml",
        "manifest.json",
        "metrics.csv",
        "tensorboard",
        "checkpoints",
        "summary.json",
        "DONE",
    } <= names
    manifest = read_json(run / "manifest.json")
    assert manifest["task"] == "language"
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


def test_metrics_of_one_step_share_a_row_and_reach_tensorboard(tmp_path: Path) -> None:
    """Loss, speed, learning rate and validation of a step stand in one row, and TensorBoard has the same values."""
    run = fit(tmp_path, "rows", *SMALL)
    row = rows(run)[1]
    for key in ("train/loss", "perf/samples_per_sec", "perf/tokens_per_sec", "perf/data_wait", "lr", "val/bpb"):
        assert float(row[key]) >= 0, key
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(losses(run))
    assert "global_batch_size: 8" in (run / "tensorboard" / "hparams.yaml").read_text()


def test_the_summary_tells_how_it_ended_and_how_to_go_on(tmp_path: Path) -> None:
    """After success: reason, last step, best checkpoint by the task's metric, speed, memory and the command."""
    run = fit(tmp_path, "done", *SMALL)
    summary = read_json(run / "summary.json")
    assert summary["exit_reason"] == "finished"
    assert summary["last_step"] == 4
    assert summary["best"]["metric"] == "val/bpb"
    assert Path(summary["best"]["checkpoint"]).exists()
    assert summary["samples_per_sec"] > 0
    assert summary["peak_memory_gib"] > 0
    assert summary["wall_time_seconds"] > 0
    assert "--run done" in summary["continue_command"]


def test_a_finished_run_does_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again exits with 0 and changes no file."""
    run = fit(tmp_path, "twice", *SMALL)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    fit(tmp_path, "twice", *SMALL)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
    assert "is finished (step 4), nothing to do" in capsys.readouterr().out


def test_an_unfinished_run_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same name continues the step count in the same files, and each step has one row."""
    # True, and the matter of exact resume, not of this claim.
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    crash = ["--model", "tests.crash.CrashAtStep", "--checkpoint.every_n_steps", "2", "--checkpoint.monitor", "none"]
    plain = [*crash, "--trainer.max_steps", "6", "--trainer.log_every_n_steps", "1", "--run", "again"]
    assert main(["fit", *CPU, *plain, "--model.crash_at", "5"]) == 1
    run = tmp_path / "again"
    summary = read_json(run / "summary.json")
    assert summary["exit_reason"] == "crashed"
    assert "breaks on purpose" in summary["error"]
    assert summary["last_step"] == 5
    assert not (run / "DONE").exists()
    assert main(["fit", *CPU, *plain, "--model.crash_at", "-1"]) == 0
    assert [int(row["step"]) for row in rows(run)] == [0, 1, 2, 3, 4, 5]
    assert read_json(run / "summary.json")["last_step"] == 6
    output = capsys.readouterr().out
    assert "continues from step 4" in output
    assert "changed since the last start: model.init_args.crash_at 5 -> -1" in output
    assert len(read_json(run / "manifest.json")["earlier_starts"]) == 1


def test_one_seed_gives_the_same_weights_twice_and_another_seed_others(tmp_path: Path) -> None:
    """Bit-identical on the CPU; also with `trainer.deterministic`, which sets what cuBLAS needs."""
    runs = [fit(tmp_path, name, *SMALL, "--model.dropout", "0.1") for name in ("a", "b")]
    other = fit(tmp_path, "c", *SMALL, "--model.dropout", "0.1", "--seed_everything", "1")
    first, second, third = map(weights, [*runs, other])
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], third[key]) for key in first)


def test_deterministic_sets_what_cublas_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.deterministic exports CUBLAS_WORKSPACE_CONFIG before the first kernel."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fit(tmp_path, "exact", *SMALL, "--trainer.deterministic", "true")
    torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_accumulation_is_the_same_mathematics(tmp_path: Path) -> None:
    """Micro batches of 2 accumulated to 8 give the curve and the weights of one batch of 8."""
    whole = fit(tmp_path, "whole", *SMALL)
    parts = fit(tmp_path, "parts", *SMALL, "--micro_batch_size", "2")
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    for key, value in weights(whole).items():
        assert torch.allclose(value, weights(parts)[key], atol=1e-4), key


def test_bf16_autocast_has_no_loss_scaler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An explicit bf16-mixed is taken as asked and trains without a scaler in its checkpoint."""
    run = fit(tmp_path, "bf16", *SMALL, "--trainer.precision", "bf16-mixed")
    (path,) = run.glob("checkpoints/step=*.ckpt")
    assert "MixedPrecision" not in torch.load(path, weights_only=True)
    assert "bf16-mixed (as asked)" in capsys.readouterr().out


def test_one_device_makes_no_process_group(tmp_path: Path) -> None:
    """One device trains without torch.distributed."""
    fit(tmp_path, "alone", *SMALL)
    assert not torch.distributed.is_initialized()


def test_vision_trains_and_test_takes_its_best_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`test` with the same configs finds the run and evaluates the checkpoint that was best in validation."""
    assert main(["fit", *VISION, *CPU, "--trainer.max_epochs", "3"]) == 0
    run = only_run(tmp_path)
    assert run.name.startswith("vision-")
    assert main(["test", *VISION, *CPU]) == 0
    result = read_json(run / "test.json")
    assert result["checkpoint"] == read_json(run / "summary.json")["best"]["checkpoint"]
    assert 0 < result["metrics"]["test/accuracy"] <= 1
    assert main(["predict", *VISION, *CPU]) == 0
    assert torch.cat(torch.load(run / "predictions.pt", weights_only=True)).shape == (270,)
    assert main(["validate", *VISION, *CPU, "--run", run.name]) == 0
    assert "val/accuracy" in read_json(run / "validate.json")["metrics"]


def test_evaluation_without_a_run_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run of this model: one line with the folder searched, exit code 2."""
    assert main(["test", *VISION, *CPU]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_lightnings_boring_model_trains_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that brings its own loaders works by its path; that the batch is not enforced is said in one line."""
    assert main(["fit", *CPU, *BORING, "--trainer.max_steps", "10", "--global_batch_size", "4"]) == 0
    run = only_run(tmp_path)
    assert run.name.startswith("BoringModel-")
    assert losses(run)
    output = capsys.readouterr().out
    assert "global_batch_size 4 cannot be enforced: BoringModel brings its own loaders" in output
    assert main(["predict", *CPU, *BORING]) == 0
    assert (run / "predictions.pt").exists()


def test_lightnings_transformer_trains_on_a_plain_data_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign model with a foreign data module: the global batch is kept through its `batch_size`."""
    # The demo downloads a text for loaders of its own, which the data module replaces.
    monkeypatch.setattr(LightningTransformer, "prepare_data", lambda self: None)
    model = ["--model", f"{DEMOS}.LightningTransformer", "--model.vocab_size", "50"]
    data = ["--data", "tests.tokens.RandomTokens", "--data.vocab", "50"]
    batch = ["--global_batch_size", "8", "--micro_batch_size", "2", "--trainer.log_every_n_steps", "1"]
    run = fit(tmp_path, "foreign", *model, *data, *batch)
    assert len(losses(run)) == 4
    assert read_json(run / "manifest.json")["accumulation"] == 4


def test_modes_survive_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each validation the module trains again and its frozen part stays in evaluation mode."""
    monkeypatch.setenv("PROBE_FOLDER", str(tmp_path))
    warnings.filterwarnings("ignore", "Found .* in eval mode")  # the claim is about just such a part
    probe = ["--model", "tests.distributed.probe.Probe", "--data", "tests.distributed.probe.NumbersData"]
    assert main(["fit", *CPU, *probe, "--trainer.max_epochs", "2", "--trainer.val_check_interval", "2"]) == 0
    modes = read_json(tmp_path / "probe-0.json")["modes"]
    assert len(modes) == 12
    assert all(mode == [True, True, False] for mode in modes)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--trainer.accumulate_grad_batches", "2"], "8 = 4 micro × 2 accumulation × 1 device"),
        (["--global_batch_size", "96", "--micro_batch_size", "24"], "96 = 24 micro × 4 accumulation × 1 device"),
        (["--data.batch_size", "2"], "8 = 2 micro × 4 accumulation × 1 device"),
    ],
)
def test_batch_overrides_take_effect_and_are_printed(
    arguments: list[str], printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accumulation, micro batch and the data module's own batch size are one plan, printed at start."""
    fit(tmp_path, "batch", *SMALL, "--trainer.max_steps", "1", *arguments)
    assert printed in capsys.readouterr().out


def test_overrides_reach_the_configuration() -> None:
    """Epochs and learning rate given on the command line are what the run uses."""
    cli = ProjectCLI(["fit", "--config", "configs/cpu.yaml", "--trainer.max_epochs", "32", "--model.lr", "5e-4"])
    assert cli.trainer.max_epochs == 32
    assert isinstance(cli.model, LanguageModule)
    assert cli.model.lr == 5e-4


def test_the_debug_preset_is_short(tmp_path: Path) -> None:
    """Fifty steps with an evaluation every ten, two samples per device."""
    run = fit(tmp_path, "debug", *SMALL[:8], "--config", "configs/presets/debug.yaml")
    with (run / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 50
    assert [int(row["step"]) for row in table if row["val/bpb"]] == [9, 19, 29, 39, 49]
    assert read_json(run / "manifest.json")["micro_batch_size"] == 2


def test_a_run_that_max_time_stops_can_be_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Timer ends this start and not the run: no DONE, and the same command goes on from there."""
    endless = [*SMALL, "--trainer.max_steps", "100000", "--run", "slot", "--trainer.max_time"]
    assert main(["fit", *CPU, *endless, "00:00:00:01"]) == 0
    run = tmp_path / "slot"
    assert not (run / "DONE").exists()
    assert read_json(run / "summary.json")["exit_reason"] == "stopped by max_time"
    reached = read_json(run / "summary.json")["last_step"]
    assert main(["fit", *CPU, *endless, "00:00:00:02"]) == 0
    assert f"continues from step {reached}" in capsys.readouterr().out


def test_a_run_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands on one run would write twice into the same files: the second one is told who is there."""
    (tmp_path / "busy").mkdir()
    with (tmp_path / "busy" / ".lock").open("w") as lock:
        lock.write("process 1 on node7")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["fit", *CPU, *SMALL, "--run", "busy"]) == 2
    assert "being trained right now by process 1 on node7" in capsys.readouterr().err
    assert main(["fit", *CPU, *SMALL, "--run", "busy"]) == 0


def test_a_run_keeps_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another model under the name of a run is refused and changes nothing there."""
    run = fit(tmp_path, "mine", *BORING, "--trainer.max_steps", "2")
    (run / "DONE").unlink()
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert main(["fit", *CPU, *SMALL, "--run", "mine"]) == 2
    assert "use a new --run name" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_finished_run_says_what_would_have_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More steps for a finished run are not ignored in silence."""
    fit(tmp_path, "short", *SMALL)
    fit(tmp_path, "short", *SMALL, "--trainer.max_steps", "8")
    assert "trainer.max_steps 4 -> 8; train on under a new --run name" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["best", "last", "no/such.ckpt"])
def test_evaluation_never_takes_untrained_weights(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A --ckpt_path that is no file is refused in one line."""
    run = fit(tmp_path, "named", *SMALL)
    assert main(["validate", *CPU, *SMALL, "--run", "named", "--ckpt_path", path]) == 2
    assert not (run / "validate.json").exists()
    assert f"--ckpt_path {path}" in capsys.readouterr().err


def test_a_checkpoint_of_another_shape_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluating a run under other model settings says so instead of listing tensors in a traceback."""
    fit(tmp_path, "narrow", *SMALL)
    assert main(["test", *CPU, *SMALL, "--model.width", "64", "--run", "narrow"]) == 2
    assert "the checkpoint is of another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "epochs"),
    [([], 1), (["--trainer.max_steps", "5"], -1), (["--trainer.max_epochs", "3"], 3)],
)
def test_one_epoch_unless_told_otherwise(arguments: list[str], epochs: int) -> None:
    """A module without limits trains one epoch; steps alone lift the epochs, as in Lightning."""
    assert ProjectCLI(["fit", "--config", "configs/cpu.yaml", *BORING, *arguments]).trainer.max_epochs == epochs


def test_what_users_bring_in_yaml_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy object, a progress bar and `logger: false` take effect; a setting that cannot is named."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "trainer:\n  logger: false\n  default_root_dir: elsewhere\n"
        "  strategy:\n    class_path: lightning.pytorch.strategies.SingleDeviceStrategy\n"
        "    init_args:\n      device: cpu\n"
        "  callbacks:\n  - class_path: lightning.pytorch.callbacks.TQDMProgressBar\n"
    )
    run = fit(tmp_path, "own", *SMALL, "--config", str(path))
    assert "default_root_dir has no effect" in capsys.readouterr().out
    assert not (run / "metrics.csv").exists()
    assert (run / "DONE").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--trainer.limit_val_batches", "1.5"], "limit_val_batches"),
        (["--trainer.max_steps", "-5"], "max_steps"),
        (["--model.heads", "5"], "multiple of heads"),
        (["--data.num_workers", "-1"], "num_workers is -1"),
        (["--checkpoint.keep", "0"], "checkpoint.keep is 0"),
        (["--run", "x" * 300], "no folder name"),
        (["--ckpt_path", "nope.ckpt"], "no such file"),
    ],
)
def test_a_wrong_value_is_one_line(
    arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that parse and cannot be are refused like typos: one line, exit code 2."""
    assert main(["fit", *CPU, *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert part in error.strip().splitlines()[-1]
