"""Every setting of the shipped tasks on a run that is continued: it takes effect, or one line refuses it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from src.cli import main
from src.command_line import CONFIGS, class_parameters
from tests.commands import CPU, TASK
from tests.small_task import SmallModule

# Another value for each, and whether it refuses, decides on the optimizer, or is the new module's own from then on.
REFUSED, OPTIMIZER, MODULE = "refused", "optimizer", "module"
TASKS: dict[str, dict[str, tuple[Any, str]]] = {
    "language": {
        "model.width": (24, REFUSED),
        "model.depth": (2, REFUSED),
        "model.heads": (1, MODULE),
        "model.context": (4, REFUSED),
        "model.dropout": (0.1, MODULE),
        "model.lr": (1e-4, OPTIMIZER),
        "model.weight_decay": (0.3, OPTIMIZER),
        "model.warmup_steps": (3, OPTIMIZER),
        "model.prompt": ("x", MODULE),
        "model.sample_bytes": (2, MODULE),
    },
    "vision": {
        "model.channels": (3, REFUSED),
        "model.classes": (11, REFUSED),
        "model.width": (16, REFUSED),
        "model.stages": (2, REFUSED),
        "model.lr": (1e-4, OPTIMIZER),
        "model.weight_decay": (0.3, OPTIMIZER),
    },
}
SMALL = {
    "language": {"width": 16, "depth": 1, "heads": 2, "context": 8, "warmup_steps": 2, "sample_bytes": 0},
    "vision": {"width": 8, "stages": 1},
}
# Of the command, for every task.
COMMAND = {
    "trainer.max_steps": (9, OPTIMIZER),
    "trainer.gradient_clip_val": (0.5, MODULE),
    "trainer.limit_val_batches": (2, MODULE),
    "trainer.val_check_interval": (3, MODULE),
    "micro_batch_size": (4, MODULE),
    "checkpoint.every_n_steps": (1, MODULE),
    "global_batch_size": (32, REFUSED),
    "seed_everything": (7, REFUSED),
}
NOT_TRIED = {"data.batch_size", "data.num_workers", "data.folder", "data.cache"}  # the batch plan's, the machine's
CASES = [
    (task, name, *case)
    for task, settings in TASKS.items()
    if (CONFIGS / f"tasks/{task}.yaml").exists()
    for name, case in {**settings, **COMMAND}.items()
]


def command(task: str, run: str, steps: int, *more: str) -> list[str]:
    small = [part for name, value in SMALL[task].items() for part in (f"--model.{name}", str(value))]
    limits = ["--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2", "--global_batch_size", "16"]
    return ["fit", *CPU, "--task", task, *small, *limits, "--trainer.max_steps", str(steps), "--run", run, *more]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the run directory of four of a task's steps, which is trained once."""
    made: dict[str, Path] = {}

    def begin(task: str) -> Path:
        if task not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(CONFIGS.parent)
                patch.setenv("RUN_ROOT", str(tmp_path_factory.mktemp(task)))
                assert main(command(task, "run", 4)) == 0
                made[task] = tmp_path_factory.getbasetemp() / f"{task}0" / "run"
                (made[task] / "DONE").unlink()
        return made[task]

    return begin


def optimizer(run: Path) -> list[Any]:
    """What the newest checkpoint has of rates and options, without moments and parameters."""
    newest = torch.load(sorted(run.glob("checkpoints/step=*.ckpt"))[-1], weights_only=True)
    groups = [group for state in newest["optimizer_states"] for group in state["param_groups"]]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


@pytest.mark.parametrize("task", [task for task in TASKS if (CONFIGS / f"tasks/{task}.yaml").exists()])
def test_every_setting_of_a_task_is_in_the_table(task: str) -> None:
    """A new argument of a task's classes is to be tried as well."""
    config = yaml.safe_load((CONFIGS / f"tasks/{task}.yaml").read_text())
    there = {f"{part}.{name}" for part in ("model", "data") for name in class_parameters(config[part]["class_path"])}
    assert there - NOT_TRIED == TASKS[task].keys()


@pytest.mark.parametrize(("task", "name", "value", "kind"), CASES, ids=lambda part: str(part))
def test_a_changed_setting_takes_effect_or_is_refused(
    task: str, name: str, value: Any, kind: str, begun: Any, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimizer ends as one that had the setting from the beginning; all else is the new objects' own."""
    run = shutil.copytree(begun(task), run_root / "run")
    change = [f"--{name}", str(value)]
    capsys.readouterr()
    code = main([*command(task, "run", 7), *change])
    said = capsys.readouterr()
    if kind == REFUSED:
        assert code == 2
        assert len(said.err.strip().splitlines()) == 1
        assert "Traceback" not in said.err
        return
    assert code == 0, said.err
    assert f"{name.replace('model.', 'model.init_args.').replace('data.', 'data.init_args.')} " in said.out
    if kind == OPTIMIZER:
        assert main([*command(task, "other", 7), *change]) == 0
        assert optimizer(run) == optimizer(run_root / "other")


class Several(SmallModule):
    """SmallModule whose parameters are shared out among several optimizers."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.count, self.automatic_optimization = optimizers, False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[number :: self.count], 0.01) for number in range(self.count)]


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_another_number_of_optimizers_is_refused_in_one_line(
    before: int, now: int, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, before a step is done; the run is resumed with the number it had."""
    several = [*TASK, "--model", f"{__name__}.Several", "--trainer.gradient_clip_val", "null", "--run", "run"]

    def fit(count: int, steps: int) -> int:
        limits = ["--trainer.max_steps", str(steps), "--trainer.limit_val_batches", "1"]
        return main(["fit", *CPU, *several, *limits, "--model.optimizers", str(count)])

    assert fit(before, 2) == 0
    (run_root / "run/DONE").unlink()
    capsys.readouterr()
    assert fit(now, 4) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert " and ".join(["SGD of 1 group(s)"] * before) in line
    assert "--fresh" in line
    assert fit(before, 4) == 0
