"""Write and read checkpoints in parts: a `step=….ckpt` whose sharded tensors are in files that each rank has written.

    checkpoints/step=00000500.ckpt                       everything else, and the names of the parts; written last
    checkpoints/shards/step=00000500-3f2a91c4.0-of-2.pt  rank 0's rows of every sharded tensor, by name
    checkpoints/shards/step=00000500-3f2a91c4.1-of-2.pt

Needs torch alone, as all that looks at checkpoints does.
"""

import re
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.engine.files import TEMPORARY
from src.engine.nested import rebuild

FOLDER = "shards"
PARTS = "parts"  # of a checkpoint: the name and bytes of each file of parts, in the order of the rows
IN_PARTS = "<in parts>"  # stands in a checkpoint where a tensor was
FAILED = ".failed"  # beside the name of a part: why its rank could not write it
SILENCE_SECONDS = 120.0  # a file server may show what another node writes a minute late
STEP = re.compile(r"step=(\d{8,})")


def part_path(path: Path, token: str, rank: int, world_size: int) -> Path:
    """Return where a rank writes its parts of `path`; the token tells this start's from an earlier one's."""
    return path.parent / FOLDER / f"{path.stem}-{token}.{rank}-of-{world_size}.pt"


def parts_of(content: dict[str, Any], path: Path) -> dict[Path, int]:
    """Return the files that belong to a checkpoint and their bytes; {} where it is in one piece.

    One that was moved to a folder beside the parts (`quarantine/`, `rolled-back/`) still has them.
    """
    places = [path.parent / FOLDER, path.parent.parent / FOLDER]
    return {
        next((place / name for place in places if (place / name).exists()), places[0] / name): size
        for name, size in content.get(PARTS, {}).items()
    }


def lacking(content: dict[str, Any], path: Path) -> str | None:
    """Return which part is missing or has another length than was written; None where all are right."""
    for part, size in parts_of(content, path).items():
        if not part.exists():
            return f"{FOLDER}/{part.name}, a part of it, is missing"
        if (now := part.stat().st_size) != size:
            return f"{FOLDER}/{part.name}, a part of it, has {now} bytes and had {size}"
    return None


@dataclass(frozen=True)
class Rows:
    """A tensor that is still in parts on the disk."""

    parts: list[Tensor]  # read where they are used

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size([sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]])

    def whole(self) -> Tensor:
        """Return the whole tensor, in the host's memory."""
        return torch.cat(self.parts)


def read(path: Path) -> dict[str, Any]:
    """Return what one file holds, parts left where they are; tensors are read from the disk where they are used."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def load(path: Path, keys: Container[str] | None = None) -> dict[str, Any]:
    """Return what a checkpoint holds, every tensor whole; what is in one piece is read where it is used."""
    content = read(path)
    if keys is not None:
        content = {key: value for key, value in content.items() if key in keys or key == PARTS}
    return join(content, path)


def join(content: dict[str, Any], path: Path, lazily: Container[str] = ()) -> dict[str, Any]:
    """Return `content` of the file `path` with its tensors put together from their parts.

    Under the keys `lazily`, `Rows` stand for the tensors, which need not all fit into memory at once.
    """
    files = [read(part) for part in parts_of(content, path)]
    joined: dict[tuple[int, ...], Tensor] = {}

    def whole(name: str, value: Any) -> Any:
        if not isinstance(value, str) or value != IN_PARTS:
            return value
        rows = Rows([file[name] for file in files if name in file])
        if re.split(r"[.\[]", name, maxsplit=1)[0] in lazily:
            return rows
        key = tuple(part.data_ptr() for part in rows.parts if part.numel())
        if not key or key not in joined:  # tied weights stay one tensor under two names
            joined[key] = rows.whole()
        return joined[key]

    return rebuild({key: value for key, value in content.items() if key != PARTS}, whole) if files else content


def await_parts(parts: list[Path]) -> None:
    """Wait until other ranks have written their parts; OSError says which one could not, or is silent, and why."""
    for part in parts:
        failed, seen, since = part.with_name(part.name + FAILED), -1, time.monotonic()
        while not part.exists():
            if failed.exists():
                raise OSError(f"{part.name}: {failed.read_text()}")
            size = _size(part.with_name(TEMPORARY.format(name=part.name)))
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > SILENCE_SECONDS:
                raise OSError(
                    f"nothing is seen of {part.name} for {SILENCE_SECONDS:.0f} s: its rank has died, or {part.parent} "
                    "is not the same folder on all nodes"
                )
            time.sleep(0.05)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def sweep(folder: Path, below: int | None = None) -> None:
    """Delete the parts that no checkpoint in `folder`, or moved aside there, has.

    A file that cannot be read, or that somebody has moved and renamed, keeps what has its step in the name. While a
    run saves, only parts of steps `below` the newest go, as those of later ones may be on their way.
    """
    parts = [path for path in (folder / FOLDER).glob("*") if path.is_file()]
    if not parts:
        return
    kept, steps = set(), set()
    for path in [*folder.glob("*.ckpt"), *folder.glob("*/*.ckpt")]:
        try:
            kept |= read(path).get(PARTS, {}).keys()
        except Exception:  # a torn file fails in many ways
            steps.add(name[1] if (name := STEP.search(path.name)) else None)
    for path in parts:
        name = STEP.search(path.name)
        if name is None or path.name in kept or name[1] in steps or None in steps:
            continue
        if below is None or int(name[1]) < below:
            path.unlink(missing_ok=True)
