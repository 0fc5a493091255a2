import pytest
import torch
from torch.utils.data import Dataset

from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from tests.tiny import Line, loader, quiet_trainer

DATA = torch.linspace(-1, 1, 24)[:, None]  # in batches of 4 an epoch is 6 steps


class Seeing(Line):
    """Remembers which samples each step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, list[float]]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch_idx, batch.flatten().tolist()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("stop", "ended", "workers"),
    [*((stop, ended, 0) for stop in (3, 5, 6, 8) for ended in (True, False)), (8, False, 1)],
)
def test_a_resumed_run_sees_the_samples_that_were_to_come(tmp_path, stop, ended, workers):
    """Wherever in an epoch it was stopped or killed, a resumed run trains on exactly the batches that had not come."""

    def fit(steps, every, resume=None):
        module, saver = Seeing(), SaveNewest(tmp_path, CheckpointSettings(every_n_steps=every, keep=99))
        trainer = quiet_trainer(callbacks=[saver], max_steps=steps)
        data = loader(trainer, DATA, 4, train=True, num_workers=workers)
        trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        return module.seen

    whole = fit(15, every=99)
    fit(stop if ended else stop + 1, every=99 if ended else stop)
    assert fit(15, 99, tmp_path / f"step={stop:08d}.ckpt") == whole[stop:]


@pytest.mark.parametrize("stop", [2, 4, 5, 8])
def test_a_shortened_epoch_is_over_where_it_ends(tmp_path, stop):
    """With limit_train_batches too, a resumed run trains on exactly the batches that had not come."""

    def fit(steps, resume=None):
        module, saver = Seeing(), SaveNewest(tmp_path, CheckpointSettings(every_n_steps=99, keep=99))
        trainer = quiet_trainer(callbacks=[saver], max_steps=steps, limit_train_batches=4)
        trainer.fit(module, loader(trainer, DATA, 4, train=True), ckpt_path=resume, weights_only=True)
        return module.seen

    whole = fit(11)
    fit(stop)
    assert fit(11, tmp_path / f"step={stop:08d}.ckpt") == whole[stop:]


def test_going_on_reads_nothing_of_what_was_trained_on(tmp_path):
    """The sampler begins where it was: a large data set is not read through to get there."""

    class Counting(Dataset):
        reads = 0

        def __len__(self) -> int:
            return len(DATA)

        def __getitem__(self, index: int) -> torch.Tensor:
            self.reads += 1
            return DATA[index]

    def reads(steps, resume=None):
        data, saver = Counting(), SaveNewest(tmp_path, CheckpointSettings(keep=99))
        trainer = quiet_trainer(callbacks=[saver], max_steps=steps)
        trainer.fit(Line(), loader(trainer, data, 4, train=True), ckpt_path=resume, weights_only=True)
        return data.reads

    assert reads(5) == 5 * 4
    assert reads(9, tmp_path / "step=00000005.ckpt") == 4 * 4
