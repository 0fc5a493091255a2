"""Runs of small checkpoint files, whole and damaged, and what `python -m src.checkpoint` says of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from src.checkpoint.__main__ import main

SCORE = "SaveBest{'monitor': 'val/loss'}"


def saved(path: Path, step: int, score: float | None = None, fill: float = 1.0) -> Path:
    """A checkpoint file with a few of the keys that training writes, large enough to be damaged in the middle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    callbacks = {} if score is None else {SCORE: {"monitor": "val/loss", "best_model_score": torch.tensor(score)}}
    weights = {"model.weight": torch.full((4096,), fill)}
    torch.save({"global_step": step, "epoch": step // 10, "state_dict": weights, "callbacks": callbacks}, path)
    return path


def a_run(root: Path, name: str, *steps: int, **summary: Any) -> Path:
    """A run directory as training leaves it, with a checkpoint of each of `steps`."""
    run = root / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("model: {}\n")
    for step in steps:
        saved(run / f"checkpoints/step={step:08d}.ckpt", step)
    if summary:
        (run / "summary.json").write_text(json.dumps(summary))
    return run


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def zeroed(path: Path) -> Path:
    """4 KB of zeros in the middle, as a disk may lose a page."""
    with path.open("rb+") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(4096))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command prints to stdout; to stderr it says nothing, or for other codes than 0 and 1 one line."""
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    if code in (0, 1):
        assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command says to bad input."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""
    return err


def steps(listed: str) -> list[str]:
    """The first column of the table."""
    return [line.split()[0] for line in listed.splitlines()[1:]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
