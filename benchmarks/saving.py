"""Measure how long training stands still for a save: behind training (asynchronous) against in front of it.

    python benchmarks/saving.py --sizes 124M 1.3B

Each mode trains the same GPT on one GPU in bf16-mixed with AdamW, in turn, and saves three times; a step of it is
waited for, so that the time of a save is the step's time less the median of the quiet steps.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import lightning
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from src.engine.checkpoint.save import SaveNewest  # noqa: E402
from src.engine.checkpoint.schedule import CheckpointSettings  # noqa: E402
from src.engine.checkpoint.write import WholeFiles  # noqa: E402
from src.models.gpt import GPT  # noqa: E402

CONTEXT, WARM = 1024, 10
# width, depth, heads, samples per step, steps between saves behind training (a write must end before the next save)
SIZES = {"124M": (768, 12, 12, 16, 120), "1.3B": (2048, 24, 16, 4, 420)}


class Tokens(Dataset):
    """Random tokens, as many as asked."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 50304, (CONTEXT + 1,))


class Module(LightningModule):
    """The GPT alone."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.model = GPT(50304, width, depth, heads, CONTEXT)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model.loss(self.model.features(batch[:, :-1]), batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)


class Saver(SaveNewest):
    """Saves at its steps and not at the end."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.checkpoint_io.wait()


class Clock(Callback):
    """Seconds of each step, and of each write."""

    def __init__(self, files: WholeFiles) -> None:
        self.files, self.seconds, self.busy = files, [], []

    def on_train_batch_end(self, *args: object) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now)
        pending = self.files._pending
        self.busy.append(pending is not None and not pending.done())


def measure(size: str, asynchronous: bool) -> dict[str, object]:
    """Train once; return seconds."""
    width, depth, heads, samples, every = SIZES[size]
    every = every if asynchronous else 30
    torch.manual_seed(0)
    files = WholeFiles()
    clock = Clock(files)
    with tempfile.TemporaryDirectory() as folder:
        settings = CheckpointSettings(every_n_steps=every, every_n_minutes=None, keep=1, asynchronous=asynchronous)
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=3 * every + every // 2,
            plugins=[files],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.callbacks += [Saver(Path(folder), settings), clock]
        module = Module(width, depth, heads)
        loader = DataLoader(Tokens(), samples, num_workers=4, pin_memory=True)
        trainer.fit(module, loader)
        (path,) = Path(folder).glob("step=*.ckpt")
        gib = path.stat().st_size / 2**30
    gaps = [later - earlier for earlier, later in zip(clock.seconds, clock.seconds[1:], strict=False)]
    saves = [every * number - 1 for number in (1, 2, 3)]  # the gap between the steps `every` and `every + 1`
    others = [index for index in range(WARM, len(gaps)) if index not in saves]
    quiet = median(gaps[index] for index in others if not clock.busy[index])
    busy = [gaps[index] for index in others if clock.busy[index] and clock.busy[index + 1]]
    return {
        "size": size,
        "mode": "asynchronous" if asynchronous else "synchronous",
        "gib": round(gib, 2),
        "stall_first": round(gaps[saves[0]] - quiet, 3),
        "stalls_later": [round(gaps[index] - quiet, 3) for index in saves[1:]],
        "step": round(quiet, 4),
        "step_while_writing": round(median(busy), 4) if busy else None,
        "write_seconds": round(sum(gaps[index] for index in others if clock.busy[index]) / 3, 2),
    }


def main() -> None:
    """Both modes of each size, and the ratio of their later stalls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    for size in parser.parse_args().sizes:
        rows = [measure(size, asynchronous) for asynchronous in (False, True)]
        ratio = median(rows[1]["stalls_later"]) / median(rows[0]["stalls_later"])
        for row in rows:
            print(json.dumps(row), flush=True)
        print(json.dumps({"size": size, "asynchronous / synchronous": round(ratio, 4)}), flush=True)
    print(
        json.dumps(
            {"torch": torch.__version__, "lightning": lightning.__version__, "card": torch.cuda.get_device_name()}
        )
    )


if __name__ == "__main__":
    main()
