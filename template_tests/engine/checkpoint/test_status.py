"""`python -m src.checkpoint status`: whether a run is alive and what a restart would do again."""

import datetime
import fcntl
import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from src.checkpoint.status import facts, state_of
from src.engine.watchdog.heartbeat import rank_line
from template_tests.checkpoints import a_run, said, truncated, zeroed


def moment(seconds: float) -> str:
    """So many seconds before 2030 as the summary writes it, in another time zone than that of a test machine."""
    zone = datetime.timezone(datetime.timedelta(hours=-7))
    return datetime.datetime.fromtimestamp(NOW - seconds, zone).strftime("%Y-%m-%dT%H:%M:%S%z")


NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC).timestamp()


def beats(run: Path, age: float, **more: object) -> None:
    """A sign of life from so many seconds before `NOW`."""
    (run / "heartbeat").write_text(json.dumps({"written": NOW - age, "host": "spot-7", "pid": 41} | more))


def test_a_long_step_is_no_end(tmp_path: Path) -> None:
    """The summary is ten minutes old and the sign of life is not: the run lives."""
    run = a_run(tmp_path, "mine", exit_reason="running", written=moment(600))
    beats(run, 12)
    assert state_of(run, NOW).name == "running"


def test_a_vanished_run_says_where_it_was(tmp_path: Path) -> None:
    """By the last sign of life, which is newer than the summary."""
    run = a_run(tmp_path, "mine", exit_reason="running", written=moment(720))
    beats(run, 600, job="77")
    told = state_of(run, NOW)
    assert told.name == "vanished"
    assert "no sign of life for 10 min" in told.why
    assert "it was on spot-7, process 41 in job 77" in told.why


def test_a_killed_run_has_done_what_the_newest_of_its_files_says(
    run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary, the heartbeat, the last row and the newest checkpoint are of different moments."""
    run = a_run(run_root, "mine", 2200, exit_reason="running", last_step=1164, written="2024-01-01T00:00:00+0000")
    (run / "metrics.csv").write_text("step,train/loss\n2199,0.5\n2208,0.4\n22")
    told = said(capsys, "status", "mine")
    assert re.search("last step +at least 2209\n", told)
    assert re.search("lost +at least 9 steps will be repeated\n", told)
    (run / "metrics.csv").write_text("")
    assert re.search("last step +at least 2200\n", said(capsys, "status", "mine"))


def test_a_process_of_this_machine_that_is_gone_needs_no_silence(tmp_path: Path) -> None:
    """Its last step is the heartbeat's, as the summary is older."""
    run = a_run(tmp_path, "mine", exit_reason="running", written=moment(20), last_step=3)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid, state in ((os.getpid(), "running"), (gone.pid, "vanished")):
        beats(run, 5, host=socket.gethostname(), pid=pid, step=7)
        told = state_of(run, NOW)
        assert (told.name, told.last_step) == (state, 7)


@pytest.mark.parametrize(
    ("reason", "age", "state"),
    [
        ("running", 5, "running"),
        ("running", 90, "running"),
        ("running", 91, "vanished"),
        ("crashed", 5, "crashed"),
        ("out of memory", 5, "crashed"),
        ("tripped", 5, "tripped"),
        ("interrupted", 5, "stopped"),
        ("stopped by max_time", 500, "stopped"),
        ("finished", 5, "stopped"),  # without DONE
    ],
)
def test_how_a_run_stands(tmp_path: Path, reason: str, age: int, state: str) -> None:
    """The summary's reason decides, and for a run that says it runs, how long ago it said so."""
    run = a_run(tmp_path, "mine", exit_reason=reason, written=moment(age), last_step=7)
    told = state_of(run, NOW)
    assert (told.name, told.last_step) == (state, 7)
    (run / "DONE").touch()
    assert state_of(run, NOW).name == "finished"


def test_a_run_without_a_summary(tmp_path: Path) -> None:
    """It is new, or stopped where it has checkpoints all the same."""
    assert state_of(a_run(tmp_path, "new"), NOW).name == "new"
    assert state_of(a_run(tmp_path, "old", 5), NOW).name == "stopped"


def test_a_vanished_run_says_for_how_long(tmp_path: Path) -> None:
    """Twelve minutes without a sign of life are named, with what they mean."""
    told = state_of(a_run(tmp_path, "mine", exit_reason="running", written=moment(720)), NOW)
    assert told.why == "no sign of life for 12 min: killed without a signal, e.g. a preempted spot machine"


def test_a_heartbeat_from_the_future_is_fresh(tmp_path: Path) -> None:
    """Where clocks differ, the run is not declared dead."""
    assert state_of(a_run(tmp_path, "mine", exit_reason="running", written=moment(-600)), NOW).name == "running"


def test_a_date_that_nobody_can_read_is_none(tmp_path: Path) -> None:
    """The other files of the run still tell how it stands."""
    run = a_run(tmp_path, "mine", 10, exit_reason="stopped", written="yesterday", last_step=10)
    told = state_of(run, NOW)
    assert (told.name, told.last_step, told.written) == ("stopped", 10, None)


def test_who_holds_the_lock_runs(tmp_path: Path) -> None:
    """A held lock means running, whatever the summary says, with the holder; long silence is no end."""
    run = a_run(tmp_path, "mine", exit_reason="crashed", written=moment(1000))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 1 on node7")
        lock.flush()
        told = state_of(run, NOW)
    assert (told.name, told.owner) == ("running", "process 1 on node7")
    assert state_of(run, NOW).name == "crashed"


def test_status_says_what_a_restart_does_again(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest whole checkpoint, the steps since, the error and the command are told, as text and as JSON."""
    run = a_run(
        run_root,
        "mine",
        150,
        180,
        **{"exit_reason": "crashed", "written": "2024-01-01T00:00:00+0000", "last_step": 188},
        **{"error": "RuntimeError: two\nlines", "continue_command": "python -m src.cli fit --run mine"},
    )
    zeroed(run / "checkpoints/step=00000180.ckpt")
    rows = ["step,train/loss,val/loss", "179,0.51,", "183,0.50,", "187,nan,", "187,,0.6", "18"]
    (run / "metrics.csv").write_text("\n".join(rows))
    lines = dict(line.split("  ", 1) for line in said(capsys, "status", "mine").splitlines())
    assert lines["state"].strip() == "crashed (crashed)"
    assert lines["last step"].strip() == "188"
    assert lines["train/loss"].strip() == "0.51 at step 179, 0.5 at step 183, not finite at step 187"
    assert lines["checkpoint"].strip().startswith("step 150, epoch 15, ")
    assert lines["lost"].strip() == "38 steps will be repeated"
    assert lines["error"].strip() == "RuntimeError: two lines"
    assert "step=00000180.ckpt is damaged" in lines["note"]
    assert lines["continue"].strip() == "python -m src.cli fit --run mine"
    told = json.loads(said(capsys, "status", "mine", "--json"))
    assert (told["state"], told["steps_lost"], told["sign_of_life"]) == ("crashed", 38, 1704067200.0)
    assert told["checkpoint"]["file"] == str(run / "checkpoints/step=00000150.ckpt")


def test_status_of_a_run_without_a_whole_checkpoint(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None whole is a note and exit code 0: the state could be told, and all steps are lost."""
    run = a_run(run_root, "mine", 150, exit_reason="interrupted", last_step=188)
    truncated(run / "checkpoints/step=00000150.ckpt")
    told = json.loads(said(capsys, "status", "mine", "--json"))
    assert (told["state"], told["checkpoint"], told["steps_lost"]) == ("stopped", None, 188)
    assert any("none of the 1 checkpoints" in note for note in told["notes"])
    (run / "summary.json").write_text("{")
    assert (
        json.loads(said(capsys, "status", "mine", "--json"))["why"]
        == "there are checkpoints, and no whole summary.json"
    )


def ranks(run: Path, ago: float, *silent: float) -> None:
    """The heartbeat as rank 0 wrote it so many seconds ago, with ranks that had been silent for so long."""
    known = {"host": "node1", "step": 7, "doing": "backward", "since": 3.0}
    rows = [known | {"rank": rank, "silent": seconds} for rank, seconds in enumerate(silent)]
    content = {"written": datetime.datetime.now(datetime.UTC).timestamp() - ago, "ranks": rows}
    (run / "heartbeat").write_text(json.dumps(content))


def lately(seconds: float) -> str:
    """So many seconds ago, as the summary writes it."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)
    return then.strftime("%Y-%m-%dT%H:%M:%S%z")


@pytest.mark.parametrize(
    ("reason", "ago", "stale"),
    [("running", 0, [False, True]), ("running", 60, [True, True]), ("hung", 6000, [False, True])],
    ids=["rank 1 is silent", "rank 0 is", "as it was at the end"],
)
def test_a_line_for_each_rank(tmp_path: Path, reason: str, ago: float, stale: list[bool]) -> None:
    """A rank silent for over 30 s is stale, all where rank 0 writes no more; an ended run's do not grow older."""
    run = a_run(tmp_path, "mine", exit_reason=reason, written=lately(ago), last_step=7)
    ranks(run, ago, 2, 31)
    told = facts(run)["ranks"]
    assert [row["stale"] for row in told] == stale
    text = rank_line(told[1])
    assert text.startswith('stale: step 7, at "backward" for 3 s, on node1, last sign of life ')
    assert rank_line(told[0]).startswith("stale") == stale[0]


def test_a_heartbeat_without_ranks_has_no_lines(tmp_path: Path) -> None:
    """One that was just begun, or that a power cut has torn."""
    run = a_run(tmp_path, "mine", exit_reason="running", written=lately(0), last_step=7)
    for content in ('{"written": 1.0}', "[1"):
        (run / "heartbeat").write_text(content)
        assert facts(run)["ranks"] == []
