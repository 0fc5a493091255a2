"""Two processes of which one is stuck, stopped or dead: all end, and one message says which it was."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src.checkpoint.__main__ import main as checkpoints
from src.engine import exit_codes
from src.engine.watchdog import heartbeat
from template_tests.distributed.test_two_processes import srun
from template_tests.launchers import TORCHRUN
from tests.commands import ROOT, TWO, environment, fit, read_json, train

HANG = [
    *("--model", "template_tests.hangs.Hangs", "--global_batch_size", "8", "--watchdog.minutes", "0.07"),
    *("--trainer.num_sanity_val_steps", "0", "--trainer.max_steps", "1000", "--run", "hung"),
]
SMALL_DATA = ["--data", "tests.small_task.SmallData"]


def of_session(session: int) -> list[int]:
    """The processes of a session that are more than an entry in the table."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(number) == session and state != "Z":
            found.append(int(folder.name))
    return found


def hang(
    run_root: Path, *arguments: str, launcher: tuple[str, ...] = ("-m",), subcommand: str = "fit", **more: str
) -> tuple[int, str]:
    """Run the command until it and every process that it has started are gone; returns its exit code and stderr."""
    command = [sys.executable, *launcher, "src.cli", subcommand, *TWO, *HANG, *arguments]
    with (run_root / "stderr").open("w+") as stderr:  # a pipe would be held open by whatever is left
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(run_root, **more),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=120)
            until = time.monotonic() + 20
            while (left := of_session(process.pid)) and time.monotonic() < until:
                time.sleep(0.2)
            assert left == []
        finally:
            for pid in of_session(process.pid):
                os.kill(pid, signal.SIGKILL)
        stderr.seek(0)
        return code, stderr.read()


def said(text: str) -> str:
    """The one message."""
    assert text.count("error: nothing has happened for 4 s (watchdog.minutes)") == 1, text
    return text[text.index("error: nothing has happened") :]


@pytest.mark.parametrize(("way", "line"), [("sleep", "hangs.py"), ("collective", "distributed_c10d.py")])
def test_a_rank_that_skips_a_collective_is_named(tmp_path: Path, way: str, line: str) -> None:
    """Both ranks end with a code of its own; the message says who is behind, in what, where, and where the other is."""
    code, text = hang(tmp_path, *SMALL_DATA, "--model.way", way)
    assert code == exit_codes.HUNG
    fault, other, _ = said(text).splitlines()[:3]
    assert re.search(rf': rank 1 on \S+ is at "training_step" after step 3, for \d+ s, in {line}:\d+ \(\w+\)$', fault)
    assert re.search(r'^  rank 0 on \S+ is at "backward" after step 3, for \d+ s, in ', other)
    assert "--run hung" in text
    run = tmp_path / "hung"
    assert "get_stuck" in (run / "hang-rank1.txt").read_text()
    assert "_engine_run_backward" in (run / "hang-rank0.txt").read_text()
    summary = read_json(run / "summary.json")
    assert summary["exit_reason"] == "hung"
    assert "rank 1" in summary["error"]


def test_a_loader_that_stalls_is_named(tmp_path: Path) -> None:
    """The rank that waits for a batch is the one at fault, and its loader's process, which hangs, is gone too."""
    stalls = ["--data", "template_tests.hangs.StallingData", "--data.num_workers", "1", "--data.rank", "1"]
    code, text = hang(tmp_path, *stalls)
    assert code == exit_codes.HUNG
    assert re.search(r': rank 1 on \S+ is at "(fetching a batch|the start of an epoch)" after step \d+', said(text))


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_rank_that_stalls_in_an_evaluation_is_named(run_root: Path, command: str) -> None:
    """An evaluation is watched as training is: both ranks end, one message says which is stuck in which step."""
    way = ["--model.way", "evaluation"]
    no_validation = ["--trainer.limit_val_batches", "0", "--trainer.max_steps", "1"]
    # Without a watchdog: this process is pytest's own, which a slow start of a few seconds must not end.
    fit(run_root, "hung", *HANG, *SMALL_DATA, *way, *no_validation, "--watchdog.enabled", "false")
    code, text = hang(run_root, *SMALL_DATA, *way, subcommand=command)
    assert code == exit_codes.HUNG
    fault, other, _ = said(text).splitlines()[:3]
    assert re.search(
        r': rank 1 on \S+ is at "the step of an evaluation" after step 0, for \d+ s, in hangs.py:\d+ ', fault
    )
    assert re.search(r"^  rank 0 on \S+ is at ", other)
    assert "get_stuck" in (run_root / "hung" / "hang-rank1.txt").read_text()


def test_a_stopped_rank_is_reported(tmp_path: Path) -> None:
    """SIGSTOP to rank 1: the other says so, and no process is left behind, the stopped one neither."""
    code, text = hang(tmp_path, *SMALL_DATA, "--model.way", "stop")
    assert code == exit_codes.HUNG
    assert re.search(
        r": rank 1 on \S+ gives no sign of life: .* after step \d+; its process \d+ is stopped \(SIGSTOP\), ",
        said(text).splitlines()[0],
    )


def test_a_stopped_rank_0_is_reported(tmp_path: Path) -> None:
    """It serves what the ranks know of each other: stopped, it is named by the other, which ends; it waits for srun."""
    rank0, rank1 = srun(tmp_path, 1, 2, "fit", *TWO, *HANG, *SMALL_DATA, "--model.way", "stop", "--model.rank", "0")
    try:
        text = rank1.communicate(timeout=120)[0]
        assert rank0.poll() is None
    finally:
        rank0.kill()
        rank0.communicate()
    assert rank1.returncode == exit_codes.HUNG
    assert re.search(r": rank 0 on \S+ gives no sign of life: it was last seen at .* after step \d; its", said(text))
    assert "rank 1 on" in said(text)


def test_a_rank_that_died_is_reported(tmp_path: Path) -> None:
    """SIGKILL to rank 1 where no launcher looks: rank 0, which hangs in no collective with it, says who is gone."""
    processes = srun(tmp_path, 1, 2, "fit", *TWO, *HANG, *SMALL_DATA, "--model.way", "kill")
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [exit_codes.HUNG, -signal.SIGKILL]
    assert re.search(
        r": rank 1 on \S+ gives no sign of life: .*; its process \d+ is stopped \(SIGSTOP\), dead, ", said(outputs[0])
    )
    assert re.search(r'rank 0 on \S+ is at "training_step" after step 3', outputs[0])


def test_status_shows_a_stopped_rank_as_stale(
    run_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the run waits for it: a line for each rank, with its step and age, and which of them is stale."""
    monkeypatch.setattr(heartbeat, "STALE_SECONDS", 4)
    arguments = [*HANG, *SMALL_DATA, "--model.way", "stop", "--model.pulse", "1", "--watchdog.minutes", "5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "src.cli", "fit", *TWO, *arguments],
        cwd=ROOT,
        env=environment(run_root),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until, rows = time.monotonic() + 120, ["", ""]
        while not ("stale: " in rows[-1] and "stale: " not in rows[0]) and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.5)
            if (run_root / "hung/heartbeat").exists():
                checkpoints(["status", "hung"])
            rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("rank ")] or ["", ""]
    finally:
        for pid in of_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    waits, stopped = rows
    assert re.match(r'rank 0 +step 3, at "backward" for \d+ s, on \S+, last sign of life \d+ s ago$', waits)
    assert re.match(r'rank 1 +stale: step \d, at ".+" for \d+ s, on \S+, last sign of life \d+ s ago$', stopped)


def test_under_torchrun_all_end_as_well(tmp_path: Path) -> None:
    """torchrun serves the store: one message, and it reports the ranks' exit code."""
    code, text = hang(tmp_path, *SMALL_DATA, "--model.way", "sleep", launcher=(*TORCHRUN, "--"))
    assert code == 1
    assert re.search(r': rank 1 on \S+ is at "training_step" after step 3', said(text))
    assert re.search(rf"exitcode *: {exit_codes.HUNG}", text)


def test_a_job_that_was_stopped_whole_goes_on(tmp_path: Path) -> None:
    """SIGSTOP to all ranks for longer than the limit, then SIGCONT: nothing is said and the run finishes."""
    arguments = [*HANG, *SMALL_DATA, "--trainer.max_steps", "400", "--checkpoint.every_n_steps", "50"]
    process = subprocess.Popen(
        [sys.executable, "-m", "src.cli", "fit", *TWO, *arguments],
        cwd=ROOT,
        env=environment(tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not list(tmp_path.glob("hung/checkpoints/step=*.ckpt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(7)
    assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    os.killpg(process.pid, signal.SIGCONT)
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert not (tmp_path / "hung" / "heartbeat").exists()


def test_work_of_rank_0_alone_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    """`rank_zero_work` holds the other rank for longer than both timeouts, and training goes on after it."""
    short = ["--collective_timeout_minutes", "0.25", "--watchdog.minutes", "0.1", "--trainer.max_steps", "6"]
    done = train(tmp_path, "fit", *TWO, *HANG, *SMALL_DATA, "--model.way", "alone", *short)
    assert done.stderr == ""
    assert read_json(tmp_path / "hung" / "summary.json")["last_step"] == 6


def test_the_collective_timeout_is_a_setting(tmp_path: Path) -> None:
    """Without a watchdog a rank that waits gives up after that time, and the command fails."""
    short = ["--collective_timeout_minutes", "0.25", "--watchdog.enabled", "false", "--watchdog.minutes", "9"]
    done = train(tmp_path, "fit", *TWO, *HANG, *SMALL_DATA, "--model.way", "sleep", *short, check=False)
    assert done.returncode != 0
    assert "Timed out waiting 15000ms" in done.stderr
    assert "watchdog.minutes has no effect with watchdog.enabled false" in done.stdout
