"""Say which of NCCL's variables a cluster file may set, and which do nothing or harm.

NCCL finds the links by itself. Its manual keeps variables in scripts only to describe a system it cannot see (which
network interface, which adapters); the rest are for finding a fault, and come out again when it is found. RULES was
checked against the sources of NCCL 2.30 and the headers of PyTorch 2.13; a newer one may know better.
"""

import re
from typing import NamedTuple

SECTIONS = {"nvlink": "one node", "infiniband": "several nodes"}
NAME = re.compile("(TORCH_)?NCCL_[A-Z0-9_]+")
# Other libraries' variables for the same links: libfabric's and UCX's, under NCCL's network plugins, and gloo's, whose
# interface has to be named wherever NCCL's is.
OTHERS = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "UCX_TLS", "UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME")
BETWEEN_NODES = re.compile("(NCCL_IB|NCCL_NET|NCCL_COLLNET|UCX|FI)(_.*)?|NCCL_CROSS_NIC")


class Rule(NamedTuple):
    """A setting to warn about: variables and values (both whole, case ignored in values) and what to do instead."""

    names: str
    values: str
    advice: str


_LEVELS = "LOC|NVL|NVB|C2C|PIX|PXB|P2C|PXN|PHB|SYS"
RULES = (
    Rule("NCCL_TIMEOUT", ".*", "nothing reads it; how long a collective may take is the strategy's `timeout`"),
    Rule(
        "NCCL_(IB_CUDA_SUPPORT|IB_GDR_LEVEL|TREE_THRESHOLD|LL_THRESHOLD)", ".*", "NCCL no longer reads it; leave it out"
    ),
    Rule("NCCL_IB_DISABLE", "1", "nodes then talk over TCP, which is very slow; only for finding a fault"),
    Rule("NCCL_(P2P|SHM)_DISABLE", "1", "GPUs of a node then talk through a slower path; only for finding a fault"),
    Rule(
        "NCCL_(NET_GDR|P2P)_LEVEL",
        f"(?!(?-i:{_LEVELS})$).*",
        "numbers are the old form, other words do nothing; leave it out or write LOC, PIX, PXB, PHB or SYS in capitals",
    ),
    Rule("NCCL_NVLS_ENABLE", "1", "stops the job where the GPUs cannot do it; the default uses it where it works"),
    Rule(
        "NCCL_SOCKET_IFNAME", "[^=^].*", "matches every interface that begins so; write =NAME, or ^NAME for all others"
    ),
    Rule(
        "NCCL_IB_HCA",
        "=[^,]+|[^,^=]+_[0-9]+(:[0-9]+)?",
        "ties all GPUs of a node to one adapter; name all: =mlx5_0,mlx5_1",
    ),
    Rule("NCCL_DEBUG", "INFO|TRACE", "fills the logs of every rank; WARN, and this only while finding a fault"),
    Rule(
        "NCCL_DEBUG_FILE",
        "(?!.*%h.*%p|.*%p.*%h).*",
        "all processes would write to one file; put %h and %p into the name",
    ),
    Rule("NCCL_(ASYNC_ERROR_HANDLING|BLOCKING_WAIT|DESYNC_DEBUG)", ".*", "is TORCH_{name} now; leave it out"),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0|1",
        "may hang after a failed collective; leave it out: 3, the default, ends the process",
    ),
)


def refusal(section: str, name: str) -> str | None:
    """Return why this variable may not stand in this section; None where it may."""
    if not NAME.fullmatch(name) and name not in OTHERS:
        return f"only NCCL_…, TORCH_NCCL_…, {', '.join(OTHERS)} may be set here; other variables belong to `setup`"
    if section == "nvlink" and BETWEEN_NODES.fullmatch(name):
        return "is about the network between nodes, which a job on one node does not use; move it to nccl.infiniband"
    return None


def warnings(name: str, value: str) -> list[str]:
    """Return warnings about this setting, one line each; [] where it is fine."""
    return [
        rule.advice.format(name=name)
        for rule in RULES
        if re.fullmatch(rule.names, name) and re.fullmatch(rule.values, value, re.IGNORECASE)
    ]
