"""A run that goes on with another number of processes, or another micro batch, learns the same."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from src.checkpoint.__main__ import main as checkpoint
from tests.commands import CPU, TWO, cut_back, rows, train
from tests.small_task import SmallModule, SmallNet

# Five steps per epoch, the last one of a smaller batch; 50 steps, a validation in each epoch.
RUN = [
    *(
        "--model",
        "template_tests.engine.test_elastic.Logged",
        "--data",
        "tests.small_task.SmallData",
        "--data.size",
        "36",
    ),
    *("--checkpoint.monitor", "val/accuracy", "--checkpoint.mode", "max", "--global_batch_size", "8"),
    *("--trainer.max_steps", "50", "--trainer.log_every_n_steps", "3", "--trainer.val_check_interval", "4"),
    *("--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99", "--run", "elastic"),
]
SHAPES = {
    "one": CPU,
    "one-accumulating": [*CPU, "--micro_batch_size", "2"],
    "two": TWO,
    "two-sharded": [*TWO, "--trainer.strategy", "fsdp_full_shard"],
}
EPOCH_MEANS = ("train/mean", "train/metric")
RESUMED_EPOCH = range(20, 25)
CUT = 23  # in the middle of an epoch, and between two rows


class Logged(SmallModule):
    """SmallModule that adds up over an epoch, in Lightning's results and in a metric of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/mean", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        self.metric.update(loss.detach(), len(batch))
        self.log("train/metric", self.metric, on_step=False, on_epoch=True)
        return loss


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The uninterrupted runs, with the checkpoints of all steps."""
    root = tmp_path_factory.mktemp("whole")
    for name in ("one", "two", "two-sharded"):
        train(root / name, "fit", *SHAPES[name], *RUN)
    return {name: root / name / "elastic" for name in ("one", "two", "two-sharded")}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("two", "one", "of 2 process(es) and continues with 1"),
        ("one", "two", "of 1 process(es) and continues with 2"),
        ("one", "one-accumulating", "micro batches 1 (now 4)"),
        ("two", "one-accumulating", "micro batches 1 (now 4)"),
        ("two", "two-sharded", "strategy DDP (now FSDP)"),
        ("two-sharded", "two", "strategy FSDP (now DDP)"),
        ("two-sharded", "one", "strategy FSDP (now SingleDeviceStrategy)"),
    ],
)
def test_a_run_goes_on_in_another_shape(
    before: str, after: str, said: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    """Every row of 50 steps is that of the uninterrupted run to 1e-4; the log says that bits may differ, and why.

    With another number of processes the means of the epoch that is resumed are those of its remaining steps.
    """
    run = cut_back(whole[before], CUT, tmp_path)
    changed = [] if before[:3] == after[:3] else ["--allow-changed", "world_size"]
    done = train(tmp_path, "fit", *SHAPES[after], *RUN, *changed)
    assert f"continues from step {CUT}" in done.stdout
    (note,) = (line for line in done.stdout.splitlines() if said in line)
    assert "not bit for bit" in note
    expected, found = rows(whole[before]), rows(run)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for old, new in zip(expected, found, strict=True):
        for name in (key for key in old if not key.startswith("perf/")):
            assert (new[name] == "") == (old[name] == ""), (old["step"], name)
            begins_anew = bool(changed) and name in EPOCH_MEANS and int(old["step"]) in RESUMED_EPOCH
            if old[name] and not begins_anew:
                assert float(new[name]) == pytest.approx(float(old[name]), abs=1e-4), (old["step"], name)


def test_the_weights_of_a_sharded_run_load_into_the_plain_network(
    whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process puts them together; they are those of the run on two whole processes, to rounding."""
    saved = {}
    for name in ("two", "two-sharded"):
        out = tmp_path / f"{name}.pt"
        assert checkpoint(["export", str(whole[name]), "--step", "50", str(out)]) == 0
        SmallNet(depth=2).load_state_dict(torch.load(out, weights_only=True), strict=True)
        saved[name] = torch.load(out, weights_only=True)
    assert "step 50 of run elastic" in capsys.readouterr().out
    for key, value in saved["two"].items():
        torch.testing.assert_close(saved["two-sharded"][key], value, rtol=0, atol=1e-4)


def test_another_number_of_processes_must_be_meant(whole: dict[str, Path], tmp_path: Path) -> None:
    """Without leave it is refused in one line that names it, and the run is as it was."""
    run = cut_back(whole["two"], CUT, tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    done = train(tmp_path, "fit", *CPU, *RUN, check=False)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "world_size 2 (now 1)" in line
    assert "--allow_changed world_size" in line
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before
