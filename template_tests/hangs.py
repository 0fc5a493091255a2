"""A task of which one rank gets stuck in a chosen step, in a chosen way."""

import os
import signal
import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

from src.engine.data.loader import GlobalBatchLoader
from src.engine.rank_zero import rank_zero_work
from src.engine.watchdog import callback as watchdog
from src.engine.watchdog.callback import PULSE
from tests.small_task import SmallData, SmallModule
from tests.tiny import loader


class Hangs(SmallModule):
    """SmallModule that gets stuck after `after` steps on one rank, in one of these ways.

    sleep: its training_step never returns; collective: it waits for the others in a collective that they skip;
    stop: SIGSTOP to its own process; kill: SIGKILL, while rank 0 sleeps; alone: not at all, rank 0 works for 18 s;
    evaluation: the step of an evaluation never returns on its second batch.

    Every `pulse` seconds the ranks give a sign of life, and rank 0 writes the heartbeat as often.
    """

    def __init__(self, way: str = "", after: int = 3, rank: int = 1, pulse: float = PULSE, **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        watchdog.PULSE = watchdog.HEARTBEAT_SECONDS = pulse
        self.way, self.after, self.rank, self.evaluated = way, after, rank, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self.after and self.way == "alone":
            with rank_zero_work(self.trainer, "some work") as mine:
                time.sleep(18 if mine else 0)
        elif self.global_step == self.after and (self.way == "kill" or self.global_rank == self.rank):
            self.get_stuck()
        return super().training_step(batch, batch_idx)

    def evaluate(self, batch: Tensor, split: str) -> None:
        if self.way == "evaluation" and self.global_rank == self.rank and self.evaluated == 1:
            self.get_stuck()
        self.evaluated += 1
        super().evaluate(batch, split)

    def get_stuck(self) -> None:
        if self.way == "collective":
            torch.distributed.barrier()
        elif self.way == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.way == "kill" and self.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.way in ("sleep", "kill", "evaluation"):
            time.sleep(1000)


class Stalls(Dataset[Tensor]):
    """Texts of which one is never there."""

    def __init__(self, texts: Tensor, at: int) -> None:
        self.texts, self.at = texts, at

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        if index == self.at:
            time.sleep(1000)
        return self.texts[index]


class StallingData(SmallData):
    """SmallData whose training sample `at` never comes where it is one of this rank's."""

    def __init__(self, at: int = 100, rank: int = 0, batch_size: int = 4, num_workers: int = 0) -> None:
        super().__init__(512, 30, batch_size, num_workers)
        self.at, self.rank = at, rank

    def train_dataloader(self) -> GlobalBatchLoader:
        mine = self.trainer is not None and self.trainer.global_rank == self.rank
        data = Stalls(self.samples(self.size, 0), self.at if mine else -1)
        return loader(self.trainer, data, self.batch_size, train=True, num_workers=self.num_workers)
