"""Find what goes wrong before there is a process group: the rendezvous, its port, and ranks that do not come."""

import errno
import json
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from src.errors import AgreedError, UserError
from src.hangs.report import ranks_text
from src.hardware import srun_layout


@dataclass(frozen=True)
class Launch:
    """This process among those of a launcher.

    Args:
        rank: of this process
        world_size: number of processes
        local_rank: of this process on its host
        address: MASTER_ADDR, as training would have it
        port: MASTER_PORT
        agent: whether torchrun itself serves the store there, not rank 0

    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent: bool

    @property
    def place(self) -> str:
        """Return the rendezvous as text."""
        return f"{self.address}:{self.port}"


def find_launch() -> Launch | None:
    """Return what torchrun or srun tells; None where this process is alone."""
    environment: TorchElasticEnvironment | SLURMEnvironment
    if TorchElasticEnvironment.detect():
        environment = TorchElasticEnvironment()
    elif (tasks := sum(srun_layout())) > 1:
        os.environ["SLURM_NTASKS"] = str(tasks)  # it may speak of the job, not of the step
        environment = SLURMEnvironment(auto_requeue=False)
    else:
        return None
    if environment.world_size() == 1:
        return None
    return Launch(
        environment.global_rank(),
        environment.world_size(),
        environment.local_rank(),
        environment.main_address,
        environment.main_port,
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def resolved(launch: Launch) -> str:
    """Return the numeric address that MASTER_ADDR stands for on this host."""
    try:
        return socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[return-value]
    except OSError as error:
        raise UserError(
            f"rank {launch.rank} on {socket.gethostname()}: MASTER_ADDR {launch.address} is no name of a host "
            f"({error.strerror}): give one that every node resolves, or an IP address"
        ) from error


def check_port(launch: Launch, address: str, seconds: float) -> str:
    """See on rank 0 whether it can serve the port, on the others whether they reach it in time; returns the result."""
    if launch.rank == 0 and not launch.agent:
        return _free(launch, address)
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, launch.port), timeout=max(0.1, min(5.0, seconds))).close()
            return "torchrun's store answers there" if launch.agent else "rank 0 answers there"
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"rank {launch.rank} on {socket.gethostname()} does not reach {launch.place} in {seconds:g} s "
                    f"({error.strerror or error}): rank 0 has not started, or a firewall is in between"
                ) from error
        time.sleep(0.2)


def _free(launch: Launch, address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    host = socket.gethostname()
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, launch.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"MASTER_PORT {launch.port} is taken by another program on {host} "
                    f"(ss -ltnp 'sport = :{launch.port}' names it): set MASTER_PORT to another"
                ) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    f"MASTER_ADDR {launch.address} ({address}) is no address of {host}, where rank 0 runs: set it to "
                    "the first node's"
                ) from error
            raise UserError(f"rank 0 cannot listen on {launch.place} ({error.strerror}): set MASTER_PORT") from error
    return "the port is free"


def meet(launch: Launch, seconds: float, value: Any) -> tuple[torch.distributed.Store, list[Any]]:
    """Enter the store that all ranks reach; returns it and every rank's `value`, of plain types.

    Rank 0 waits for the others, and refuses for all when some do not come in so many seconds.
    """
    rank, world_size = launch.rank, launch.world_size
    serves = rank == 0 and not launch.agent
    keys = [f"rank/{number}" for number in range(world_size)]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its processes
    try:
        server = torch.distributed.TCPStore(
            launch.address, launch.port, world_size, serves, timedelta(seconds=seconds), wait_for_workers=False
        )
        store = torch.distributed.PrefixStore(f"doctor/{attempt}", server)
        store.set(keys[rank], json.dumps(value))
        if rank == 0:
            missing = _missing(store, keys, seconds)
            store.set("missing", json.dumps(missing))
        else:
            store.wait(["missing"], timedelta(seconds=seconds + 10))
            missing = json.loads(store.get("missing"))
        if not missing:
            return store, [json.loads(text) for text in store.multi_get(keys)]
    except RuntimeError as error:
        raise UserError(
            f"rank {rank} on {socket.gethostname()} has lost rank 0, or the store at {launch.place} ({error})"
        ) from error
    leave(store, launch, [number for number in range(world_size) if number not in missing])
    raise AgreedError(
        f"{seconds:g} s after rank 0, {ranks_text(missing)} of {world_size} {'has' if len(missing) == 1 else 'have'} "
        f"not come to {launch.place}: see that they are started and not stopped; --timeout waits longer"
    )


def _missing(store: torch.distributed.Store, keys: list[str], seconds: float) -> list[int]:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except torch.distributed.DistStoreError:
        return [number for number, key in enumerate(keys) if not store.check([key])]
    return []


def leave(store: torch.distributed.Store, launch: Launch, ranks: Iterable[int]) -> None:
    """Keep rank 0, which may serve the store, until `ranks` have read what they need."""
    with suppress(RuntimeError):
        store.set(f"left/{launch.rank}", "")
        if launch.rank == 0:
            store.wait([f"left/{number}" for number in ranks], timedelta(seconds=10))
