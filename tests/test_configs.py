"""Every shipped configuration, and what the shapes say."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml

from src.cli import ProjectCLI, main
from src.engine.config import CONFIGS
from src.engine.errors import UserError
from src.engine.resolve.hardware import read_shape
from tests.commands import BORING, SMALL

SHAPES = sorted(path for path in CONFIGS.glob("*.yaml") if re.fullmatch(r"cpu|\w+_n\d+_(gpu|proc)\d+", path.stem))
EXPERIMENTS = sorted((CONFIGS / "experiments").rglob("*.yaml"))
EVERY = sorted({path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "clusters"} - {*EXPERIMENTS})
TASKS = sorted(path.stem for path in (CONFIGS / "tasks").glob("*.yaml"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What --print_config says to these arguments, which it must accept."""
    with pytest.raises(SystemExit) as done:
        ProjectCLI(["fit", *arguments, "--print_config"])
    assert done.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_configuration_parses(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print_config accepts each file strictly, for any model where it names none."""
    names_model = "model" in (yaml.safe_load(path.read_text()) or {})
    config = yaml.safe_load(printed(capsys, "--config", str(path), *([] if names_model else BORING)))
    assert "class_path" in config["model"]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_fits_a_task(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print_config accepts it with one of the tasks, or with a model of its own."""
    refusals = []
    for more in (*(["--task", task] for task in TASKS), BORING):
        try:
            printed(capsys, *more, "--config", str(path))
        except UserError as error:
            refusals.append(f"{more}: {error}")
        else:
            return
    pytest.fail("\n".join(refusals))


@pytest.mark.parametrize(
    ("preset", "least", "most"),
    [
        ("fast", timedelta(0), timedelta(minutes=2)),
        ("1hour", timedelta(minutes=50), timedelta(hours=1)),
        ("3hour", timedelta(hours=2.5), timedelta(hours=2, minutes=59)),
        ("full", timedelta(days=1), timedelta(days=2)),
    ],
)
def test_a_preset_for_a_slot_leaves_room_for_the_start_and_the_last_save(
    preset: str, least: timedelta, most: timedelta
) -> None:
    """fast, 1hour, 3hour and full stop by themselves before the time that they are named for."""
    cli = ProjectCLI(["fit", *SMALL, "--config", f"configs/presets/{preset}.yaml"])
    assert least < timedelta(seconds=cli.max_seconds or 0) < most


def test_a_printed_configuration_can_be_fed_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Feeding --print_config's output to --config prints it unchanged."""
    first = printed(capsys, *SMALL, "--model.width", "24")
    (tmp_path / "again.yaml").write_text(first)
    assert printed(capsys, "--config", str(tmp_path / "again.yaml")) == first


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_a_shape_says_what_its_name_says(path: Path) -> None:
    """<gpu>_n<N>_gpu<G> asks for N nodes with G devices each and nothing else."""
    config = yaml.safe_load(path.read_text())
    assert config.keys() == {"trainer"}
    shape = read_shape(**config["trainer"])
    name = path.stem.split("_")
    nodes = int(name[1].removeprefix("n")) if len(name) > 1 else 1
    devices = int(name[2].removeprefix("gpu").removeprefix("proc")) if len(name) > 2 else 1
    assert (shape.num_nodes, shape.devices) == (nodes, devices)
    assert shape.accelerator == ("cpu" if name[0] == "cpu" else "gpu")


@pytest.mark.parametrize("path", [path for path in SHAPES if "gpu" in path.stem], ids=lambda path: path.stem)
def test_a_shape_that_is_not_here_answers_in_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it asks for, what is here, what runs here and how to send it to a cluster, and exits with 2."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(CONFIGS.parent)
    assert main(["fit", "--config", f"configs/{path.name}", *BORING]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"configs/{path.name} asks for" in line
    assert "this machine has 0 GPUs" in line
    assert "Runs here: configs/cpu" in line
    assert "srun --nodes=" in line
