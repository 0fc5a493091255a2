"""Starting the real command as a user would, on a task small enough for a test, and reading what it leaves."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from src.cli import main

ROOT = Path(__file__).resolve().parent.parent
CPU = ["--config", "configs/cpu.yaml"]
TWO = ["--config", "configs/cpu_n1_proc2.yaml"]
BORING = ["--model", "lightning.pytorch.demos.boring_classes.BoringModel"]
TASK = [
    *("--model", "tests.small_task.SmallModule", "--data", "tests.small_task.SmallData"),
    *("--global_batch_size", "8", "--checkpoint.monitor", "val/accuracy", "--checkpoint.mode", "max"),
]
# Four steps with two validations, of any task.
STEPS = [
    *("--trainer.max_steps", "4", "--trainer.limit_val_batches", "2", "--trainer.val_check_interval", "2"),
    *("--trainer.log_every_n_steps", "1", "--trainer.num_sanity_val_steps", "0"),
    *("--trainer.gradient_clip_val", "1.0"),
]
SMALL = [*TASK, *STEPS]
# What a surrounding job or launcher would hand down.
LAUNCHERS = (
    "SLURM_",
    "TORCHELASTIC_",
    "MASTER_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "NODE_RANK",
    "LIGHTNING_RUN",
    "STOP",
)


def environment(run_root: Path, **more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, with `run_root` and one thread per process."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    return clean | {"RUN_ROOT": str(run_root), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


def train(
    run_root: Path, *arguments: str, launcher: tuple[str, ...] = (), check: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    """`python -m src.cli …` (or `python <launcher> src.cli …`) in the project's folder."""
    start = [sys.executable, *(launcher or ("-m",)), "src.cli", *arguments]
    done = subprocess.run(
        start, cwd=ROOT, env=environment(run_root, **more), capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def fit(run_root: Path, name: str, *arguments: str) -> Path:
    """Train on one CPU in this process, which stands in the project's folder; returns the run directory."""
    assert main(["fit", *CPU, *arguments, "--run", name]) == 0
    return run_root / name


def rows(run: Path) -> list[dict[str, str]]:
    """metrics.csv of a run directory."""
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run: Path) -> list[float]:
    """The train/loss column."""
    return [float(row["train/loss"]) for row in rows(run) if row["train/loss"]]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint's weights."""
    newest = sorted(run.glob("checkpoints/step=*.ckpt"))[-1]
    return torch.load(newest, weights_only=True, map_location="cpu")["state_dict"]


def cut_back(run: Path, step: int, run_root: Path) -> Path:
    """A copy of a finished run as a kill would have left it after the save of `step` steps (keep all checkpoints)."""
    copy = run_root / run.name
    shutil.copytree(run, copy)
    (copy / "DONE").unlink()
    for path in copy.glob("checkpoints/*.ckpt"):
        if int(path.stem.rsplit("=", 1)[1]) > step:
            path.unlink()
    return copy


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def only_run(run_root: Path) -> Path:
    """The one run directory in `run_root`."""
    (run,) = run_root.iterdir()
    return run
