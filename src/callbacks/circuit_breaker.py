"""Stops a run whose metrics say that it is broken, before it wastes a night and buries its good checkpoints."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer

from src.callbacks.breaker_rules import GRADIENT, LOSS, SKIPPED, BreakerSettings, Judge, Verdict
from src.callbacks.loss_scale import current_scale
from src.checkpoint.choose import newest
from src.checkpoint.put_aside import free_name, put_aside
from src.checkpoint.write import save_in_front, saved_or_said
from src.errors import TrippedError, UserError

TRIPPED, UNHEALTHY = "tripped", "unhealthy"  # folders in checkpoints/, where nothing looks for a state to go on from
LATEST = 50  # steps between two readings, at most

Row = dict[str, Tensor | float]


class CircuitBreaker(Callback):
    """Trips, on every rank at once, after so many bad steps in a row (`BreakerSettings` says what is bad).

    A step's loss, its largest gradient and the named metrics stay on the device until the next reading: once per
    `log_every_n_steps` (at most 50 steps), at the end of validation and of an epoch where metrics are named, and at the
    end of training. There every rank gets what all ranks saw, with one small gather and one synchronisation, and
    replays it step by step. So streaks are exact to the step, and a trip comes one interval after its last step at
    most. The gradients cost one fused pass over them per step. A log that a module writes in its own
    `on_train_batch_end` counts for the step that follows.

    A trip saves the state to `checkpoints/tripped/`, moves what was saved since the streak began to
    `checkpoints/unhealthy/`, so that the same command goes on from before it, and raises TrippedError; nothing is
    deleted and nothing saved after it.

    With an fp16 loss scaler gradients are allowed to be Inf or NaN now and then: there only skipped steps count, and a
    loss that is NaN or Inf itself. A transport or a server that is down is none of this callback's business: whoever
    calls it should raise at once.

    Args:
        settings: what is bad, and for how long
        again: the command that continues the run
        folder: its checkpoints; None where the run keeps none

    """

    def __init__(self, settings: BreakerSettings, again: str = "the same command", folder: Path | None = None) -> None:
        self.settings, self.again, self.folder = settings, again, folder
        self.judge = Judge(settings)
        self.names = [LOSS, GRADIENT, SKIPPED, *settings.watched]
        self._rows: list[tuple[int, Row]] = []  # not read yet
        self._row: Row = {}  # of the step that is being done
        self._scale: Tensor | None = None
        self._seen: dict[str, object] = {}  # the newest value of a metric, to tell it from one that was there before
        self._heard: set[str] = set()
        self._noted = self._in_epoch = False

    # --- collect, without asking the device ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._strategy, self._step, self._read_at = trainer.strategy, trainer.global_step, trainer.global_step
        self._rows, self._row, self._scale, self._in_epoch = [], {}, None, False
        if trainer.is_global_zero:
            self._note_settings()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:  # noqa: D102
        scale = current_scale(trainer)
        if scale is not None:
            self._note_skip(scale)  # of another optimizer in the same step
            self._scale = scale.clone()
        elif self.settings.nonfinite and (largest := largest_gradient(optimizer)) is not None:
            before = self._row.get(GRADIENT)
            self._row[GRADIENT] = largest if before is None else torch.maximum(torch.as_tensor(before), largest)

    def _note_skip(self, scale: Tensor) -> None:
        if self._scale is not None:
            skipped, before = (scale < self._scale).float(), self._row.get(SKIPPED)
            self._row[SKIPPED] = skipped if before is None else torch.maximum(torch.as_tensor(before), skipped)

    def on_train_batch_end(  # noqa: D102
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._in_epoch = True
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.settings.nonfinite and isinstance(loss, Tensor) and loss.numel() == 1:
            self._row[LOSS] = loss.detach().float().reshape(()) + self._row.get(LOSS, 0.0)
        self._add_step_metrics(trainer)
        if trainer.global_step == self._step:
            return  # a pass of a step that is not done
        scale = current_scale(trainer)
        if scale is not None:
            self._note_skip(scale)
        self._step, self._scale = trainer.global_step, None
        self._rows.append((self._step, self._row))
        self._row = {}
        every = min(trainer.log_every_n_steps or LATEST, LATEST)  # type: ignore[attr-defined]
        if self._step // every > self._read_at // every:
            self._read_at = self._step
            self._read_and_trip(trainer)

    def hear_row(self, values: dict[str, float]) -> None:
        """What the project's own callbacks log passes by Lightning; `write_row` tells."""
        self._heard |= values.keys()
        self._row |= {name: values[name] for name in self.settings.watched if name in values}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        if trainer.sanity_checking or trainer.state.fn != "fit" or not self.settings.watched:
            return
        results, logged = trainer.fit_loop.epoch_loop.val_loop._results, trainer.callback_metrics
        fresh = {name for item in results.values() if not item.has_reset for name in results._forked_name(item, False)}
        row: Row = {name: logged[name] for name in self._watched_in(fresh & logged.keys())}
        self._rows.append((trainer.global_step, row))
        self._read_and_trip(trainer)
        self._note_unlogged(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take what was logged for the epoch before: its sums are settled now, which a resumed run adds to before."""
        self._end_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is left before the end is saved."""
        self._end_epoch(trainer)
        self._read_and_trip(trainer)

    def _add_step_metrics(self, trainer: Trainer) -> None:
        for item in trainer.fit_loop.epoch_loop._results.values() if self.settings.watched else ():
            value = item._forward_cache
            for name in self._watched_in({item.meta.name, item.meta.forked_name(True)} if item.meta.on_step else set()):
                # A value that was not logged anew in this step is still there.
                if isinstance(value, Tensor) and value is not self._seen.get(name):
                    self._seen[name] = value
                    self._row[name] = value.detach().reshape(())

    def _end_epoch(self, trainer: Trainer) -> None:
        if not self._in_epoch or not self.settings.watched:
            return
        row: Row = {}
        self._in_epoch, results = False, trainer.fit_loop.epoch_loop._results
        logged = trainer.callback_metrics
        whole = {name for item in results.values() for name in results._forked_name(item, False)}
        by_step = {item.meta.name for item in results.values() if item.meta.on_step}
        for name in self._watched_in(whole - by_step & logged.keys()):
            if logged[name] is not self._seen.get(name):
                self._seen[name] = row[name] = logged[name]
        self._rows.append((trainer.global_step, row))
        self._read_and_trip(trainer)
        self._note_unlogged(trainer)

    def _watched_in(self, names: set[str]) -> list[str]:
        return [name for name in self.settings.watched if name in names]

    # --- read ---

    def _read(self) -> None:
        """Hand every rank's rows to the judge of every rank. Collective; each rank has as many rows."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        device = self._strategy.root_device
        exact = torch.float32 if device.type == "mps" else torch.float64
        none = torch.zeros((), device=device, dtype=exact)
        numbers = [
            torch.as_tensor(row[name], dtype=exact, device=device).reshape(()) if name in row else none
            for _, row in rows
            for name in self.names
        ]
        there = torch.tensor([name in row for _, row in rows for name in self.names], device=device, dtype=exact)
        gathered = self._strategy.all_gather(torch.stack([torch.stack(numbers), there]))
        ranks = gathered.reshape(-1, 2, len(rows), len(self.names)).tolist()  # the one synchronisation
        for index, (step, _) in enumerate(rows):
            self.judge.feed(
                step,
                [
                    {name: values[index][i] for i, name in enumerate(self.names) if mask[index][i]}
                    for values, mask in ranks
                ],
            )

    def state_dict(self) -> dict[str, Any]:
        """The streaks up to now. Collective, as saving is."""
        self._read()
        return self.judge.state_dict()

    def running_since(self) -> int | None:
        """Return the first step of a streak that has not ended. Collective."""
        self._read()
        return self.judge.running_since()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: D102
        self.judge.load_state_dict(state_dict)

    # --- trip ---

    def _read_and_trip(self, trainer: Trainer) -> None:
        self._read()
        if (verdict := self.judge.verdict) is None:
            return
        self.judge.forgive()  # whoever goes on from the state that is saved here wants another chance
        for saver in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(saver, ModelCheckpoint):
                saver.save_on_exception = False  # the state of a broken run is saved once, where nothing finds it
        said = "" if self.folder is None else self._save(trainer, self.folder)
        if trainer.is_global_zero:
            said = explain(trainer, verdict, self.again, self.folder, said)
        raise TrippedError(trainer.strategy.broadcast(said))

    def _save(self, trainer: Trainer, folder: Path) -> str:
        name = free_name(folder / TRIPPED / f"step={trainer.global_step:08d}.ckpt")
        path = Path(trainer.strategy.broadcast(str(name)))
        error = save_in_front(trainer, path)
        if not trainer.is_global_zero:
            return ""
        return f"The state of now is {path}. " if saved_or_said(path, trainer.global_step, error) else ""

    # --- say what has no effect ---

    def _note_settings(self) -> None:
        if self.settings.spike_factor != BreakerSettings.spike_factor and not self.settings.spike:
            print("note: breaker.spike_factor has no effect without a metric in breaker.spike")

    def _note_unlogged(self, trainer: Trainer) -> None:
        """Say once, at the first end of a validation or of an epoch, which names nobody has logged until then."""
        if self._noted:
            return
        self._noted = True
        loop, logged = trainer.fit_loop.epoch_loop, set(self._heard)
        for results in (loop._results, loop.val_loop._results):
            logged |= {
                name for item in results.values() for on in (True, False) for name in results._forked_name(item, on)
            }
        missing = [name for name in self.settings.watched if name not in logged]
        if missing and trainer.is_global_zero:
            print(
                f"note: the breaker watches {', '.join(missing)}, which nobody has logged so far "
                f"(logged: {', '.join(sorted(logged)) or 'nothing'})"
            )


@torch.no_grad()  # in which a sharded tensor's part is had for nothing; else it is an operation of autograd's
def largest_gradient(optimizer: Optimizer) -> Tensor | None:
    """The largest absolute value in an optimizer's gradients, NaN where one is; None without gradients.

    One fused reduction per kind of tensor, and no wait for the device.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # of a sharded model, this rank's
        gradient = gradient._values() if gradient.is_sparse else gradient
        if gradient.numel():
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    # A sum of squares would overflow where no gradient has.
    largest = [torch.stack(torch._foreach_norm(part, torch.inf)).max().float() for part in kinds.values()]
    return torch.stack([value.to(largest[0].device) for value in largest]).max() if largest else None


def explain(trainer: Trainer, verdict: Verdict, again: str, folder: Path | None, saved: str) -> str:
    """Put the checkpoints of the streak aside, and say what happened and how to go on. For the one rank that moves."""
    where = ""
    if trainer.world_size > 1 and len(verdict.ranks) < trainer.world_size:
        where = f" on rank {', '.join(map(str, verdict.ranks))} of {trainer.world_size}"
    text = (
        f"run stopped at step {trainer.global_step}, as it looks broken (breaker rule {verdict.rule}): {verdict.what()}"
        f"{where}, since step {verdict.first}. "
    )
    if folder is None:
        return f"{text}It keeps no checkpoints. Change first: {verdict.advice()}"
    moved = put_aside(folder, folder / UNHEALTHY, verdict.first)
    for saver in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(saver, ModelCheckpoint) and Path(saver.best_model_path) in moved:
            saver.best_model_path, saver.best_model_score = "", None  # the summary must not name it
    text += saved + (f"Moved to {folder / UNHEALTHY}: {', '.join(path.name for path in moved)}. " if moved else "")
    try:
        found = newest(folder)
    except UserError:  # files, and none is whole
        found = None
    if found is None:
        return f"{text}No checkpoint from before is left: start anew with another --run NAME and {verdict.advice()}"
    return (
        f"{text}The last healthy checkpoint is {found[0]} (step {found[1]}). A continued run is exact and would "
        f"break in the same way: change {verdict.advice()}; then continue with: {again}"
    )
