"""`test`, `validate` and `predict`: which run and which state of it they take."""

from pathlib import Path

import pytest
import torch

from src.cli import main
from src.engine.checkpoint.shards import IN_PARTS, Rows
from tests.commands import CPU, SMALL, fit, read_json, rows


def test_evaluation_takes_the_best_checkpoint_of_the_run_with_these_settings(run_root: Path) -> None:
    """`test`, `predict` and `validate` find the run and evaluate the state that was best, not the newest one."""
    worst_is_best = [*SMALL, "--checkpoint.monitor", "val/loss"]  # the mode is max and the loss falls: step 2 of 4
    run = fit(run_root, "best", *worst_is_best)
    assert main(["test", *CPU, *worst_is_best]) == 0
    result = read_json(run / "test.json")
    assert result["checkpoint"] == read_json(run / "summary.json")["best"]["checkpoint"]
    assert Path(result["checkpoint"]).name == "best-step=00000002.ckpt"
    assert 0 < result["metrics"]["test/accuracy"] <= 1
    assert main(["predict", *CPU, *worst_is_best]) == 0
    assert torch.cat(torch.load(run / "predictions.pt", weights_only=True)).shape == (30, 16)
    assert main(["validate", *CPU, *worst_is_best, "--run", "best"]) == 0
    found = read_json(run / "validate.json")["metrics"]["val/loss"]
    assert found == pytest.approx(float(rows(run)[1]["val/loss"]))


def test_a_named_run_is_evaluated_with_its_own_model(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model on the command line, of whatever width it is; an option of the command still counts."""
    run = fit(run_root, "wide", *SMALL, "--model.width", "24")
    assert main(["test", *CPU, "--run", "wide"]) == 0
    assert read_json(run / "test.json")["metrics"]["test/accuracy"] > 0
    assert main(["test", *CPU, "--run", "wide", "--model.width", "16"]) == 2
    assert "the checkpoint is of another model" in capsys.readouterr().err
    assert main(["test", *CPU, "--run", "wode"]) == 2
    assert "like it: wide" in capsys.readouterr().err


def test_a_run_that_takes_no_file_is_evaluated_all_the_same(
    run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers are printed and a note says where they are not; --output puts them elsewhere; predictions need it."""
    run = fit(run_root, "locked", *SMALL)
    (run / "test.json").mkdir()  # as root one may write to what is read-only for others
    assert main(["test", *CPU, "--run", "locked"]) == 0
    told = capsys.readouterr().out
    assert "test/accuracy" in told
    assert f"note: {run} takes no test.json (Is a directory); --output FOLDER names another" in told
    assert main(["test", *CPU, "--run", "locked", "--output", str(tmp_path)]) == 0
    assert read_json(tmp_path / "test.json")["metrics"]["test/accuracy"] > 0
    assert main(["predict", *CPU, "--run", "locked", "--output", str(tmp_path / "nowhere")]) == 2
    assert "name another folder with --output" in capsys.readouterr().err
    assert main(["predict", *CPU, "--run", "locked", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "predictions.pt").exists()


def test_evaluation_without_a_run_says_what_to_do(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run of this model: one line with the folder searched, exit code 2."""
    assert main(["test", *CPU, *SMALL]) == 2
    assert str(run_root) in capsys.readouterr().err


@pytest.mark.parametrize("path", ["best", "last", "no/such.ckpt"])
def test_evaluation_never_takes_untrained_weights(
    path: str, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A --ckpt_path that is no file is refused in one line."""
    run = fit(run_root, "named", *SMALL)
    assert main(["validate", *CPU, *SMALL, "--run", "named", "--ckpt_path", path]) == 2
    assert not (run / "validate.json").exists()
    assert f"--ckpt_path {path}" in capsys.readouterr().err


def test_a_checkpoint_of_another_shape_is_one_line(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluating a run under other model settings says so instead of listing tensors in a traceback."""
    fit(run_root, "narrow", *SMALL)
    assert main(["test", *CPU, *SMALL, "--model.width", "64", "--run", "narrow"]) == 2
    assert "the checkpoint is of another model" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["auto", "fsdp_full_shard"])
def test_evaluation_leaves_the_optimizer_on_the_disk(
    strategy: str, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint in parts only weights and their average are put together, under every strategy."""
    average = ["--trainer.callbacks+", "src.engine.callbacks.ema.EMA"]
    run = fit(run_root, "in_parts", *SMALL, "--trainer.strategy", "fsdp_full_shard", *average)
    content = torch.load(run / "checkpoints/step=00000004.ckpt", weights_only=True)
    weights = [value for value in content["state_dict"].values() if value == IN_PARTS]
    assert content["optimizer_states"][0]["state"][0]["exp_avg"] == IN_PARTS
    whole, joined = Rows.whole, []

    def noted(rows: Rows) -> torch.Tensor:
        joined.append(rows.shape)
        return whole(rows)

    monkeypatch.setattr(Rows, "whole", noted)
    assert main(["test", *CPU, *SMALL, "--trainer.strategy", strategy, "--run", "in_parts"]) == 0
    assert len(joined) == 2 * len(weights) > 0
