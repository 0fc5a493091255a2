"""What becomes of sbatch's answers: its own words with a hint, one number, and never a second submission."""

from dataclasses import replace
from pathlib import Path

import pytest

from slurm import sbatch
from slurm.errors import LaunchError
from slurm.script import Job
from template_tests.launcher.test_script import job, site

COMMENT = "0123abcd.0"
# sbatch's words (Slurm 22.05 and 23.11) for every hint.
SAID = [
    ("Batch job submission failed: Invalid account or account/partition combination specified", "belong together"),
    ("invalid partition specified: nope", "sinfo -s lists"),
    ("Batch job submission failed: Invalid partition name specified", "sinfo -s lists"),
    ("Batch job submission failed: Invalid qos specification", "format=account,partition,qos"),
    (
        "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time "
        "limits)",
        "a limit of your account or QOS",
    ),
    ("QOSMaxSubmitJobPerUserLimit", "a limit of your account or QOS"),
    ("Invalid generic resource (gres) specification", "gpu_type or gpu_request"),
    ("Requested time limit is invalid (missing or exceeds some limit)", "allows less time"),
    ("Node count specification invalid", "has not so many nodes"),
    ("Requested node configuration is not available", "no node has that many GPUs"),
    ("Memory specification can not be satisfied", "no node has that many GPUs"),
    ("fatal: Could not establish a configuration source", "know no cluster"),
    ("Invalid wckey specification", "sbatch: [--wckey=NAME]"),
    ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Slurm's commands are; sbatch counts its calls, the queue is empty."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin", "squeue", "true")
    return tmp_path / "bin"


def program(programs: Path, name: str, body: str) -> None:
    count = f"echo {name} >> {programs.parent}/calls\n"
    (programs / name).write_text(f"#!/bin/sh\n{count}{body}\n")
    (programs / name).chmod(0o755)


def calls(programs: Path, name: str) -> int:
    return (programs.parent / "calls").read_text().split().count(name)


@pytest.fixture
def one(tmp_path: Path) -> Job:
    """What is submitted."""
    (tmp_path / "slurm").mkdir()
    return job(site("local"), folder=tmp_path / "slurm")


@pytest.mark.parametrize(("said", "hint"), SAID)
def test_a_refusal_is_sbatchs_words_and_what_to_do(programs: Path, one: Job, said: str, hint: str) -> None:
    """One line with both; sbatch was called once."""
    program(programs, "sbatch", f'echo "sbatch: error: {said}" >&2; exit 1')
    with pytest.raises(LaunchError) as caught:
        sbatch.submit(one)
    text = str(caught.value)
    assert "sbatch refused gpt: " in text
    assert said in text
    assert hint in text
    assert "\n" not in text
    assert calls(programs, "sbatch") == 1


def test_every_hint_is_given_for_something() -> None:
    """No entry of HINTS is without one of the words above, nor hidden by one before it."""
    given = {next(hint for pattern, hint in sbatch.HINTS if hint in sbatch.advice(said)) for said, _ in SAID}
    assert given == {hint for _, hint in sbatch.HINTS}


@pytest.mark.parametrize(
    "stdout",
    [
        "4711\n",
        "4711;cluster\n",
        "Welcome to the 2026 cluster\n4711\n",
        "balance: 12 h\n4711;c\nenjoy\n",
    ],
)
def test_the_number_is_read_from_stdout_alone(programs: Path, one: Job, stdout: str) -> None:
    """Whatever a site's plugin adds to it, and whatever numbers are on stderr."""
    program(programs, "sbatch", f"echo 99 >&2; printf '{stdout}'")
    assert sbatch.submit(one) == "4711"


def test_what_sbatch_says_beside_the_number_is_not_lost(
    programs: Path, one: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site's warning on stderr reaches the user, though the job is accepted."""
    program(programs, "sbatch", "echo 'sbatch: warning: account lab has 3 hours left' >&2; echo 4711")
    assert sbatch.submit(one) == "4711"
    assert "account lab has 3 hours left" in capsys.readouterr().err


def test_a_slow_sbatch_is_a_clear_error_and_is_not_called_again(
    programs: Path, one: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that the job may be in the queue all the same."""
    monkeypatch.setattr(sbatch, "SECONDS", 1)
    program(programs, "sbatch", "sleep 30")
    with pytest.raises(sbatch.NoClearAnswerError, match=r"no answer within 1 s.*may be in the queue.*list"):
        sbatch.submit(one)
    assert calls(programs, "sbatch") == 1


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
        "echo accepted, but without a number",
        "printf '\\377\\376 job\\n'",
    ],
)
def test_what_was_accepted_after_all_is_found_in_the_queue(programs: Path, one: Job, answer: str) -> None:
    """By its comment; of an array by the number that its tasks share. It is not submitted again."""
    program(programs, "sbatch", answer)
    program(
        programs,
        "squeue",
        f'test "$*" = "--me --noheader --array --format=%F %K %k" && printf "11 N/A (null)\\n12 3 {COMMENT}\\n"',
    )
    assert sbatch.submit(one) == "12"
    assert calls(programs, "sbatch") == 1


def test_a_queue_that_does_not_answer_either_leaves_it_open(programs: Path, one: Job) -> None:
    """That is no refusal, and is not called one."""
    program(programs, "sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    program(programs, "squeue", "exit 1")
    with pytest.raises(sbatch.NoClearAnswerError, match="no clear answer for gpt"):
        sbatch.submit(one)


def test_a_plain_refusal_asks_no_queue(programs: Path, one: Job) -> None:
    """A controller that is busy is not asked what is known already."""
    program(programs, "sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(LaunchError, match="sbatch refused"):
        sbatch.submit(one)
    assert calls(programs, "squeue") == 0


def test_setup_that_bash_cannot_read_is_not_submitted(programs: Path, one: Job) -> None:
    """It would fail at its start, after hours in the queue."""
    program(programs, "sbatch", "echo 4711")
    broken = replace(one, cluster=replace(one.cluster, setup=("echo it's",)))
    with pytest.raises(LaunchError, match=r"setup: bash cannot read it \(.*unexpected EOF"):
        sbatch.submit(broken)
    assert not (programs.parent / "calls").exists()


def test_a_squeue_that_fails_is_no_empty_queue(programs: Path) -> None:
    """Else a run that has a job would get a second one."""
    program(programs, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match=r"squeue: .*scontrol ping"):
        sbatch.queued()
