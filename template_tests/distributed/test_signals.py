"""Signals to running processes: what ends well must do so whichever rank they reach, and whenever.

$STOPS is how many times each is tried, once if it is not set; by hand 50.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src.checkpoint.compare import differences, outcome
from src.engine import exit_codes, stopped
from template_tests.launchers import TORCHRUN, free_port, srun
from tests.commands import CPU, ROOT, SMALL, environment, read_json, rows, train

STOPS = int(os.environ.get("STOPS", "1"))
TWO_RANKS = ["fit", *CPU, *SMALL, "--trainer.devices", "2", "--model.dropout", "0.3", "--data.size", "64"]
ENDLESS = ["--trainer.max_steps", "1000000", "--checkpoint.every_n_steps", "7"]


def wait_for_steps(run: Path, process: subprocess.Popen[str], saved: bool = False) -> None:
    """Until it trains, and where asked has saved."""
    until = time.monotonic() + 120
    wanted = "checkpoints/step=*.ckpt" if saved else "metrics.csv"
    while not any(run.glob(wanted)) or len(rows(run)) < 3:
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
    places = ["--model", "template_tests.signalled.Signalled", "--model.folder", str(tmp_path), "--model.places"]
    settings = [*TWO_RANKS, *ENDLESS, *places, "[fit 9 0]", "--run", "run", "--model.split", "true"]
    processes = srun(tmp_path, 1, 2, *settings, STOPPED_IS_READ="1", STOP_LEAD_SECONDS="60")
    codes, outputs = zip(*map(ended, processes), strict=True)
    assert codes == (0, 0), outputs
    assert re.search("stopped by SIG(TERM|USR1)", outputs[0])  # whichever came before they asked each other
    assert_goes_on_exactly(tmp_path, *places, "[]")


def test_one_ranks_signal_cuts_off_a_long_validation(tmp_path: Path) -> None:
    """Both leave it, the state before it is saved, and the next start makes it."""
    places = ["--model", "template_tests.signalled.Signalled", "--model.folder", str(tmp_path)]
    slow = ["--trainer.limit_val_batches", "7", "--data.val_size", "64", "--model.slow", "0.6"]
    at = ["--model.rank", "1", "--model.places", "[validate 4 1]"]
    processes = srun(tmp_path, 1, 2, *TWO_RANKS, *ENDLESS, *places, *slow, *at, "--run", "run")
    codes, outputs = zip(*map(ended, processes), strict=True)
    assert codes == (exit_codes.STOPPED, 0), outputs
    assert [row["val/loss"] != "" for row in rows(tmp_path / "run")] == [False, True, False, False]
    assert_goes_on_exactly(tmp_path, *places, *slow[:-2], "--model.places", "[]")


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, exit_codes.STOPPED), (signal.SIGINT, exit_codes.INTERRUPTED)]
)
def test_a_signal_to_the_whole_job_leaves_no_process(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    """As of a scheduler, or Ctrl-C; a loader's process that went at once would take the training with it."""
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
    os.killpg(process.pid, number)
    code, output = ended(process)
    assert code == expected, output
    assert "DataLoader worker" not in output
    until = time.monotonic() + 30
    while somebody_is_left(process.pid):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_run_of_which_every_process_was_killed_tells_what_happened(tmp_path: Path) -> None:
    """Silent since when, where it was, healthy until then, amid an epoch, how much is lost, and how to go on."""
    processes = srun(tmp_path, 1, 2, *TWO_RANKS, *ENDLESS, "--run", "run")
    wait_for_steps(tmp_path / "run", processes[0], saved=True)
    for process in processes:
        process.kill()
    assert [ended(process)[0] for process in processes] == [-signal.SIGKILL] * 2
    beat = read_json(tmp_path / "run/heartbeat")
    for name in ("heartbeat", "summary.json"):  # as if that was ten minutes ago
        told = read_json(tmp_path / "run" / name)
        older = {"written": 1000.0 if name == "heartbeat" else "2001-09-09T01:46:40+0000"}
        (tmp_path / "run" / name).write_text(json.dumps(told | older))
    command = [sys.executable, "-m", "src.checkpoint", "status", "run"]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True)
    said = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert re.match(r"vanished \(no sign of life for \d+ d.*: killed without a signal", said["state"]), done.stdout
    assert f"it was on {beat['host']}, process {processes[0].pid} in job 4711" in said["state"]
    assert said["train/loss"].count("at step") == 3
    assert re.match(r"step \d+, epoch \d+, \d+ of its 64 samples done, ", said["checkpoint"]), done.stdout
    assert re.match(r"at least \d+ steps will be repeated", said["lost"]), done.stdout
    assert "--run run" in said["continue"]


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


def test_ctrl_c_during_the_imports_leaves_without_a_traceback(tmp_path: Path) -> None:
    """The command ends with 130 and nothing on stderr; here PyTorch is a module that presses Ctrl-C."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", "src.cli", "fit"],
        cwd=ROOT,
        env=environment(tmp_path, PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # the tests may ignore it
    )
    assert (done.returncode, done.stderr) == (exit_codes.INTERRUPTED, "")


def test_a_reader_that_has_gone_ends_no_training(tmp_path: Path) -> None:
    """Of `fit | head -1`, or of a terminal: the run is trained to its end, saved, and the command ends with 0."""
    process = srun(tmp_path, 1, 1, *TWO_RANKS, "--trainer.devices", "1", "--run", "run")[0]
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == exit_codes.DONE
    assert (tmp_path / "run/DONE").exists()


def test_a_terminal_that_is_gone_stops_a_run_that_is_not_under_nohup(tmp_path: Path) -> None:
    """SIGHUP: saved, with 85; one that was told to ignore it trains on."""
    for number, ignored in enumerate((False, True)):
        command = [sys.executable, "-m", "src.cli", *TWO_RANKS, *ENDLESS, "--trainer.devices", "1", "--run", "run"]
        process = subprocess.Popen(
            ["nohup", *command] if ignored else command,
            cwd=ROOT,
            env=environment(tmp_path / str(number)),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may be under nohup themselves
        )
        wait_for_steps(run := tmp_path / f"{number}/run", process)
        done = len(rows(run))
        process.send_signal(signal.SIGHUP)
        while ignored and len(rows(run)) < done + 3:
            assert process.poll() is None
            time.sleep(0.1)
        if ignored:
            process.send_signal(signal.SIGTERM)
        code, output = ended(process)
        assert code == exit_codes.STOPPED, output
        assert f"stopped by {'SIGTERM' if ignored else 'SIGHUP'}" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_waits_for_the_others_can_be_ended(tmp_path: Path, number: signal.Signals) -> None:
    """The wait is PyTorch's, in which no handler of Python's runs."""
    (process,) = srun(tmp_path, 1, 2, *TWO_RANKS, "--run", "run", ranks=(0,), MASTER_PORT=str(port := free_port()))
    try:
        until = time.monotonic() + 120
        while True:  # until it serves the store that the others are to come to
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(number)
        code, output = ended(process)
    finally:
        process.kill()
    assert code == -number, output


def test_a_signal_before_the_wait_for_the_others_ends_it(tmp_path: Path) -> None:
    """One that comes while modules are imported is noted; nobody waits then for ranks that may not come."""
    (process,) = srun(tmp_path, 1, 2, *TWO_RANKS, "--run", "run", ranks=(0,))
    try:
        time.sleep(1.0)  # within the imports
        process.terminate()
        code, output = ended(process)
    finally:
        process.kill()
    assert code in (128 + signal.SIGTERM, -signal.SIGTERM), output
