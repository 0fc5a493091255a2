"""Load data by global batch: step k trains on the same samples on 1, 2, 4 or 16 devices."""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Dataset, Sampler

from src.engine.cpus import usable_cpus
from src.engine.data.seeding import SeededSamples, epoch_seed
from src.engine.errors import UserError

WORKER_CAP = 8  # per rank; more have not helped a loader that 8 could not feed
# Settings of the Trainer that count batches: Lightning means micro batches, a configuration means global ones.
COUNTED = (
    "val_check_interval",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
)


def in_micro_batches(settings: Mapping[str, Any], accumulation: int) -> dict[str, int]:
    """Return the Trainer's counts of batches (integers; fractions stay) times the accumulation.

    So "validate every 100 batches, on 50" is every 100 optimizer steps on 50 × global_batch_size samples everywhere.
    """
    counts = {name: settings.get(name) for name in COUNTED}
    return {name: count * accumulation for name, count in counts.items() if isinstance(count, int) and count > 0}


class GlobalBatchSampler(Sampler[list[int]]):
    """This rank's part of every micro step; the order is a function of (seed, epoch) and of nothing else.

    The order of the whole data set is cut into chunks of `micro_batch_size × world_size`; each chunk is split over the
    ranks. A global batch is `accumulation` chunks in a row, so its samples do not depend on how it is spread. The last
    chunk of an epoch may be smaller and is split as evenly as possible. Every sample is drawn exactly once per epoch.

    Ranks of a training loader always get the same number of batches, because gradients are reduced in each of them: a
    rank without a sample of its own in the last chunk repeats one with share 0 (see `weight`). In evaluation such a
    rank simply gets one batch less, so that nothing is counted twice.
    """

    def __init__(
        self, size: int, micro_batch_size: int, *, train: bool, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if size < world_size:
            raise UserError(f"a data set of {size} samples cannot be shared by {world_size} devices")
        self.size, self.micro_batch_size, self.train, self.seed = size, micro_batch_size, train, seed
        self.rank, self.world_size, self.epoch = rank, world_size, 0
        self.shuffle = train
        self.start = 0  # the first chunk of the next iteration, after a resume in the middle of an epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order; Lightning calls this before each epoch."""
        self.epoch = epoch

    @property
    def chunk(self) -> int:
        """Return the samples that all ranks together take in one micro step."""
        return self.micro_batch_size * self.world_size

    def _chunk_size(self, index: int) -> int:
        return min(self.chunk, self.size - index * self.chunk)

    def _bounds(self, index: int, rank: int) -> tuple[int, int]:
        """Return a rank's part of chunk `index`, as positions inside the chunk."""
        size = self._chunk_size(index)
        return size * rank // self.world_size, size * (rank + 1) // self.world_size

    def samples(self, batch_idx: int) -> int:
        """Return how many samples of this rank's batch count: 0 for filler."""
        start, stop = self._bounds(batch_idx, self.rank)
        return stop - start

    def weight(self, batch_idx: int, accumulation: int) -> float:
        """Return the factor for this rank's mean loss that makes the step's gradient the mean over its samples.

        Lightning divides each loss by `accumulation` and averages gradients over ranks, which is right for full global
        batches (weight 1) and wrong for an epoch's last, smaller one.
        """
        batch_idx %= len(self)  # a CombinedLoader repeats this one beside a longer loader
        first = batch_idx // accumulation * accumulation * self.chunk
        global_batch = min(accumulation * self.chunk, self.size - first)
        return self.samples(batch_idx) * self.world_size * accumulation / global_batch

    def __len__(self) -> int:
        chunks = math.ceil(self.size / self.chunk)
        return chunks if self.train or self.samples(chunks - 1) else chunks - 1

    def __iter__(self) -> Iterator[list[int]]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
            order = torch.randperm(self.size, generator=generator)
        else:
            order = torch.arange(self.size)
        first_index, self.start = self.start, 0
        for index in range(first_index, len(self)):
            start, stop = self._bounds(index, self.rank)
            first = index * self.chunk
            # An empty share repeats a sample of the chunk as filler; its weight is 0.
            yield order[first + start : first + max(stop, start + 1)].tolist()


class _WithEpoch:
    """The sampler's batches as (epoch, index) pairs."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.sampler.epoch
        return ([(epoch, index) for index in batch] for batch in self.sampler)


class GlobalBatchLoader:
    """A map-style data set in global batches, this rank's part of each.

    Use it in a `LightningDataModule` (`batch_size` is the micro batch that the command line sets):

        def train_dataloader(self):
            return GlobalBatchLoader(self.train_set, self.batch_size, self.trainer, train=True)

    It wraps a `DataLoader` instead of being one: Lightning re-creates DataLoaders with a `DistributedSampler`, which
    pads with repeated samples, and leaves every other iterable as it is.
    """

    batch_sampler = None  # Lightning looks for one beside `sampler`, which alone matters here

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        trainer: Trainer | None = None,
        *,
        train: bool,
        num_workers: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        on_cpu = trainer is None or trainer.strategy.root_device.type == "cpu"
        local_ranks = trainer.num_devices if trainer else 1
        workers = loader_workers(num_workers, local_ranks, on_cpu)
        # Lightning's seed_everything leaves the seed here for every process of the run.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        size = len(cast(Sized, dataset))
        self.sampler = GlobalBatchSampler(
            size, micro_batch_size, train=train, seed=seed, rank=rank, world_size=world_size
        )
        self.sampler.shuffle = train and not getattr(trainer, "overfit_batches", 0)  # overfit on the same batches
        self._done, self._done_in = 0, -1  # batches drawn, and the epoch that they belong to
        self._resumed: int | None = None  # the epoch that a checkpoint was in
        # A generator of its own: iterators draw worker seeds from it and never from the global RNG.
        self._generator = torch.Generator()
        # Augmentation is for training; evaluation has nothing to draw.
        self.loader = DataLoader(
            SeededSamples(dataset, seed) if train else dataset,
            batch_sampler=_WithEpoch(self.sampler) if train else self.sampler,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=not on_cpu,
            persistent_workers=workers > 0,
            generator=self._generator,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # A generator: Lightning calls iter() of a resumed epoch before set_epoch, and workers would fetch at once.
        self._generator.manual_seed(epoch_seed(self.sampler.seed, self.sampler.epoch))
        if self._resumed not in (None, self.sampler.epoch):  # its epoch was over, cut short by limit_train_batches
            self.sampler.start = 0
        self._resumed, self._done, self._done_in = None, self.sampler.start, self.sampler.epoch
        for batch in self.loader:
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, in samples of all ranks; Lightning keeps it in the checkpoint."""
        done = self._done if self._done_in == self.sampler.epoch else 0
        samples = min(done * self.sampler.chunk, self.sampler.size)
        return {"epoch": self.sampler.epoch, "samples": samples, "size": self.sampler.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from that position, if its epoch is not over."""
        before, samples = state.get("size", self.sampler.size), state["samples"]
        if samples > self.sampler.size:
            raise UserError(
                f"the data set has {self.sampler.size} samples, and the checkpoint is at sample {samples} of {before}: "
                "restore the data set, or start another run (--fresh)"
            )
        if before != self.sampler.size:
            rank_zero_only(print)(
                f"note: the data set had {before} samples and has {self.sampler.size} now: samples of this epoch may "
                "be repeated or left out"
            )
            samples = 0 if samples == before else samples  # that epoch was over
        self._resumed = self._done_in = state["epoch"]
        self._done = math.ceil(samples / self.sampler.chunk)  # a state that is saved before the first batch is the same
        self.sampler.start = samples % self.sampler.size // self.sampler.chunk


def training_loaders(trainer: Trainer) -> list[Any]:
    """Return all loaders that training draws from; a CombinedLoader, a list or a dictionary has several."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def stop_workers(loaders: Any) -> None:
    """End the worker processes of `loaders` (one, a list or a dictionary of loaders) now.

    For persistent workers with pinned memory PyTorch's exit handler waits 5 seconds for each worker without telling it
    to stop: a finished job with 16 workers was still there 20 s later.
    """
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            stop_workers(loader)
        return
    loader = getattr(loaders, "loader", loaders)
    if (iterator := getattr(loader, "_iterator", None)) is not None:
        iterator._shutdown_workers()
        loader._iterator = None


def loader_workers(requested: int | None, local_ranks: int, on_cpu: bool) -> int:
    """Return the loader processes per rank: as asked, else this rank's share of the CPUs less one for training itself.

    Training on the CPU needs the cores itself, so the default is none there.
    """
    share = usable_cpus() // max(local_ranks, 1)
    if requested is not None and requested < 0:
        raise UserError(f"num_workers is {requested}; it is a number of processes, 0 for none")
    if requested is None:
        return 0 if on_cpu else max(0, min(WORKER_CAP, share - 1))
    if requested > share:
        _say_too_many_workers(requested, share, local_ranks)
    return requested


@functools.cache  # once, not once per loader
def _say_too_many_workers(requested: int, share: int, local_ranks: int) -> None:
    rank_zero_only(print)(
        f"warning: num_workers {requested} per rank, but {local_ranks} local rank(s) share {usable_cpus()} CPUs: "
        f"the loaders will fight for them; use --data.num_workers {max(share - 1, 0)}"
    )
