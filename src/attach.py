"""What joins the Trainer when the run's directory is known: loggers, records, saving, watchdog.

One run's callback is named in a configuration (trainer.callbacks); one that every run is to have is added here.
"""

from dataclasses import dataclass
from typing import Any

from lightning import Callback, Trainer

from src.batch_plan import BatchPlan
from src.callbacks.breaker_rules import BreakerSettings
from src.callbacks.circuit_breaker import CircuitBreaker
from src.callbacks.counts import TrainingCounts
from src.callbacks.frozen import Frozen
from src.callbacks.global_batch import GlobalBatch
from src.callbacks.heartbeat import Heartbeat
from src.callbacks.loss_scale import LossScale
from src.callbacks.preemption import Preemption
from src.callbacks.progress import Progress
from src.callbacks.run_record import RunRecord
from src.callbacks.step_costs import FreeGradients, FreezeGarbage
from src.callbacks.throughput import Throughput
from src.callbacks.watchdog import Watchdog
from src.checkpoint.best import SaveBest
from src.checkpoint.save import SaveNewest
from src.checkpoint.schedule import CheckpointSettings
from src.hangs.dump import record_collectives
from src.loggers import keep_wandb_run, run_loggers
from src.run import Run


@dataclass
class Wanted:
    """What the configuration wants of these.

    Args:
        progress: our progress line
        loggers: TensorBoard and metrics.csv
        checkpoints: when to save; None: not at all (trainer.enable_checkpointing false)
        breaker: when a run counts as broken
        seconds: of training, after which it stops and is saved; None: no limit of ours
        hang_limit: seconds without an event after which the watchdog ends all ranks; None: no watchdog
        plan, asked: the batch, as TrainingCounts compares it

    """

    progress: bool
    loggers: bool
    checkpoints: CheckpointSettings | None
    breaker: BreakerSettings
    seconds: float | None = None
    hang_limit: float | None = None
    plan: BatchPlan | None = None
    asked: str | None = None


def attach(
    trainer: Trainer, run: Run, wanted: Wanted, facts: dict[str, Any], block: list[tuple[str, str]], again: str
) -> RunRecord:
    """Add them all for a training; `facts` and `block` are what the record keeps and says at the start.

    Their order counts. The record comes first: its checks must precede everything else, and it must see every
    exception. Saving comes before the clock, which does not count it, and after the states that it saves. The breaker
    comes after what it hears and before saving, so that the end of a broken run is not saved.
    """
    trainer._default_root_dir = run.folder  # type: ignore[attr-defined]  # what Lightning's callbacks and tuners write by themselves
    keep_wandb_run(run, trainer.loggers)
    if wanted.loggers:
        trainer.loggers = [*trainer.loggers, *run_loggers(run)]
    loss, speed = GlobalBatch(), Throughput()
    record = RunRecord(run, facts, block, again, speed)
    folder = run.path / "checkpoints"
    callbacks: list[Callback] = [
        *watch(trainer, run, wanted, again, record),
        record,
        Heartbeat(run.path),
        TrainingCounts(run, wanted.plan, wanted.asked),
        FreeGradients(),
        FreezeGarbage(),
        Frozen(),
        loss,
        LossScale(),
    ]
    breaker = CircuitBreaker(wanted.breaker, again, folder if wanted.checkpoints else None)
    if wanted.breaker.enabled:
        callbacks.append(breaker)
    if wanted.checkpoints:
        since = breaker.running_since
        newest = SaveNewest(folder, wanted.checkpoints, {"loss": loss}, speed.restart_clock, wanted.seconds, since)
        preemption = Preemption(lambda: newest.first_save_seconds, saves=True)
        callbacks += [preemption, newest, SaveBest(folder, wanted.checkpoints, newest)]
    else:
        callbacks.append(Preemption())
    callbacks.append(speed)
    if wanted.progress:
        callbacks.append(Progress(loss, speed))
    trainer.callbacks += callbacks  # type: ignore[attr-defined]
    return record


def watch(trainer: Trainer, run: Run, wanted: Wanted, again: str, record: RunRecord | None = None) -> list[Callback]:
    """The watchdog, where it is wanted; it comes before whatever may hang."""
    record_collectives(run.path)
    if wanted.hang_limit is None:
        return []
    tell = None if record is None else lambda text: record.write(trainer, "hung", text)
    return [Watchdog(wanted.hang_limit, run.path, tell, again)]
