"""Two gloo processes, started by the real command under each launcher."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from src.checkpoint.compare import differences, outcome
from src.engine import exit_codes
from src.engine.checkpoint.names import step_in_name
from template_tests.launchers import PROBE, TORCHRUN, srun
from tests.commands import CPU, ROOT, SMALL, TWO, environment, losses, only_run, read_json, rows, train, weights
from tests.small_task import SmallModule

MANY = ["--trainer.max_epochs", "2", "--global_batch_size", "8", "--trainer.num_sanity_val_steps", "0"]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss curve of the small task on one process."""
    root = tmp_path_factory.mktemp("single")
    train(root, "fit", *CPU, *SMALL)
    return losses(only_run(root))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same on two processes that plain python started: the run directory and what was printed."""
    root = tmp_path_factory.mktemp("plain")
    done = train(root, "fit", *TWO, *SMALL)
    return only_run(root), done.stdout


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two epochs over 27 samples on two ranks, 7 for validation: the run directory and what each rank saw.

    The module has a branch that no step uses, which `ddp_find_unused` allows.
    """
    root = tmp_path_factory.mktemp("probed")
    unused = ["--model.unused", "true", "--trainer.strategy", "ddp_find_unused"]
    train(root / "runs", "fit", *PROBE, *MANY, *TWO, *unused, "--data.size", "27", PROBE_FOLDER=str(root))
    return only_run(root / "runs"), [read_json(path) for path in sorted(root.glob("probe-*.json"))]


def test_plain_python_starts_both_and_gives_the_curve_of_one(plain: tuple[Path, str], single: list[float]) -> None:
    """Two processes train as one does; the start block says how the global batch is spread, and where each rank is."""
    run, output = plain
    assert len(single) == 4
    assert losses(run) == pytest.approx(single, abs=1e-5)
    assert output.count("world size 2") == 1
    assert "8 = 4 micro × 1 accumulation × 2 devices" in output
    assert re.findall(r"(?m)^rank (\d) +(\S+), CPU$", output) == [(str(rank), socket.gethostname()) for rank in (0, 1)]
    assert read_json(run / "manifest.json")["world_size"] == 2


def test_only_rank_0_writes(plain: tuple[Path, str]) -> None:
    """One run directory, one event file, one checkpoint: two ranks leave one set of files."""
    run, _ = plain
    assert len(list(run.rglob("events.out.tfevents*"))) == 1
    assert len(list(run.glob("checkpoints/step=*.ckpt"))) == 1


def test_a_checkpoint_of_two_ranks_loads_into_a_bare_model(plain: tuple[Path, str]) -> None:
    """Keys carry no `module.` prefix and load strictly on one process."""
    SmallModule().load_state_dict(weights(plain[0]), strict=True)


def test_torchrun_gives_the_curve_of_one(tmp_path: Path, single: list[float]) -> None:
    """The same configuration under torchrun trains as on one process, into one run directory."""
    train(tmp_path, "fit", *TWO, *SMALL, launcher=TORCHRUN)
    assert losses(only_run(tmp_path)) == pytest.approx(single, abs=1e-5)


def test_srun_on_two_nodes_gives_the_curve_of_one(tmp_path: Path, single: list[float]) -> None:
    """Two nodes with two tasks each are one world of four that trains as one process does."""
    shape = ["--trainer.num_nodes", "2", "--trainer.devices", "2"]
    processes = srun(tmp_path, 2, 2, "fit", *CPU, *SMALL, *shape)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], outputs
    assert losses(only_run(tmp_path)) == pytest.approx(single, abs=1e-5)


def test_less_memory_is_the_same_mathematics(tmp_path: Path, single: list[float]) -> None:
    """The lowmem preset (micro batch 1, activations recomputed) on two ranks gives the curve of the plain run."""
    done = train(tmp_path, "fit", *TWO, *SMALL, "--config", "configs/presets/lowmem.yaml")
    assert "8 = 1 micro × 4 accumulation × 2 devices" in done.stdout
    assert losses(only_run(tmp_path)) == pytest.approx(single, abs=1e-5)


def test_every_rank_starts_equal_and_draws_differently(probed: tuple[Path, list[dict[str, Any]]]) -> None:
    """Weights are bit-identical over ranks at step 0 and gradients after each backward; random draws differ."""
    first, second = probed[1]
    assert first["weights_at_start"] == second["weights_at_start"]
    assert first["gradients"] == second["gradients"]
    assert len(first["gradients"]) == 8
    assert first["draw"] != second["draw"]


def test_every_sample_is_trained_once_per_epoch_in_a_new_order(probed: tuple[Path, list[dict[str, Any]]]) -> None:
    """Over both ranks an epoch is the data set, without overlap, also with a rest; epochs differ in order."""
    seen = probed[1]
    epochs = [[batch for rank in seen for batch in rank["train"][epoch]] for epoch in ("0", "1")]
    for batches in epochs:
        assert sorted(number for batch in batches for number in batch) == list(range(27))
    assert epochs[0] != epochs[1]
    assert [len(rank["train"]["0"]) for rank in seen] == [4, 4]


def test_evaluation_counts_no_sample_twice(probed: tuple[Path, list[dict[str, Any]]]) -> None:
    """Seven samples on two ranks: each is evaluated once per epoch and the logged mean is the mean of the seven."""
    run, seen = probed
    assert sorted(number for rank in seen for number in rank["val"]) == sorted(2 * list(range(7)))
    assert float(rows(run)[-1]["val/mean"]) == pytest.approx(3.0)


def test_predictions_of_two_ranks_come_in_the_data_sets_order(probed: tuple[Path, list[dict[str, Any]]]) -> None:
    """`predict` leaves one file with every sample once, in order, that loads without pickle."""
    run, _ = probed
    train(run.parent, "predict", *PROBE, *TWO, "--run", run.name, "--model.unused", "true")
    batches = torch.load(run / "predictions.pt", weights_only=True)
    assert torch.cat(batches).flatten().tolist() == list(range(7))


def test_an_unused_branch_needs_the_named_strategy(tmp_path: Path) -> None:
    """Plain ddp fails on a module that trains under ddp_find_unused (`probed`); it names that and the parameters."""
    failed = train(tmp_path, "fit", *PROBE, *MANY, *TWO, "--model.unused", "true", check=False)
    assert failed.returncode == 1
    assert "--trainer.strategy ddp_find_unused" in failed.stderr
    assert "without a gradient: unused.weight, unused.bias\n" in failed.stderr


@pytest.mark.parametrize("strategy", ["ddp", "fsdp_full_shard"])
def test_batchnorm_that_cannot_be_synchronized_is_refused(tmp_path: Path, strategy: str) -> None:
    """On CPUs PyTorch has no SyncBatchNorm: one line on rank 0, exit code 2."""
    norm = ["--model.norm", "true", "--trainer.sync_batchnorm", "true", "--trainer.strategy", strategy]
    done = train(tmp_path, "fit", *PROBE, *MANY, *TWO, *norm, check=False)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if not line.startswith("warning: ")] == [
        "error: trainer.sync_batchnorm works on GPUs alone and this model's BatchNorm is on CPUs: leave it out here, "
        "where each rank then normalizes by its own samples"
    ]


def test_one_broken_rank_ends_all_and_the_summary_says_so(tmp_path: Path) -> None:
    """An exception on rank 1 ends the command with its traceback, a non-zero exit code and a summary."""
    done = train(tmp_path, "fit", *PROBE, *MANY, *TWO, "--model.fail_at", "2", check=False)
    assert done.returncode == exit_codes.CRASHED  # as rank 1, not 76 as rank 0
    assert "this rank breaks on purpose" in done.stderr
    summary = read_json(only_run(tmp_path) / "summary.json")
    assert summary["exit_reason"] == "lost a rank"
    assert summary["last_step"] == 2


def test_a_killed_rank_leaves_a_summary(tmp_path: Path) -> None:
    """Kill -9 on rank 1: the command ends, and rank 0 has written why, how far and how to go on.

    It loses no more than the steps between two saves, and the run ends as one that nobody has killed.
    """
    saves = ["--checkpoint.every_n_steps", "20", "--checkpoint.asynchronous", "false"]
    settings = [*TWO, *SMALL, *saves, "--run", "killed", "--trainer.max_steps"]
    command = [sys.executable, "-m", "src.cli", "fit", *settings, "100000"]
    pipe = subprocess.PIPE
    first = subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path), stdout=pipe, stderr=pipe)
    run = tmp_path / "killed"
    while not list(run.glob("checkpoints/step=*.ckpt")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.2)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"src.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ranks[0], signal.SIGKILL)
    _, said = first.communicate(timeout=120)
    assert b"local rank 1 ended with exit code 137" in said
    assert first.returncode == exit_codes.KILLED
    summary = read_json(run / "summary.json")
    assert summary["exit_reason"] == "lost a rank"
    assert summary["last_step"] >= 20
    assert "--run killed" in summary["continue_command"]
    assert Path(summary["last_checkpoint"]).exists()
    saved = step_in_name(Path(summary["last_checkpoint"]))
    assert saved <= summary["last_step"] <= saved + 20
    again = train(tmp_path, "fit", *settings, str(saved + 10))
    assert f"continues from step {saved}" in again.stdout
    train(tmp_path / "whole", "fit", *settings, str(saved + 10))
    assert list(differences(outcome(run), outcome(tmp_path / "whole/killed"))) == []


def test_a_full_disk_of_another_node_leaves_the_parts_of_before(tmp_path: Path) -> None:
    """Rank 0 says whose part is missing; the run goes on from the last whole state and ends as ever."""
    saves = ["--trainer.strategy", "fsdp_full_shard", "--checkpoint.every_n_steps", "2", "--trainer.max_steps", "8"]
    settings = [
        "fit",
        *TWO,
        *SMALL,
        *saves,
        "--run",
        "full",
        "--model",
        "template_tests.crash.FullDisk",
        "--model.first",
    ]
    done = train(tmp_path, *settings, "4", check=False)
    assert done.returncode == exit_codes.BUSY
    assert "warning: step 6 could not be saved (step=00000006-" in done.stdout
    assert "error: the end of this start, step 8, is not saved" in done.stderr
    assert "Traceback" not in done.stderr
    run = tmp_path / "full"
    assert [path.stem for path in sorted(run.glob("checkpoints/step=*.ckpt"))] == ["step=00000002", "step=00000004"]
    assert "continues from step 4" in train(tmp_path, *settings, "-1").stdout
    steps = {step_in_name(path) for path in run.glob("checkpoints/*.ckpt")}
    parts = [int(path.name[5:13]) for path in run.glob("checkpoints/shards/step=*.pt")]
    assert sorted(parts) == sorted([*steps, *steps])
    train(tmp_path / "whole", *settings, "-1")
    assert list(differences(outcome(run), outcome(tmp_path / "whole/full"))) == []
