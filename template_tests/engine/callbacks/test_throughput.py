from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from src.engine.callbacks import throughput
from src.engine.callbacks.throughput import PEAK_FLOPS, Throughput, count_samples, peak_flops
from src.engine.memory.usage import peak_memory
from tests.tiny import Line, loader, quiet_trainer


class Clock:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=clock))
    return clock


class Slow(Dataset):
    """Samples that take their time."""

    def __init__(self, size: int, seconds: float, clock: Clock) -> None:
        self.size, self.seconds, self.clock = size, seconds, clock

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += self.seconds
        return torch.ones(1)


@pytest.fixture
def fit(rows, clock):
    """Trains in micro batches of 4 with the seconds that each part shall take; returns the callback."""

    def run(*, sample=0.0, step=0.0, validation=0.0, between=0.0, size=16, tokens=None, epochs=1, **settings):
        class Timed(Line):
            tokens_per_sample = tokens

            def training_step(self, batch, batch_idx):
                clock.now += step
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch, batch_idx):
                clock.now += validation

            def on_train_epoch_end(self):
                clock.now += between

        speed = Throughput()
        trainer = quiet_trainer(logger=[rows], callbacks=[speed], max_epochs=epochs, **settings)
        train = loader(trainer, Slow(size, sample, clock), 4, train=True)
        trainer.fit(Timed(), train, loader(trainer, Slow(8, 0, clock), 4, train=False) if validation else None)
        return speed

    return run


def test_a_slow_data_set_is_waiting_time(fit, rows):
    """A second per batch of waiting and one of training are half the time waited and two samples a second."""
    fit(sample=0.25, step=1.0)
    assert rows.curve("perf/data_wait") == pytest.approx(dict.fromkeys(range(4), 0.5))
    assert rows.curve("perf/step_time") == pytest.approx(dict.fromkeys(range(4), 2.0))
    assert rows.curve("perf/samples_per_sec") == pytest.approx(dict.fromkeys(range(4), 2.0))
    assert rows.curve("lr") == pytest.approx(dict.fromkeys(range(4), 0.1))


def test_the_learning_rate_is_the_one_that_the_step_used(fit, rows, monkeypatch):
    """`lr` at a step is the rate of that step and not of the next, so a one-cycle curve ends at its lowest."""
    used = []

    def configure(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def note(module, optimizer):
        used.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(Line, "configure_optimizers", configure)
    monkeypatch.setattr(Line, "on_before_optimizer_step", note)
    fit(step=1.0)
    curve = rows.curve("lr")
    assert curve == dict(enumerate(used))
    assert curve[3] == min(curve.values()) < 1e-5


def test_a_step_is_an_optimizer_step(fit, rows):
    """With accumulation 2, step_time is the time of both passes and the samples of both count."""
    fit(step=1.0, accumulate_grad_batches=2)
    assert rows.curve("perf/step_time") == pytest.approx({0: 2.0, 1: 2.0})
    assert rows.curve("perf/samples_per_sec") == pytest.approx({0: 4.0, 1: 4.0})


def test_values_come_once_per_log_interval(fit, rows):
    """With a log interval of 3 steps the values are means over 3 steps, at the last of them."""
    fit(step=1.0, size=28, log_every_n_steps=3)
    assert rows.curve("perf/step_time") == pytest.approx({2: 1.0, 5: 1.0})


def test_validation_is_no_training_time(fit, rows):
    """Validation and what is done between two epochs change no number, however long they take."""
    speed = fit(step=1.0, validation=1000.0, between=100.0, val_check_interval=2, epochs=2)
    assert rows.curve("perf/step_time") == pytest.approx(dict.fromkeys(range(8), 1.0))
    assert rows.curve("perf/data_wait") == pytest.approx(dict.fromkeys(range(8), 0.0))
    assert (speed.samples, speed.seconds) == pytest.approx((32, 8.0))


def test_a_last_smaller_batch_counts_what_it_has(fit, rows):
    """The last batch of 2 samples counts as 2."""
    fit(step=1.0, size=10)
    assert rows.curve("perf/samples_per_sec") == pytest.approx({0: 4.0, 1: 4.0, 2: 2.0})


def test_tokens_are_counted_for_modules_that_say_how_many(fit, rows):
    """tokens/s are samples/s times the module's tokens per sample, and are missing without."""
    fit(step=1.0, tokens=128)
    assert rows.curve("perf/tokens_per_sec") == pytest.approx(dict.fromkeys(range(4), 512.0))
    rows.rows.clear()
    fit(step=1.0)
    assert rows.curve("perf/tokens_per_sec") == {}


def test_a_cpu_has_no_mfu(fit, rows, monkeypatch):
    """Where the device's peak is unknown no MFU is made up."""
    monkeypatch.setattr(Line, "flops_per_sample", 1e9, raising=False)
    fit(step=1.0)
    assert rows.curve("perf/mfu") == {}


def test_data_bound_is_said_once_with_what_to_turn(fit, capsys):
    """Waiting for most of the time in two intervals in a row prints one note that names the keys."""
    fit(sample=1.0, step=1.0, size=32)
    said = capsys.readouterr().out
    assert said.count("note: data-bound: 80% of the time") == 1
    assert "0 workers per rank" in said
    assert "--data.num_workers" in said
    assert "--micro_batch_size" in said


@pytest.mark.parametrize("settings", [{"sample": 0.05, "step": 1.0}, {"sample": 1.0, "step": 1.0, "size": 4}])
def test_a_moment_of_waiting_is_not_worth_a_word(fit, capsys, settings):
    """A sixth of the time, or a single interval such as the one that starts the workers, prints no note."""
    fit(**settings)
    assert "data-bound" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_a_cards_peak_is_its_own(name, entry):
    """A card's peak is found by whole words of its name, so A10 is not A100; an unknown card or a slice has none."""
    assert peak_flops(name) == (PEAK_FLOPS[entry] if entry else None)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(3, 5), 3),
        ([torch.ones(4), torch.ones(7)], 4),
        ((torch.ones(2, 2), None), 2),
        ({"text": ["a", "b"], "ids": torch.ones(6, 1)}, 6),
        ({"pair": (torch.ones(5), torch.ones(5))}, 5),
        (torch.tensor(1.0), 1),
        ("text", 0),
        ([], 0),
    ],
)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch, count):
    """A batch of tensors, lists, tuples or dictionaries has as many samples as its first tensor has rows."""
    assert count_samples(batch) == count


def test_peak_memory_is_plausible():
    """The memory of a Python process with torch in it is between 50 MiB and a TiB, whatever unit the system has."""
    assert 0.05 < peak_memory(torch.device("cpu")) < 1024
