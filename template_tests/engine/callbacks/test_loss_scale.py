import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from src.engine.callbacks.loss_scale import LossScale
from tests.tiny import Line, Pair, loader, quiet_trainer


@pytest.fixture
def fit(rows):
    """Trains 6 steps with an fp16 loss scaler; `bad` steps have an infinite loss. Returns the weight after each."""

    def run(bad, callback, accumulation=1, scaled=True, **settings):
        weights = []

        class Sometimes(Line):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                return loss * float("inf") if self.global_step in bad else loss

            def on_train_batch_end(self, outputs, batch, batch_idx):
                weights.append(self.weight.item())

        if scaled:
            settings["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
        trainer = quiet_trainer(
            logger=[rows], callbacks=[callback], max_steps=6, accumulate_grad_batches=accumulation, **settings
        )
        data = torch.full((6 * accumulation, 1), 0.5)
        trainer.fit(Sometimes(), loader(trainer, data, 1, train=True))
        return weights

    return run


def test_a_skipped_step_is_counted(fit, rows):
    """An infinite loss in one step leaves the weights as they were, halves the scale and counts as one skipped step."""
    weights = fit({2}, LossScale())
    assert weights[2] == weights[1]
    assert len(set(weights)) == 5
    assert rows.curve("fp16/skipped_steps") == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    assert rows.curve("fp16/scale") == {0: 1024, 1: 1024, 2: 512, 3: 512, 4: 512, 5: 512}


def test_skipped_steps_between_two_logs_are_counted(fit, rows):
    """Steps are counted in every step and logged once per interval."""
    fit({0, 1, 4}, LossScale(), log_every_n_steps=3)
    assert rows.curve("fp16/skipped_steps") == {2: 2, 5: 3}


def test_a_step_is_an_optimizer_step(fit, rows):
    """With accumulation a step with several infinite losses is one skipped step."""
    fit({2}, LossScale(), accumulation=3)
    assert rows.curve("fp16/skipped_steps") == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}


def test_a_step_that_one_of_two_optimizers_skips_is_counted():
    """Whichever of them it is, and though the other one's step comes after it."""
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = quiet_trainer(callbacks=[callback := LossScale()], max_epochs=1, plugins=[scaled])
    trainer.fit(Pair(bad={1, 2, 4}), loader(trainer, torch.full((6, 1), 0.5), 1, train=True))
    assert callback.state_dict() == {"skipped": 3.0}


def test_the_count_survives_a_restart(fit, rows):
    """A continued run counts on from the state of the checkpoint, which holds plain numbers."""
    first, second = LossScale(), LossScale()
    fit({1, 2}, first)
    state = first.state_dict()
    assert state == {"skipped": 2.0}
    assert type(state["skipped"]) is float
    second.load_state_dict(state)
    rows.rows.clear()
    fit({3}, second)
    assert rows.curve("fp16/skipped_steps") == {0: 2, 1: 2, 2: 2, 3: 3, 4: 3, 5: 3}


def test_without_a_scaler_nothing_is_logged(fit, rows):
    """In a precision without a loss scaler there is no fp16 metric."""
    fit(set(), LossScale(), scaled=False)
    assert not any(key.startswith("fp16/") for _, metrics in rows.rows for key in metrics)
