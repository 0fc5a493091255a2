"""What becomes of a job after a start."""

import datetime
import json
import os
from pathlib import Path

import pytest

from slurm.cluster import ROOT
from slurm.node import guard, history, requeue
from slurm.node.requeue import Limits
from src.engine import exit_codes, stopped

KILLED = "srun: error: n2: task 1: Killed\n"
TERMINATED = "srun: error: n1: task 0: Terminated\n"  # with it, as srun reports a rank that does not listen yet
NOT_LAUNCHED = "srun: error: Task launch for StepId=7.0 failed on node n3: Communication connection failure\n"
NO_MEMORY = "srun: error: n2: task 1: Out Of Memory\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in its second start, in job 7; a scontrol that says yes and remembers what it was asked."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(ROOT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    (tmp_path / "bin/scontrol").chmod(0o755)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step=00000040.ckpt").touch()
    for event in ("start", "end", "start"):
        history.note(tmp_path / "run", "7", event)
    return tmp_path / "run"


def asked(run: Path) -> list[str]:
    path = run.parent / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith("requeue")]


def decide(run: Path, code: int, batch: str = "", **limits: int) -> tuple[int, str]:
    """The exit code, and what was said."""
    told: list[str] = []
    code = requeue.decide(run, Limits(**{"restarts": 20} | limits), code, batch, told.append)
    return code, " ".join(told)


def test_a_stopped_start_is_requeued_once(run: Path) -> None:
    """By its own number, and only if it runs: a cancelled job stays cancelled."""
    stopped.mark(run, 40, "SIGUSR2")
    code, told = decide(run, 0)
    assert asked(run) == ["requeue incomplete 7"]
    assert code == exit_codes.STOPPED
    assert told == "stopped by SIGUSR2 at step 40, saved: asks Slurm for another start, from step 40 requeued"


def test_a_job_that_was_cancelled_is_not_called_requeued(run: Path) -> None:
    """Slurm says yes to `requeue incomplete` of such a job, too."""
    (run.parent / "bin/scontrol").write_text("#!/bin/sh\n[ $1 = requeue ] || echo 'JobId=7 JobState=CANCELLED'\n")
    stopped.mark(run, 40, "SIGUSR2")
    assert decide(run, 0)[1].endswith("not requeued: the job was cancelled")


def test_a_full_disk_keeps_no_job_from_coming_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The history is not written, which is said; the job is requeued all the same."""
    stopped.mark(run, 40, "SIGUSR2")
    monkeypatch.setattr(history, "open", lambda *path, **_: open("/dev/full", "a"), raising=False)  # noqa: SIM115
    assert decide(run, 0)[0] == exit_codes.STOPPED
    assert asked(run) == ["requeue incomplete 7"]
    assert "not noted in the job's history" in capsys.readouterr().err


def test_another_starts_marker_means_nothing(run: Path) -> None:
    """The one that the start before has left, or a start outside of this job."""
    stopped.mark(run, 40, "SIGUSR2")
    said = json.loads((run / "STOPPED").read_text())
    for other in ({"start": 0}, {"job": "6"}, {"job": None, "start": None}):
        (run / "STOPPED").write_text(json.dumps(said | other))
        assert decide(run, 0)[0] == 0
    assert asked(run) == []


@pytest.mark.parametrize(
    ("limits", "reason"), [({"restarts": 1}, "--max-restarts 1 is reached"), ({"seconds": 0}, "--total-time are used")]
)
def test_a_limit_ends_the_chain(run: Path, limits: dict[str, int], reason: str) -> None:
    """Saved, with 85, the reason and what to do."""
    stopped.mark(run, 40, "SIGTERM")
    code, told = decide(run, 0, "", **limits)
    assert (code, asked(run)) == (exit_codes.STOPPED, [])
    assert reason in told
    assert told.endswith("python slurm/jobs.py resume run resumes it")
    assert reason in history.read(run, "7")[-1]["why"]


@pytest.mark.parametrize(
    ("code", "batch", "retries", "restarted"),
    [
        (137, KILLED, 0, False),
        (137, KILLED, 1, True),
        (exit_codes.HUNG, "", 1, True),
        (exit_codes.BUSY, "", 0, False),
        (exit_codes.BUSY, "", 1, True),
        (1, NOT_LAUNCHED, 0, False),
        (1, NOT_LAUNCHED, 1, True),
        (139, "", 1, True),
        (137, NO_MEMORY, 1, False),
        (exit_codes.OUT_OF_MEMORY, "", 9, False),
        (exit_codes.TRIPPED, "", 9, False),
        (exit_codes.NO_CHECKPOINT, "", 9, False),
        (1, "", 9, False),
        (2, "", 9, False),
        (143, "", 0, True),
        (140, "srun: error: n1: task 0: User defined signal 2\n", 0, True),
        (143, KILLED + TERMINATED, 0, False),
        (143, KILLED + TERMINATED, 1, True),
    ],
)
def test_only_a_lost_rank_or_an_early_signal_is_tried_again(
    run: Path, code: int, batch: str, retries: int, restarted: bool
) -> None:
    """A lost rank as often as was asked for; what would come again ends the job with its code."""
    ended, _ = decide(run, code, batch, crash_retries=retries)
    assert (asked(run) != []) == restarted
    assert ended == {NO_MEMORY: exit_codes.OUT_OF_MEMORY, KILLED + TERMINATED: 137}.get(batch, code)
    if restarted and retries:
        history.note(run, "7", "start")
        (run.parent / "asked").unlink()
        decide(run, code, batch, crash_retries=retries)
        assert asked(run) == []


def test_a_finished_run_is_not_requeued(run: Path) -> None:
    """Also where a signal came after its last step, or a rank fell while it left."""
    stopped.mark(run, 40, "SIGTERM")
    (run / "DONE").touch()
    assert decide(run, 0)[0] == 0
    assert decide(run, 137, KILLED, crash_retries=3)[0] == 137
    assert asked(run) == []


@pytest.mark.parametrize(
    ("says", "asks"),
    [
        ("Unexpected message received for job 7", 3),  # as Slurm 22.05 to 26.05 say of a controller that is away
        ("Something new", 3),
        ("Access/permission denied for job 7", 1),
        ("Requested operation is presently disabled for job 7", 1),
        ("Invalid job id specified for job 7", 1),
    ],
)
def test_a_controller_that_is_away_is_asked_again(
    run: Path, says: str, asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is back at the third time; one that refuses is asked once."""
    slept: list[float] = []
    monkeypatch.setattr(requeue.time, "sleep", slept.append)
    body = (
        f'echo "$*" >> {run.parent}/asked\n[ $(wc -l < {run.parent}/asked) -gt 2 ] || {{ echo "{says}" >&2; exit 1; }}'
    )
    (run.parent / "bin/scontrol").write_text(f"#!/bin/sh\n{body}\n")
    stopped.mark(run, 40, "SIGUSR2")
    code, told = decide(run, 0)
    waited = slept.count(requeue.AGAIN_SECONDS)
    assert (code, len(asked(run)), waited) == (exit_codes.STOPPED, asks, asks - 1)
    assert ("jobs.py resume run resumes it" in told) == (asks == 1)


@pytest.mark.parametrize(
    ("ends", "until"),
    [([None] * 9, 1970), ([1000, None, None, None], 970), ([1000, 3000, 3000, *[None] * 9], 2970)],
)
def test_the_guard_waits_for_the_limit_that_slurm_has_named_last(
    ends: list[float | None], until: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else for the one in the script; an administrator may change it, and the controller may be away for a while."""
    now, answers = [0.0], iter(ends)
    zone = datetime.datetime.now().astimezone().tzinfo

    def asked(*what: str) -> str:
        moment = next(answers, None)
        return "" if moment is None else f"EndTime={datetime.datetime.fromtimestamp(moment, zone):%Y-%m-%dT%H:%M:%S} x"

    monkeypatch.setattr(guard.requeue, "scontrol", asked)
    monkeypatch.setattr(guard.time, "time", lambda: now[0])
    monkeypatch.setattr(guard.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    guard.wait(2000, 30)
    assert now[0] == until


@pytest.mark.parametrize(("signal", "waits"), [("SIGUSR2", False), ("SIGTERM", True)])
def test_without_scontrol_only_a_preemption_is_waited_for(
    run: Path, signal: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm takes a preempted job back by itself, if that is still there."""
    slept: list[float] = []
    monkeypatch.setattr(requeue.time, "sleep", slept.append)
    monkeypatch.setenv("PATH", str(run))
    stopped.mark(run, 40, signal)
    code, told = decide(run, 0)
    assert code == exit_codes.STOPPED
    assert "requeueing failed (no scontrol on this node): python slurm/jobs.py resume run resumes it" in told
    assert slept == ([requeue.GRACE_SECONDS] if waits else [])


def test_restarts_without_a_step_are_counted(run: Path) -> None:
    """Two of them, after the first start; with a step made between them it goes on."""
    assert requeue.stuck(run, "7") is None
    path = run / "slurm/7_history.jsonl"
    for steps in ((-1, 30, 40), (40, 40)):  # only one restart is where it was; only one start is a restart
        path.unlink()
        for step in steps:
            history.note(run, "7", "start", step=step)
        assert requeue.stuck(run, "7") is None
    path.unlink()
    for step in (-1, 40, 40):
        history.note(run, "7", "start", step=step)
    assert "two restarts have made no step beyond 40" in str(requeue.stuck(run, "7"))
    (run / "checkpoints/step=00000041.ckpt").touch()
    assert requeue.stuck(run, "7") is None
