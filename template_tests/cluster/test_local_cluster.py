"""The local Slurm does what the four-node examples and the launcher's tests count on, and leaves nothing behind."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.local import __main__ as local_cluster
from slurm.local import machine
from slurm.local.__main__ import LocalCluster, chosen_folder, main
from template_tests.cluster.jobs import FOUR_GPUS, NODES, field, found, needs_root, slurm, wait_for
from tests.commands import ROOT

Submit = Callable[..., str]


def test_there_are_four_free_nodes_of_four_gpus() -> None:
    """`sinfo` has n1 to n4, idle, each with four A100s, and a second partition."""

    def nodes() -> list[str]:
        return slurm("sinfo", "--noheader", "--Node", "--partition=a100", "--format=%N %T %G").splitlines()

    wait_for(lambda: nodes() == [f"{name} idle {FOUR_GPUS}" for name in NODES], 60, f"four idle nodes: {nodes()}")
    assert slurm("sinfo", "--noheader", "--format=%P").split() == ["a100*", "urgent"]


def test_srun_starts_two_tasks_with_two_gpus_on_each_of_four_nodes() -> None:
    """Eight tasks on four node names, and each sees the two GPUs of its node's share."""
    told = slurm(
        *("srun", "--nodes=4", "--ntasks-per-node=2", "--gpus-per-node=2"),
        *("bash", "-c", "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"),
    )
    assert sorted(told.splitlines()) == [f"{NODES[rank // 2]} {rank} 0,1" for rank in range(8)]


def test_the_nodes_names_lead_to_this_machine() -> None:
    """The first node's name is what a job's processes meet at."""
    assert {socket.gethostbyname(name) for name in NODES} == {"127.0.0.1"}


def test_sbatch_estimates_the_start() -> None:
    """`sbatch --test-only` says when the job would start, and submits nothing."""
    everything = ("squeue", "--noheader", "--states=all", "--format=%A")
    before = slurm(*everything).split()
    done = subprocess.run(
        ["sbatch", "--test-only", "--nodes=4", "--gpus-per-node=4", "--wrap=hostname"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert re.search(r"Job \d+ to start at \d{4}-\d\d-\d\dT.* on nodes n\[1-4\]", done.stderr), done.stderr
    assert set(slurm(*everything).split()) <= set(before)


def test_what_can_never_start_is_refused() -> None:
    """sbatch says so at once, for more nodes than there are; the job does not wait for ever."""
    done = subprocess.run(["sbatch", "--nodes=5", "--wrap=hostname"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "sbatch: error:" in done.stderr


def test_an_urgent_job_sends_another_back_to_the_queue(submit: Submit, tmp_path: Path) -> None:
    """Preemption: the job is warned by SIGTERM, outlives the grace time, and waits for its second start."""
    log = tmp_path / "log"
    task = (
        f"say() {{ echo $1 $SLURM_PROCID >> {log}; }}; trap 'say warned' TERM; say started; while :; do sleep 1; done"
    )
    job = submit(
        f"srun bash -c {shlex.quote(task)}",
        *("--nodes=4", "--ntasks-per-node=1", "--exclusive", "--output=/dev/null"),
    )
    wait_for(lambda: log.exists() and log.read_text().count("started") == 4, 60, "the job runs on four nodes")
    urgent = submit("sleep 1", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null")
    wait_for(lambda: field(job, "Restarts") == "1", 120, "the job has been requeued")
    wait_for(lambda: field(urgent, "JobState") == "COMPLETED", 60, "the urgent job has come to its end")
    assert set(log.read_text().splitlines()) >= {f"warned {rank}" for rank in range(4)}


@needs_root
def test_everybody_on_the_machine_may_submit() -> None:
    """A job of a user without rights runs, and as that user."""
    told = subprocess.run(["srun", "id", "-un"], user="nobody", cwd="/", capture_output=True, text=True)
    assert told.stdout == "nobody\n", told.stderr  # where it may say that it waits


@needs_root
def test_a_second_start_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """`up` on a running cluster says so; the same processes run on with the same configuration."""
    cluster = LocalCluster(chosen_folder())
    before = cluster.running(), cluster.conf.stat().st_mtime_ns
    assert len(before[0]) == 6
    assert main(["up"]) == 0
    assert "already up" in capsys.readouterr().out
    assert (cluster.running(), cluster.conf.stat().st_mtime_ns) == before


def test_without_a_cluster_these_tests_fail() -> None:
    """On a machine without it they say why; nothing that was asked for is left out in silence."""
    test = "template_tests/cluster/test_local_cluster.py::test_the_nodes_names_lead_to_this_machine"
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # another one, which cannot start: this one is up
        hidden = os.environ | {"PATH": "", "LOCAL_SLURM": folder}
        command = [sys.executable, "-m", "pytest", "-m", "cluster", "-p", "no:cacheprovider", test]
        done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert "1 error" in done.stdout
    assert "the local Slurm is not up: " in done.stdout
    assert done.returncode == 1


# A second cluster beside the one that the other tests use, with an /etc of its own


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster that is up, whose link, hosts file and ports are nobody else's."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets lie there
    folder.chmod(0o755)
    (folder / "hosts").write_text("127.0.0.1 localhost")
    monkeypatch.setenv("LOCAL_SLURM", str(folder / "s"))
    monkeypatch.setattr(machine, "HOSTS", folder / "hosts")
    monkeypatch.setattr(machine, "LINK", folder / "slurm/slurm.conf")
    monkeypatch.setattr(local_cluster, "PORT", 26817)
    cluster = LocalCluster(folder / "s")
    try:
        assert main(["up"]) == 0
        yield cluster
    finally:
        main(["down"])
        shutil.rmtree(folder)


def processes(cluster: LocalCluster) -> list[str]:
    """Every process that has the cluster's folder in its command line or environment, daemons and jobs."""
    here = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            told = command + (process / "environ").read_bytes()
        except OSError:
            continue
        if f"{cluster.folder}/".encode() in told and int(process.name) != os.getpid():
            here.append(command.replace(b"\0", b" ").decode())
    return here


def run_something(cluster: LocalCluster) -> None:
    """A job with a process on every node, which does not heed SIGTERM."""
    script = "--wrap=trap '' TERM; srun sleep 600"
    assert cluster.tool("sbatch", "--nodes=4", "--output=/dev/null", script).returncode == 0
    wait_for(lambda: sum("sleep 600" in command for command in processes(cluster)) >= 4, 60, "the job runs")


@needs_root
def test_down_leaves_nothing(second: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Daemons, jobs, the link and the hosts line are gone, with the file as it was; a second `down` finds nothing."""
    assert second.hosts_line in machine.HOSTS.read_text()
    assert machine.LINK.resolve() == second.conf
    run_something(second)
    assert main(["down"]) == 0
    assert processes(second) == []
    assert machine.HOSTS.read_text() == "127.0.0.1 localhost\n"
    assert not os.path.lexists(machine.LINK)
    assert main(["status"]) == 1
    capsys.readouterr()
    assert main(["down"]) == 0
    assert "was not up" in capsys.readouterr().out
    assert found(), "the other cluster is still there"
    assert main(["up"]) == 0
    assert second.tool("squeue", "--noheader").stdout == "", "the job must not come back"


@needs_root
def test_up_repairs_what_was_killed_and_drained(second: LocalCluster) -> None:
    """After a killed node, a killed slurmctld and a drained node `up` brings all four back."""
    before = second.running()
    assert second.tool("scontrol", "update", "nodename=n3", "state=drain", "reason=test").returncode == 0
    for name in ("n2", "slurmctld"):
        os.kill(before[name], signal.SIGKILL)
    wait_for(lambda: len(second.running()) == 4, 30, "two are dead")
    assert main(["up"]) == 0
    assert second.states() == dict.fromkeys(NODES, "idle")
    assert {name for name, pid in second.running().items() if pid != before[name]} == {"n2", "slurmctld"}


@needs_root
def test_a_pid_that_now_belongs_to_somebody_else_is_left_alone(second: LocalCluster) -> None:
    """The number in a pid file is not enough to kill."""
    os.kill(second.running()["n4"], signal.SIGKILL)
    with subprocess.Popen(["sleep", "60"]) as other:
        (second.folder / "run/n4.pid").write_text(str(other.pid))
        assert "n4" not in second.running()
        assert main(["down"]) == 0
        assert other.poll() is None
        other.kill()
