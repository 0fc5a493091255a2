"""What a user gets for a typo: one line that names the key, exit code 2, nothing written."""

import shutil
from pathlib import Path

import pytest
import yaml

from src.cli import ProjectCLI, main
from src.engine import config as command_line
from src.engine.config import CONFIGS, with_defaults
from src.engine.errors import UserError
from tests.commands import SMALL, fit

FIT = ["fit", "--config", "configs/cpu.yaml"]
TASKS = {
    "letters": "model: tests.small_task.SmallModule\ndata: tests.small_task.SmallData\nglobal_batch_size: 8\n",
    "boring": "model: lightning.pytorch.demos.boring_classes.BoringModel\n",
}


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stand in a project with two tasks of its own; returns its folder."""
    root = tmp_path / "project"
    (root / "configs/tasks").mkdir(parents=True)
    for name in ("defaults", "cpu"):
        shutil.copy(CONFIGS / f"{name}.yaml", root / "configs")
    for name, text in TASKS.items():
        (root / f"configs/tasks/{name}.yaml").write_text(text)
    (root / "project.yaml").write_text("task: letters\n")
    monkeypatch.setattr(command_line, "CONFIGS", root / "configs")
    monkeypatch.chdir(root)
    monkeypatch.setenv("RUN_ROOT", str(root / "runs"))
    return root


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
        (["--model", "tests.small_task.Nope"], ["tests.small_task.Nope", "no attribute 'Nope'"]),
        (["--config", "configs/cpu.yml"], ["configs/cpu.yml", "no such file", "configs/cpu.yaml"]),
        (["--task", "leters"], ["leters", "did you mean letters?", "boring, letters"]),
        (["--trainer.strategy", "dpp"], ["dpp", "ddp_find_unused"]),
        (["--trainer.precision", "bf17"], ["bf17", "bf16-mixed"]),
        (["--trainer.precision", "16-mixed"], ["needs a GPU", "32-true or bf16-mixed"]),
        (["--trainer.devices", "none"], ["trainer.devices 'none'"]),
        (["--trainer.accelerator", "tpu"], ["trainer.accelerator 'tpu'", "auto, cpu or gpu"]),
        (["--global_batch_size", "7", "--micro_batch_size", "2"], ["--global_batch_size 6 or 8"]),
        (["--micro_batch_size", "2", "--data.batch_size", "3"], ["contradicts"]),
        (["--run", "../elsewhere"], ["'../elsewhere'", "no folder name"]),
        (["--compile", "true", "--model", "lightning.pytorch.demos.boring_classes.BoringModel"], ["BLOCKS"]),
        (["--trainer.gradient_clip_val", "-1"], ["gradient_clip_val -1", "above 0, or null"]),
        (["--trainer.gradient_clip_val", ".nan"], ["gradient_clip_val nan", "above 0, or null"]),
        (["--task", ""], ["--task is empty", "boring, letters"]),
        (["--task", "../tasks/letters"], ["'../tasks/letters' is unknown"]),
        (["--task", "boring", "--model", "a.B"], ["--task boring", "leave one of them out"]),
        (["stray"], ["'stray' belongs to no option"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value[0].startswith("--") else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], parts: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the key or value and what is allowed; there is no traceback."""
    assert main([*FIT, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    "given",
    [
        ["--model.api_key", "hunter22"],
        ["--data.token=hunter22"],
        ["--trainer.logger", '{"init_args": {"password": "hunter22"}}'],
        ["--data.url", "https://me:hunter22@host/x"],
        ["--data.name", "hf_hunter22hunter22"],
    ],
)
def test_a_secret_is_refused_and_not_repeated(
    given: list[str], run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of training would stand in the configuration, the manifest and every checkpoint."""
    assert main([*FIT, *SMALL, *given]) == 2
    said = capsys.readouterr().err
    assert given[0].partition("=")[0] in said
    assert "environment variable" in said
    assert "hunter22" not in said
    assert not list(run_root.glob("*"))


@pytest.mark.parametrize(
    "given", [["--model.mask_token", "5"], ["--model.use_token=true"], ["--run", "token"], ["--data.key", "<eos>"]]
)
def test_a_number_a_switch_and_a_word_are_no_secrets(given: list[str]) -> None:
    """Only a text behind a name that ends like a credential's is one."""
    assert with_defaults([*FIT, *SMALL, *given])[-len(given) :] == given


def test_bad_input_leaves_no_run_behind(project: Path) -> None:
    """A run that never began has no folder."""
    assert main([*FIT, "--trainer.max_epoch", "3"]) == 2
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("trainer:\n  max_epoch: 3\n", ["trainer.max_epoch", "did you mean trainer.max_epochs?", "bad.yaml"]),
        ("trainr:\n  max_epochs: 3\n", ["trainr.max_epochs", "did you mean trainer.max_epochs?", "bad.yaml"]),
        ("model:\n  init_args:\n    lrr: 3\n", ["model.init_args.lrr", "model.init_args.lr?", "bad.yaml"]),
        ("trainer:\n  max_steps: [1\n", ["bad.yaml", "line 3", "not YAML"]),
        ("- 1\n- 2\n", ["bad.yaml", "got a list"]),
        ("trainer:\n#  max_steps: 3\n", ["trainer is empty", "leave `trainer:` out", "bad.yaml"]),
        ("trainer: 3\n", ["trainer is 3", "bad.yaml"]),
        ("checkpoint: null\n", ["checkpoint is empty", "bad.yaml"]),
        ("breaker: [1]\n", ["breaker is [1]", "bad.yaml"]),
        ("watchdog: 3\n", ["watchdog is 3", "bad.yaml"]),
    ],
)
def test_an_error_in_a_file_names_the_file(
    content: str, parts: list[str], project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Key, nearest name and file stand in one line."""
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    assert main([*FIT, "--config", str(path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    for part in parts:
        assert part in error


@pytest.mark.parametrize("later", [["--trainer.max_steps", "1"], ["--config", "configs/cpu.yaml"], ["--print_config"]])
def test_an_empty_group_does_not_drop_what_came_before(
    later: list[str], project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser forgets the defaults of a group that is empty, and takes it once anything is set in it."""
    (path := tmp_path / "bad.yaml").write_text("trainer:\n#  max_steps: 3\n")
    assert main([*FIT, "--config", str(path), *later]) == 2
    assert f"--config {path}: trainer is empty" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "near"), [(["fitt"], "fit"), (["--config", "x.yaml", "fit"], "start with one of")])
def test_the_subcommand_comes_first(argv: list[str], near: str) -> None:
    """Anything else in its place is refused with the four that exist."""
    with pytest.raises(UserError, match=near):
        with_defaults(argv)


def tasks(*argv: str) -> list[str]:
    """The task files that a command line loads, after defaults.yaml and before any other file."""
    files = [Path(arg) for arg in with_defaults(["fit", *argv]) if arg.endswith(".yaml")]
    assert files[0].name == "defaults.yaml"
    return [file.stem for file in files[1:2] if file.parent.name == "tasks"]


def test_the_projects_task_is_trained_where_no_other_is_named(project: Path) -> None:
    """project.yaml's task comes after the defaults and before the user's files; anything that names a model wins."""
    assert tasks("--config", "configs/cpu.yaml") == ["letters"]
    assert tasks("--model.lr", "1") == ["letters"]
    assert tasks("--task=boring") == ["boring"]
    assert tasks("--config", "configs/tasks/boring.yaml") == ["boring"]
    assert tasks("--model", "a.B") == []
    (project / "own.yaml").write_text("task: boring\n")
    assert tasks("--config", "own.yaml") == ["boring"]
    (project / "project.yaml").write_text("task: boring\ncluster: local\naccount: ''\n")
    assert tasks() == ["boring"]


def test_a_run_remembers_the_task_that_it_trained(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed configuration names the chosen task, so that it means the same when project.yaml has changed."""
    with pytest.raises(SystemExit):
        ProjectCLI(["fit", "--task", "boring", "--print_config"])
    assert "task: boring\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ProjectCLI(["fit", "--print_config"])
    assert "task: letters\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tsak: letters\n", "project.yaml: unknown key tsak (did you mean task?)"),
        ("task:\n", "no model and no task: --task NAME, or `task:` in project.yaml; configs/tasks has boring, letters"),
        ("task: speech\n", "task 'speech' is unknown; configs/tasks has boring, letters"),
        ("task: no\n", "project.yaml: task: got False, expected a name in quotes"),
        ("- task\n", "error: project.yaml: expected `key: value` lines"),
        ("task: {\n", "error: project.yaml, line 2: not YAML"),
        (None, "no model and no task"),
    ],
)
def test_a_project_file_that_names_no_task_says_so(
    text: str | None, part: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what is wrong and which tasks there are; nothing is trained instead."""
    (project / "project.yaml").unlink()
    if text is not None:
        (project / "project.yaml").write_text(text)
    assert main(FIT) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert part in line


def test_without_examples_a_model_must_be_named(project: Path) -> None:
    """All tasks may be deleted: a command without a model says that there is none, one with a model goes on."""
    shutil.rmtree(project / "configs/tasks")
    with pytest.raises(UserError, match="configs/tasks has none"):
        with_defaults(FIT)
    assert tasks("--model", "a.B") == []


def test_a_default_that_is_an_enum_is_written_as_its_value(run_root: Path) -> None:
    """Lightning's Timer has one; what the run keeps starts another run."""
    run = fit(run_root, "timed", *SMALL, "--trainer.callbacks", "lightning.pytorch.callbacks.Timer")
    (timer,) = [yaml.safe_load((run / "config.yaml").read_text())["trainer"]["callbacks"]]
    assert timer["init_args"]["interval"] == "step"
    assert main(["fit", "--config", str(run / "config.yaml"), "--run", "again"]) == 0
