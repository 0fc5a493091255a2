"""`python -m src.doctor` as torchrun and srun start it: two processes over gloo."""

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src.doctor import __main__ as doctor
from src.doctor.group import _refuse_shared, bus_bandwidth
from src.engine.errors import AgreedError
from template_tests.launchers import TORCHRUN, srun
from tests.commands import ROOT, environment

DOCTOR = ("-m", "src.doctor")


def answers(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each, without what PyTorch says of itself."""
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    return [
        (process.returncode, "".join(line for line in output.splitlines(True) if not line.startswith("[")))
        for process, output in zip(processes, outputs, strict=True)
    ]


def test_under_torchrun_the_group_is_described(tmp_path: Path) -> None:
    """Rendezvous, one row per rank, a bandwidth above zero for each size; every rank exits with 0."""
    command = [sys.executable, *TORCHRUN, "--", "src.doctor", "--group"]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    first, met, *rows, last = done.stdout.splitlines()
    assert re.match(r"rendezvous +MASTER_ADDR \S+ \([\d.:a-f]+\), MASTER_PORT \d+, served by torchrun$", first)
    assert "all 2 ranks have met" in met
    assert [row.split()[:2] for row in rows] == [["rank", "0"], ["rank", "1"]]
    assert all(row.endswith(f"{socket.gethostname()}, CPU") for row in rows)
    rates = [float(rate) for rate in re.findall(r"([\d.e-]+) GB/s at", last)]
    assert last.startswith("all-reduce    over gloo, 2 ranks: bus bandwidth")
    assert len(rates) == 3
    assert min(rates) > 0


def test_under_srun_rank_0_serves_the_port_and_says_all(tmp_path: Path) -> None:
    """Rank 1 says nothing; both exit with 0."""
    (code, said), other = answers(srun(tmp_path, 1, 2, "--group", start=DOCTOR))
    assert (code, other) == (0, (0, ""))
    assert "served by rank 0" in said
    assert len(re.findall(r"^rank \d ", said, re.M)) == 2
    assert "all-reduce" in said


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (0, r"error: 3 s after rank 0, rank 1 of 2 has not come to 127\.0\.0\.1:\d+: see that .*\n"),
        (1, r"error: rank 1 on \S+ does not reach 127\.0\.0\.1:\d+ in 3 s: rank 0 has not .*\n"),
    ],
)
def test_a_rank_that_nobody_joins_ends_with_one_line(tmp_path: Path, rank: int, told: str) -> None:
    """Within the timeout, with exit code 2, and it says who is missing."""
    arguments = ("--group", "--timeout", "3")
    ((code, said),) = answers(srun(tmp_path, 2, 1, *arguments, start=DOCTOR, ranks=(rank,)))
    assert code == 2
    assert re.fullmatch(told, "".join(line for line in said.splitlines(True) if not line.startswith("rendezvous")))


def test_a_port_that_is_taken_ends_with_one_line(tmp_path: Path) -> None:
    """Rank 0 does not wait for anybody then, and says how to find out who has it."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        ((code, said),) = answers(srun(tmp_path, 2, 1, "--group", start=DOCTOR, ranks=(0,), MASTER_PORT=port))
    assert code == 2
    (error,) = [line for line in said.splitlines() if not line.startswith("rendezvous")]
    assert re.match(rf"error: rank 0 on \S+ cannot serve 127\.0\.0\.1:{port}: .* MASTER_PORT free \(ss -ltnp", error)
    assert "EADDRINUSE" in error


def test_an_all_reduce_that_a_rank_does_not_join_ends_with_one_line(tmp_path: Path) -> None:
    """The ranks have met and one is stuck: exit code 2 instead of a hang."""
    stuck = (
        "import os, sys, time\n"
        "from src.doctor import __main__ as doctor, group as doctor_group\n"
        "if os.environ['SLURM_PROCID'] == '1': doctor_group.measure = lambda *_: time.sleep(1000)\n"
        "sys.exit(doctor.main(['--group', '--timeout', '8']))"
    )
    (first, said), (second, other) = answers(srun(tmp_path, 1, 2, start=("-c", stuck)))
    assert (first, second) == (2, 2)
    assert re.search(
        r"^error: rank 0 on \S+: the ranks have met, and an all-reduce over gloo has not come back in 8 s: ", said, re.M
    )
    assert said.count("error") == other.count("error") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wait_for_the_others_ends_with_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    """While rank 0 waits for rank 1, which does not come, Ctrl-C and SIGTERM end it at once and without a traceback."""
    (process,) = srun(tmp_path, 1, 2, "--group", "--timeout", "170", start=DOCTOR, ranks=(0,))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rendezvous")  # next it waits
    time.sleep(1)
    process.send_signal(number)
    ((code, said),) = answers([process])
    assert (code, said) == (-number, "")


def test_one_process_is_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    """--group alone, or a time that is none: one line, exit code 2."""
    assert doctor.main(["--group"]) == 2
    assert "this is a single process" in capsys.readouterr().err
    assert doctor.main(["--group", "--timeout", "0"]) == 2
    assert "--timeout is 0; it is a number of seconds above 0" in capsys.readouterr().err


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """NCCL would fail with words of its own; the same GPU of another host is another."""
    places = [{"host": host, "gpu": "GPU-1"} for host in ("node1", "node2")]
    _refuse_shared([*places, {"host": "node1", "gpu": None}, {"host": "node1", "gpu": None}])
    with pytest.raises(AgreedError, match="2 ranks share one GPU of node1"):
        _refuse_shared([*places, places[0]])


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """2 (n - 1) / n times bytes over time, in 10⁹ bytes per second."""
    assert bus_bandwidth(10**9, 0.5, 2) == pytest.approx(2.0)
    assert bus_bandwidth(10**9, 1.0, 8) == pytest.approx(1.75)
