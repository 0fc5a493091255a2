"""Look at this machine before a run needs it.

    python -m src.doctor            # everything
    python -m src.doctor --storage  # where runs live: does it outlive this machine, is there room, how fast is it
    srun python -m src.doctor       # everything, and whether and how fast all processes exchange data
    torchrun --nproc-per-node=2 -m -- src.doctor --group  # only that

Exit code 0 where nothing is wrong, 1 where something may cost a run, 2 where it cannot be used.
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    from src.engine import streams

    streams.survive_closed_streams()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # PyTorch logs a C++ stack for each failed connection
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while PyTorch waits for others, no handler of Python's runs

import torch

from src.engine.cpus import usable_cpus
from src.engine.errors import AgreedError, FileError, UserError
from src.engine.run.storage import run_root
from src.engine.run.temporary import filesystem

WRITTEN = 64  # MiB that the speed is measured with
LAUNCHED = {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_STEPID"}  # one of them: torchrun or srun has started it
Line = tuple[str, str, bool]  # what it is about, what was found, whether that may cost a run


def main(argv: list[str] | None = None) -> int:
    """Print what was found; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m src.doctor", description="Look at this machine.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--storage", action="store_true", help="only where runs live")
    only.add_argument("--group", action="store_true", help="only what the processes of a launcher are to each other")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for the other processes, and for an all-reduce"
    )
    arguments = parser.parse_args(argv)
    rank, doubtful = 0, 0
    try:
        rank, parts = examinations(arguments)
        for lines in parts:
            for name, text, doubt in lines:
                print(f"{name:<12}  {'warning: ' if doubt else ''}{text}", flush=True)
                doubtful += doubt
    except OSError as error:
        print(f"error: {FileError(error)}", file=sys.stderr)
        return FileError(error).exit_code
    except UserError as error:
        if not (rank and isinstance(error, AgreedError)):
            print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    return int(doubtful > 0)


def examinations(arguments: argparse.Namespace) -> tuple[int, list[Iterator[Line]]]:
    """Return this process's rank and what it looks at: everything on rank 0, the group alone on the others."""
    if not arguments.timeout > 0:
        raise UserError(f"--timeout is {arguments.timeout:g}; it is a number of seconds above 0")
    launch = None
    if LAUNCHED & os.environ.keys():
        from src.doctor.rendezvous import find_launch  # imports Lightning, which takes seconds

        launch = find_launch()
    if arguments.group and launch is None:
        raise UserError(
            "--group: this is a single process; start it with torchrun --nproc-per-node=2 -m -- src.doctor, or srun"
        )
    rank = launch.rank if launch else 0
    parts = [] if rank or arguments.storage or arguments.group else [machine()]
    if launch and not arguments.storage:
        from src.doctor.group import group

        parts.append(group(launch, arguments.timeout))
    return rank, parts if rank or arguments.group else [*parts, storage()]


def machine() -> Iterator[Line]:
    """Give versions and cards; a driver that does not answer may cost a run."""
    yield "python", f"{platform.python_version()}, torch {torch.__version__}", False
    yield "cpus", f"{usable_cpus()}", False
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        memory = f"{card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
        yield f"gpu {index}", f"{card.name}, {memory}", False
    if not torch.cuda.is_available():
        yield "gpus", "none that torch can use", False
        return
    version = driver()
    yield "driver", version or "nvidia-smi does not say its version", version is None
    if torch.distributed.is_nccl_available():
        yield "nccl", f"{'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}", False


def driver() -> str | None:
    """Return the version of NVIDIA's driver; None where nvidia-smi does not know, as with a card that is lost."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None


def storage() -> Iterator[Line]:
    """Give the run root, what is free there and how fast it is."""
    root, notes = run_root()
    origin = "RUN_ROOT" if os.environ.get("RUN_ROOT") else "RUN_ROOT is not set"
    yield "run root", f"{root} ({origin}; {filesystem(root.resolve()) or 'unknown'} file system)", False
    for note in notes:
        yield "", note, True
    usage = shutil.disk_usage(root)
    yield "room", f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB are free", False
    speed = writing_speed(root)
    # fp32 weights and two moments of Adam: 12 bytes a parameter.
    yield (
        "writing",
        f"{speed:.0f} MiB/s: a checkpoint of a billion parameters takes {12e9 / 2**20 / speed:.0f} s",
        False,
    )


def writing_speed(folder: Path) -> float:
    """Return MiB/s to the disk, not to memory that the system would write later."""
    block = os.urandom(2**20)
    try:
        begun = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(WRITTEN):
                file.write(block)
            os.fsync(file.fileno())
        return WRITTEN / (time.perf_counter() - begun)
    except OSError as error:
        raise UserError(
            f"{folder} does not take {WRITTEN} MiB ({error.strerror}): make room or set RUN_ROOT"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
