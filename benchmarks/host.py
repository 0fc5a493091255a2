"""Measure a step's Python: what the command takes for one beside a bare loop, where the model's own work is small.

    python benchmarks/host.py
    python benchmarks/host.py --only fsdp_full_shard --rounds 5

One process on a CPU, a GPT of 24 blocks and 16 channels (292 parameters), fp32, fused AdamW, clipping by norm, no
workers; medians over intervals of ten steps, and of these the round in the middle. Where it is more than a GPU takes
for the step, the GPU waits for it. The loop clips by `torch.nn.utils.clip_grad_norm_`, as everybody's does.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from src.models.gpt import GPT  # noqa: E402

CONTEXT, STEPS, WARM, INTERVAL, CLIP = 16, 120, 20, 10, 1.0
STRATEGIES = ("ddp", "fsdp_shard_grad_op", "fsdp_full_shard")


class Deep(LightningModule):
    """Many small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(256, 16, 24, 2, CONTEXT)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0].long()
        return self.model.loss(self.model.features(tokens[:, :-1]), tokens[:, 1:])

    forward = training_step  # for the bare loop

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


class Bytes(LightningDataModule):
    """Rows of random bytes."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randint(0, 256, (STEPS, CONTEXT + 1), dtype=torch.uint8)))


def command(strategy: str) -> float:
    """Milliseconds per step of `python -m src.cli fit`."""
    options = {
        "--model": "benchmarks.host.Deep",
        "--data": "benchmarks.host.Bytes",
        "--trainer.accelerator": "cpu",
        "--trainer.devices": 1,
        "--trainer.precision": "32-true",
        "--trainer.strategy": strategy,
        "--trainer.gradient_clip_val": CLIP,
        "--trainer.max_steps": STEPS,
        "--trainer.log_every_n_steps": INTERVAL,
        "--run": "host",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(part) for pair in options.items() for part in pair]
        done = subprocess.run(
            [sys.executable, "-m", "src.cli", "fit", *arguments],
            cwd=ROOT,
            env=os.environ | {"RUN_ROOT": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit((done.stdout + done.stderr)[-1500:])
        with (Path(folder) / "host" / "metrics.csv").open() as file:
            return 1000 * median(
                float(row["perf/step_time"]) for row in csv.DictReader(file) if int(row["step"]) >= WARM
            )


def bare(strategy: str) -> None:
    """Print the milliseconds per step of the loop that everybody writes."""
    torch.set_num_threads(1)
    module: torch.nn.Module = Deep()
    if strategy != "ddp":  # which the command leaves out for one process, too
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        for block in module.model.blocks:
            fully_shard(block, reshard_after_forward=strategy == "fsdp_full_shard")
        fully_shard(module, reshard_after_forward=False)
    optimizer, times, start = module.configure_optimizers(), [], time.perf_counter()
    for index, batch in enumerate(Bytes().train_dataloader()):
        if index >= WARM and index % INTERVAL == 0:
            now = time.perf_counter()
            times.append(1000 * (now - start) / INTERVAL)
            start = now
        elif index == WARM - INTERVAL:
            start = time.perf_counter()
        module(batch, index).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(median(times), flush=True)


def main() -> None:
    """Print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.bare)
        return
    print(f"torch {torch.__version__}\nstrategy | the command, ms a step | bare loop | ratio", flush=True)
    for strategy in arguments.only:
        pairs = []
        for _ in range(arguments.rounds):
            loop = subprocess.run(
                [sys.executable, __file__, "--bare", strategy], check=True, stdout=subprocess.PIPE, text=True
            )
            pairs.append((command(strategy), float(loop.stdout)))
        pairs.sort(key=lambda pair: pair[0] / pair[1])
        least, middle, most = (ours / theirs for ours, theirs in (pairs[0], pairs[len(pairs) // 2], pairs[-1]))
        ours, theirs = pairs[len(pairs) // 2]
        print(f"{strategy} | {ours:.1f} | {theirs:.1f} | {middle:.2f} ({least:.2f} to {most:.2f})", flush=True)


if __name__ == "__main__":
    main()
