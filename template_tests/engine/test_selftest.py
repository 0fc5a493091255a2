"""The self-test says whether a killed run ends as it would have ended."""

import json
from pathlib import Path

import pytest
import torch

from src import selftest
from src.checkpoint.compare import differences
from tests.commands import CPU, SMALL, TWO

STEPS = ["--trainer.max_steps", "40", "--trainer.log_every_n_steps", "3", "--model.dropout", "0.3"]


@pytest.mark.parametrize("config", [CPU, TWO], ids=["one", "two"])
def test_a_killed_run_is_found_bit_identical(
    config: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two SIGKILLs of all ranks at random moments, and what was given behind `--` is what was trained."""
    monkeypatch.chdir(Path(selftest.__file__).parent.parent)
    assert selftest.main(["resume", "--kills", "2", "--", *config, *SMALL, *STEPS]) == 0
    output = capsys.readouterr().out
    assert "bit-identical" in output
    assert "newest: step=" in output


def test_what_differs_is_reported_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each difference has a line with its place and its size, rows first, and both runs stay to be looked at."""

    def forgetful(folder: Path, arguments: list[str], kills: int, seed: int) -> list[str]:
        weights = {"state_dict": {"w": torch.ones(4), "b": torch.ones(1)}, "global_step": 8}
        other = {"state_dict": {"w": torch.tensor([1.0, 1, 1, 1.5]), "b": torch.ones(1)}, "global_step": 9}
        rows = {"metrics.csv": [{"step": "3"}]}, {"metrics.csv": [{"step": "4"}]}
        return list(differences(weights | rows[0], other | rows[1]))

    monkeypatch.setattr(selftest, "resume", forgetful)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert selftest.main(["resume"]) == 1
    (kept,) = tmp_path.iterdir()
    assert capsys.readouterr().out.splitlines() == [
        "DIFFERENT:",
        "metrics.csv[0].step: '3', '4'",
        "state_dict.w: 1 of 4 values differ, by 0.5 at most",
        "global_step: 8, 9",
        f"both runs, with their logs: {kept}",
    ]


def test_a_training_that_fails_by_itself_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong setting is shown with the training's own words."""
    assert selftest.main(["resume", "--", *CPU, *SMALL, "--trainer.max_epoch", "3"]) == 1
    assert "did you mean trainer.max_epochs?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ([1, 2], [1], [": 2 entries, 1 entries"]),
        ({"a": 1}, {"b": 1}, ["a: only in the first", "b: only in the second"]),
        ({"a": {"b": torch.ones(2)}}, {"a": {"b": torch.ones(3)}}, ["a.b: (2,) torch.float32, (3,) torch.float32"]),
        (json.loads("[1.0]"), [1.0], []),
    ],
)
def test_differences_are_named_by_their_place(left: object, right: object, said: list[str]) -> None:
    """Another length, a key that only one has, another shape: one line each; equal things give none."""
    assert list(differences(left, right)) == said
