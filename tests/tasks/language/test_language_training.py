"""The language task through the command, on its real text, with a model of 0.04 M parameters."""

from pathlib import Path

import pytest

from src.cli import main
from src.tasks.language import LanguageModule
from tests.commands import CPU, STEPS, TWO, losses, only_run, read_json, rows, train, weights

SIZES = ["--model.width", "32", "--model.depth", "2", "--model.context", "32", "--model.sample_bytes", "20"]
LANGUAGE = ["--task", "language", *SIZES, *STEPS]


@pytest.fixture
def alone(run_root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """The run on one process, and what was printed."""
    assert main(["fit", *CPU, *LANGUAGE]) == 0
    return only_run(run_root), capsys.readouterr().out


def test_a_run_is_named_after_the_task_and_ends_with_a_sample(alone: tuple[Path, str]) -> None:
    """The run has the task's name and batch, bits per byte decide which state is the best, and a sample is printed."""
    run, output = alone
    assert run.name.startswith("language-2")
    manifest = read_json(run / "manifest.json")
    assert (manifest["task"], manifest["global_batch_size"]) == ("language", 16)
    best = read_json(run / "summary.json")["best"]
    assert best["metric"] == "val/bpb"
    assert best["value"] == pytest.approx(min(float(row["val/bpb"]) for row in rows(run) if row["val/bpb"]))
    assert float(rows(run)[-1]["perf/tokens_per_sec"]) > 0
    assert "--- sample ---\ndef " in output


def test_two_processes_give_the_curve_of_one(alone: tuple[Path, str], tmp_path: Path) -> None:
    """Two processes train as one does, print one sample, and their checkpoint loads strictly into a bare module."""
    done = train(tmp_path / "two", "fit", *TWO, *LANGUAGE)
    run, curve = only_run(tmp_path / "two"), losses(alone[0])
    assert read_json(run / "manifest.json")["world_size"] == 2
    assert len(curve) == 4
    assert losses(run) == pytest.approx(curve, abs=1e-5)
    assert done.stdout.count("--- sample ---") == 1
    LanguageModule(width=32, depth=2, context=32).load_state_dict(weights(run), strict=True)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--model.heads", "5"], "multiple of heads"), (["--data.folder", "no/such/folder"], "is no folder")],
)
def test_a_wrong_setting_is_one_line(
    arguments: list[str], part: str, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads that do not fit the width and a folder that is not there are refused like typos, with exit code 2."""
    assert main(["fit", *CPU, *LANGUAGE, *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert part in error.strip().splitlines()[-1]
