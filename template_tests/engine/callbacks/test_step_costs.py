import gc
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from torch import Tensor

from src.engine.callbacks.step_costs import FreeGradients, FreezeGarbage
from tests.tiny import Line, loader, quiet_trainer


class Counts(Line):
    """Notes how many objects the collector leaves alone in a step, and can fail there."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.frozen = fails, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.frozen = gc.get_freeze_count()
        if self.fails:
            raise RuntimeError("as asked")
        return self.error(batch)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_there_at_the_start_is_not_walked_over_until_training_ends(fails: bool) -> None:
    """The libraries' hundreds of thousands of objects; nothing stays frozen, also after an error."""
    module, trainer = Counts(fails), quiet_trainer(callbacks=[FreezeGarbage()], max_epochs=1)
    data = loader(trainer, torch.linspace(-1, 1, 6)[:, None], 1, train=True)
    if fails:
        with pytest.raises(RuntimeError, match="as asked"):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)
    assert module.frozen > 100_000
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_so() -> None:
    """A user's own freeze outlives the training."""
    gc.freeze()
    try:
        trainer = quiet_trainer(callbacks=[FreezeGarbage()], max_epochs=1)
        trainer.fit(Line(), loader(trainer, torch.linspace(-1, 1, 6)[:, None], 1, train=True))
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.unfreeze()


# --- gradients of the step before ---


class Looks(Line):
    """Remembers in which forward passes gradients of an earlier one were there."""

    def __init__(self) -> None:
        super().__init__()
        self.there: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.there.append(self.weight.grad is not None)
        return self.error(batch)


class LooksAtZero(Looks):
    """Looks at gradients before they are zeroed, too."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Only being there matters."""


def test_a_callback_that_looks_at_gradients_before_they_are_zeroed_finds_them() -> None:
    """As it would without ours."""
    seen = []

    class Watching(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: object) -> None:
            seen.append(pl_module.weight.grad is not None)

    trainer = quiet_trainer(callbacks=[FreeGradients(), Watching()], max_epochs=1)
    trainer.fit(Line(), loader(trainer, torch.linspace(-1, 1, 6)[:, None], 1, train=True))
    assert seen == [False] + [True] * 5


@pytest.mark.parametrize(
    ("module", "accumulation", "there"),
    [
        (Looks, 1, [False] * 6),
        (Looks, 3, [False, True, True] * 2),
        (LooksAtZero, 1, [False] + [True] * 5),
    ],
)
def test_no_forward_pass_has_the_gradients_of_the_step_before(
    module: type[Looks], accumulation: int, there: list[bool]
) -> None:
    """A step begins without; its own are kept over its passes, and a module that wants to see them keeps all."""
    weights = []
    for callbacks in ([FreeGradients()], []):
        trainer, trained = (
            quiet_trainer(callbacks=list(callbacks), max_epochs=1, accumulate_grad_batches=accumulation),
            module(),
        )
        trainer.fit(trained, loader(trainer, torch.linspace(-1, 1, 6)[:, None], 1, train=True))
        weights.append(trained.weight.item())
        assert not callbacks or trained.there == there
    assert weights[0] == weights[1]
