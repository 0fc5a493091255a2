"""Refuse before the first step what would fail at the first save."""

from lightning import LightningModule, Trainer
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

from src.engine.errors import AgreedError

# Lightning's callbacks with which a resumed run differs: why, and what to use instead (docs/callbacks.md).
NOT_RESUMABLE: dict[type[Callback], str] = {
    BatchSizeFinder: "it changes the batch size of the run; find it with `python -m src.batch_size`",
    GradientAccumulationScheduler: "it changes the global batch during the run, and a resume inside an epoch forgets "
    "the factor; set --global_batch_size",
    LearningRateFinder: "it searches again at each resume and may find another rate; search once without checkpoints, "
    "then set the rate",
    ModelPruning: "its masks are not restored; prune a trained model in a script of your own",
    SpikeDetection: "its running mean is not restored; use --breaker.spike '[train/loss]'",
    StochasticWeightAveraging: "its average and its schedule are not restored; use --trainer.callbacks+ "
    "src.engine.callbacks.ema.EMA",
}


def note_manual_optimization(module: LightningModule) -> None:
    """Say what counts as a step where a module optimizes by itself."""
    if module.global_rank == 0 and not module.automatic_optimization:
        print(
            "note: the module optimizes by itself: rows count batches, checkpoints and max_steps its optimizers' "
            "steps; gradients that it keeps from one batch to the next are not saved"
        )


def refuse_callbacks(trainer: Trainer) -> None:
    """Refuse Lightning's callbacks with which a run cannot be resumed exactly."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, why in NOT_RESUMABLE.items():
            if isinstance(callback, kind):
                raise AgreedError(
                    f"trainer.callbacks has {kind.__name__}: {why}, or train with --trainer.enable_checkpointing false"
                )


def refuse_writers(trainer: Trainer) -> None:
    """Refuse strategies and plugins whose files cannot be checked or resumed from here."""
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy):
        raise AgreedError(
            f"{type(strategy).__name__} writes checkpoints of its own, which no run here resumes from exactly: use "
            "--trainer.strategy fsdp_full_shard (or another fsdp_ name), or --trainer.enable_checkpointing false and "
            "a checkpoint callback of your own"
        )
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        raise AgreedError(
            "trainer.plugins has AsyncCheckpointIO, which is not needed: the state is written in the background anyway "
            "(--checkpoint.asynchronous); leave it out"
        )
