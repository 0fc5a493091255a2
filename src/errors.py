"""Errors that a user can mend: one line on stderr and exit code 2, never a traceback."""

import torch


class UserError(Exception):
    """Bad input or a machine that does not fit it. The text says what it got, what is allowed, what to do."""


def hint(error: BaseException) -> str | None:
    """What to turn when training itself failed with `error`; None where the traceback says enough."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "out of GPU memory. The same global batch in less memory: lower --micro_batch_size (accumulation follows), "
            "then --activation_checkpointing true, or both at once: --config configs/presets/lowmem.yaml"
        )
    if "find_unused_parameters" in text or "marked as ready twice" in text:
        return (
            "some parameters got no gradient in a step. If the model skips parts of itself on purpose: "
            "--trainer.strategy ddp_find_unused (slower); otherwise TORCH_DISTRIBUTED_DEBUG=DETAIL names them"
        )
    return None
