"""Settings that have changed since a checkpoint was written, and the states that it brings back."""

from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch.optim import SGD, AdamW, RMSprop
from torch.optim import lr_scheduler as schedules

from src.engine.checkpoint.restore import Restore
from src.engine.errors import AgreedError
from tests.tiny import Line, loader, quiet_trainer


class Built(Line):
    """Line with the optimizer and the schedule that it is given."""

    def __init__(self, optimizer: Any, schedule: Any = None, monitor: str | None = None) -> None:
        super().__init__()
        self.optimizer, self.schedule, self.monitor = optimizer, schedule, monitor

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        config = {"scheduler": self.schedule(optimizer), "interval": "step", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config | ({"monitor": self.monitor} if self.monitor else {})}

    def training_step(self, batch, batch_idx):
        self.log("level", 1.0)  # stands still, as a plateau does
        return super().training_step(batch, batch_idx)


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


def fit(module, steps, path, resume=None, callbacks=(), settings=None):
    """Train up to `steps` steps, save at the end; returns the Trainer and the rate of each step."""
    rates = Rates()
    trainer: Any = quiet_trainer(max_steps=steps, max_epochs=-1, limit_val_batches=0, callbacks=[rates, *callbacks])
    trainer._checkpoint_connector, trainer.model_settings = Restore(trainer), settings
    data = loader(trainer, torch.full((40, 1), 0.5), 1, train=True)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(path)
    return trainer, rates.seen


def sgd(lr: float = 0.1, **more: Any) -> Any:
    return lambda parameters: SGD(parameters, lr=lr, **more)


def warmed_up(warm: int) -> Any:
    def build(optimizer):
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=warm), schedules.ExponentialLR(optimizer, 0.9)]
        return schedules.SequentialLR(optimizer, parts, milestones=[warm])

    return build


def followed_by(function: Any) -> Any:
    def build(optimizer):
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.LambdaLR(optimizer, function)]
        return schedules.SequentialLR(optimizer, parts, milestones=[2])

    return build


def inverse(k: int) -> float:
    return 1 / (1 + k)


def inverse_root(k: int) -> float:
    """Equal to `inverse` at 0, so that both are built with the same rate."""
    return (1 + k) ** -0.5


SCHEDULES = {
    "none": (lambda lr: (sgd(lr), None), 0.1, 0.03),
    "gamma": (lambda gamma: (sgd(), lambda o: schedules.ExponentialLR(o, gamma)), 0.9, 0.8),
    "rate of a schedule": (lambda lr: (sgd(lr), lambda o: schedules.ExponentialLR(o, 0.9)), 0.1, 0.03),
    "length": (lambda length: (sgd(), lambda o: schedules.CosineAnnealingLR(o, length)), 8, 30),
    "function": (lambda lr: (sgd(lr), lambda o: schedules.LambdaLR(o, lambda k: 1 / (1 + k))), 0.1, 0.03),
    "function alone": (lambda f: (sgd(), lambda o: schedules.LambdaLR(o, f)), inverse, inverse_root),
    "function alone, after a warm-up": (lambda f: (sgd(), followed_by(f)), inverse, inverse_root),
    "warm-up": (lambda warm: (sgd(), warmed_up(warm)), 2, 6),
    "a warm-up from 0": (lambda lr: (sgd(lr), lambda o: schedules.LambdaLR(o, lambda k: k / 9)), 0.1, 0.03),
    "another schedule": (
        lambda make: (sgd(), make),
        lambda o: schedules.StepLR(o, 2),
        lambda o: schedules.ConstantLR(o),
    ),
    "one where was none": (lambda make: (sgd(), make), None, lambda o: schedules.StepLR(o, 100)),
    "momentum that follows": (
        lambda top: (sgd(momentum=0.9), lambda o: schedules.OneCycleLR(o, top, total_steps=20)),
        *(0.2, 0.4),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_changed_rate_or_schedule_takes_effect_at_its_position(name, tmp_path):
    """The rates after a resume are those that a run with the new settings has had at these steps."""
    make, before, now = SCHEDULES[name]
    fit(Built(*make(before)), 5, tmp_path / "a.ckpt")
    trainer, rates = fit(Built(*make(now)), 10, tmp_path / "b.ckpt", tmp_path / "a.ckpt")
    other, wanted = fit(Built(*make(now)), 10, tmp_path / "c.ckpt")
    assert rates == wanted[5:]
    same = [
        {key: value for key, value in group.items() if key != "params"} for group in trainer.optimizers[0].param_groups
    ]
    assert same == [{key: group[key] for key in same[0]} for group in other.optimizers[0].param_groups]


@pytest.mark.parametrize("schedule", [None, followed_by(inverse), lambda o: schedules.StepLR(o, 20)])
def test_unchanged_settings_restore_what_training_has_made_of_them(schedule, tmp_path):
    """A rate that the module has set by hand stays in the next step, as no setting of it is another."""

    class ByHand(Callback):
        def on_train_end(self, trainer, pl_module):
            trainer.optimizers[0].param_groups[0]["lr"] = 0.07

    fit(Built(sgd(), schedule), 5, tmp_path / "a.ckpt", callbacks=[ByHand()])
    assert fit(Built(sgd(weight_decay=0.5), schedule), 6, tmp_path / "b.ckpt", tmp_path / "a.ckpt")[1] == [0.07]


def test_a_changed_function_of_a_schedule_is_said(tmp_path, capsys):
    """No setting of its state shows it, so the line has the rate of before and of now."""
    fit(Built(sgd(1.0), lambda o: schedules.LambdaLR(o, inverse)), 3, tmp_path / "a.ckpt")
    fit(Built(sgd(1.0), lambda o: schedules.LambdaLR(o, inverse_root)), 4, tmp_path / "b.ckpt", tmp_path / "a.ckpt")
    assert "note: LambdaLR continues with lr 0.25 -> 0.5\n" in capsys.readouterr().out


def test_changed_options_of_an_optimizer_take_effect_and_its_moments_stay(tmp_path, capsys):
    """The weight decay is the new one, the momentum's buffer the old one, and a line says so."""
    fit(Built(sgd(momentum=0.9)), 5, tmp_path / "a.ckpt")
    start = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    trainer, _ = fit(Built(sgd(momentum=0.9, weight_decay=0.1)), 5, tmp_path / "b.ckpt", tmp_path / "a.ckpt")
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.1
    assert trainer.optimizers[0].state_dict()["state"] == start
    assert "note: SGD continues with weight_decay 0 -> 0.1\n" in capsys.readouterr().out


def test_a_schedule_that_follows_a_metric_keeps_what_it_has_reduced(tmp_path):
    """With half the rate and another patience a rate that was reduced twice is half of what it was."""

    def plateau(lr, patience):
        return Built(sgd(lr), lambda o: schedules.ReduceLROnPlateau(o, factor=0.1, patience=patience), "level")

    trainer, _ = fit(plateau(0.1, 1), 5, tmp_path / "a.ckpt")
    before = trainer.optimizers[0].param_groups[0]["lr"]
    assert before == pytest.approx(0.001)
    trainer, rates = fit(plateau(0.05, 50), 9, tmp_path / "b.ckpt", tmp_path / "a.ckpt")
    assert rates == pytest.approx([before / 2] * 4)


def test_a_changed_setting_of_a_callback_takes_effect_and_its_count_stays(tmp_path):
    """EarlyStopping brings its patience back from its state, and has counted epochs without progress."""
    first, then = (EarlyStopping("level", patience=patience) for patience in (20, 12))
    fit(Built(sgd()), 200, tmp_path / "a.ckpt", callbacks=[first])
    trainer, _ = fit(Built(sgd()), 4000, tmp_path / "b.ckpt", tmp_path / "a.ckpt", callbacks=[then])
    assert (then.patience, then.wait_count) == (12, 12)
    assert 200 < trainer.global_step < 600


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (sgd(), lambda parameters: AdamW(parameters), "SGD of 1 group(s), and the configuration builds AdamW of 1"),
        (
            sgd(),
            lambda parameters: SGD(
                [{"params": list(parameters)}, {"params": [torch.nn.Parameter(torch.ones(1))]}], 0.1
            ),
            "SGD of 1 group(s), and the configuration builds SGD of 2 group(s)",
        ),
    ],
)
def test_other_optimizers_are_refused_in_one_line(before, now, said, tmp_path):
    """Before a step is done, with what to do."""
    fit(Built(before), 2, tmp_path / "a.ckpt")
    with pytest.raises(AgreedError, match="--fresh") as refused:
        fit(Built(now), 4, tmp_path / "b.ckpt", tmp_path / "a.ckpt")
    assert said in str(refused.value)


def test_a_schedule_that_is_over_before_the_checkpoint_is_refused(tmp_path):
    """OneCycleLR raises beyond its end: one line says how long it is."""
    one_cycle = lambda steps: Built(sgd(momentum=0.9), lambda o: schedules.OneCycleLR(o, 0.2, total_steps=steps))  # noqa: E731
    fit(one_cycle(20), 10, tmp_path / "a.ckpt")
    with pytest.raises(AgreedError, match="OneCycleLR, cannot be continued at position 10"):
        fit(one_cycle(5), 12, tmp_path / "b.ckpt", tmp_path / "a.ckpt")


def test_a_checkpoint_without_a_record_is_restored_as_it_is(tmp_path):
    """One of Lightning's own: its rate stays."""
    fit(Built(sgd()), 5, tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del content["built"]
    torch.save(content, tmp_path / "a.ckpt")
    assert fit(Built(sgd(0.03)), 6, tmp_path / "b.ckpt", tmp_path / "a.ckpt")[1] == [0.1]


@pytest.mark.parametrize(
    ("kind", "option", "kept"),
    [
        (AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (RMSprop, {"centered": True}, "grad_avg"),
        (RMSprop, {"momentum": 0.9}, "momentum_buffer"),
        (SGD, {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_an_option_that_keeps_something_for_each_parameter_can_be_turned_on(kind, option, kept, tmp_path):
    """What it keeps begins at zero as in a new run, beside moments that stay; PyTorch alone would raise a KeyError."""
    fit(Built(lambda parameters: kind(parameters, lr=0.1)), 3, tmp_path / "a.ckpt")
    optimizer = lambda parameters: kind(parameters, lr=0.1, **option)  # noqa: E731
    trainer, _ = fit(Built(optimizer), 5, tmp_path / "b.ckpt", tmp_path / "a.ckpt")
    (state,) = trainer.optimizers[0].state.values()
    assert state[kept].any()
    assert "step" not in state or state["step"] == 5


class WithBuffer(Built):
    """A module that divides its loss by a buffer, which each step may count up."""

    divisor: torch.Tensor

    def __init__(self, divisor: float, counts: bool = False) -> None:
        super().__init__(sgd())
        self.register_buffer("divisor", torch.tensor(divisor))
        self.counts = counts

    def training_step(self, batch, batch_idx):
        self.divisor += self.counts
        return super().training_step(batch, batch_idx) / self.divisor


@pytest.mark.parametrize(
    ("settings", "counts", "divisor"),
    [({"divisor": 8.0}, False, 8.0), ({"divisor": 8.0}, True, 2.0 + 5), ({"divisor": 2.0}, False, 2.0)],
    ids=["left as it was built", "changed by training", "of unchanged settings"],
)
def test_a_buffer_has_the_new_setting_or_is_restored(settings, counts, divisor, tmp_path):
    """Only with other settings, and where training has not changed it: a buffer may be random in each start."""
    fit(WithBuffer(2.0, counts), 3, tmp_path / "a.ckpt", settings={"divisor": 2.0})
    module = WithBuffer(8.0, counts)
    fit(module, 5, tmp_path / "b.ckpt", tmp_path / "a.ckpt", settings=settings)
    assert module.divisor.item() == divisor
