"""Rebuild nests of dictionaries, lists and tuples with other leaves."""

import collections
import copy
from collections.abc import Callable
from typing import Any

MAPPINGS = (dict, collections.OrderedDict, collections.Counter)  # what `weights_only` loads; others become dict


def rebuild(value: Any, leaf: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return the same nest of dictionaries, lists and tuples with `leaf(name, value)` in place of everything else."""
    if isinstance(value, dict):
        # A shallow copy keeps the class and what PyTorch hangs on a state_dict (`_metadata`).
        made = copy.copy(value) if type(value) in MAPPINGS else dict(value)
        for key, item in value.items():
            made[key] = rebuild(item, leaf, f"{name}.{key}" if name else str(key))
        return made
    if type(value) in (list, tuple, set):
        return type(value)(rebuild(item, leaf, f"{name}[{index}]") for index, item in enumerate(value))
    return leaf(name, value)
