"""Small files that no reader meets half written."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, to the disk, then rename: a power cut leaves the old or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    sync(temporary)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """What is in it; {} where there is no such file, or one that a power cut has left empty or torn."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def sync(path: Path) -> None:
    """To the disk, so that a power cut cannot take it back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
