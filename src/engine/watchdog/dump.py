"""Write down where a rank is when it is ended because the run hangs."""

import faulthandler
import os
import time
from pathlib import Path
from typing import Any

import torch

from src.engine.files import replacing

COLLECTIVES = "flight-recorder-rank"  # and the rank: what `torchfrtrace` reads


def dumps(folder: Path) -> str:
    """Return where the files below are, for people."""
    text = f"Python stacks: {folder}/hang-rank*.txt"
    return f"{text}, PyTorch's record of the last collectives: {folder / COLLECTIVES}*" if _over_nccl() else text


def dump_stacks(folder: Path, rank: int, text: str) -> None:
    """Write where each Python thread of this process is, under the message `text`."""
    with replacing(folder / f"hang-rank{rank}.txt") as temporary, temporary.open("w") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n{text}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def dump_collectives(folder: Path, rank: int) -> None:
    """Write PyTorch's record of the last collectives over NCCL: which were begun and did not end."""
    if _over_nccl():
        dump: Any = torch._C._distributed_c10d._dump_nccl_trace  # type: ignore[attr-defined]  # not in a CPU's build
        with replacing(folder / f"{COLLECTIVES}{rank}") as temporary:
            temporary.write_bytes(dump())


def _over_nccl() -> bool:
    return torch.distributed.is_initialized() and "nccl" in str(torch.distributed.get_backend_config())


def record_collectives(folder: Path) -> None:
    """Have PyTorch write its record into `folder` by itself if a collective times out first; what is set stays."""
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / COLLECTIVES))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
