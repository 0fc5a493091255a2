"""Switch on what NCCL and PyTorch themselves report of collectives, in the log of every rank."""

import os

import torch

QUIET = ("", "VERSION", "WARN")  # of NCCL_DEBUG; a cluster's file sets WARN, which INFO contains


def debug_collectives() -> None:
    """Have NCCL and PyTorch report at INFO, here and in the processes started here; a value that says more stays.

    Call it before there is a process group. PyTorch's own C++ messages also need TORCH_CPP_LOG_LEVEL=INFO, which it
    reads when it is imported: set that by hand. DETAIL is not set: it waits for all ranks in every collective, and
    torch 2.13 crashes with it.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() in QUIET:
        os.environ["NCCL_DEBUG"] = "INFO"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    torch.distributed.set_debug_level_from_env()
