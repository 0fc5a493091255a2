"""Start the command as srun and torchrun do, on this machine."""

import socket
import subprocess
import sys
from pathlib import Path

from tests.commands import ROOT, environment

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
PROBE = ["--model", "template_tests.distributed.probe.Probe", "--data", "template_tests.distributed.probe.NumbersData"]


def srun(
    run_root: Path,
    nodes: int,
    per_node: int,
    *arguments: str,
    start: tuple[str, ...] = ("-m", "src.cli"),
    ranks: tuple[int, ...] | None = None,
    **more: str,
) -> list[subprocess.Popen[str]]:
    """What srun does: every task at once, each with Slurm's variables; only `ranks`, where others do not come."""
    world, port = nodes * per_node, free_port()
    processes = []
    for rank in range(world) if ranks is None else ranks:
        env = environment(
            run_root,
            SLURM_JOB_ID="4711",
            SLURM_STEP_ID="0",
            SLURM_JOB_NAME="train",
            SLURM_NTASKS=str(world),
            SLURM_STEP_NUM_TASKS=str(world),
            SLURM_STEP_NUM_NODES=str(nodes),
            SLURM_NNODES=str(nodes),
            SLURM_NTASKS_PER_NODE=str(per_node),
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank % per_node),
            SLURM_NODEID=str(rank // per_node),
            SLURM_JOB_NODELIST="localhost",
            SLURM_NODELIST="localhost",
            MASTER_ADDR="127.0.0.1",
            **{"MASTER_PORT": str(port)} | more,
        )
        command = [sys.executable, *start, *arguments]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    return processes


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
