import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from src.engine.breaker.callback import CircuitBreaker, largest_gradient
from src.engine.breaker.rules import BreakerSettings, Judge
from src.engine.callbacks.global_batch import GlobalBatch
from src.engine.callbacks.loss_scale import LossScale
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.write import WholeFiles
from src.engine.errors import TrippedError, UserError
from tests.tiny import Line, Pair, loader, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

NAN, INF = float("nan"), float("inf")


class Sick(Line):
    """Multiplies the loss, logs `reward`, or makes gradients infinite, as functions of the step (from 1)."""

    def __init__(
        self,
        loss: Callable[[int], float] = lambda step: 1.0,
        reward: Callable[[int], float | None] = lambda step: float(step),
        endless: Callable[[int], bool] = lambda step: False,
    ) -> None:
        super().__init__(lr=0.0, start=0.5)
        self.factor, self.reward, self.endless = loss, reward, endless

    def training_step(self, batch, batch_idx):
        step = self.global_step + 1
        if (reward := self.reward(step)) is not None:
            self.log("reward", reward)
        return super().training_step(batch, batch_idx) * self.factor(step)

    def on_after_backward(self):
        if self.endless(self.global_step + 1):
            torch.nn.init.constant_(self.gradient, INF)

    def on_before_optimizer_step(self, optimizer):
        """Heal, behind the breaker's back, so that one bad step does not make all that follow bad."""
        torch.nn.init.zeros_(self.gradient)

    @property
    def gradient(self) -> Tensor:
        assert self.weight.grad is not None
        return self.weight.grad

    def validation_step(self, batch, batch_idx):
        self.log("val/score", 0.0 if self.global_step > 4 else float(self.global_step))
        self.log("val/loss", -float(self.global_step))


@pytest.fixture
def fit(tmp_path, rows):
    """Trains with the breaker, up to 40 steps; returns the step at which it tripped (None), and what it said."""

    def run(module, settings, resume=None, callbacks=(), keep=99, validate=0, accumulation=1, folder=True, **more):
        place = tmp_path / "checkpoints"
        breaker = CircuitBreaker(BreakerSettings(**settings), "the command", place if folder else None)
        saving: list[Any] = []
        if folder:
            chosen = CheckpointSettings(every_n_steps=1, keep=keep)
            newest = SaveNewest(place, chosen, bad_since=breaker.running_since)
            saving = [newest, SaveBest(place, chosen, newest)]
        more = {"max_steps": 40, "max_epochs": -1, "log_every_n_steps": 1, "num_sanity_val_steps": 0} | more
        trainer = quiet_trainer(
            callbacks=[*callbacks, breaker, *saving],
            logger=[rows],
            default_root_dir=tmp_path,
            val_check_interval=validate * accumulation or None,
            limit_val_batches=1 if validate else 0,
            accumulate_grad_batches=accumulation,
            **more,
        )
        train = loader(trainer, torch.full((40 * accumulation, 1), 0.5), 1, train=True)
        val = loader(trainer, torch.ones(1, 1), 1, train=False)
        try:
            trainer.fit(module, train, val, ckpt_path=resume, weights_only=True)
        except TrippedError as error:
            return trainer.global_step, str(error)
        return None, ""

    return run


def between(first: int, last: int, bad: float = NAN) -> Callable[[int], float]:
    """`bad` from step `first` to step `last`, 1.0 elsewhere."""
    return lambda step: bad if first <= step <= last else 1.0


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    ("bad", "trips"), [(between(5, 13), False), (between(5, 14), True), (lambda step: NAN if step % 10 else 1.0, False)]
)
def test_ten_bad_steps_in_a_row_trip_and_nine_do_not(fit, bad, trips, every):
    """A loss of NaN trips in the tenth step in a row, at the reading behind it; one good step resets the count."""
    step, said = fit(Sick(bad), {}, log_every_n_steps=every)
    assert step == ({1: 14, 4: 16}[every] if trips else None)
    if trips:
        assert "the loss had NaN or Inf in 10 optimizer steps in a row (last: nan), since step 5." in said


def test_steps_are_optimizer_steps(fit):
    """Under accumulation a step whose passes are NaN is one bad step."""
    assert fit(Sick(between(5, 14)), {}, accumulation=3)[0] == 14


def test_an_infinite_gradient_counts_with_a_finite_loss(fit):
    """Gradients that are Inf at the optimizer step are bad, and the message tells them from the loss."""
    step, said = fit(Sick(endless=lambda step: step >= 3), {"steps": 4})
    assert step == 6
    assert "the gradients had NaN or Inf in 4 optimizer steps" in said


def test_what_counts_as_the_largest_gradient():
    """The largest absolute value over all kinds of gradients, NaN and Inf included; no square overflows."""

    def largest(*gradients):
        weights = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        return largest_gradient(torch.optim.SGD([*weights, torch.nn.Parameter(torch.zeros(1))], 0.1))

    sparse = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.tensor([-7.0]), (9,), check_invariants=False)
    assert largest() is None
    assert largest(torch.tensor([1.0, -3.0]), torch.tensor([2.0], dtype=torch.bfloat16), torch.zeros(0)) == 3
    assert largest(torch.tensor([1.0]), sparse) == 7
    assert largest(torch.tensor([1e30])) == torch.tensor(1e30)
    assert largest(torch.tensor([1.0]), torch.tensor([2.0, -INF])) == INF
    assert torch.isnan(largest(torch.tensor([9.0]), torch.tensor([2.0, NAN], dtype=torch.float64)))


def test_nothing_counts_during_the_warm_up(fit):
    """Bad steps of the first `warmup_steps` are not part of a streak."""
    assert fit(Sick(between(1, 12)), {"warmup_steps": 8})[0] is None
    assert fit(Sick(between(1, 18)), {"warmup_steps": 8})[0] == 18


@pytest.mark.parametrize(("value", "text"), [(0.0, "was exactly 0"), (0.25, "stayed at 0.25")])
def test_a_metric_that_stands_still_trips(fit, value, text):
    """A named metric that is 0, or does not change, is bad, and only where it is named."""

    def module():
        return Sick(reward=lambda step: value if step > 6 else float(step))

    step, said = fit(module(), {"steps": 5, "zero_or_constant": ["reward"]})
    assert step == (11 if value == 0 else 12)
    assert f"reward {text} in 5 logged values in a row" in said
    assert fit(module(), {"steps": 5}, folder=False)[0] is None


def test_a_value_that_is_not_logged_anew_does_not_count(fit):
    """A metric that changes whenever it is logged, in every fifth step, never stands still."""
    rare = Sick(reward=lambda step: float(step) if step % 5 == 0 else None)
    assert fit(rare, {"steps": 3, "zero_or_constant": ["reward"]})[0] is None


def test_a_validation_metric_counts_per_validation(fit):
    """val/score is 0 in the validations from step 6 on, every 2 steps: three of them end the run at step 10."""
    step, said = fit(Sick(), {"steps": 3, "zero_or_constant": ["val/score"]}, validate=2)
    assert (step, "since step 6" in said) == (10, True)


def test_an_epoch_metric_counts_per_epoch(fit):
    """What is logged for an epoch as a whole counts once when the epoch is over."""

    class PerEpoch(Sick):
        def training_step(self, batch, batch_idx):
            self.log("epochs", 0.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    assert fit(PerEpoch(), {"steps": 3, "zero_or_constant": ["epochs"]}, limit_train_batches=4)[0] == 12


def test_a_spike_trips(fit):
    """A loss above ten times its median trips once it stays there, the project's own train/loss too; nine times not."""
    settings = {"steps": 3, "spike": ["train/loss"]}
    step, said = fit(Sick(lambda step: 11.0 if step > 15 else 1.0), settings, callbacks=[GlobalBatch()])
    assert step == 18
    assert "train/loss spiked in 3 logged values in a row" in said
    nine = Sick(lambda step: 9.0 if step > 15 else 1.0)
    assert fit(nine, settings, callbacks=[GlobalBatch()], folder=False)[0] is None


def test_a_median_needs_values_and_a_sign():
    """A first value, a spike too early, and a metric around or below 0 are no spikes; the window holds the last 100."""

    def judged(values):
        judge = Judge(BreakerSettings(steps=1, spike=["x"]))
        for step, value in enumerate(values, 1):
            judge.feed(step, [{"x": value}])
        return judge.verdict and judge.verdict.first

    assert judged([1.0, 100.0, 100.0]) is None
    assert judged([-1.0] * 20 + [5.0]) is None
    assert judged([1.0] * 10 + [10.5]) == 11
    assert judged([1.0] * 200 + [9.0] * 51 + [50.0]) is None
    assert judged([1.0] * 10 + [NAN]) == 11


@pytest.mark.parametrize(("last", "trips"), [(8, False), (9, True)])
def test_a_loss_scaler_may_skip_for_a_while(fit, last, trips):
    """With an fp16 scaler gradients that are Inf count by `fp16_skips` alone, as steps that it skipped in a row."""
    scaled = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
    module = Sick(endless=lambda step: 3 <= step <= last)
    step, said = fit(module, {"steps": 2, "fp16_skips": 7}, plugins=scaled, callbacks=[GlobalBatch(), LossScale()])
    assert step == (9 if trips else None)
    assert ("the fp16 loss scaler skipped 7 optimizer steps in a row" in said) == trips


def test_one_of_two_optimizers_may_not_skip_for_ever(fit):
    """Though the other one finds a scale that works."""
    scaled = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
    _, said = fit(
        Pair(bad=set(range(3, 40))),
        {"fp16_skips": 7},
        plugins=scaled,
        callbacks=[GlobalBatch(), LossScale()],
        max_steps=80,
    )
    assert "the fp16 loss scaler skipped 7 optimizer steps in a row" in said


@pytest.mark.parametrize(("last", "trips"), [(14, 14), (13, None)])
@pytest.mark.parametrize("every", [1, 7])
def test_a_streak_goes_on_after_a_restart(fit, tmp_path, last, trips, every):
    """Killed after nine bad steps: one more trips the resumed run, a good one does not. The state is plain types."""

    class Killed(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 13:
                raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        fit(Sick(between(5, 14)), {}, callbacks=[Killed()], log_every_n_steps=every)
    found = newest(tmp_path / "checkpoints")
    assert found is not None
    path = found[0]
    assert found[1] == 13
    state = torch.load(path, weights_only=True)["callbacks"]["CircuitBreaker"]
    assert state["series"]["nonfinite 0"] == {"length": 9, "first": 5}
    tripped, said = fit(Sick(between(5, last)), {}, resume=path, log_every_n_steps=every)
    assert tripped == trips
    assert trips is None or "since step 5." in said


def test_a_restart_remembers_the_median_and_the_last_value():
    """Windows and last values come back, so that a spike and a standstill are found as if nothing had happened."""
    settings = BreakerSettings(steps=2, spike=["x"], zero_or_constant=["y"])
    first, second = Judge(settings), Judge(settings)
    for step in range(1, 13):
        first.feed(step, [{"x": 1.0, "y": float(step)}, {"x": 2.0, "y": 0.5 + step}])
    second.load_state_dict(first.state_dict())
    second.feed(13, [{"y": 12.0}, {"y": 0.0}])
    assert second.verdict is None
    second.feed(14, [{"y": 12.0}, {"y": 1.0}])
    assert second.verdict is not None
    assert (second.verdict.first, second.verdict.ranks) == (13, [0])


def test_any_rank_makes_a_step_bad():
    """NaN on one rank and then on another is one streak; a metric at 0 on one rank and then on another is none."""
    judge = Judge(BreakerSettings(steps=2, zero_or_constant=["x"]))
    judge.feed(1, [{"x": 1.0}, {"x": 0.0}])
    judge.feed(2, [{"x": 0.0}, {"x": 3.0}])
    judge.feed(3, [{"the loss": 1.0}, {"the loss": NAN}])
    assert judge.verdict is None
    judge.feed(4, [{"the loss": INF}, {"the loss": 1.0}])
    assert judge.verdict is not None
    assert (judge.verdict.rule, judge.verdict.ranks, judge.verdict.value) == ("nonfinite", [0], INF)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_a_trip_keeps_the_state_and_puts_the_streak_aside(fit, tmp_path):
    """The state goes to tripped/, the streak's files, the best too, to unhealthy/; nothing newer comes."""
    step, said = fit(Sick(between(5, 8)), {"steps": 4}, validate=3, log_every_n_steps=2)
    folder = tmp_path / "checkpoints"
    assert step == 8
    assert names(folder) == [f"step={number:08d}.ckpt" for number in (1, 2, 3, 4)]
    assert names(folder / "unhealthy") == ["best-step=00000006.ckpt", *(f"step={n:08d}.ckpt" for n in (5, 6, 7))]
    assert names(folder / "tripped") == ["step=00000008.ckpt"]
    for text in (str(folder / "tripped"), f"healthy checkpoint is {folder}/step=00000004.ckpt (step 4)"):
        assert text in said
    assert said.endswith("then continue with: the command")


def test_nobody_saves_on_the_way_out(fit, tmp_path):
    """A ModelCheckpoint that saves when training raises does not save the state of a broken run."""
    saver = ModelCheckpoint(dirpath=tmp_path / "own", save_on_exception=True, every_n_train_steps=1000)
    assert fit(Sick(between(5, 14)), {}, callbacks=[saver])[0] == 14
    assert not list((tmp_path / "own").glob("*"))


def test_nothing_is_overwritten_when_it_trips_again(fit, tmp_path):
    """A second trip of the same kind leaves the files of the first where they are, beside its own."""
    folder = tmp_path / "checkpoints"
    fit(Sick(between(5, 8)), {"steps": 4})
    before = {path: path.stat().st_ino for name in ("tripped", "unhealthy") for path in (folder / name).iterdir()}
    fit(Sick(between(5, 8)), {"steps": 4}, resume=folder / "step=00000004.ckpt")
    assert {path: path.stat().st_ino for path in before} == before
    assert names(folder / "tripped") == ["step=00000008-2.ckpt", "step=00000008.ckpt"]
    assert len(names(folder / "unhealthy")) == 2 * 3


def test_the_state_of_a_trip_can_be_gone_on_from(fit, tmp_path):
    """Whoever starts from the tripped state, healed or nearly so, is not stopped for what was before."""
    fit(Sick(between(5, 8)), {"steps": 4})
    start = tmp_path / "checkpoints/tripped/step=00000008.ckpt"
    assert fit(Sick(between(9, 11)), {"steps": 4}, resume=start)[0] is None


def test_the_newest_state_before_a_streak_stays(fit, tmp_path):
    """However few are kept, one from before the streak is there to go on from; it goes when the streak has ended."""
    step, said = fit(Sick(between(9, 17)), {"steps": 9}, keep=2, log_every_n_steps=4)
    assert step == 20
    assert names(tmp_path / "checkpoints") == ["step=00000008.ckpt"]
    assert "(step 8). A continued run is exact and would" in said
    fit(Sick(between(12, 14)), {"steps": 9}, resume=tmp_path / "checkpoints/step=00000008.ckpt", keep=2)
    assert names(tmp_path / "checkpoints") == ["step=00000039.ckpt", "step=00000040.ckpt"]


def test_a_trip_amid_a_save_leaves_the_state_before_the_streak(fit, tmp_path, monkeypatch):
    """What the trip forgives does not reach the save that is being written, which deletes older files at its end."""
    save, wait, forgive = torch.save, WholeFiles.wait, Judge.forgive
    tripped, released = threading.Event(), threading.Event()

    def slow(state, path):
        if getattr(path, "name", "").startswith(".step=00000016"):
            assert released.wait(60)
        save(state, path)

    def waits(files):
        if tripped.is_set():  # the trip's own save, whose content is put together
            released.set()
        wait(files)

    monkeypatch.setattr(torch, "save", slow)
    monkeypatch.setattr(WholeFiles, "wait", waits)

    def forgives(judge):
        tripped.set()
        forgive(judge)

    monkeypatch.setattr(Judge, "forgive", forgives)
    step, said = fit(Sick(between(9, 17)), {"steps": 9}, keep=2, plugins=[WholeFiles()])
    assert (step, released.is_set()) == (17, True)
    assert names(tmp_path / "checkpoints") == ["step=00000008.ckpt"]
    assert "(step 8). A continued run is exact and would" in said


def test_a_metric_of_the_validation_that_goes_bad_leaves_a_state_from_before(fit, tmp_path):
    """A streak of validations is as long as many saves."""
    _, said = fit(Sick(), {"zero_or_constant": ["val/score"], "steps": 5}, keep=2, validate=2)
    assert "healthy checkpoint is" in said
    (healthy,) = [name for name in names(tmp_path / "checkpoints") if name.startswith("step=")]
    assert healthy == "step=00000005.ckpt"


def test_without_a_healthy_checkpoint_a_new_name_is_the_way(fit, tmp_path):
    """Where every checkpoint is of the streak, all are put aside and the message names no command to continue."""
    step, said = fit(Sick(between(1, 4)), {"steps": 4}, keep=2)
    assert step == 4
    assert names(tmp_path / "checkpoints") == []
    assert "No checkpoint from before is left: start anew with another --run NAME" in said
    assert "the command" not in said


def test_the_end_is_read_before_it_is_saved(fit, tmp_path):
    """A streak that fills up in the last, unread steps trips at the end of training, whose state is not saved."""
    assert fit(Sick(between(31, 40)), {}, log_every_n_steps=50)[0] == 40
    assert names(tmp_path / "checkpoints")[-1] == "step=00000030.ckpt"


def test_without_checkpoints_there_is_nothing_to_save(fit, tmp_path):
    """A run that keeps no checkpoints trips as well and leaves no files."""
    step, said = fit(Sick(between(5, 14)), {}, folder=False)
    assert step == 14
    assert "It keeps no checkpoints." in said
    assert not list(tmp_path.rglob("*.ckpt"))


class Syncs(TorchDispatchMode):
    """Counts where a number is fetched from a tensor, which waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_a_healthy_run_reads_once_per_interval(fit, monkeypatch):
    """No scalar is fetched beyond those without the breaker, and its one gather comes once per log interval."""
    counts: list[int] = []
    reads: list[Any] = []

    def heard(act):
        def call(*args):
            if args[-1].ndim > 1:  # samplers read theirs too
                reads.append(args[-1].shape)
            return act(*args)

        return call

    monkeypatch.setattr(Tensor, "tolist", heard(Tensor.tolist))
    monkeypatch.setattr(SingleDeviceStrategy, "all_gather", heard(lambda self, tensor: tensor))
    watch = {"zero_or_constant": ["reward"], "spike": ["train/loss"]}
    for settings in (watch, {"nonfinite": False}):
        with Syncs() as syncs:
            assert fit(Sick(), settings, callbacks=[GlobalBatch()], folder=False, log_every_n_steps=10)[0] is None
        counts.append(syncs.count)
        if settings is watch:
            # Each a gather and a list of ten steps; then the end of the epoch and of training.
            assert reads[:6] == [(2, 50), (1, 2, 10, 5)] * 3
            assert len(reads) <= 12
    assert counts[0] == counts[1]


def test_a_healthy_run_never_trips(fit):
    """With every rule on, a run whose numbers move is left alone."""
    every = {"zero_or_constant": ["reward", "val/loss"], "spike": ["reward", "train/loss"], "steps": 2}
    assert fit(Sick(), every, callbacks=[GlobalBatch()], validate=5)[0] is None


def test_a_name_that_nobody_logs_is_said_once(fit, capsys):
    """After the first validation one note names it and what is logged; known names are not in it."""
    watch = ["train/reward", "reward", "val/score", "train/loss"]
    fit(Sick(), {"zero_or_constant": watch, "steps": 40}, callbacks=[GlobalBatch()], validate=5, folder=False)
    said = capsys.readouterr().out
    assert said.count("note: the breaker watches train/reward, which has not been logged so far") == 1
    assert "(logged: reward, " in said


def test_settings_without_an_effect_are_said(fit, capsys):
    """A factor without a metric has a note."""
    fit(Sick(), {"spike_factor": 5.0})
    assert "breaker.spike_factor has no effect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("warmup_steps", -1), ("fp16_skips", 0), ("spike_factor", 1.0), ("spike_factor", NAN)],
)
def test_settings_that_cannot_be_are_refused(name, value):
    """A value out of range is refused by its name."""
    with pytest.raises(UserError, match=f"breaker.{name} is {value}; it must be"):
        BreakerSettings(**{name: value})
