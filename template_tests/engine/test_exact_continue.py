"""The command after a kill: what it ends with is, to the last bit, what it would have ended with."""

import itertools
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.checkpoint.compare import differences, outcome
from src.cli import main
from src.engine.checkpoint import schedule
from src.engine.config import CONFIGS
from tests.commands import CPU, SMALL, TWO, cut_back, only_run, rows, train
from tests.small_task import SmallModule

# Five steps per epoch, three epochs; validation in the middle of each.
KEEP = ["--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99", "--model.dropout", "0.3", "--data.size", "40"]
RUN = [*SMALL, *KEEP, "--trainer.max_steps", "14", "--trainer.log_every_n_steps", "3", "--run", "killed"]


def test_one_process_ends_as_if_it_had_not_been_killed(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in an epoch, between a step and its validation's row, between epochs or after the last step: no change."""
    assert main(["fit", *CPU, *RUN]) == 0
    whole = outcome(only_run(run_root))
    for step in (3, 5, 12, 14):
        root = run_root.parent / f"again-{step}"
        copy = cut_back(run_root / "killed", step, root)
        monkeypatch.setenv("RUN_ROOT", str(root))
        assert main(["fit", *CPU, *RUN]) == 0
        assert list(differences(outcome(copy), whole)) == [], step
        assert events(copy) == events(run_root / "killed"), step  # of which the copy had those behind the step, too


@pytest.mark.parametrize("task", sorted(path.stem for path in (CONFIGS / "tasks").glob("*.yaml")))
def test_each_task_goes_on_exactly(task: str, run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own schedule, metrics and data, in the middle of an epoch: a schedule may ask for the loaders early.

    And to more steps than were asked for before: a schedule may have taken the length into its state.
    """
    keep = ["--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99", "--trainer.log_every_n_steps", "3"]
    short = ["--trainer.max_steps", "9", "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "4"]
    command = ["fit", *CPU, "--task", task, *keep, *short, "--run", "killed"]
    assert main(command) == 0
    copy = cut_back(run_root / "killed", 5, run_root.parent / "again")
    monkeypatch.setenv("RUN_ROOT", str(run_root.parent / "again"))
    assert main(command) == 0
    assert list(differences(outcome(copy), outcome(run_root / "killed"))) == []
    (copy / "DONE").unlink()
    assert main([*command, "--trainer.max_steps", "12"]) == 0
    assert outcome(copy)["global_step"] == 12


class TwoOptimizers(SmallModule):
    """SmallModule that optimizes by itself: its blocks in every second batch, the rest in each."""

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 + batch_idx % 2]:  # type: ignore[index]
            optimizer.step()
        self.log("train/own", loss)
        return loss

    def configure_optimizers(self) -> Any:
        blocks = set(self.model.blocks.parameters())
        rest = [parameter for parameter in self.parameters() if parameter not in blocks]
        return torch.optim.AdamW(rest, self.lr), torch.optim.SGD(blocks, self.lr)


def test_a_module_that_optimizes_by_itself_goes_on_exactly(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is a row, however many steps its optimizers make; the state of an optimizer's step is named by these."""
    own = ["--model", f"{__name__}.TwoOptimizers", "--model.dropout", "0.3", "--trainer.gradient_clip_val", "null"]
    command = ["fit", *CPU, *RUN, *own, "--trainer.max_steps", "30"]
    assert main(command) == 0
    whole = outcome(run_root / "killed")
    logged = [(int(row["step"]), row["train/loss"] != "") for row in rows(run_root / "killed") if row["train/own"]]
    assert logged == [(step, True) for step in (2, 5, 8, 11, 14, 17, 20)]
    for step in (6, 7, 16):
        root = run_root.parent / f"again-{step}"
        copy = cut_back(run_root / "killed", step, root)
        monkeypatch.setenv("RUN_ROOT", str(root))
        assert main(command) == 0
        assert list(differences(outcome(copy), whole)) == [], step


def test_a_kill_right_after_a_save_loses_no_row(tmp_path: Path) -> None:
    """The row and the events of the newest saved step are on disk before its checkpoint is."""
    rows, module = ["--trainer.log_every_n_steps", "1"], ["--model", "template_tests.crash.KilledAtStep"]
    command = ["fit", *CPU, *RUN, *rows, *module, "--model.markers"]
    train(tmp_path / "whole", *command, "{}")
    markers = json.dumps({step: str(tmp_path / f"killed-{step}") for step in (3, 8)})  # without a validation
    for _ in range(2):
        assert train(tmp_path / "again", *command, markers, check=False).returncode == -signal.SIGKILL
    train(tmp_path / "again", *command, markers)
    again, whole = (tmp_path / name / "killed" for name in ("again", "whole"))
    assert list(differences(outcome(again), outcome(whole))) == []
    assert events(again) == events(whole)


def events(run: Path) -> list[tuple[int, float]]:
    """(step, train/loss) as TensorBoard shows them."""
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    return [(event.step, event.value) for event in board.Scalars("train/loss")]


SHARDED = [
    *("--trainer.strategy", "fsdp_full_shard", "--micro_batch_size", "2", "--data.num_workers", "2"),
]


@pytest.mark.parametrize(
    ("settings", "damaged"),
    [([], "step=00000008.ckpt"), (SHARDED, "shards/step=00000008-*.1-of-2.pt")],
    ids=["ddp", "fsdp-accumulation-workers"],
)
def test_two_processes_end_as_if_they_had_not_been_killed(settings: list[str], damaged: str, tmp_path: Path) -> None:
    """Each rank's own random numbers come back: dropout on both goes on where it was.

    Rank 0 chooses for both, and says so once: from the state before a damaged one.
    """
    train(tmp_path / "whole", "fit", *TWO, *RUN, *settings)
    copy = cut_back(tmp_path / "whole/killed", 8, tmp_path / "again")
    (newest,) = copy.glob(f"checkpoints/{damaged}")
    newest.write_bytes(newest.read_bytes()[:-4096])
    done = train(tmp_path / "again", "fit", *TWO, *RUN, *settings)
    assert done.stdout.count("is damaged; moved to") == 1
    assert "step=00000007.ckpt, epoch 1, 16 of its 40 samples done" in done.stdout
    assert "continues from step 7" in done.stdout
    assert list(differences(outcome(copy), outcome(tmp_path / "whole/killed"))) == []


def test_a_run_in_short_slots_ends_like_a_long_one(
    run_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each start has time for a few steps; the last one ends with the weights and the rows of a run in one go."""
    assert main(["fit", *CPU, *RUN]) == 0
    whole = outcome(only_run(run_root))
    monkeypatch.setenv("RUN_ROOT", str(run_root.parent / "slots"))
    seconds = itertools.count()
    # One second for each look at the clock.
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    stops = 0
    while not (run_root.parent / "slots/killed/DONE").exists():
        assert main(["fit", *CPU, *RUN, "--trainer.max_time", "00:00:00:09"]) == 0
        stops += "stopped by max_time at step" in capsys.readouterr().out
        assert stops < 9
    assert stops > 1
    assert list(differences(outcome(run_root.parent / "slots/killed"), whole)) == []
