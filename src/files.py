"""Small files that no reader meets half written."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name in the same folder, then rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """What is in it; {} where there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {}
