"""A signal in a validation: the state before it is saved, and the next start runs that validation."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from src.checkpoint.compare import differences, outcome
from src.cli import main
from src.engine import exit_codes, stopped
from src.engine.checkpoint.files import PENDING
from tests.commands import CPU, SMALL, fit, read_json, rows
from tests.small_task import SmallData

# Six steps in an epoch, validated after each second one in four batches; two epochs and a piece.
SIGNALLED = [
    *(*SMALL, "--model", "template_tests.signalled.Signalled", "--model.dropout", "0.3", "--data.size", "48"),
    *("--trainer.limit_val_batches", "4", "--trainer.max_steps", "14", "--trainer.log_every_n_steps", "2"),
]
WAYS = {
    "plain": [],
    "plateau": ["--model.plateau", "true"],
    "averaged": ["--trainer.callbacks+", "src.engine.callbacks.ema.EMA", "--trainer.callbacks.decay", "0.5"],
    "stopping early": [
        *(
            "--trainer.callbacks+",
            "lightning.pytorch.callbacks.EarlyStopping",
            "--trainer.callbacks.monitor",
            "val/own",
        ),
        *("--trainer.callbacks.patience", "7", "--trainer.callbacks.min_delta", "9"),
    ],
    "accumulating": ["--micro_batch_size", "2"],
    "by itself": ["--model", "template_tests.signalled.ByItself", "--trainer.gradient_clip_val", "null"],
    "without a length": [
        "--data",
        f"{__name__}.Unsized",
        "--data.val_size",
        "32",
        "--trainer.limit_val_batches",
        "1.0",
    ],
}


class Unsized(SmallData):
    """Validates on a stream."""

    def val_dataloader(self) -> Any:
        batches = super().val_dataloader()

        class Stream(IterableDataset):
            def __iter__(self) -> Iterator[Any]:
                yield from batches

        return DataLoader(Stream(), batch_size=None)


def signalled(folder: Path, *places: str) -> list[str]:
    """The options of a module that is signalled at these places."""
    return [*SIGNALLED, "--model.folder", str(folder), "--model.places", str(list(places))]


def judged(run: Path) -> tuple[list[str], list[Any]]:
    """The names of the best files, and what callbacks have counted in validations."""
    newest = sorted(run.glob("checkpoints/step=*.ckpt"))[-1]
    callbacks = torch.load(newest, weights_only=True, map_location="cpu")["callbacks"]
    counted = [
        state.get(name)
        for key, state in callbacks.items()
        if key.startswith(("EarlyStopping", "SaveBest"))
        for name in ("wait_count", "stopped_epoch", "best_score", "best_model_score")
    ]
    return [path.name for path in run.glob("checkpoints/best-*.ckpt")], counted


@pytest.mark.parametrize("way", WAYS)
def test_a_validation_that_a_signal_ended_is_run_by_the_next_start(way: str, run_root: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, at its end and after the last step: weights and rows as if no signal had come.

    So are the best state and what callbacks have counted: no validation counts twice.
    """
    whole = fit(run_root, "whole", *signalled(tmp_path), *WAYS[way])
    command = ["fit", *CPU, *signalled(tmp_path, "validate 4 1", "validate 6 2", "validate 14 0"), *WAYS[way]]
    for step in (4, 6, 14):
        assert main([*command, "--run", "cut"]) == exit_codes.STOPPED
        newest = sorted(run_root.glob("cut/checkpoints/step=*.ckpt"))[-1]
        content = torch.load(newest, weights_only=True, map_location="cpu")
        assert (content["global_step"], content[PENDING]) == (step, True)
        assert rows(run_root / "cut")[-1]["val/own"] == ""
    assert main([*command, "--run", "cut"]) == 0
    assert list(differences(outcome(run_root / "cut"), outcome(whole))) == []
    assert judged(run_root / "cut") == judged(whole)


def test_a_stopped_run_says_so(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout, in its summary, and in the marker that a batch script reads; the next start takes that away."""
    command = ["fit", *CPU, *signalled(tmp_path, "fit 3 0"), "--run", "told"]
    assert main(command) == exit_codes.STOPPED
    assert re.search(
        "stopped by SIGTERM at step 4(; val.*)?; continue with: python -m src.cli fit", capsys.readouterr().out
    )
    said = stopped.read(run_root / "told")
    assert said is not None
    assert (said["step"], said["signal"]) == (4, "SIGTERM")
    summary = read_json(run_root / "told/summary.json")
    assert summary["exit_reason"] == "stopped by SIGTERM"
    assert summary["last_checkpoint"].endswith("step=00000004.ckpt")
    assert main(command) == 0
    assert not (run_root / "told/STOPPED").exists()
