"""The command on a run that breaks: it stops itself, says why and how to go on, and keeps what was good."""

from pathlib import Path

import pytest

from src.cli import main
from template_tests.launchers import TORCHRUN
from tests.commands import CPU, SMALL, TWO, read_json, rows, train

BAD = ["--model", "template_tests.crash.BadFromStep", "--model.first", "6", "--model.last", "12"]
RUN = [
    *(*SMALL, "--trainer.max_steps", "12", "--breaker.steps", "3", "--run", "sick"),
    *("--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99"),
]
SAID = (
    "run stopped at step 8, as it looks broken (breaker rule nonfinite): the loss had NaN or Inf in 3 optimizer steps"
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def test_a_broken_run_stops_and_goes_on_from_before(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 70 and one line; the summary says it too; the command goes on from before the streak, once mended."""
    assert main(["fit", *CPU, *RUN, *BAD]) == 70
    (line,) = capsys.readouterr().err.strip().splitlines()
    run, folder = run_root / "sick", run_root / "sick" / "checkpoints"
    assert line.startswith(f"error: {SAID}")
    assert "(step 5)" in line
    assert line.endswith(" ".join(BAD) + " --run sick")
    assert names(folder)[-1] == "step=00000005.ckpt"
    assert names(folder / "tripped") == ["step=00000008.ckpt"]
    assert [name for name in names(folder / "unhealthy") if name.startswith("step=")] == [
        "step=00000006.ckpt",
        "step=00000007.ckpt",
    ]
    summary = read_json(run / "summary.json")
    assert (summary["exit_reason"], summary["last_step"]) == ("tripped", 8)
    assert SAID in summary["error"]
    assert summary["last_checkpoint"] == str(folder / "step=00000005.ckpt")
    assert Path(summary["best"]["checkpoint"]).exists() if summary["best"] else True
    assert not (run / "DONE").exists()
    # Unchanged it comes to the same, from the same checkpoint; mended it ends.
    assert main(["fit", *CPU, *RUN, *BAD]) == 70
    assert "continues from step 5" in capsys.readouterr().out
    assert main(["fit", *CPU, *RUN, *BAD, "--model.last", "7"]) == 0
    assert "continues from step 5" in capsys.readouterr().out
    assert [int(row["step"]) for row in rows(run)] == list(range(12))


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--breaker.enabled", "false"], 0), (["--trainer.enable_checkpointing", "false"], 70)]
)
def test_it_can_be_turned_off_and_needs_no_checkpoints(run_root: Path, arguments: list[str], code: int) -> None:
    """Without the breaker a broken run runs on to its end; without checkpoints it trips and leaves none."""
    assert main(["fit", *CPU, *RUN, *BAD, *arguments]) == code
    assert (run_root / "sick/DONE").exists() == (code == 0)
    assert bool(list((run_root / "sick").rglob("*.ckpt"))) == (code == 0)


def test_a_trial_run_of_a_few_batches_has_no_breaker(run_root: Path) -> None:
    """fast_dev_run passes by it."""
    assert main(["fit", *CPU, *RUN, *BAD, "--trainer.fast_dev_run", "8"]) == 0


def test_metrics_are_named_on_the_command_line(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list of metrics is one option; lr, which the project logs itself, stands still here and trips."""
    flat = ["--model", "template_tests.crash.FlatRate"]
    assert main(["fit", *CPU, *RUN, *flat, "--breaker.zero_or_constant", "[lr, val/loss]"]) == 70
    assert "lr stayed at 0.01 in 3 logged values in a row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--breaker.steps", "0"], "breaker.steps is 0; it must be at least 1"),
        (["--breaker.spike_factor", "0.5"], "breaker.spike_factor is 0.5"),
        (["--breaker.stesp", "3"], "did you mean breaker.steps?"),
        (["--breaker.spike", "train/loss"], "breaker.spike"),
    ],
)
def test_a_wrong_setting_is_one_line(
    arguments: list[str], part: str, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that cannot be and unknown keys: one line and exit code 2."""
    assert main(["fit", *CPU, *RUN, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert part in line


@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "--")], ids=["plain", "torchrun"])
def test_two_processes_trip_together(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """NaN on rank 1 alone stops both at the same step, with one line and one set of files; nothing hangs."""
    done = train(tmp_path, "fit", *TWO, *RUN, *BAD, "--model.rank", "1", launcher=launcher, check=False)
    # torchrun has an exit code of its own and shows that of the processes.
    assert done.returncode == (1 if launcher else 70), done.stderr
    assert not launcher or "exitcode  : 70" in done.stderr
    assert done.stderr.count(f"error: {SAID}") == 1
    assert "in a row (last: nan) on rank 1 of 2, since step 6" in done.stderr
    assert launcher or "Traceback" not in done.stderr
    folder = tmp_path / "sick" / "checkpoints"
    assert names(folder / "tripped") == ["step=00000008.ckpt"]
    assert names(folder)[-1] == "step=00000005.ckpt"
    assert read_json(tmp_path / "sick/summary.json")["exit_reason"] == "tripped"
