"""`python -m src.checkpoint diff`: the same to the last bit or not."""

from pathlib import Path

import pytest
import torch

from src.checkpoint.compare import SHOWN, differences, outcome
from src.engine.checkpoint.contents import AVERAGE
from template_tests.checkpoints import a_run, refused, said, saved, truncated


def test_diff_of_files_and_runs(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same is `identical` with exit code 0; else a line per difference and 1; rows count between runs alone."""
    one, two = a_run(run_root, "one", 5), a_run(run_root, "two", 5)
    assert said(capsys, "diff", "one", "two") == "identical\n"
    (one / "metrics.csv").write_text("step,train/loss,perf/speed\n0,1.5,7\n")
    (two / "metrics.csv").write_text("step,train/loss,perf/speed\n0,2.5,8\n")
    assert said(capsys, "diff", "one", "two", code=1) == "metrics.csv[0].train/loss: '1.5', '2.5'\n"
    file = two / "checkpoints/step=00000005.ckpt"
    assert said(capsys, "diff", "one", str(file)) == "identical\n"
    saved(two / "checkpoints/step=00000006.ckpt", 6, fill=3.0)
    out = said(capsys, "diff", str(file), "two", code=1)
    assert out.splitlines() == [
        "state_dict.model.weight: 4096 of 4096 values differ, by 2 at most",
        "global_step: 5, 6",
    ]
    truncated(file)
    assert "is no whole checkpoint" in refused(capsys, "diff", "one", str(file))
    a_run(run_root, "empty")
    assert "has no checkpoint yet" in refused(capsys, "diff", "one", "empty")


def test_an_average_of_the_weights_counts(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two states with the same weights and another average of them are not the same."""
    files = [a_run(run_root, name, 5) / "checkpoints/step=00000005.ckpt" for name in ("one", "two")]
    for value, path in enumerate(files):
        average = {"weights": {"model.weight": torch.full((3,), float(value))}}
        torch.save(torch.load(path, weights_only=True) | {"callbacks": {AVERAGE: average}}, path)
    out = said(capsys, "diff", "one", "two", code=1)
    assert out == "average.model.weight: 3 of 3 values differ, by 1 at most\n"


def test_a_long_diff_is_cut(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first lines are shown and the others counted."""
    for name, last in (("one", 0), ("two", 1)):
        rows = "".join(f"{step},{last}\n" for step in range(SHOWN + 3))
        (a_run(run_root, name, 5) / "metrics.csv").write_text("step,train/loss\n" + rows)
    lines = said(capsys, "diff", "one", "two", code=1).splitlines()
    assert len(lines) == SHOWN + 1
    assert lines[-1] == "… and 3 more"


def test_two_runs_may_diverge_alike() -> None:
    """NaN in the same places is no difference; NaN on one side is, and is counted alone."""
    nan = float("nan")
    left, right = torch.tensor([1.0, nan, 3.0]), torch.tensor([1.0, nan, nan])
    assert list(differences([left, nan], [left.clone(), nan])) == []
    assert list(differences(left, right, "w")) == ["w: 1 of 3 values differ, by nan at most"]


def test_the_outcome_is_that_of_the_newest_step_inside(tmp_path: Path) -> None:
    """A renamed file is compared by its steps, and a damaged one gives way."""
    run = a_run(tmp_path, "mine", 7)
    (run / "checkpoints/step=00000007.ckpt").rename(run / "checkpoints/step=00000001.ckpt")
    saved(run / "checkpoints/step=00000005.ckpt", 5)
    assert outcome(run)["global_step"] == 7
    truncated(run / "checkpoints/step=00000001.ckpt")
    assert outcome(run)["global_step"] == 5
