import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from src.engine.errors import UserError
from src.tasks.vision import VisionModule
from tests.tiny import loader, loaders, quiet_trainer

# Images that are bright in the left or in the right half, with that half as the label.
LABELS = torch.arange(50) % 2
IMAGES = torch.rand(50, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.2
IMAGES[LABELS == 0, :, :, :2] += 0.8
IMAGES[LABELS == 1, :, :, 2:] += 0.8
DATA = TensorDataset(IMAGES, LABELS)


class Watched(VisionModule):
    """Remembers the learning rate of each step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates = [*getattr(self, "rates", []), optimizer.param_groups[0]["lr"]]


def module() -> Watched:
    torch.manual_seed(0)
    return Watched(classes=2, width=8, stages=1, lr=0.01)


@pytest.fixture
def fit(rows):
    """Trains on the halves; returns the module."""

    def run(epochs):
        model = module()
        trainer = quiet_trainer(logger=[rows], max_epochs=epochs, num_sanity_val_steps=0)
        trainer.fit(model, *loaders(trainer, DATA, 16))
        return model

    return run


def test_it_learns(fit, rows):
    """After a few epochs the halves are told apart, and the accuracy that is logged says so."""
    fit(5)
    accuracy = rows.curve("val/accuracy")
    assert accuracy[max(accuracy)] > 0.95


@pytest.mark.parametrize("split", ["val", "test"])
def test_metrics_are_over_all_images(split):
    """Loss and accuracy are means over the images, not over batches, of which the last is smaller."""
    model, trainer = module(), quiet_trainer()
    run = trainer.validate if split == "val" else trainer.test
    (found,) = run(model, loader(trainer, DATA, 16, train=False), verbose=False)
    with torch.no_grad():
        logits = model.model(IMAGES)
    assert found[f"{split}/accuracy"] == pytest.approx((logits.argmax(-1) == LABELS).float().mean().item())
    assert found[f"{split}/loss"] == pytest.approx(cross_entropy(logits, LABELS).item())


def test_the_schedule_is_one_cycle_over_all_steps(fit):
    """The learning rate rises to its peak and falls to nearly nothing in the last step."""
    rates = fit(2).rates
    assert len(rates) == 8
    assert max(rates) == pytest.approx(0.01, rel=0.1)
    assert rates.index(max(rates)) not in (0, 7)
    assert rates[-1] == min(rates) < 0.01 / 1000


def test_a_training_without_an_end_is_refused():
    """One cycle over endless steps is refused with the settings that give it an end."""
    trainer = quiet_trainer(max_epochs=-1, max_steps=-1, num_sanity_val_steps=0)
    with pytest.raises(UserError, match=r"--trainer\.max_epochs or --trainer\.max_steps"):
        trainer.fit(module(), *loaders(trainer, DATA, 16))


def test_predictions_are_the_likeliest_labels():
    """`predict_step` gives one label per image."""
    model = module()
    found = model.predict_step((IMAGES, LABELS), 0)
    assert torch.equal(found, model.model(IMAGES).argmax(-1))
