"""An average of the weights, against one worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from src.checkpoint.__main__ import main as checkpoints
from src.checkpoint.compare import differences, outcome
from src.cli import main
from src.engine.callbacks.ema import EMA
from src.engine.checkpoint.contents import average_in
from src.engine.errors import UserError
from tests.commands import CPU, SMALL, cut_back, read_json
from tests.tiny import Line, loaders, quiet_trainer

DATA = torch.ones(12, 1)
DECAY = 0.75
AVERAGED = ["--trainer.callbacks+", "src.engine.callbacks.ema.EMA", "--trainer.callbacks.decay", "0.5"]


class Watched(Line):
    """Line that notes its weight after every step, and what it is validated with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[float] = []
        self.evaluated: list[float] = []

    def on_before_zero_grad(self, optimizer: object) -> None:
        self.weights.append(self.weight.item())  # as the step before has left it

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.evaluated.append(self.weight.item())

    def on_train_end(self) -> None:
        self.weights.append(self.weight.item())


def trained(*callbacks: Any, **settings: Any) -> Watched:
    module = Watched()
    settings = {"max_steps": 4, "val_check_interval": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1} | settings
    trainer = quiet_trainer(callbacks=list(callbacks), **settings)
    trainer.fit(module, *loaders(trainer, DATA, 1))
    return module


def by_hand(weights: list[float], start: int = 0) -> float:
    """The average of the weights after each step, the first of which is before any."""
    average = weights[start + 1]
    for weight in weights[start + 2 :]:
        average = DECAY * average + (1 - DECAY) * weight
    return average


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("start", [0, 2])
def test_the_average_moves_once_per_step(accumulation: int, start: int) -> None:
    """Also where a step is of several batches; it begins with the weights after the first step that counts."""
    average = EMA(DECAY, start)
    module = trained(average, accumulate_grad_batches=accumulation, val_check_interval=accumulation)
    assert len(module.weights) == 5
    assert average.averages["weight"].item() == pytest.approx(by_hand(module.weights, start), abs=1e-6)


def test_validation_sees_the_average_and_training_does_not() -> None:
    """Each validation is of the average so far, of the weights before it begins; the training is the same without."""
    with_average, without = trained(EMA(DECAY, start_step=1)), trained()
    assert with_average.weights == without.weights
    expected = [without.weights[1], *(by_hand(without.weights[: end + 1], 1) for end in (2, 3, 4))]
    assert with_average.evaluated == pytest.approx(expected, abs=1e-6)
    assert without.evaluated == without.weights[1:]


def test_an_evaluation_that_breaks_leaves_the_weights() -> None:
    """Whoever saves after an exception in a validation finds the weights that were trained."""

    class Broken(Watched):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.global_step == 3:
                raise ZeroDivisionError

    module = Broken()
    trainer = quiet_trainer(callbacks=[EMA(DECAY)], max_steps=4, val_check_interval=1, num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, *loaders(trainer, DATA, 1))
    assert module.weight.item() == pytest.approx(trained().weights[3])


class Parts(LightningModule):
    """Frozen and tied parameters, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.last.weight = self.first.weight
        self.frozen, self.norm = nn.Linear(1, 1).requires_grad_(False), nn.BatchNorm1d(1)
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.means: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(self.last(self.first(self.frozen(batch * (batch_idx + 1))))).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.means.append(self.norm.running_mean.item())  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([part for part in self.parameters() if part.requires_grad], 0.1)


def test_what_a_file_keeps_and_training_changes_is_averaged() -> None:
    """Not what is frozen, counted, or made anew; a tied weight is in the state under both its names."""
    average, module = EMA(DECAY), Parts()
    trainer = quiet_trainer(callbacks=[average], max_steps=3, limit_val_batches=0)
    trainer.fit(module, loaders(trainer, torch.rand(12, 1), 4)[0])
    assert average.averages.keys() == {"first.weight", "norm.weight", "norm.bias", *RUNNING}
    assert average.averages["norm.running_mean"].item() == pytest.approx(by_hand([0.0, *module.means]), abs=1e-6)
    state = average.state_dict()["weights"]
    assert state.keys() == {*average.averages, "last.weight"}
    assert state["last.weight"] is state["first.weight"]


RUNNING = ("norm.running_mean", "norm.running_var")


def test_small_steps_add_up_where_weights_are_of_16_bits() -> None:
    """The average is kept in fp32, or in the weights' type where that is finer."""
    for precision, dtype in (("bf16-true", torch.float32), ("64-true", torch.float64)):
        average = EMA(0.999)
        module = trained(average, precision=precision)
        assert average.averages["weight"].dtype == dtype
        assert module.weight.dtype == {"bf16-true": torch.bfloat16}.get(precision, torch.float64)
        assert module.evaluated == pytest.approx([module.weights[1]] * 4, abs=5e-3)


@pytest.mark.parametrize(("settings", "said"), [({"decay": 1.0}, "below 1"), ({"start_step": -1}, "0 or more")])
def test_an_average_that_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    """With what is allowed."""
    with pytest.raises(UserError, match=said):
        EMA(**settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with an average, and all its checkpoints."""
    patch = pytest.MonkeyPatch()
    root = tmp_path_factory.mktemp("averaged")
    patch.setenv("RUN_ROOT", str(root))
    assert main(["fit", *COMMAND]) == 0
    patch.undo()
    return root / "averaged"


COMMAND = [*CPU, *SMALL, *AVERAGED, "--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99", "--run", "averaged"]
COMMAND += ["--model.dropout", "0.3", "--trainer.max_steps", "6"]


def saved(run: Path, step: int) -> dict[str, Any]:
    return torch.load(run / f"checkpoints/step={step:08d}.ckpt", weights_only=True)


def test_a_killed_run_goes_on_with_its_average(run: Path, run_root: Path) -> None:
    """Averages, weights and the rows of validations on averages are those of the run that was not killed."""
    copy = cut_back(run, 3, run_root)
    assert main(["fit", *COMMAND]) == 0
    assert average_in(saved(copy, 6))
    assert list(differences(outcome(copy), outcome(run))) == []


def test_the_end_of_a_run_is_not_the_average(run: Path) -> None:
    """The last checkpoint has the weights that training would go on with."""
    state, before = saved(run, 6), average_in(saved(run, 5))
    for name, average in average_in(state).items():
        torch.testing.assert_close(average, torch.lerp(before[name], state["state_dict"][name], 0.5))


@pytest.mark.parametrize("given", [AVERAGED, []])
def test_a_runs_evaluation_is_of_the_average(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    """`validate` finds what the validation after the fourth step found, with the callback or without."""
    monkeypatch.setenv("RUN_ROOT", str(run.parent))
    path = run / "checkpoints" / "step=00000004.ckpt"
    assert main(["validate", *CPU, *SMALL, *given, "--ckpt_path", str(path)]) == 0
    assert "note: evaluating the EMA weights" in capsys.readouterr().out
    found = read_json(run / "validate.json")["metrics"]["val/loss"]
    logged = {row["step"]: row["val/loss"] for row in outcome(run)["metrics.csv"] if row["val/loss"]}
    assert found == pytest.approx(float(logged["3"]), abs=1e-6)


def test_the_average_is_what_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the optimizer's weights are asked for; both have all names and types of the state."""
    state = saved(run, 6)
    for name, choice in (("average", []), ("weights", ["--trained"])):
        assert checkpoints(["export", str(run), str(tmp_path / f"{name}.pt"), "--prefix", "", *choice]) == 0
        assert ("the average of the weights" in capsys.readouterr().out) == (name == "average")
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        expected = state["state_dict"] | (average_in(state) if name == "average" else {})
        assert found.keys() == state["state_dict"].keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
