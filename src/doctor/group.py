"""Check for `python -m src.doctor` whether the processes of a launcher meet, and how fast they exchange data."""

import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from src.doctor import nccl_log
from src.doctor.rendezvous import Launch, enter, leave, meet, resolved
from src.engine.distributed import gather_objects
from src.engine.errors import AgreedError, UserError, hint
from src.engine.text import size

NEVER = timedelta(days=1)  # `limited` ends the process before
Line = tuple[str, str, bool]  # as src/doctor/__main__.py has them
SIZES = {"gloo": (2**16, 2**20, 2**24), "nccl": (2**20, 2**25, 2**28)}  # bytes
REPEATS = {"gloo": 4, "nccl": 20}  # all-reduces between two looks at the clock
ROUNDS = 5  # of which the median counts


def group(launch: Launch, seconds: float) -> Iterator[Line]:
    """Check the rendezvous, every rank, and how data travels and how fast. Collective; rank 0 gets the lines."""
    begun = time.monotonic()
    address = resolved(launch)
    if launch.rank == 0:
        server = "torchrun" if launch.agent else "rank 0"
        text = f"MASTER_ADDR {launch.address} ({address}), MASTER_PORT {launch.port}, served by {server}"
        yield "rendezvous", text, False
    store = enter(launch, seconds)
    devices = meet(store, launch, seconds, _device(launch))
    if launch.rank == 0:
        yield "", f"all {launch.world_size} ranks have met, {time.monotonic() - begun:.1f} s after rank 0 came", False
        yield from ranks(devices)
    all_ranks = range(launch.world_size)
    try:
        _refuse_shared(devices)
    except AgreedError:
        leave(store, launch, all_ranks)
        raise
    over_gpus = all(device["gpu"] for device in devices)
    backend, device = ("nccl", torch.device("cuda", _index(launch))) if over_gpus else ("gloo", torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder, limited(launch, backend, seconds, Path(folder)):
        if over_gpus:
            nccl_log.report_into(Path(folder))
        results = exchange(launch, store, backend, device, Path(folder))
    leave(store, launch, all_ranks)
    if launch.rank == 0:
        if over_gpus:
            yield from transports(results)
        rates = ", ".join(
            f"{bus_bandwidth(count, took, launch.world_size):.3g} GB/s at {size(count)}"
            for count, took in results[0]["times"]
        )
        text = f"over {backend}, {launch.world_size} ranks: bus bandwidth {rates} (2(n-1)/n x bytes / time, median)"
        yield "all-reduce", text, False


def ranks(devices: list[dict[str, Any]]) -> Iterator[Line]:
    """Give one line for each rank; one without a GPU where others have one is doubtful."""
    some = any(device["gpu"] for device in devices)
    for rank, device in enumerate(devices):
        lacks = some and not device["gpu"]
        more = ": no GPU that PyTorch can use, so all exchange data over gloo" if lacks else ""
        yield f"rank {rank}", f"{device['host']}, {device['device']}{more}", lacks


def transports(results: list[dict[str, Any]]) -> Iterator[Line]:
    """Give what NCCL chose, by what every rank's NCCL has reported."""
    ways = nccl_log.summary(link for result in results for link in result["links"])
    if any(result["multicast"] for result in results):
        ways.append("NVLS: NVLink's switches sum up")
    if not ways:
        yield "transport", "NCCL's report names none", True
    for way in ways:
        slow = way.startswith("NET/Socket")
        more = ": TCP, not InfiniBand (ibstat; NCCL_IB_DISABLE, NCCL_NET_PLUGIN)" if slow else ""
        yield "transport", way + more, slow


def exchange(
    launch: Launch, store: torch.distributed.Store, backend: str, device: torch.device, folder: Path
) -> list[dict[str, Any]]:
    """Make the process group, measure, and take it down again; returns every rank's result."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(
            backend,
            store=torch.distributed.PrefixStore("group", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=NEVER,
        )
        times = measure(backend, device)
        report = nccl_log.report(folder)
        result = {"times": times, "links": nccl_log.links(report), "multicast": nccl_log.multicast(report)}
        return gather_objects(result)
    except RuntimeError as error:
        why = nccl_log.last_warning(nccl_log.report(folder)) or str(error)
        text = f"rank {launch.rank} on {socket.gethostname()}: an all-reduce over {backend} fails: {why}"
        raise UserError("; ".join(filter(None, (text, hint(error))))) from error
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def limited(launch: Launch, backend: str, seconds: float, folder: Path) -> Iterator[None]:
    """End this process with one line and exit code 2 when the block takes longer: a collective cannot be left.

    Rank 0 comes first: its launcher ends the others, which need not print it again.
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


def _device(launch: Launch) -> dict[str, Any]:
    host = socket.gethostname()
    if not torch.cuda.is_available():
        return {"host": host, "device": "CPU", "gpu": None}
    index = _index(launch)
    card = torch.cuda.get_device_properties(index)
    return {"host": host, "device": f"cuda:{index} {card.name}", "gpu": str(card.uuid)}


def _index(launch: Launch) -> int:
    """Return this rank's GPU: srun may show each task only its own."""
    return launch.local_rank % torch.cuda.device_count()


def _refuse_shared(devices: list[dict[str, Any]]) -> None:
    """Refuse two ranks on one GPU, for which NCCL does not work."""
    used = Counter((device["host"], device["gpu"]) for device in devices if device["gpu"])
    for (host, gpu), count in used.items():
        if count > 1:
            raise AgreedError(f"{count} ranks share one GPU of {host} ({gpu}): start one process for each GPU")


# --- measuring ---


def measure(backend: str, device: torch.device) -> list[tuple[int, float]]:
    """Return bytes and seconds of one all-reduce of fp32, for each size, after a check of a sum. Collective."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    total = torch.full((1000,), rank + 1.0, device=device)
    torch.distributed.all_reduce(total)
    if not bool((total == world_size * (world_size + 1) / 2).all()):
        raise UserError(f"rank {rank}: an all-reduce over {backend} gives a wrong sum, {total[0].item():g}")
    return [(size, _seconds(size, REPEATS[backend], device)) for size in SIZES[backend]]


def _seconds(size: int, repeats: int, device: torch.device) -> float:
    tensor = torch.zeros(size // 4, device=device)
    moments = []
    for _ in range(ROUNDS + 1):  # the first round makes connections
        for _ in range(repeats):
            torch.distributed.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moments.append(time.perf_counter())
    return statistics.median(end - begin for begin, end in pairwise(moments)) / repeats


def bus_bandwidth(size: int, seconds: float, world_size: int) -> float:
    """Return GB/s (10⁹ bytes) as nccl-tests has it: what every link carries, whatever the number of ranks."""
    return 2 * (world_size - 1) / world_size * size / seconds / 1e9
