"""`python -m src.doctor` under torchrun or srun: do the processes meet, and how fast do they exchange data?"""

import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from src import nccl_log
from src.bus_bandwidth import bus_bandwidth, measure
from src.checkpoint.units import size
from src.errors import AgreedError, UserError, hint
from src.rendezvous import Launch, Meeting, check_port, resolved

NCCL_FILE = "NCCL_DEBUG_FILE"
Line = tuple[str, str, bool]  # as src/doctor.py has them


def group(launch: Launch, seconds: float) -> Iterator[Line]:
    """The rendezvous, every rank, how data travels and how fast. All ranks must run through it; rank 0 gets the lines.

    Args:
        launch: who this is
        seconds: how long to wait for the others, and for an all-reduce

    Raises:
        UserError: they do not meet, or cannot exchange anything.

    """
    begun = time.monotonic()
    address = resolved(launch)
    state = check_port(launch, address, seconds)
    if launch.rank == 0:
        yield "rendezvous", f"MASTER_ADDR {launch.address} ({address}), MASTER_PORT {launch.port}: {state}", False
    meeting = Meeting(launch, seconds)
    places = meeting.share("place", _place(launch))
    if launch.rank == 0:
        yield "", f"all {launch.world_size} ranks have met, {time.monotonic() - begun:.1f} s after rank 0 came", False
        yield from ranks(places)
    try:
        _refuse_shared(places)
    except AgreedError:
        meeting.leave()
        raise
    over_gpus = all(place["gpu"] for place in places)
    backend, device = ("nccl", torch.device("cuda", _index(launch))) if over_gpus else ("gloo", torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder, limited(launch, backend, seconds, Path(folder)):
        own = NCCL_FILE in os.environ
        if over_gpus:
            nccl_log.report_into(Path(folder))
        found = exchange(meeting, backend, device, Path(folder))
        told = meeting.share("measurement", found)
    meeting.leave()
    if launch.rank == 0:
        if over_gpus:
            yield from transports(told, own)
        rates = ", ".join(
            f"{bus_bandwidth(count, took, launch.world_size):.3g} GB/s at {size(count)}"
            for count, took in told[0]["times"]
        )
        text = f"over {backend}, {launch.world_size} ranks: bus bandwidth {rates} (2(n-1)/n x bytes / time, median)"
        yield "all-reduce", text, False


def ranks(places: list[dict[str, Any]]) -> Iterator[Line]:
    """One row for each; a rank without a GPU where others have one is a doubt."""
    some = any(place["gpu"] for place in places)
    for rank, place in enumerate(places):
        lacks = some and not place["gpu"]
        more = ": no GPU that PyTorch can use, so all exchange data over gloo" if lacks else ""
        yield f"rank {rank}", f"{place['host']}, {place['device']}{more}", lacks


def transports(told: list[dict[str, Any]], own: bool) -> Iterator[Line]:
    """What NCCL chose, by what every rank's NCCL has reported."""
    ways = nccl_log.summary(link for found in told for link in found["links"])
    if any(found["multicast"] for found in told):
        ways.append("NVLS: NVLink's switches sum up")
    if own:
        yield "", f"{NCCL_FILE} is not used: NCCL's report was read here instead", False
    if not ways:
        yield "transport", "NCCL's report names none", True
    for way in ways:
        slow = way.startswith("NET/Socket")
        more = ": TCP, not InfiniBand (ibstat; NCCL_IB_DISABLE, NCCL_NET_PLUGIN)" if slow else ""
        yield "transport", way + more, slow


def exchange(meeting: Meeting, backend: str, device: torch.device, folder: Path) -> dict[str, Any]:
    """Make the process group, measure, and take it down again.

    Raises:
        UserError: the ranks have met and cannot make a group, or sum up wrong.

    """
    launch = meeting.launch
    never = timedelta(seconds=2 * meeting.seconds + 60)  # `limited` comes first
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(
            backend,
            store=torch.distributed.PrefixStore("group", meeting.store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=never,
        )
        times = measure(backend, device)
    except RuntimeError as error:
        why = nccl_log.last_warning(nccl_log.report(folder)) or str(error)
        text = f"rank {launch.rank} on {socket.gethostname()}: an all-reduce over {backend} fails: {why}"
        raise UserError("; ".join(part for part in (text, hint(error)) if part)) from error
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    text = nccl_log.report(folder)
    return {"times": times, "links": nccl_log.links(text), "multicast": nccl_log.multicast(text)}


@contextmanager
def limited(launch: Launch, backend: str, seconds: float, folder: Path) -> Iterator[None]:
    """End this process with one line and exit code 2 where what runs inside takes longer: a collective cannot be left.

    Rank 0 comes first: its launcher ends the others, which need not say it again.
    """

    def give_up() -> None:
        why = nccl_log.last_warning(nccl_log.report(folder)) or (
            f"a rank is stopped, or {'NCCL' if backend == 'nccl' else 'gloo'} took an address that others do not reach "
            f"({'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME)"
        )
        text = f"error: rank {launch.rank} on {socket.gethostname()}: the ranks have met, and an all-reduce over "
        print(f"{text}{backend} has not come back in {seconds:g} s: {why}", file=sys.stderr, flush=True)
        os._exit(UserError.exit_code)

    timer = threading.Timer(seconds + (5 if launch.rank else 0), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _place(launch: Launch) -> dict[str, Any]:
    host = socket.gethostname()
    if not torch.cuda.is_available():
        return {"host": host, "device": "CPU", "gpu": None}
    index = _index(launch)
    card = torch.cuda.get_device_properties(index)
    return {"host": host, "device": f"cuda:{index} {card.name}", "gpu": str(card.uuid)}


def _index(launch: Launch) -> int:
    """This rank's GPU: srun may show each task only its own."""
    return launch.local_rank % torch.cuda.device_count()


def _refuse_shared(places: list[dict[str, Any]]) -> None:
    """NCCL does not work for two ranks on one GPU.

    Raises:
        AgreedError: there are such.

    """
    used = Counter((place["host"], place["gpu"]) for place in places if place["gpu"])
    for (host, gpu), count in used.items():
        if count > 1:
            raise AgreedError(f"{count} ranks share one GPU of {host} ({gpu}): start one process for each GPU")
