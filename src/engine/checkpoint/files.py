"""Look into checkpoint files and check that they are whole. Needs torch alone, so that it starts fast."""

import errno
import zipfile
from pathlib import Path

from src.engine.checkpoint import shards
from src.engine.checkpoint.names import kind_by_name, ours, step_in_name
from src.engine.files import TEMPORARY

PENDING = "validation_pending"  # in a checkpoint: the validation after its last step comes first


# Error numbers of a torn zip and of a missing file. With any other the disk refuses, whatever the file holds.
DAMAGED = (None, errno.EINVAL, errno.ENOENT)


def is_of_a_run(path: Path) -> bool:
    """Return whether training is resumed from there: it is ours and not moved aside."""
    return path.parent.name == "checkpoints" and kind_by_name(path) != "other"


def why_damaged(error: Exception) -> str:
    """Return in one line why a checkpoint could not be read; raise `error` where the disk refuses to read it."""
    if isinstance(error, OSError) and error.errno not in DAMAGED:
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0]


def fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint file, None where it is whole; OSError where the disk refuses to read it.

    Every byte is read: torch.save writes a zip with a checksum per tensor, and a memory-mapped load looks at none of
    them (4 KB of zeros in the middle of a file were found only so).
    """
    if reason := _torn(path):
        return reason
    try:
        content = shards.read(path)
        int(content["global_step"])
    except Exception as error:  # what pickle, torch or a missing key may raise
        return why_damaged(error)
    if reason := shards.lacking(content, path):
        return reason
    for part in shards.parts_of(content, path):
        if reason := _torn(part):
            return f"{part.parent.name}/{part.name}, a part of it: {reason}"
    return None


def _torn(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except Exception as error:  # a torn zip fails in many ways
        return why_damaged(error)
    return None if torn is None else f"the checksum of {torn} in it is wrong"


def bytes_of(path: Path) -> int:
    """Return the size of a checkpoint, its parts included."""
    return path.stat().st_size + sum(shards.read(path).get(shards.PARTS, {}).values())


def steps_inside(path: Path) -> int:
    """Return the optimizer steps done in a checkpoint."""
    return int(shards.read(path)["global_step"])


def rows_inside(path: Path) -> int:
    """Return how many steps have a row: under manual optimization batches, as Lightning's loggers count."""
    content = shards.read(path)
    loops = content.get("loops", {}).get("fit_loop", {})
    manual = loops.get("epoch_loop.manual_optimization.optim_step_progress", {}).get("total", {}).get("completed")
    if not manual:
        return int(content["global_step"])
    # A validation counts as part of the batch before it, which has its row.
    return int(loops["epoch_loop.state_dict"]["_batches_that_stepped"]) + bool(content.get(PENDING))


def place_inside(path: Path) -> str:
    """Return where in the data a checkpoint is, for people to read; loaders that keep no position have none."""
    content = shards.read(path)
    loaders = content.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    keys = {"epoch", "samples", "size"}
    positions = [state for state in loaders if isinstance(state, dict) and keys <= state.keys()]
    epoch = f"epoch {positions[0]['epoch'] if positions else content.get('epoch', '?')}"
    return ", ".join([epoch, *(f"{state['samples']} of its {state['size']} samples done" for state in positions)])


def resumable(path: Path) -> bool:
    """Return whether a file holds a whole state: a user's ModelCheckpoint may save weights alone."""
    return kind_by_name(path) != "other" or "optimizer_states" in shards.read(path)


def prune(folder: Path, step: int, keep: int, for_good: int | None, bad_since: int | None) -> None:
    """Delete the oldest checkpoints up to `step`, which has just been written: later ones are not this start's.

    The newest `keep`, multiples of `for_good` steps, and the newest state from before step `bad_since` stay.
    """
    saved = [path for path in ours(folder, "newest") if step_in_name(path) <= step]
    healthy = [path for path in saved if bad_since is not None and step_in_name(path) < bad_since][-1:]
    for path in saved[:-keep]:
        if path not in healthy and not (for_good and step_in_name(path) % for_good == 0):
            path.unlink(missing_ok=True)
    shards.sweep(folder, below=step)


def clear_temporary(folder: Path) -> None:
    """Remove what a killed save has left; only for the one process that owns the run."""
    for each in (folder, folder / shards.FOLDER):
        for path in each.glob(TEMPORARY.format(name="*")):
            path.unlink()
    shards.sweep(folder)
