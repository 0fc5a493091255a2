"""Refuses before the first step what would fail at the first save."""

from lightning import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from src.checkpoint.contents import refuse_unsafe
from src.errors import AgreedError, UserError


def refuse_writers(trainer: Trainer) -> None:
    """A strategy or plugin whose files nobody here can check or go on from.

    Raises:
        AgreedError: what to use instead.

    """
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy):
        raise AgreedError(
            f"{type(strategy).__name__} writes checkpoints of its own, which no run here goes on from exactly: use "
            "--trainer.strategy fsdp_full_shard (or another fsdp_ name), or --trainer.enable_checkpointing false and "
            "a checkpoint callback of your own"
        )
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        raise AgreedError(
            "trainer.plugins has AsyncCheckpointIO, which is not needed: the state is written behind training anyway "
            "(--checkpoint.asynchronous); leave it out"
        )


def refuse_state(trainer: Trainer) -> None:
    """What a checkpoint of now would hold that no safe load takes. Collective, as saving is.

    Raises:
        AgreedError: where it is, and what to do.

    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    try:
        refuse_unsafe(checkpoint)
    except UserError as error:
        raise AgreedError(str(error)) from error
