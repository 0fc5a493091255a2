from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from src.engine.callbacks.global_batch import GlobalBatch
from src.engine.data.loader import GlobalBatchSampler
from tests.tiny import Line, loader, quiet_trainer

DATA = torch.linspace(0.1, 2, 26)[:, None]  # in global batches of 8 an epoch has three of them and one of 2


@pytest.fixture
def fit(rows):
    """Trains two epochs from w = 0.5 in global batches of 8; returns the curve of train/loss and the last weight."""

    def run(accumulation, module=None, every=1, epochs=2):
        module = Line(start=0.5) if module is None else module
        trainer = quiet_trainer(
            callbacks=[GlobalBatch()],
            logger=[rows],
            max_epochs=epochs,
            accumulate_grad_batches=accumulation,
            log_every_n_steps=every,
        )
        trainer.fit(module, loader(trainer, DATA, 8 // accumulation, train=True))
        curve = rows.curve("train/loss")
        rows.rows.clear()
        return curve, module.weight.item()

    return run


def by_hand(lr: float = 0.1) -> tuple[dict[int, float], float]:
    """The same training in plain arithmetic: each step is the mean over its samples."""
    weight, curve = 0.5, dict[int, float]()
    order = GlobalBatchSampler(26, 8, train=True)
    for epoch in range(2):
        order.set_epoch(epoch)
        for samples in order:
            x = DATA[samples].double()
            curve[len(curve)] = (weight * x - 1).square().mean().item()
            weight -= lr * (2 * x * (weight * x - 1)).mean().item()
    return curve, weight


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_the_curve_and_the_weight_are_those_of_the_global_batch(fit, accumulation):
    """train/loss and training itself are means over each step's samples for any accumulation and an odd last batch."""
    curve, weight = fit(accumulation)
    expected, last = by_hand()
    assert curve == pytest.approx(expected)
    assert weight == pytest.approx(last)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_logged_value_is_the_mean_since_the_last_one(fit, accumulation):
    """With a log interval of 3, a value is the mean of the losses of 3 steps, at the last of them."""
    curve, _ = fit(accumulation, every=3)
    expected = by_hand()[0]
    means = {step: sum(expected[step - back] for back in range(3)) / 3 for step in (2, 5)}
    assert curve == pytest.approx(means)


def test_a_loss_in_a_dictionary_counts_too(fit):
    """A training_step that returns a dictionary has the same curve."""

    class Dictionary(Line):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "other": 1}

    assert fit(4, Dictionary(start=0.5))[0] == pytest.approx(by_hand()[0])


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_module_that_logs_it_itself_is_left_alone(fit, accumulation):
    """Where the module logs train/loss, its values are the curve, from the first step on."""

    class Own(Line):
        def training_step(self, batch, batch_idx):
            self.log("train/loss", 42.0)
            return super().training_step(batch, batch_idx)

    curve, _ = fit(accumulation, Own(start=0.5))
    assert curve == dict.fromkeys(range(8), 42.0)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_module_that_logs_it_once_per_epoch_is_left_alone(fit, accumulation):
    """Where the module logs train/loss only when an epoch ends, these values are the whole curve from the first on."""

    class Own(Line):
        def training_step(self, batch, batch_idx):
            self.log("train/loss", 42.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    curve, _ = fit(accumulation, Own(start=0.5))
    assert curve == {3: 42.0, 7: 42.0}


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_other_loaders_are_taken_as_they_are(rows):
    """With a plain DataLoader nothing is weighed: a step is the mean of its batches, as Lightning has it."""
    trainer = quiet_trainer(callbacks=[GlobalBatch()], logger=[rows], max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Line(lr=0, start=0.5), DataLoader(cast(Dataset, DATA), batch_size=10))
    losses = [(0.5 * part - 1).square().mean().item() for part in DATA.split(10)]
    # Lightning divides the last, lonely batch by the accumulation all the same.
    assert rows.curve("train/loss") == pytest.approx({0: sum(losses[:2]) / 2, 1: losses[2] / 2})


def a_trainer(data: Any = None, **settings: Any) -> Any:
    """One that is about to train on `data`."""
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(_batches_that_stepped=0),
        _combined_loader=CombinedLoader([] if data is None else [data]),
    )
    return SimpleNamespace(**{"fit_loop": loop, "global_rank": 0, "world_size": 1, "is_global_zero": True} | settings)


def test_every_rank_draws_masks_of_its_own():
    """From one seed, ranks that begin to train draw different random numbers, and the same rank the same again."""
    drawn = []
    for rank in (0, 1, 0):
        torch.manual_seed(5)
        GlobalBatch().on_train_start(a_trainer(global_rank=rank, is_global_zero=False), Line())
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_data_of_another_loader_is_noted_once(capsys):
    """What a resume and several ranks then depend on; nothing of it for this project's loader."""
    GlobalBatch().on_train_start(a_trainer(DataLoader(cast(Dataset, DATA))), Line())
    assert capsys.readouterr().out.count("note: the training data is not from GlobalBatchLoader") == 1
    GlobalBatch().on_train_start(a_trainer(loader(None, DATA, 8, train=True)), Line())
    assert capsys.readouterr().out == ""
