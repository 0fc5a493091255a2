"""Signals to running processes: what ends well must do so whichever rank they reach, and whenever.

$STOPS is how many times each is tried, once if it is not set; by hand 50.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src import exit_codes, stopped
from src.checkpoint.compare import differences, outcome
from tests.commands import CPU, ROOT, SMALL, TORCHRUN, environment, read_json, rows, srun, train

STOPS = int(os.environ.get("STOPS", "1"))
TWO_RANKS = ["fit", *CPU, *SMALL, "--trainer.devices", "2", "--model.dropout", "0.3", "--data.size", "64"]
ENDLESS = ["--trainer.max_steps", "1000000", "--checkpoint.every_n_steps", "7"]


def wait_for_steps(run: Path, process: subprocess.Popen[str]) -> None:
    """Until it trains."""
    until = time.monotonic() + 120
    while not (run / "metrics.csv").exists() or len(rows(run)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def somebody_is_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def assert_goes_on_exactly(run_root: Path, *settings: str) -> None:
    """A few steps more, in one process each: the stopped run comes to the same as one that was never stopped."""
    last = sorted((run_root / "run/checkpoints").glob("step=*.ckpt"))[-1]
    step = int(last.stem.removeprefix("step="))
    more = [*settings, "--trainer.max_steps", str(step + 3), "--trainer.devices", "2", "--run", "run"]
    assert f"continues from step {step}" in train(run_root, *TWO_RANKS, *more).stdout
    train(run_root / "whole", *TWO_RANKS, *more)
    assert list(differences(outcome(run_root / "run"), outcome(run_root / "whole/run"))) == []


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)], ids=["both ranks", "rank 0", "rank 1"])
@pytest.mark.parametrize("trial", range(STOPS))
def test_sigterm_at_any_moment_ends_well(tmp_path: Path, ranks: tuple[int, ...], trial: int) -> None:
    """Steps of some milliseconds, ranks reached at different ones, and more signals until the end."""
    chance = random.Random(trial)
    processes = srun(tmp_path, 1, 2, *TWO_RANKS, *ENDLESS, "--run", "run")
    wait_for_steps(tmp_path / "run", processes[0])
    time.sleep(chance.random())
    for rank in ranks:
        time.sleep(chance.random() / 10)
        processes[rank].send_signal(signal.SIGTERM)
    while any(process.poll() is None for process in processes):  # also in the middle of the save, and behind it
        time.sleep(0.05)
        for rank in ranks:
            processes[rank].send_signal(signal.SIGTERM)
    codes, outputs = zip(*map(ended, processes), strict=True)
    assert codes == (exit_codes.STOPPED, 0), outputs
    assert "stopped by SIGTERM" in outputs[0]
    assert not any("Traceback" in output or "warning" in output for output in outputs), outputs
    said = read_json(tmp_path / "run/STOPPED")
    assert (said["signal"], said["job"], said["start"]) == ("SIGTERM", "4711", 0)
    assert (tmp_path / f"run/checkpoints/step={said['step']:08d}.ckpt").exists()
    if trial == 0 and ranks == (1,):
        assert_goes_on_exactly(tmp_path)


def test_two_requests_at_different_steps_are_one_stop(tmp_path: Path) -> None:
    """SIGUSR1 on one rank and SIGTERM on the other a step later: both leave at the same step, with code 0 in a job."""
    places = ["--model", "tests.signalled.Signalled", "--model.folder", str(tmp_path), "--model.places"]
    settings = [*TWO_RANKS, *ENDLESS, *places, "[fit 9 0]", "--run", "run", "--model.split", "true"]
    processes = srun(tmp_path, 1, 2, *settings, STOPPED_IS_READ="1", STOP_LEAD_SECONDS="60")
    codes, outputs = zip(*map(ended, processes), strict=True)
    assert codes == (0, 0), outputs
    assert re.search("stopped by SIG(TERM|USR1)", outputs[0])  # whichever came before they asked each other
    assert_goes_on_exactly(tmp_path, *places, "[]")


def test_one_ranks_signal_cuts_off_a_long_validation(tmp_path: Path) -> None:
    """Both leave it, the state before it is saved, and the next start makes it."""
    places = ["--model", "tests.signalled.Signalled", "--model.folder", str(tmp_path)]
    slow = ["--trainer.limit_val_batches", "7", "--data.val_size", "64", "--model.slow", "0.6"]
    at = ["--model.rank", "1", "--model.places", "[validate 4 1]"]
    processes = srun(tmp_path, 1, 2, *TWO_RANKS, *ENDLESS, *places, *slow, *at, "--run", "run")
    codes, outputs = zip(*map(ended, processes), strict=True)
    assert codes == (exit_codes.STOPPED, 0), outputs
    assert [row["val/loss"] != "" for row in rows(tmp_path / "run")] == [False, True, False, False]
    assert_goes_on_exactly(tmp_path, *places, *slow[:-2], "--model.places", "[]")


def test_loaders_processes_outlive_a_signal_to_the_whole_job(tmp_path: Path) -> None:
    """A scheduler signals every process; a loader's that went at once would take the training with it."""
    command = [sys.executable, "-m", "src.cli", *TWO_RANKS, *ENDLESS, "--data.num_workers", "1", "--run", "run"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_for_steps(tmp_path / "run", process)
    os.killpg(process.pid, signal.SIGTERM)
    code, output = ended(process)
    assert code == exit_codes.STOPPED, output
    assert "DataLoader worker" not in output
    until = time.monotonic() + 30
    while somebody_is_left(process.pid):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_torchrun_hands_the_signal_on(tmp_path: Path) -> None:
    """It waits for its processes, which save and stop; its own exit code says nothing, the marker does."""
    command = [sys.executable, *TORCHRUN, "--", "src.cli", *TWO_RANKS, *ENDLESS, "--run", "run"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(tmp_path), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for_steps(tmp_path / "run", process)
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == exit_codes.CRASHED, output
    assert "stopped by SIGTERM" in output
    assert stopped.read(tmp_path / "run") is not None


def test_a_signal_before_training_stops_it_before_the_first_step(tmp_path: Path) -> None:
    """While Python imports: it is noted, nothing is lost, and the next start trains."""
    command = [sys.executable, "-X", "importtime", "-m", "src.cli", *TWO_RANKS, *ENDLESS, "--trainer.devices", "1"]
    process = subprocess.Popen(
        [*command, "--run", "run"],
        cwd=ROOT,
        env=environment(tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.endswith("torch._utils\n"):
            break
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == exit_codes.STOPPED, output
    assert "stopped by SIGTERM at step 0" in output
