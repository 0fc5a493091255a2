"""Refuses before the first step what would fail at the first save."""

from lightning import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from src.checkpoint.contents import refuse_unsafe
from src.errors import AgreedError, UserError

# Lightning's callbacks after which a resumed run is another one: why, and what to use instead (docs/callbacks.md).
NOT_RESUMABLE: dict[type[Callback], str] = {
    BatchSizeFinder: "it changes the batch size of the run; find it with `python -m src.batch_size`",
    GradientAccumulationScheduler: "it changes the global batch during the run, and a resume inside an epoch forgets "
    "the factor; set --global_batch_size",
    LearningRateFinder: "it searches again at each resume and may find another rate; search once without checkpoints, "
    "then set the rate",
    ModelPruning: "its masks are not restored; prune a trained model in a script of your own",
    SpikeDetection: "its running mean is not restored; use --breaker.spike '[train/loss]'",
    StochasticWeightAveraging: "its average and its schedule are not restored; use --trainer.callbacks+ "
    "src.callbacks.ema.EMA",
}


def refuse_callbacks(trainer: Trainer) -> None:
    """One of Lightning's with which a run cannot be resumed exactly.

    Raises:
        AgreedError: why, and what to use instead.

    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, why in NOT_RESUMABLE.items():
            if isinstance(callback, kind):
                raise AgreedError(
                    f"trainer.callbacks has {kind.__name__}: {why}, or train with --trainer.enable_checkpointing false"
                )


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
