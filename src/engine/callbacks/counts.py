"""Count what is really trained and validated, and say where that is not what was asked for."""

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from src.engine.callbacks.throughput import count_samples
from src.engine.checkpoint.best import SaveBest
from src.engine.data.loader import GlobalBatchSampler, training_loaders
from src.engine.errors import AgreedError
from src.engine.resolve.batch import BatchPlan
from src.engine.run.directory import Run


class TrainingCounts(Callback):
    """Compare the batch, the steps and the validations of a training with what was meant.

    Args:
        run: the run directory, whose manifest.json gets the batch that is trained
        plan: the batch that was worked out from the settings; None where the data brings its own
        asked: the setting that asks for it, as "global_batch_size 64"; None where nobody did

    """

    def __init__(self, run: Run, plan: BatchPlan | None, asked: str | None) -> None:
        self.run, self.plan, self.asked = run, plan, asked
        self._begun: int | None = None
        self._batches = self._validations = 0
        self._said_short = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count raw optimizer steps, too."""
        self._begun = trainer.global_step
        if not pl_module.automatic_optimization:
            count_raw_steps(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Compare the first batch of this start with the plan; manifest.json gets the batch that is trained."""
        if self._batches:
            return
        stated = [size for size in map(stated_batch_size, training_loaders(trainer)) if size]
        planned = self.plan.micro_batch_size if self.plan else None
        micro = planned if planned in stated else (stated or [count_samples(batch)])[0]
        sizes = torch.tensor([micro, int(micro != planned)], device=trainer.strategy.root_device)
        per_pass, differ = trainer.strategy.reduce(sizes, reduce_op="sum").tolist()
        if not per_pass or not differ:
            return
        trained = per_pass * trainer.accumulate_grad_batches
        text = (
            f"the training loader gives {micro} samples a pass{'' if planned is None else f', not {planned}'}: the "
            f"global batch is {trained} = {per_pass} over {trainer.world_size} device(s) × "
            f"{trainer.accumulate_grad_batches} accumulation"
        )
        if stated and self.asked:
            raise AgreedError(
                f"{self.asked} cannot be enforced: {text}; let the data module hand its batch_size to the loader as it "
                "is, or leave the setting out"
            )
        if trainer.is_global_zero:
            # Of a loader that states none: the first dimension of the first tensor, which need not be the samples.
            print(f"note: {'' if stated else 'as far as the first batch tells, '}{text}", flush=True)
            planned_global = self.plan.global_batch_size if self.plan else None
            counted = {"global_batch_size": trained, "micro_batch_size": micro, "planned_batch_size": planned_global}
            self.run.write_json("manifest.json", self.run.read_json("manifest.json") | counted)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        self._batches += 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say once that the data has fewer batches than its length."""
        done, stated = trainer.fit_loop.epoch_loop.batch_progress.current.completed, trainer.num_training_batches
        stopped = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if done < stated < float("inf") and not stopped and not self._said_short:
            self._said_short = True
            _say(
                trainer,
                f"the training data ended after {done} batches, and its length says {stated}: schedules and the "
                "validation at an epoch's end count by the length",
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validations += not trainer.sanity_checking

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of what was meant to be and is not; a run without a step is not finished, which is an error."""
        wanted = 0 not in (trainer.limit_train_batches, trainer.max_steps, trainer.max_epochs)
        if wanted and not trainer.should_stop and trainer.global_step == (self._begun or 0):
            if self._batches:
                raise AgreedError(
                    f"{self._batches} batches ran and no optimizer step was counted, so nothing is saved: step the "
                    "optimizers that configure_optimizers gives"
                )
            if trainer.global_step == 0:
                raise AgreedError("no batch was trained: the training loader is empty")
        if self._begun != 0:
            return
        best = next((call for call in trainer.callbacks if isinstance(call, SaveBest)), None)  # type: ignore[attr-defined]
        if trainer.enable_validation and not self._validations:
            empty = not sum(trainer.num_val_batches)
            why = "its data gives no batch" if empty else f"none was due in {self._batches} batches"
            _say(trainer, f"nothing was validated ({why}), so no best checkpoint is kept")
        elif self._validations and best is not None and best.monitor not in trainer.callback_metrics:
            _say(trainer, f"no best checkpoint is kept: checkpoint.monitor {best.monitor!r} was never logged")


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print(f"warning: {text}", flush=True)


def stated_batch_size(loader: object) -> int | None:
    """Return the samples of a pass on this rank as the loader states them; None where it does not."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, GlobalBatchSampler):
        return sampler.micro_batch_size
    sizes = (getattr(part, "batch_size", None) for part in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)


def count_raw_steps(trainer: Trainer) -> None:
    """Count the steps of optimizers from `self.optimizers(use_pl_optimizer=False)`, which Lightning leaves out."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    def stepped(*_: Any) -> None:
        if progress.current.ready == progress.current.completed:  # else Lightning is counting this one
            progress.increment_ready()
            progress.increment_completed()

    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(stepped)
