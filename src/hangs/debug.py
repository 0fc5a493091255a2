"""The debug switch: what NCCL and PyTorch themselves say of collectives, in the log of every rank."""

import os
import sys

import torch

QUIET = ("", "VERSION", "WARN")  # of NCCL_DEBUG; a cluster's file sets WARN, which INFO contains


def debug_collectives(argv: list[str]) -> list[str]:
    """Have NCCL and PyTorch report at INFO, before there is a process group, here and in the processes started here.

    A value of the user's own that says more stays. PyTorch reads one of the variables when it is imported: a command
    that lacks it starts itself anew, in the same process, and this does not return. DETAIL is not set: it waits for all
    ranks in every collective, and torch 2.13 crashes with it.

    Args:
        argv: the options that were parsed; nothing starts anew where they are not those of this process

    Returns:
        Notes on what is not shown.

    """
    if os.environ.get("NCCL_DEBUG", "").upper() in QUIET:
        os.environ["NCCL_DEBUG"] = "INFO"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    if "TORCH_CPP_LOG_LEVEL" not in os.environ and argv == sys.argv[1:]:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very command
    torch.distributed.set_debug_level_from_env()
    level = os.environ.get("TORCH_CPP_LOG_LEVEL", "not set")
    if level.upper() in ("INFO", "0"):
        return []
    return [f"debug_collectives: PyTorch's own messages need TORCH_CPP_LOG_LEVEL=INFO before it starts; it is {level}"]
