"""Every setting that docs/resume.md names, changed on a resumed run: it takes effect, or one line refuses it."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from src.cli import main
from src.engine.config import CONFIGS, class_parameters
from src.engine.trainer import ProjectTrainer
from tests.commands import CPU, ROOT, TASK
from tests.small_task import SmallModule

BUFFER = "a buffer that a setting fills and training leaves as it is"
COMPUTED = "what the network or the loss computes with"
REFUSED, EFFECT = "refused", "takes effect"
FOREIGN = "foreign"


class Foreign(LightningModule):
    """A module that knows nothing of this project, with settings of every kind."""

    def __init__(
        self,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        optimizer: str = "AdamW",
        groups: int = 1,
        pct_start: float = 0.3,
        total_steps: int = 20,
        hidden: int = 4,
        negative_slope: float = 0.1,
        label_smoothing: float = 0.0,
        class_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(negative_slope), nn.Linear(hidden, 2))
        # PyTorch keeps the classes' weights as a buffer, which a checkpoint holds.
        self.loss = nn.CrossEntropyLoss(torch.tensor([1.0, class_weight]), label_smoothing=label_smoothing)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (points,) = batch
        return self.loss(self.net(points), (points.sum(1) > 1).long())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        settings: Any = self.hparams
        parameters = list(self.parameters())
        groups = [{"params": parameters[n :: settings.groups]} for n in range(settings.groups)]
        if settings.optimizer == "SGD":
            return torch.optim.SGD(groups, settings.lr)
        optimizer = torch.optim.AdamW(groups, settings.lr, weight_decay=settings.weight_decay, amsgrad=settings.amsgrad)
        schedule = OneCycleLR(
            optimizer, settings.lr, settings.total_steps, pct_start=settings.pct_start, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.utils.data.TensorDataset(torch.rand(16, 2)), 4)

    val_dataloader = train_dataloader


@dataclass
class Start:
    """What one start of the command has built and done."""

    trainer: Any = None
    rates: list[float] = field(default_factory=list)  # of the first group, in each step
    validations: list[int] = field(default_factory=list)  # the steps after which there was one
    output: str = ""

    @property
    def model(self) -> Any:
        return self.trainer.lightning_module

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizers' groups at the end."""
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]


class Watch(Callback):
    """Notes what a start does."""

    def __init__(self, start: Start) -> None:
        self.start = start

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.start.rates.append(optimizer.param_groups[0]["lr"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start.validations.append(trainer.global_step)


@dataclass
class Case:
    """One setting's other value.

    Args:
        value: of the option with the setting's name
        effect: what has it after the resume; None: the change is refused
        expected: what `effect` returns; None: the value
        as_new: steps have the rates, and the optimizer ends with the settings, of a run that began with them
        row: the name in the document's table, if not the setting's
        more: options beside it

    """

    value: Any
    effect: Callable[[Start], Any] | None
    expected: Any = None
    as_new: bool = False
    row: str | None = None
    more: tuple[str, ...] = ()


def group(name: str, number: int = 0) -> Callable[[Start], Any]:
    return lambda start: start.groups[number][name]


TASKS: dict[str, dict[str, Case]] = {
    "language": {
        "model.width": Case(24, None),
        "model.depth": Case(2, None),
        "model.heads": Case(1, lambda start: start.model.model.blocks[0].heads),
        "model.context": Case(4, None),
        "model.dropout": Case(0.1, lambda start: start.model.model.blocks[0].dropout),
        "model.lr": Case(1e-4, lambda start: start.groups[1]["initial_lr"], as_new=True),
        "model.weight_decay": Case(0.3, group("weight_decay"), as_new=True),
        "model.warmup_steps": Case(6, lambda start: start.rates[:2], [1e-2 * 5 / 6, 1e-2], as_new=True),
        "model.prompt": Case("x=1", lambda start: "\nx=1" in start.output, True, more=("--model.sample_bytes", "1")),
        "model.sample_bytes": Case(2, lambda start: start.output.count("--- sample ---"), 1),
    },
    "vision": {
        "model.channels": Case(3, None),
        "model.classes": Case(11, None),
        "model.width": Case(16, None),
        "model.stages": Case(2, None),
        "model.lr": Case(1e-4, lambda start: start.groups[0]["initial_lr"], as_new=True),
        "model.weight_decay": Case(0.3, group("weight_decay"), as_new=True),
        "trainer.max_steps": Case(9, lambda start: start.trainer.global_step, as_new=True),
    },
    FOREIGN: {
        "model.lr": Case(0.03, group("max_lr"), as_new=True),
        "model.weight_decay": Case(0.3, group("weight_decay"), as_new=True),
        "model.amsgrad": Case(True, group("amsgrad"), row="an option of an optimizer"),
        "model.pct_start": Case(
            0.6, lambda start: start.trainer.lr_scheduler_configs[0].scheduler._schedule_phases[0]["end_step"], 11.0,
            as_new=True, row="a setting of a schedule",
        ),
        "model.total_steps": Case(3, None, row="a schedule that ends before the checkpoint's step"),
        "model.hidden": Case(5, None, row="what shapes the model"),
        "model.negative_slope": Case(0.2, lambda start: start.model.net[1].negative_slope, row=COMPUTED),
        "model.label_smoothing": Case(0.2, lambda start: start.model.loss.label_smoothing, row=COMPUTED),
        "model.class_weight": Case(3.0, lambda start: start.model.loss.weight[1].item(), row=BUFFER),
        "model.optimizer": Case("SGD", None, row="another class of optimizer"),
        "model.groups": Case(2, None, row="another number of parameter groups"),
        "trainer.max_epochs": Case(
            3, lambda start: (start.trainer.global_step, start.trainer.current_epoch), (12, 3),
            more=("--trainer.max_steps", "-1"),
        ),
        "trainer.callbacks.patience": Case(
            7, lambda start: next(c for c in start.trainer.callbacks if isinstance(c, EarlyStopping)).patience,
            row="a callback's setting that its state holds",
        ),
    },
}  # fmt: skip
COMMAND = {
    "trainer.max_steps": Case(9, lambda start: start.trainer.global_step, as_new=True),
    "trainer.gradient_clip_val": Case(0.5, lambda start: start.trainer.gradient_clip_val),
    "trainer.limit_val_batches": Case(2, lambda start: start.trainer.num_val_batches, [2]),
    "trainer.val_check_interval": Case(3, lambda start: start.validations, [6]),
    "micro_batch_size": Case(
        4, lambda start: (start.trainer.datamodule.batch_size, start.trainer.accumulate_grad_batches), (4, 4)
    ),
    "checkpoint.every_n_steps": Case(
        1, lambda start: Path(start.trainer.default_root_dir, "checkpoints/step=00000006.ckpt").exists(), True,
    ),
    "global_batch_size": Case(32, None),
    "seed_everything": Case(7, None),
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "language": {"width": 16, "depth": 1, "heads": 2, "context": 8, "lr": 1e-2, "warmup_steps": 2, "sample_bytes": 0},
    "vision": {"width": 8, "stages": 1},
}
NOT_TRIED = {"data.batch_size", "data.num_workers", "data.folder", "data.cache"}  # the batch plan's, the machine's
SHIPPED = [task for task in SMALL if (CONFIGS / f"tasks/{task}.yaml").exists()]
CASES = [
    *((task, name, case) for task in [*SHIPPED, FOREIGN] for name, case in TASKS[task].items()),
    *((task, name, case) for task in SHIPPED[:1] for name, case in COMMAND.items()),
]


def text(part: Any) -> str:
    return str(part.value if isinstance(part, Case) else part)


def command(task: str, run: str, steps: int, *more: str) -> list[str]:
    limits = [
        "--trainer.limit_val_batches",
        "1",
        "--trainer.val_check_interval",
        "2",
        "--trainer.max_steps",
        str(steps),
    ]
    if task == FOREIGN:
        stop = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val/loss"]
        chosen = ["--model", f"{__name__}.Foreign", *stop, "--trainer.callbacks.patience", "50"]
    else:
        small = [part for name, value in SMALL[task].items() for part in (f"--model.{name}", str(value))]
        chosen = ["--task", task, *small, "--global_batch_size", "16"]
    return ["fit", *CPU, *chosen, *limits, "--run", run, *more]


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


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns a function that trains by the command in this process, and returns what that start did."""

    def begin(arguments: list[str]) -> Start:
        watched, run = Start(), Trainer._run

        def watch(trainer: Any, *args: Any, **kwargs: Any) -> None:
            watched.trainer = trainer
            trainer.callbacks.append(Watch(watched))
            run(trainer, *args, **kwargs)

        monkeypatch.setattr(ProjectTrainer, "_run", watch)
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        assert code == 0, said.err
        watched.output = said.out
        return watched

    return begin


@pytest.mark.parametrize("task", SHIPPED)
def test_every_setting_of_a_task_is_in_the_table(task: str) -> None:
    """A new argument of a task's classes is to be tried as well."""
    config = yaml.safe_load((CONFIGS / f"tasks/{task}.yaml").read_text())
    names = {f"{part}.{name}" for part in ("model", "data") for name in class_parameters(config[part]["class_path"])}
    assert names - NOT_TRIED == {name for name in TASKS[task] if name.startswith("model.")}


def test_the_document_names_the_settings_that_are_tried_here() -> None:
    """Each with what becomes of it; without a name of its own in the document a setting stands for its row."""
    documented: dict[str, str] = {}
    for line in (ROOT / "docs/resume.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| setting"):
            names, outcome = [cell.strip() for cell in line.strip("| ").split(" | ")]
            outcome = EFFECT if outcome.startswith(EFFECT) else outcome
            documented |= {name.strip("`"): outcome for name in re.split(", (?=`|another|a |an |what )", names)}
    tried = [*((name, case) for cases in TASKS.values() for name, case in cases.items()), *COMMAND.items()]
    outcomes = {case.row or name: REFUSED if case.effect is None else EFFECT for name, case in tried}
    assert documented == outcomes | {"another number of optimizers": REFUSED}


@pytest.mark.parametrize(("task", "name", "case"), [case for case in CASES if case[2].effect is None], ids=text)
def test_a_change_that_cannot_be_is_refused_in_one_line(
    task: str, name: str, case: Case, begun: Any, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a step is done, with exit code 2."""
    run = shutil.copytree(begun(task), run_root / "run")
    capsys.readouterr()
    assert main([*command(task, "run", 7), f"--{name}", str(case.value), *case.more]) == 2
    said = capsys.readouterr()
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err
    assert sorted(path.name for path in run.glob("checkpoints/step=*")) == ["step=00000004.ckpt"]


@pytest.mark.parametrize(("task", "name", "case"), [case for case in CASES if case[2].effect is not None], ids=text)
def test_a_changed_setting_takes_effect(
    task: str, name: str, case: Case, begun: Any, run_root: Path, start: Any
) -> None:
    """What the start has built computes with the new value from its first step on, and the start names the change."""
    shutil.copytree(begun(task), run_root / "run")
    change = [f"--{name}", str(case.value), *case.more]
    resumed = start([*command(task, "run", 7), *change])
    assert "continues from step 4" in resumed.output
    if not name.startswith("trainer.callbacks"):
        assert f"{name.replace('model.', 'model.init_args.')} " in resumed.output
    assert case.effect is not None
    assert case.effect(resumed) == (case.value if case.expected is None else case.expected)
    if case.as_new:
        other = start([*command(task, "other", 7), *change])
        assert resumed.rates == other.rates[4:]
        assert resumed.groups == other.groups


@pytest.mark.parametrize(("limit", "code"), [(("max_steps", "3"), 0), (("max_epochs", "0"), 2)])
def test_a_limit_that_has_been_passed_trains_no_further(
    limit: tuple[str, str], code: int, begun: Any, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer steps than are done end the run where it is; fewer epochs are refused in one line."""
    run = shutil.copytree(begun(FOREIGN), run_root / "run")
    capsys.readouterr()
    assert main([*command(FOREIGN, "run", -1), f"--trainer.{limit[0]}", limit[1]]) == code
    said = capsys.readouterr()
    assert "finished at step 4" in said.out if code == 0 else "max_epochs=0" in said.err
    assert len(said.err.strip().splitlines()) == bool(code)
    assert sorted(path.name for path in run.glob("checkpoints/step=*")) == ["step=00000004.ckpt"]


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
