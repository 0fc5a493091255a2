"""Which checkpoint to continue from or to evaluate: by the step inside the file, never by its name or date."""

from pathlib import Path

import torch


def step_inside(path: Path) -> int | None:
    """Optimizer steps done in a checkpoint; None where the file cannot be read.

    Reads through a memory map, so a large file costs no memory. Tensors and plain types only (`weights_only`).
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(checkpoint["global_step"])
    except Exception as error:  # a torn file fails in many ways, none of which may stop the search
        print(f"warning: {path} is no readable checkpoint and is passed over ({type(error).__name__}: {error})")
        return None


def score_inside(path: Path, callback: str) -> torch.Tensor | None:
    """The best score that the callback of this state key knew when it wrote `path`; None where there is none."""
    if step_inside(path) is None:
        return None
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["callbacks"].get(callback, {})
    return state.get("best_model_score")


def newest(folder: Path) -> tuple[Path, int] | None:
    """The readable checkpoint with the most steps and that number, the best-by-metric ones included.

    None where the folder holds no checkpoint file at all.

    Raises:
        RuntimeError: there are files and none can be read; starting from scratch would bury the work.

    """
    files = sorted(folder.glob("*.ckpt"))
    steps = {path: step for path in files if (step := step_inside(path)) is not None}
    if files and not steps:
        raise RuntimeError(
            f"none of the {len(files)} checkpoints in {folder} can be read; move them away to start anew"
        )
    if not steps:
        return None
    path = max(steps, key=lambda file: (steps[file], file.name.startswith("step=")))
    return path, steps[path]
