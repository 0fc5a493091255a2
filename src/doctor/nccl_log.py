"""Read from NCCL's own report, at NCCL_DEBUG=INFO, which ways data takes between GPUs."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

# `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read`, `… 1[1] -> 8[0] [send] via NET/IB/0(1)/GDRDMA/Shared`: ranks, and in
# brackets the device, of older versions its bus address.
CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? ?: (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[(?:send|receive)\] )?via (.+?)(?: comm 0x.*)?$", re.M
)
# `Pattern 4, crossNic 0, nChannels 24, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1`; 4 is the ring.
RING = re.compile(r"Pattern 4, .*, type (\w+)/(\w+)")
MULTICAST = re.compile(r"NVLS comm \S+ headRank")
PATHS = {
    "NVL": "NVLink",
    "NVB": "NVLink through another GPU",
    "C2C": "NVLink-C2C",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "P2C": "NVLink-C2C and PCIe",
    "PHB": "PCIe and the CPU",
    "SYS": "the link between CPUs",
}

Link = tuple[int, int, str]  # from rank, to rank, how


def report_into(folder: Path) -> None:
    """Have NCCL write its report into a file of each process in `folder`; before it is used first."""
    os.environ |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET",
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p"),
    }


def report(folder: Path) -> str:
    """Return what it has written there; "" for nothing."""
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))


def links(text: str) -> list[Link]:
    """Return the connections that this process has made, each once, whatever the number of its channels.

    What follows the transport's name is left out where it counts devices (`NET/IB/3(1)` is `NET/IB`); GDRDMA, by which
    a network card reads the GPU's memory itself, stays. P2P is named with what the ring of this host runs over.
    """
    path = next((PATHS.get(ring[1]) for ring in RING.finditer(text)), None)
    channels = (match.groups() for match in CHANNEL.finditer(text) if match[1] != match[2])
    return sorted({(int(source), int(target), _name(way, path)) for source, target, way in channels})


def multicast(text: str) -> bool:
    """Return whether NVLink's switches sum up (NVLink SHARP)."""
    return MULTICAST.search(text) is not None


def last_warning(text: str) -> str:
    """Return the last of NCCL's warnings, without where it comes from; "" where there is none."""
    warnings = re.findall(r"NCCL WARN (.*)", text)
    return warnings[-1].strip() if warnings else ""


def _name(way: str, path: str | None) -> str:
    parts = way.split("/")
    if parts[0] == "P2P":
        return "/".join(parts[:2]) + (f" over {path}" if path else "")
    if parts[0] == "NET":
        return "/".join([*parts[:2], *(part for part in parts[2:] if part.startswith("GDRDMA"))])
    return parts[0]


def summary(connections: Iterable[Sequence]) -> list[str]:
    """Return every way once, with the pairs of ranks that it joins: `P2P/CUMEM over NVLink (0-1, 1-2)`."""
    pairs: dict[str, set[tuple[int, int]]] = {}
    for source, target, way in connections:
        pairs.setdefault(way, set()).add((min(source, target), max(source, target)))
    texts = []
    for way, joined in sorted(pairs.items()):
        shown = ", ".join(f"{low}-{high}" for low, high in sorted(joined)[:8])
        texts.append(f"{way} ({shown}{f' and {len(joined) - 8} more pairs' if len(joined) > 8 else ''})")
    return texts
