"""Measure what it costs that the ranks ask each other about signals and rank 0's clock, once in AGREE_SECONDS.

    torchrun --standalone --nproc-per-node=2 benchmarks/agreement.py

A GPT on the CPU of every process. Blocks of steps in which they ask at every step and in which they never do take
turns; the difference of their means is what a question costs, also by its waiting for the slower rank.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import mean, median, stdev

import lightning
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import src.strategies  # noqa: E402, F401
from src.engine.checkpoint.schedule import AGREE_SECONDS, CheckpointSettings, Schedule  # noqa: E402
from src.models.gpt import GPT  # noqa: E402

CONTEXT, BLOCK, PAIRS = 64, 20, 60


class Module(LightningModule):
    """The GPT alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(256, 128, 4, 4, CONTEXT)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model.loss(self.model.features(batch[:, :-1]), batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)


class Clock(Callback):
    """Asks in every other block of steps; seconds of each block."""

    def __init__(self) -> None:
        self.schedule = Schedule(CheckpointSettings(every_n_steps=10**9, every_n_minutes=None))
        self.blocks: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.schedule.begin(trainer)
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step // BLOCK % 2:
            self.schedule.ask(trainer, self.schedule._poll, trainer.global_step)
        if trainer.global_step % BLOCK == 0:
            now = time.perf_counter()
            self.blocks.append(now - self.began)
            self.began = now


def main() -> None:
    """Train once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock, world = Clock(), int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_steps=2 * BLOCK * (PAIRS + 1),
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(0, 256, (2 * BLOCK * (PAIRS + 1) * world, CONTEXT + 1))
    trainer.fit(Module(), DataLoader(tokens))  # type: ignore[arg-type]
    quiet, asking = clock.blocks[2::2], clock.blocks[3::2]  # without the first pair
    cost = [(more - less) / BLOCK for less, more in zip(quiet, asking, strict=True)]
    if trainer.is_global_zero:
        row = {
            "step_ms": round(1e3 * median(quiet) / BLOCK, 2),
            "question_us": round(1e6 * mean(cost)),
            "standard_error_us": round(1e6 * stdev(cost) / len(cost) ** 0.5),
            "share_of_time": f"{mean(cost) / AGREE_SECONDS:.4%}",
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        }
        print(json.dumps(row))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
