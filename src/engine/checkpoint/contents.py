"""Reduce a checkpoint to tensors and plain types, and copy them so that training cannot change them."""

import io
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from src.engine.errors import AgreedError
from src.engine.nested import rebuild

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
AVERAGE = "EMA"  # of the states of callbacks, the one of `src.engine.callbacks.ema`
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")  # Lightning's two keys


def average_in(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the average of the weights (`src.engine.callbacks.ema`) by their names; {} where none is kept."""
    return checkpoint.get("callbacks", {}).get(AVERAGE, {}).get("weights", {})


def plain(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with plain types for paths, enums and NumPy's values, so that `weights_only` loads it.

    Any other object among the hyperparameters (a loss, a function) is kept as its text: they are a record, nothing
    is restored from them. Elsewhere it stays, see `refuse_unsafe`.
    """
    return rebuild(checkpoint, _plain)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) or type(value) in PLAIN:
        return value
    if isinstance(value, Enum):
        return _plain(name, value.value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, tuple | list):  # a named tuple or another class of its own
        return rebuild(tuple(value) if isinstance(value, tuple) else list(value), _plain, name)
    if isinstance(value, str | int | float):
        return next(base(value) for base in (str, int, float) if isinstance(value, base))
    return repr(value) if name.split(".")[0] in HYPERPARAMETERS else value


def refuse_unsafe(checkpoint: dict[str, Any]) -> None:
    """Refuse, on every rank alike, a state with something that only an unsafe load could restore."""
    unsafe: list[str] = []

    def check(name: str, value: Any) -> None:
        if not (isinstance(value, Tensor) or type(value) in PLAIN or _is_safe(value)):
            unsafe.append(f"{name} is a {type(value).__qualname__}")

    rebuild(plain(checkpoint), check)
    without = rebuild(plain(checkpoint), lambda _, value: None if isinstance(value, Tensor) else value)
    if not unsafe and not _is_safe(without):
        unsafe = [f"a key in {name}" for name, part in without.items() if not _is_safe(part)]
    if unsafe:
        raise AgreedError(
            f"the state of this run cannot be saved: {', '.join(unsafe[:3])}; a checkpoint holds tensors and plain "
            "types alone, as anything else can run code when it is loaded. Save its numbers instead (state_dict, "
            "on_save_checkpoint)"
        )


def _is_safe(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # whatever pickle makes of a foreign object
        return False
    return True


class HostCopies:
    """Copy states into the host's memory. The buffers are used again, as page-locked memory is slow to get.

    A second state of the run must fit into the memory of the host whose process writes.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._shared: dict[tuple[Any, ...], Tensor] = {}

    def of(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a copy that training cannot change; it overwrites the one before."""
        self._shared = {}
        before = self._buffers
        self._buffers = {}
        copied = rebuild(checkpoint, lambda name, value: self._leaf(name, value, before))
        for device in {key[-1] for key in self._shared if key[-1].type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def _leaf(self, name: str, value: Any, before: dict[str, Tensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        if value.layout != torch.strided or value.numel() == 0:
            return value.to("cpu", copy=True)
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if key not in self._shared:  # tied weights are one tensor under two names
            buffer = before.get(name)
            like = torch.empty_like(value, device="meta")  # channels_last stays that, as where training waits
            if buffer is None or (buffer.shape, buffer.stride(), buffer.dtype) != (
                like.shape,
                like.stride(),
                like.dtype,
            ):
                buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self._shared[key] = self._buffers[name] = buffer.copy_(value, non_blocking=True)
        return self._shared[key]
