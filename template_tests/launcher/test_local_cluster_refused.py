"""What `make cluster-up` says where it cannot start a Slurm: one line, exit code 2, and nothing is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.local import __main__ as local_cluster
from slurm.local import machine
from slurm.local.__main__ import LocalCluster, main
from tests.commands import ROOT

FOLDER = Path("/nobody/has/this")
INSTALL = "apt-get install -y slurmctld slurmd slurm-client munge"


@pytest.fixture(autouse=True)
def _nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root on a machine with all programs; nothing outside of the test's folder can be changed."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(local_cluster.shutil, "which", lambda program, path: f"/usr/sbin/{program}")
    monkeypatch.setattr(local_cluster.subprocess, "run", lambda *command, **_: pytest.fail(f"ran {command}"))
    monkeypatch.setattr(local_cluster, "FOLDER", FOLDER)
    for name in ("HOSTS", "LINK"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    monkeypatch.delenv("LOCAL_SLURM", raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends with."""
    assert main([*arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1
    return told.err


@pytest.mark.parametrize("command", ["up", "down"])
def test_it_needs_root(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user reads what to type, and nothing was written."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "sudo make cluster-up" in refused(capsys, command)
    assert list(tmp_path.iterdir()) == []


def test_it_names_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing, and the line that brings it; without --install that line is not run."""
    monkeypatch.setattr(local_cluster.shutil, "which", lambda program, path: None if program == "slurmd" else program)
    assert (
        refused(capsys, "up") == f"error: slurmd not found; on Debian or Ubuntu `up --install` gets them: {INSTALL}\n"
    )


def test_install_runs_the_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--install gives it to apt-get where there is one, and says so where that fails."""
    ran: list[str] = []

    def run(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(command))
        return subprocess.CompletedProcess(command, 100)

    monkeypatch.setattr(local_cluster.subprocess, "run", run)
    monkeypatch.setattr(local_cluster.shutil, "which", lambda program, path: None)
    assert INSTALL in refused(capsys, "up", "--install")
    assert ran == []
    monkeypatch.setattr(local_cluster.shutil, "which", lambda program, path: program if "apt" in program else None)
    assert INSTALL in refused(capsys, "up", "--install")
    assert ran == ["apt-get update -qq", INSTALL]


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_slurm_of_somebody_else_is_left_alone(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another configuration, as a file or a link, also one to a file server that is away, is an error; it stays."""
    if kind == "file":
        (tmp_path / "LINK").write_text("ClusterName=real\n")
    else:
        (tmp_path / "LINK").symlink_to(tmp_path if kind == "link" else "/nowhere/slurm.conf")
    assert "this machine has another Slurm, which is left alone" in refused(capsys, "up")
    assert [path.name for path in tmp_path.iterdir()] == ["LINK"]


def test_down_takes_nothing_of_somebody_else(tmp_path: Path) -> None:
    """A foreign configuration and other lines of the hosts file are there after `down`."""
    (tmp_path / "LINK").write_text("ClusterName=real\n")
    (tmp_path / "HOSTS").write_text("127.0.0.1 localhost\n127.0.0.1 n1 # mine\n")
    assert main(["down"]) == 0
    assert (tmp_path / "LINK").read_text() == "ClusterName=real\n"
    assert (tmp_path / "HOSTS").read_text() == "127.0.0.1 localhost\n127.0.0.1 n1 # mine\n"


def test_down_after_a_restart_of_the_machine_takes_the_rest_away(tmp_path: Path) -> None:
    """Nothing runs any more; the link and the line in the hosts file go."""
    (tmp_path / "LINK").symlink_to(LocalCluster(FOLDER).conf)
    (tmp_path / "HOSTS").write_text("127.0.0.1 localhost\n" + LocalCluster(FOLDER).hosts_line)
    assert main(["down"]) == 0
    assert not os.path.lexists(tmp_path / "LINK")
    assert (tmp_path / "HOSTS").read_text() == "127.0.0.1 localhost\n"


def test_down_leaves_the_link_of_another_local_cluster(tmp_path: Path) -> None:
    """One that was started with another LOCAL_SLURM stays as it is."""
    other = LocalCluster(Path("/somewhere/else"))
    (tmp_path / "LINK").symlink_to(other.conf)
    (tmp_path / "HOSTS").write_text(other.hosts_line)
    assert main(["down"]) == 0
    assert os.readlink(tmp_path / "LINK") == str(other.conf)
    assert (tmp_path / "HOSTS").read_text() == other.hosts_line


def test_it_starts_on_a_python_without_packages() -> None:
    """No .venv: only the standard library is imported, however poor the Python."""
    done = subprocess.Popen(
        [sys.executable, "-S", "-m", "slurm.local", "sideways"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "invalid choice: 'sideways'" in done.communicate()[1]
    assert done.returncode == 2
