"""A user's own script: a Trainer under this project's strategies, without its command.

python -m template_tests.distributed.own_trainer FOLDER
"""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from src.strategies import DDP, FSDP, gather_objects
from tests.tiny import Line

ROWS = torch.arange(1.0, 17.0)[:, None] / 16  # one batch: Lightning shuffles what ranks share
SETTINGS: dict[str, Any] = {
    **{"accelerator": "cpu", "max_epochs": 8, "gradient_clip_val": 0.5, "num_sanity_val_steps": 0},
    **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
}


def main(folder: Path) -> None:
    """Train with two processes by name, and with strategy objects; then what ranks can tell each other."""
    atexit.register(left, folder)  # the first that is registered is called last
    for name, strategy in (("by_name", "fsdp_full_shard"), ("ddp", DDP()), ("fsdp", FSDP(ranks_per_shard=2))):
        trainer, module = Trainer(strategy=strategy, devices=2, **SETTINGS), Line()
        trainer.fit(module, DataLoader(ROWS, 8))  # type: ignore[arg-type]
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    rank = trainer.global_rank
    # As on GPUs, a group of which Lightning does not see that numbers in the host's memory travel over gloo.
    group = torch.distributed.new_group(backend="cpu:gloo")
    told = {
        "gathered": gather_objects({"rank": rank, "rows": [torch.full((1 + rank,), float(rank))]}),
        "means": [trainer.strategy.reduce(torch.tensor(x), group, "mean").item() for x in (float(rank), rank)],
        "total": trainer.strategy.reduce(torch.tensor(rank + 1), group, "sum").item(),
    }
    torch.save(told, folder / f"told-{rank}.pt")


def left(folder: Path) -> None:
    """Whether a process group is left to the interpreter's exit."""
    (folder / f"left-{os.environ.get('LOCAL_RANK')}").write_text(str(torch.distributed.is_initialized()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
