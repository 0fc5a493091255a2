"""`python -m src.check`: what another machine would refuse, said here in fit's own words."""

import io
import json

import pytest

from src.check import main
from tests.commands import SMALL

ON_FOUR = ["fit", *SMALL, "--trainer.accelerator", "gpu", "--trainer.devices", "4"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--trainer.strategy", "fspd_full"], "trainer.strategy 'fspd_full' is unknown"),
        (["--trainer.precision", "bf17"], "trainer.precision 'bf17' is unknown"),
        (["--micro_batch_size", "4", "--data.batch_size", "8"], "micro_batch_size 4 contradicts data.batch_size 8"),
        (["--trainer.precision", "bf16-mixed"], "V100, compute capability 7.0 has no bf16 units"),
        (["--global_batch_size", "7"], "global_batch_size 7 cannot be shared by 4 devices"),
        (["--model.widht", "8"], "did you mean model.init_args.width?"),
    ],
    ids=["strategy", "precision", "two batch sizes", "bf16 on a V100", "remainder", "key"],
)
def test_what_the_other_machine_refuses_is_said_here(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings are resolved for cards that this machine lacks: one line, exit code 2."""
    assert main(["V100:7.0", *ON_FOUR, *wrong]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_a_right_command_passes_and_leaves_nothing(run_root) -> None:
    """Neither does anything train."""
    assert main(["H100:9.0", *ON_FOUR, "--trainer.precision", "bf16-mixed"]) == 0
    assert not run_root.exists()


def test_the_last_of_several_commands_is_read_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grid's, from standard input."""
    cpu = ["fit", *SMALL]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([cpu, cpu, [*cpu, "--model.depth", "x"]])))
    assert main(["cpu", "-"]) == 2
    assert "depth" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["V100", "V100:7", ":7.0", "V100:x.y"])
def test_a_card_is_a_name_and_a_capability(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is refused with an example."""
    assert main([text, "fit", *SMALL]) == 2
    assert "such as a100:8.0, or cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "give a card and a command"), (["cpu"], "give a card and a command"), (["cpu", "-"], "no JSON")],
)
def test_a_call_that_is_incomplete_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, exit code 2."""
    monkeypatch.setattr("sys.stdin", io.StringIO("fit"))
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
