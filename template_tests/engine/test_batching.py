import multiprocessing
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from src.engine.data import loader as batching
from src.engine.data.loader import (
    GlobalBatchLoader,
    GlobalBatchSampler,
    epoch_seed,
    in_micro_batches,
    loader_workers,
    stop_workers,
)
from src.engine.errors import UserError
from src.engine.resolve.batch import BatchPlan, plan_batches
from tests.tiny import Line, loader, quiet_trainer

WORLDS = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("world_size", "given", "expected"),
    [
        (1, {"global_batch_size": 16}, BatchPlan(16, 1, 1)),
        (4, {"global_batch_size": 16}, BatchPlan(4, 1, 4)),
        (2, {"global_batch_size": 16, "micro_batch_size": 2}, BatchPlan(2, 4, 2)),
        (2, {"global_batch_size": 16, "accumulation": 4}, BatchPlan(2, 4, 2)),
        (2, {"global_batch_size": 16, "micro_batch_size": 2, "accumulation": 4}, BatchPlan(2, 4, 2)),
        (8, {"micro_batch_size": 3}, BatchPlan(3, 1, 8)),
        (8, {"micro_batch_size": 3, "accumulation": 2}, BatchPlan(3, 2, 8)),
        (8, {}, None),
        (8, {"accumulation": 2}, None),
    ],
)
def test_what_is_not_given_follows_from_what_is(world_size, given, expected):
    """The missing factors of the global batch are derived; without any batch size there is no plan."""
    assert plan_batches(world_size, **given) == expected


@pytest.mark.parametrize("world_size", [1, 2, 4, 16])
def test_the_global_batch_is_the_same_on_every_world(world_size):
    """The plan multiplies back to exactly the global batch that was asked for, on 1 device and on 16."""
    plan = plan_batches(world_size, 64, 2)
    assert plan is not None
    assert plan.global_batch_size == 64
    assert str(plan).startswith(f"64 = 2 micro × {32 // world_size} accumulation × {world_size} device")


@pytest.mark.parametrize(
    ("world_size", "given", "fits"),
    [
        (4, {"global_batch_size": 30}, "--global_batch_size 28 or 32"),
        (4, {"global_batch_size": 3}, "--global_batch_size 4"),
        (2, {"global_batch_size": 10, "accumulation": 3}, "--global_batch_size 6 or 12"),
        (2, {"global_batch_size": 12, "micro_batch_size": 4}, "--global_batch_size 8 or 16"),
        (2, {"global_batch_size": 12, "micro_batch_size": 4}, "--micro_batch_size from 1, 2, 3, 6"),
    ],
)
def test_a_remainder_is_refused_with_sizes_that_fit(world_size, given, fits):
    """A global batch that leaves a remainder is refused, and each size that the text offers is accepted."""
    with pytest.raises(UserError, match=fits.replace(".", r"\.")):
        plan_batches(world_size, **given)
    option, _, numbers = fits.removeprefix("--").partition(" ")
    for number in numbers.replace("from", "").replace("or", ",").split(","):
        assert plan_batches(world_size, **given | {option: int(number)}) is not None


def test_three_numbers_that_contradict_each_other_are_refused():
    """A given accumulation that does not fit is refused with the global batch that it would mean."""
    with pytest.raises(UserError, match="--global_batch_size 24"):
        plan_batches(2, 16, 4, accumulation=3)


@pytest.mark.parametrize("name", ["global_batch_size", "micro_batch_size", "accumulation"])
def test_zero_is_no_batch(name):
    """Zero is refused by name instead of dividing by it."""
    with pytest.raises(UserError, match=f"{name.replace('accumulation', 'accumulate_grad_batches')} is 0"):
        plan_batches(2, **{"global_batch_size": 16} | {name: 0})


@pytest.mark.parametrize("name", batching.COUNTED)
def test_counts_of_batches_mean_global_ones(name):
    """A count of batches is multiplied with the accumulation; fractions, zero and what is not given stay."""
    assert in_micro_batches({name: 5, "max_steps": 7}, 4) == {name: 20}
    for other in (0.5, 1.0, 0, None):
        assert in_micro_batches({name: other}, 4) == {}


def samplers(world_size: int, size: int, micro: int, *, train: bool = True) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(size, micro, train=train, seed=7, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def counted(sampler: GlobalBatchSampler) -> list[list[int]]:
    """The samples that count, without fillers."""
    return [batch[: sampler.samples(index)] for index, batch in enumerate(sampler)]


def steps(world_size: int, micro: int, epoch: int = 0) -> list[set[int]]:
    """The samples of each optimizer step of an epoch of 100 samples in global batches of 24."""
    ranks = samplers(world_size, 100, micro)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    batches = [counted(sampler) for sampler in ranks]
    accumulation = 24 // (micro * world_size)
    found: list[set[int]] = [set() for _ in range(0, len(batches[0]), accumulation)]
    for rank in batches:
        for index, batch in enumerate(rank):
            found[index // accumulation] |= set(batch)
    return found


@pytest.mark.parametrize(("world_size", "micro"), [(1, 6), (2, 12), (2, 3), (3, 8), (4, 6), (4, 1)])
def test_step_k_has_the_same_samples_however_they_are_spread(world_size, micro):
    """The samples of an optimizer step do not depend on devices, micro batch and accumulation."""
    assert steps(world_size, micro) == steps(1, 24)


def test_epochs_differ_and_come_again():
    """Another epoch has another order, and the same epoch has the same one."""
    assert steps(2, 3, epoch=0) != steps(2, 3, epoch=1)
    assert steps(2, 3, epoch=1) == steps(2, 3, epoch=1)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("size", [4, 13, 24, 25])
def test_every_sample_counts_once_per_epoch(size, world_size, train):
    """Over all ranks an epoch has each sample exactly once, also where the size divides by nothing."""
    drawn = [i for sampler in samplers(world_size, size, 3, train=train) for batch in counted(sampler) for i in batch]
    assert sorted(drawn) == list(range(size))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("size", [4, 13, 24, 25])
def test_all_ranks_train_on_the_same_number_of_batches(size, world_size):
    """In training no rank has a batch less or an empty one, else the others would wait for its gradients forever."""
    ranks = samplers(world_size, size, 3)
    assert len({len(sampler) for sampler in ranks}) == 1
    assert all(len(list(sampler)) == len(sampler) and all(sampler) for sampler in ranks)


@pytest.mark.parametrize("world_size", WORLDS)
def test_evaluation_repeats_no_sample_to_fill_a_batch(world_size):
    """In evaluation a rank without a sample in the last chunk has a batch less: its metrics count nothing twice."""
    ranks = samplers(world_size, 13, 3, train=False)
    assert sum(len(batch) for sampler in ranks for batch in sampler) == 13
    assert all(len(list(sampler)) == len(sampler) for sampler in ranks)


@pytest.mark.parametrize(("world_size", "micro"), [(1, 24), (1, 6), (2, 3), (3, 4), (4, 1)])
@pytest.mark.parametrize("size", [24, 100, 73, 25])
def test_the_weights_make_each_step_the_mean_over_its_samples(size, world_size, micro):
    """Mean loss × weight, divided by accumulation and averaged over ranks, is the mean over the step's samples."""
    value = torch.rand(size, dtype=torch.float64)
    accumulation = 24 // (micro * world_size)
    ranks = samplers(world_size, size, micro)
    batches = [list(sampler) for sampler in ranks]
    order = list(GlobalBatchSampler(size, 24, train=True, seed=7))
    for step, samples in enumerate(order):
        mean = 0.0
        for sampler, mine in zip(ranks, batches, strict=True):
            for index in range(step * accumulation, min((step + 1) * accumulation, len(mine))):
                mean += value[mine[index]].mean() * sampler.weight(index, accumulation) / accumulation / world_size
        assert mean == pytest.approx(value[samples].mean())


def test_fewer_samples_than_devices_are_refused():
    """A data set that leaves a device without any sample is refused."""
    with pytest.raises(UserError, match="3 samples cannot be shared by 4 devices"):
        GlobalBatchSampler(3, 1, train=True, world_size=4)


def test_neighbouring_seeds_and_epochs_have_seeds_of_their_own():
    """Seed 1 in epoch 0 is not seed 0 in epoch 1, and every result is one that a torch generator takes."""
    seeds = {epoch_seed(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_lightning_gives_the_loader_each_epoch():
    """A real Trainer draws every sample once per epoch, in another order each time, and keeps this loader as it is."""
    seen = []

    class Watching(Line):
        def training_step(self, batch, batch_idx):
            seen.append((self.current_epoch, batch.flatten().tolist()))
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(Watching(), loader(trainer, torch.arange(10.0)[:, None], 4, train=True))
    epochs = [[batch for number, batch in seen if number == epoch] for epoch in (0, 1)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 2]
    assert all(sorted(i for batch in batches for i in batch) == list(range(10)) for batches in epochs)
    assert epochs[0] != epochs[1]


def test_loaders_leave_the_global_random_numbers_alone():
    """Drawing batches takes nothing from torch's global generator, so dropout does not depend on the loader."""
    data = TensorDataset(torch.arange(10))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert len(list(GlobalBatchLoader(data, 4, train=True))) == 3
    assert torch.equal(before, torch.get_rng_state())


def test_the_seed_of_the_run_chooses_the_order(monkeypatch):
    """The order follows the seed that the command line set."""
    orders = []
    for seed in ("1", "2", "1"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        (batch,) = GlobalBatchLoader(TensorDataset(torch.arange(32)), 32, train=True)
        orders.append(batch[0].tolist())
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(
    ("cpus", "local_ranks", "on_cpu", "expected"),
    [(16, 1, False, 8), (16, 4, False, 3), (4, 4, False, 0), (2, 4, False, 0), (16, 1, True, 0)],
)
def test_workers_follow_from_the_share_of_cpus(monkeypatch, capsys, cpus, local_ranks, on_cpu, expected):
    """By default a rank takes its share of the CPUs less one, at most 8, and none when it trains on the CPU."""
    monkeypatch.setattr(batching, "usable_cpus", lambda: cpus)
    assert loader_workers(None, local_ranks, on_cpu) == expected
    assert capsys.readouterr().out == ""


def test_too_many_workers_are_kept_with_a_warning(monkeypatch, capsys):
    """What is asked for is done, and a line says what would fit when it is more than there are CPUs."""
    monkeypatch.setattr(batching, "usable_cpus", lambda: 8)
    assert loader_workers(6, 2, on_cpu=False) == 6
    assert "--data.num_workers 3" in capsys.readouterr().out
    assert loader_workers(4, 2, on_cpu=False) == 4
    assert capsys.readouterr().out == ""


def one(loader):
    return loader


def several(loader):
    return [loader, None]


def named(loader):
    return {"a": loader, "b": [loader]}


@pytest.mark.parametrize("batches", [1, 5])
@pytest.mark.parametrize("arranged", [one, several, named])
def test_stopped_workers_are_gone(arranged, batches):
    """Worker processes, of a loader in a list or dictionary too, end at once, whether or not all batches were taken."""
    data = GlobalBatchLoader(TensorDataset(torch.arange(10)), 2, train=True, num_workers=1)
    before = set(multiprocessing.active_children())
    iterator = iter(data)
    assert len([next(iterator) for _ in range(batches)]) == batches
    (worker,) = set(multiprocessing.active_children()) - before
    stop_workers(arranged(data))
    assert not worker.is_alive()
    assert len(list(data)) == 5


def test_loaders_without_workers_have_none_to_stop():
    """A loader without workers, one that was never used, and no loader at all are fine, and can be used after."""
    data = TensorDataset(torch.arange(10))
    used, plain = GlobalBatchLoader(data, 2, train=True, num_workers=0), DataLoader(data, 2)
    fresh = GlobalBatchLoader(data, 2, train=True, num_workers=1)
    assert len(list(used)) == len(list(plain)) == 5
    stop_workers([used, {"plain": plain, "fresh": fresh}, None])
    assert len(list(used)) == len(list(plain)) == 5


@pytest.mark.parametrize(("device", "workers"), [("cuda", 2), ("cuda", 0), ("cpu", 2), ("cpu", 0)])
def test_memory_is_pinned_for_a_gpu_and_workers_stay(device: str, workers: int) -> None:
    """Pages are pinned by default where a GPU copies from them, and workers outlast an epoch where there are any."""
    trainer: Any = SimpleNamespace(
        global_rank=0, world_size=1, num_devices=1, strategy=SimpleNamespace(root_device=torch.device(device))
    )
    made = GlobalBatchLoader(cast(Dataset, torch.zeros(4)), 2, trainer, train=True, num_workers=workers).loader
    assert (made.pin_memory, made.persistent_workers) == (device == "cuda", workers > 0)
