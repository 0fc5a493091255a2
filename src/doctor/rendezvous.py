"""Find what goes wrong before there is a process group: the rendezvous, its port, and ranks that do not come."""

import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from src.engine.errors import AgreedError, UserError
from src.engine.resolve.hardware import srun_layout
from src.engine.watchdog.report import ranks_text


@dataclass(frozen=True)
class Launch:
    """This process among those of a launcher."""

    rank: int
    world_size: int
    local_rank: int
    address: str  # MASTER_ADDR, as training would have it
    port: int
    agent: bool  # torchrun itself serves the store there, not rank 0

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


def enter(launch: Launch, seconds: float) -> torch.distributed.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 or torchrun serves."""
    serves = launch.rank == 0 and not launch.agent
    try:
        store = torch.distributed.TCPStore(
            launch.address, launch.port, launch.world_size, serves, timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        who = f"rank {launch.rank} on {socket.gethostname()}"
        if serves:
            raise UserError(
                f"{who} cannot serve {launch.place}: MASTER_ADDR must be this host's, and MASTER_PORT free "
                f"(ss -ltnp 'sport = :{launch.port}'): {error}"
            ) from error
        raise UserError(
            f"{who} does not reach {launch.place} in {seconds:g} s: rank 0 has not started, or a firewall is in between"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its processes
    return torch.distributed.PrefixStore(f"doctor/{attempt}", store)


def meet(store: torch.distributed.Store, launch: Launch, seconds: float, value: Any) -> list[Any]:
    """Return every rank's `value`, of plain types; refused for all when some rank does not come in so many seconds."""
    rank, world_size = launch.rank, launch.world_size
    keys = [f"rank/{number}" for number in range(world_size)]
    try:
        store.set(keys[rank], json.dumps(value))
        if rank == 0:
            missing = _missing(store, keys, seconds)
            store.set("missing", json.dumps(missing))
        else:
            store.wait(["missing"], timedelta(seconds=seconds + 10))
            missing = json.loads(store.get("missing"))
        if not missing:
            return [json.loads(text) for text in store.multi_get(keys)]
    except RuntimeError as error:
        who = f"rank {rank} on {socket.gethostname()}"
        raise UserError(f"{who} has lost rank 0, or the store at {launch.place} ({error})") from error
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
