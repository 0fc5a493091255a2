"""NCCL's environment in a cluster file: what may stand there, and what does nothing or harms.

NCCL finds the links by itself. Its manual keeps variables in scripts only to describe a system it cannot see (which
network interface, which adapters); the rest are for finding a fault, and come out again when it is found. RULES was
checked against the sources of NCCL 2.30 and the headers of PyTorch 2.13; a newer one may know better.
"""

import re
from dataclasses import dataclass

SECTIONS = {"nvlink": "one node", "infiniband": "several nodes"}
NAME = re.compile("(TORCH_)?NCCL_[A-Z0-9_]+")
# Other libraries' variables for the same links: libfabric's and UCX's, under NCCL's network plugins, and gloo's, whose
# interface has to be named wherever NCCL's is.
OTHERS = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "UCX_TLS", "UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME")
BETWEEN_NODES = re.compile("(NCCL_IB|NCCL_NET|NCCL_COLLNET|UCX|FI)(_.*)?|NCCL_CROSS_NIC")
INSIDE_A_NODE = re.compile("NCCL_(P2P|SHM|NVLS|NVB)_.*")


@dataclass(frozen=True)
class Rule:
    """A setting to warn about: variables and values (both whole, case ignored in values) and what to do instead."""

    names: str
    values: str
    advice: str


_LEVELS = "LOC|NVL|NVB|C2C|PIX|PXB|P2C|PXN|PHB|SYS"
RULES = (
    Rule(
        "NCCL_TIMEOUT",
        ".*",
        "neither NCCL nor PyTorch reads it; how long a collective may take is the strategy's `timeout`",
    ),
    Rule(
        "NCCL_IB_CUDA_SUPPORT|NCCL_IB_GDR_LEVEL|NCCL_TREE_THRESHOLD|NCCL_LL_THRESHOLD",
        ".*",
        "NCCL no longer reads it; leave it out",
    ),
    Rule("NCCL_IB_DISABLE|NCCL_SHM_DISABLE|NCCL_P2P_DISABLE", "0", "this is the default; leave it out"),
    Rule("NCCL_CROSS_NIC|NCCL_NVLS_ENABLE", "2", "this is the default; leave it out"),
    Rule("NCCL_IB_TIMEOUT", "20", "this is the default; leave it out"),
    Rule("NCCL_IB_RETRY_CNT", "7", "this is the default; leave it out"),
    Rule("NCCL_IB_DISABLE", "1", "nodes then talk over TCP, which is very slow; only for finding a fault"),
    Rule(
        "NCCL_P2P_DISABLE|NCCL_SHM_DISABLE",
        "1",
        "GPUs of a node then talk through a slower path; only for finding a fault",
    ),
    Rule(
        "NCCL_NET_GDR_LEVEL|NCCL_P2P_LEVEL",
        "[0-9]+",
        "numbers are the old form; leave it out, or write a name: LOC, PIX, PXB, PHB or SYS",
    ),
    Rule(
        "NCCL_NET_GDR_LEVEL|NCCL_P2P_LEVEL",
        f"(?![0-9])(?!(?-i:{_LEVELS})$).*",
        "NCCL ignores it without a word; leave it out, or write LOC, PIX, PXB, PHB or SYS in capitals",
    ),
    Rule(
        "NCCL_P2P_LEVEL",
        "(?-i:NVL)",
        "is chosen by itself where there is NVLink, and cuts GPUs on PCIe off from each other; leave it out",
    ),
    Rule(
        "NCCL_NVLS_ENABLE",
        "1",
        "stops the job where the GPUs cannot do it; leave it out: the default uses it where it works",
    ),
    Rule(
        "NCCL_SOCKET_IFNAME",
        "[^=^].*",
        "matches every interface that begins so; write =NAME for one, ^NAME for all but it",
    ),
    Rule(
        "NCCL_IB_HCA",
        "=[^,]+|[^,^=]+_[0-9]+(:[0-9]+)?",
        "ties all GPUs of a node to one adapter; leave it out, or name every one that may be used: =mlx5_0,mlx5_1",
    ),
    Rule("NCCL_DEBUG", "INFO|TRACE", "fills the logs of every rank; WARN, and this only while finding a fault"),
    Rule(
        "NCCL_DEBUG_FILE",
        "(?!.*%h.*%p|.*%p.*%h).*",
        "all processes would write over each other; put %h (host) and %p (process) into the name",
    ),
    Rule(
        "NCCL_ASYNC_ERROR_HANDLING|NCCL_BLOCKING_WAIT|NCCL_DESYNC_DEBUG",
        ".*",
        "has been renamed: TORCH_{name}; the default is good, leave it out",
    ),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0|1",
        "0 lets a failed collective hang, 1 can hang while cleaning up; leave it out: 3, the default, ends the process",
    ),
    Rule(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        ".*",
        "is the old name of TORCH_FR_BUFFER_SIZE; on by default (2000), leave it out",
    ),
)


def refusal(section: str, name: str) -> str | None:
    """Return why this variable may not stand in this section; None where it may."""
    if not NAME.fullmatch(name) and name not in OTHERS:
        return f"only NCCL_…, TORCH_NCCL_…, {', '.join(OTHERS)} may be set here; other variables belong to `setup`"
    if section == "nvlink" and BETWEEN_NODES.fullmatch(name):
        return "is about the network between nodes, which a job on one node does not use; move it to nccl.infiniband"
    return None


def warnings(section: str, name: str, value: str) -> list[str]:
    """Return warnings about this setting, one line each; [] where it is fine."""
    found = [
        rule.advice.format(name=name)
        for rule in RULES
        if re.fullmatch(rule.names, name) and re.fullmatch(rule.values, value, re.IGNORECASE)
    ]
    if section == "infiniband" and INSIDE_A_NODE.fullmatch(name):
        found.append("is about links inside a node; move it to nccl.nvlink unless jobs here use several GPUs per node")
    return found
