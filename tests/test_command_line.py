"""What a user gets for a typo: one line that names the key, exit code 2, nothing written."""

from pathlib import Path

import pytest

from src.cli import main
from src.command_line import CONFIGS, with_defaults
from src.errors import UserError

FIT = ["fit", "--config", "configs/cpu.yaml"]


@pytest.fixture
def in_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stand in the project's folder with an empty run root; returns the run root."""
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--trainer.max_epoch", "3"], ["trainer.max_epoch", "did you mean trainer.max_epochs?"]),
        (["--global_batchsize", "3"], ["global_batchsize", "did you mean global_batch_size?"]),
        (["--checkpoint.evry_n_steps", "3"], ["checkpoint.evry_n_steps", "checkpoint.every_n_steps"]),
        (["--model.lrr", "1"], ["model.init_args.lrr", "did you mean model.init_args.lr?"]),
        (["--data.batchsize", "1"], ["data.init_args.batchsize", "data.init_args.batch_size"]),
        (["--trainer.max_steps", "many"], ["trainer.max_steps", "expected int, got many"]),
        (["--model.lr", "fast"], ["model.lr", "expected float, got fast"]),
        (["--model", "src.tasks.language.Nope"], ["src.tasks.language.Nope", "no attribute 'Nope'"]),
        (["--config", "configs/cpu.yml"], ["configs/cpu.yml", "no such file", "configs/cpu.yaml"]),
        (["--task", "visoin"], ["visoin", "did you mean vision?", "language, vision"]),
        (["--trainer.strategy", "dpp"], ["dpp", "ddp_find_unused"]),
        (["--trainer.precision", "bf17"], ["bf17", "bf16-mixed"]),
        (["--trainer.precision", "16-mixed"], ["needs a GPU", "32-true or bf16-mixed"]),
        (["--trainer.devices", "none"], ["trainer.devices 'none'"]),
        (["--trainer.accelerator", "tpu"], ["trainer.accelerator 'tpu'", "auto, cpu or gpu"]),
        (["--global_batch_size", "7", "--micro_batch_size", "2"], ["--global_batch_size 6 or 8"]),
        (["--micro_batch_size", "2", "--data.batch_size", "4"], ["contradicts"]),
        (["--run", "../elsewhere"], ["'../elsewhere'", "no folder name"]),
        (["--data.folder", "no/such/folder"], ["data.folder", "is no folder"]),
        (["--compile", "true", "--model", "lightning.pytorch.demos.boring_classes.BoringModel"], ["BLOCKS"]),
        (["--task", "vision", "--model", "a.B"], ["--task vision", "leave one of them out"]),
        (["stray"], ["'stray' belongs to no option"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value[0].startswith("--") else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], parts: list[str], in_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the key or value and what is allowed; there is no traceback."""
    assert main([*FIT, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    for part in parts:
        assert part in error


def test_bad_input_leaves_no_run_behind(in_project: Path) -> None:
    """A run that never began has no folder."""
    assert main([*FIT, "--trainer.max_epoch", "3"]) == 2
    assert not in_project.exists()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("trainer:\n  max_epoch: 3\n", ["trainer.max_epoch", "did you mean trainer.max_epochs?", "bad.yaml"]),
        ("trainr:\n  max_epochs: 3\n", ["trainr.max_epochs", "did you mean trainer.max_epochs?", "bad.yaml"]),
        ("model:\n  init_args:\n    lrr: 3\n", ["model.init_args.lrr", "model.init_args.lr?", "bad.yaml"]),
        ("trainer:\n  max_steps: [1\n", ["bad.yaml", "line 3", "not YAML"]),
        ("- 1\n- 2\n", ["bad.yaml", "got a list"]),
    ],
)
def test_an_error_in_a_file_names_the_file(
    content: str, parts: list[str], in_project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Key, nearest name and file stand in one line."""
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    assert main([*FIT, "--config", str(path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    for part in parts:
        assert part in error


@pytest.mark.parametrize(("argv", "near"), [(["fitt"], "fit"), (["--config", "x.yaml", "fit"], "start with one of")])
def test_the_subcommand_comes_first(argv: list[str], near: str) -> None:
    """Anything else in its place is refused with the four that exist."""
    with pytest.raises(UserError, match=near):
        with_defaults(argv)


def test_the_default_task_is_loaded_where_no_model_is_named() -> None:
    """Defaults come first, then the task, then the user's files; a named model replaces the task."""
    files = [arg for arg in with_defaults(["fit", "--config", str(CONFIGS / "cpu.yaml")]) if arg.endswith(".yaml")]
    assert [Path(file).name for file in files] == ["defaults.yaml", "language.yaml", "cpu.yaml"]
    vision = ["fit", "--config", str(CONFIGS / "tasks/vision.yaml")]
    assert not any("language" in arg for arg in with_defaults(vision))
    assert not any("language" in arg for arg in with_defaults(["fit", "--model", "a.B"]))
    assert any("language" in arg for arg in with_defaults(["fit", "--model.lr", "1"]))
    assert any("vision" in arg for arg in with_defaults(["fit", "--task=vision"]))
