"""Where the processes of a launch meet, and who comes: what goes wrong before there is a process group, in one line."""

import errno
import json
import os
import socket
import time
from collections.abc import Callable
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
        """The rendezvous, for people."""
        return f"{self.address}:{self.port}"


def find_launch() -> Launch | None:
    """What torchrun or srun says; None where this process is alone."""
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
    """The numeric address that MASTER_ADDR stands for on this host.

    Raises:
        UserError: for none.

    """
    try:
        return socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[return-value]
    except OSError as error:
        raise UserError(
            f"rank {launch.rank} on {socket.gethostname()}: MASTER_ADDR {launch.address} is no name of a host "
            f"({error.strerror}): give one that every node resolves, or an IP address"
        ) from error


def check_port(launch: Launch, address: str, seconds: float) -> str:
    """Rank 0 sees whether it can serve the port, all others whether they reach it; returns what was found.

    Raises:
        UserError: it cannot, or nobody listens there within so many seconds.

    """
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


class Meeting:
    """The store that all ranks reach, and what they tell each other there, without a collective.

    Args:
        launch: who this is
        seconds: how long to wait for others, each time

    """

    def __init__(self, launch: Launch, seconds: float) -> None:
        self.launch, self.seconds = launch, seconds
        serves = launch.rank == 0 and not launch.agent
        limit = timedelta(seconds=seconds)
        try:
            store = torch.distributed.TCPStore(
                launch.address, launch.port, launch.world_size, serves, limit, wait_for_workers=False
            )
        except RuntimeError as error:
            raise UserError(f"rank {launch.rank} does not get into the store at {launch.place}: {error}") from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its processes
        self.store = torch.distributed.PrefixStore(f"doctor/{attempt}", store)

    def share(self, name: str, value: Any) -> list[Any]:
        """Every rank's value of that name, on every rank.

        Raises:
            UserError: on rank 0, ranks have not given theirs in time.
            AgreedError: on the others then.

        """
        rank, world_size = self.launch.rank, self.launch.world_size
        keys = [f"{name}/{number}" for number in range(world_size)]
        self._ask(lambda: self.store.set(keys[rank], json.dumps(value)))
        if rank == 0:
            if not self._come(keys, self.seconds):
                missing = [number for number, key in enumerate(keys) if not self.store.check([key])]
                who = f"{ranks_text(missing)} of {world_size} {'has' if len(missing) == 1 else 'have'}"
                self._refuse(
                    f"{self.seconds:g} s after rank 0, {who} not come to {self.launch.place} ({name}): see that they "
                    "are started and not stopped; --timeout waits longer"
                )
            self.store.set(f"{name}/all", "")
        elif not self._ask(lambda: self._come([f"{name}/all"], self.seconds + 10, "refused")):
            raise UserError(f"rank {rank} has not heard of rank 0 for {self.seconds + 10:g} s ({name})")
        if rank and self._ask(lambda: self.store.check(["refused"])):
            self._ask(lambda: self.store.set(f"read/{rank}", ""))
            raise AgreedError("rank 0 has ended it")
        return [json.loads(text) for text in self._ask(lambda: self.store.multi_get(keys))]

    def leave(self) -> None:
        """Go; rank 0, which may serve the store, when the others have."""
        rank, world_size = self.launch.rank, self.launch.world_size
        with suppress(UserError):
            self._ask(lambda: self.store.set(f"left/{rank}", ""))
            if rank == 0:
                self._come([f"left/{number}" for number in range(world_size)], 10)

    def _refuse(self, text: str) -> None:
        """End it on every rank that is here."""
        here = [number for number in range(1, self.launch.world_size) if self.store.check([f"place/{number}"])]
        self.store.set("refused", "")
        self._come([f"read/{number}" for number in here], 5)
        raise UserError(text)

    def _come(self, keys: list[str], seconds: float, end: str | None = None) -> bool:
        """Whether all keys are there, or `end` is, within so many seconds."""
        until = time.monotonic() + seconds
        while not (self.store.check(keys) or (end and self.store.check([end]))):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise UserError(
                f"rank {self.launch.rank} on {socket.gethostname()} has lost the store at {self.launch.place}: the "
                "process that serves it has ended"
            ) from error
