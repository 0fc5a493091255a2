"""What the first node of a job decides: whether there is something to do, and where the ranks meet."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import race
from slurm.cluster import ROOT
from slurm.errors import LaunchError
from slurm.node import history, requeue
from slurm.node import start as job
from src.engine import exit_codes


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment of a job on two nodes, in the project; the run's folder."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.chdir(ROOT)
    return tmp_path / "run"


def evaluated(text: str) -> dict[str, str]:
    """The exports of a text that bash is to evaluate."""
    return dict(shlex.split(line)[1].split("=", 1) for line in text.splitlines())


def test_a_node_whose_name_leads_nowhere_is_met_at_slurms_address(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cloud without names; one that can be resolved keeps its name."""
    programs = tmp_path / "bin"
    programs.mkdir()
    says = "NodeName=x.invalid NodeAddr=10.1.2.3 NodeHostName=x"
    (programs / "scontrol").write_text(f'#!/bin/sh\ntest "$*" = "show node x.invalid" && echo "{says}"\n')
    (programs / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    assert (job.address("x.invalid"), job.address("localhost")) == ("10.1.2.3", "localhost")


def test_a_port_is_below_the_ephemeral_ones_and_free() -> None:
    """It follows from the job's number; one that is taken is passed over."""
    port = job.free_port(1234)
    assert 10000 <= port < 30000
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        other = job.free_port(1234)
    assert other != port
    assert 10000 <= other < 30000


def test_two_jobs_on_a_node_get_different_ports() -> None:
    """Also where neither listens yet."""
    assert job.free_port(1234) != job.free_port(1235)


def test_a_start_says_where_to_meet_and_is_remembered(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script gets address and port, batch.out a line with job, nodes and run, the history a start."""
    found = evaluated(job.begin(inside, 2, ""))
    assert found.keys() == {"MASTER_ADDR", "MASTER_PORT"}
    assert found["MASTER_ADDR"] == "n1"
    said = capsys.readouterr().err
    assert "job 1234, first start, on n[1-2]" in said
    assert [entry["event"] for entry in history.read(inside, "1234")] == ["start"]


def test_a_finished_run_is_left_alone(inside: Path) -> None:
    """A job that comes back after the end does nothing and ends well."""
    inside.mkdir()
    (inside / "DONE").touch()
    assert job.begin(inside, 2, "") == "exit 0"


def test_who_lost_the_race_leaves_before_it_writes(inside: Path) -> None:
    """It ends well, and nothing in the run's history is its own."""
    race.claim(inside / "slurm", "r", "1233")
    assert job.begin(inside, 2, "r") == "exit 0"
    assert history.read(inside, "1234") == []


def test_a_finished_run_is_evaluated(inside: Path) -> None:
    """Only training has nothing to do there."""
    inside.mkdir()
    (inside / "DONE").touch()
    assert "MASTER_ADDR" in job.begin(inside, 2, "", evaluate=True)


def test_a_job_that_cannot_train_does_not_take_the_race(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other shape still may."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    with pytest.raises(LaunchError):
        job.begin(inside, 2, "r")
    assert race.holder(inside / "slurm", "r") is None


def test_a_scontrol_that_does_not_answer_stops_nothing(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's name is taken then."""

    def late(*arguments: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("scontrol", 60)

    monkeypatch.setattr(requeue.subprocess, "run", late)
    assert job.address("no.such.host.invalid") == "no.such.host.invalid"


def test_another_number_of_tasks_is_refused(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's count against the run's: a smaller world would train without an error."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    with pytest.raises(LaunchError, match="1 tasks, the run wants 2"):
        job.begin(inside, 2, "")


def test_code_from_elsewhere_is_refused(inside: Path, tmp_path: Path) -> None:
    """Where Python would import src from another place than the job's folder, the job ends with that place."""
    other, here = tmp_path / "other", tmp_path / "here"
    for place in (other, here):
        (place / "src").mkdir(parents=True)
        (place / "src/__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": f"{other}:{ROOT}", "PATH": "/usr/bin:/bin"}
    probe = "import sys; sys.path.remove(''); from slurm.node import start; sys.exit(start.main())"
    command = [sys.executable, "-c", probe, "--tasks", "2", "r"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == exit_codes.BAD_INPUT
    assert done.stderr.splitlines()[-1].startswith(f"error: src would be imported from {other}")
