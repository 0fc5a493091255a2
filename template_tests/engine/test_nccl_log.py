"""What is read from NCCL's report, by lines as NCCL 2.2x writes them."""

import os
from pathlib import Path

import pytest

from src.doctor import nccl_log
from src.doctor.group import ranks, transports

HEAD = "node1:4711:4799 [0] NCCL INFO "
RING = "Pattern 4, crossNic 0, nChannels 24, bw 20.000000/20.000000, type {}/PIX, sameChannels 1"
TREE = "Pattern 1, crossNic 0, nChannels 24, bw 20.000000/20.000000, type SYS/PIX, sameChannels 1"


def report(*lines: str) -> str:
    return "".join(f"{HEAD}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("via P2P/CUMEM/read", "P2P/CUMEM"),
        ("via P2P/CUMEM", "P2P/CUMEM"),
        ("via P2P/IPC", "P2P/IPC"),
        ("via P2P/direct pointer/read", "P2P/direct pointer"),
        ("via P2P/IPC/read comm 0x7f8b00003c00 nRanks 02", "P2P/IPC"),
        ("via SHM/direct/direct", "SHM"),
        ("[send] via NET/IB/0/GDRDMA", "NET/IB/GDRDMA"),
        ("[receive] via NET/IB/7(3)/GDRDMA(PCI)/Shared", "NET/IB/GDRDMA(PCI)"),
        ("[send] via NET/IB/1", "NET/IB"),
        ("[send] via NET/Socket/0", "NET/Socket"),
        ("[send] via NET/AWS Libfabric/2/GDRDMA", "NET/AWS Libfabric/GDRDMA"),
    ],
)
def test_a_channel_names_its_transport(way: str, name: str) -> None:
    """By its kind, without device numbers; a plugin's name may hold a space."""
    assert nccl_log.links(report(f"Channel 00/0 : 0[0] -> 1[1] {way}")) == [(0, 1, name)]


def test_channels_of_a_pair_count_once_and_older_words_are_read() -> None:
    """24 channels between two GPUs are one connection each way; bus addresses stood in the brackets once."""
    lines = [f"Channel {k:02d}/0 : {a}[{a}] -> {b}[{b}] via P2P/CUMEM" for k in range(24) for a, b in ((0, 1), (1, 0))]
    assert nccl_log.links(report(*lines)) == [(0, 1, "P2P/CUMEM"), (1, 0, "P2P/CUMEM")]
    assert nccl_log.links(report("Channel 01 : 3[1b000] -> 0[81000] via P2P/IPC")) == [(3, 0, "P2P/IPC")]
    assert nccl_log.links(report("Channel 00/24 :    0   1", "Connected all rings", "Trees [0] 1/-1/-1->0->-1")) == []


@pytest.mark.parametrize(
    ("kind", "words"), [("NVL", "NVLink"), ("PHB", "PCIe and the CPU"), ("PIX", "one PCIe switch")]
)
def test_peer_to_peer_says_over_what(kind: str, words: str) -> None:
    """The ring's path within the host decides, not the tree's; what is no P2P goes without."""
    channels = ["Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0"]
    found = nccl_log.links(report(TREE, RING.format(kind), *channels))
    assert found == [(0, 1, f"P2P/CUMEM over {words}"), (1, 2, "NET/IB")]


def test_ways_are_summed_up_over_pairs() -> None:
    """Both directions of a pair are one; a warning stands where TCP carries what InfiniBand should."""
    found = [{"links": [[0, 1, "P2P/CUMEM over NVLink"], [1, 2, "NET/Socket"]], "multicast": False}]
    found += [{"links": [[1, 0, "P2P/CUMEM over NVLink"], [2, 1, "NET/Socket"]], "multicast": True}]
    lines = list(transports(found))
    assert [text.split(":")[0] for _, text, _ in lines] == [
        "NET/Socket (1-2)",
        "P2P/CUMEM over NVLink (0-1)",
        "NVLS",
    ]
    assert [doubt for _, _, doubt in lines] == [True, False, False]
    assert list(transports([{"links": [], "multicast": False}])) == [("transport", "NCCL's report names none", True)]


def test_multicast_and_warnings_are_found() -> None:
    """NVLink SHARP, and the last warning without where it comes from."""
    text = report("NVLS comm 0x55e0 headRank 0 nHeads 2 nvlsRanks 2 buffSize 1048576")
    text += (
        "\nnode1:1:2 [0] transport/net.cc:1 NCCL WARN NET/IB : no device\n[2026] node1:1:2 [0] a.cc:9 NCCL WARN Bad\n"
    )
    assert nccl_log.multicast(text)
    assert not nccl_log.multicast(report("NVLS multicast support is not available on dev 0"))
    assert nccl_log.last_warning(text) == "Bad"
    assert nccl_log.last_warning(report("fine")) == ""


def test_the_report_goes_to_files_and_a_clusters_setting_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL_DEBUG=WARN of a cluster's file would leave nothing to read; each process has a file of its own."""
    environment = {"NCCL_DEBUG": "WARN"}
    monkeypatch.setattr(os, "environ", environment)
    nccl_log.report_into(tmp_path)
    assert environment["NCCL_DEBUG"] == "INFO"
    name = environment["NCCL_DEBUG_FILE"].replace("%h", "node1").replace("%p", "4711")
    Path(name).write_text("said")
    assert nccl_log.report(tmp_path) == "said"


def test_a_rank_without_a_gpu_among_others_is_a_doubt() -> None:
    """It makes all exchange data over gloo; where none has one, nothing is wrong."""
    card = {"host": "node1", "device": "cuda:0 NVIDIA H100", "gpu": "GPU-1"}
    plain = {"host": "node2", "device": "CPU", "gpu": None}
    assert [doubt for _, _, doubt in ranks([card, plain])] == [False, True]
    assert list(ranks([plain])) == [("rank 0", "node2, CPU", False)]
