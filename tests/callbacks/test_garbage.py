import gc

import pytest
import torch
from torch import Tensor

from src.callbacks.garbage import FreezeGarbage
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
