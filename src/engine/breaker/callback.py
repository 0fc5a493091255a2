"""Stop a run whose metrics show that it is broken, before it wastes a night and buries its good checkpoints."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer

from src.engine.breaker.rules import ADVICE, GRADIENT, LOSS, SKIPPED, BreakerSettings, Judge, Verdict
from src.engine.callbacks.loss_scale import LossScale
from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.move import free_name, move_to
from src.engine.checkpoint.write import save_in_front, saved_or_said
from src.engine.errors import TrippedError, UserError
from src.engine.resolve.precision import current_scale

TRIPPED, UNHEALTHY = "tripped", "unhealthy"  # folders in checkpoints/, where nothing looks for a state to resume from
LATEST = 50  # steps between two readings, at most

Row = dict[str, Tensor | float]


class CircuitBreaker(Callback):
    """Trips, on every rank at once, after so many bad steps in a row (`BreakerSettings` says what is bad).

    A step's loss, its largest gradient and the named metrics stay on the device until the next reading: once per
    `log_every_n_steps` (at most 50 steps), at the end of training, and, where metrics are named, of validation and of
    an epoch. There every rank gets what all ranks saw, with one small gather and one synchronisation, and replays it
    step by step. So streaks are exact to the step, and a trip comes one interval after its last step at most. The
    gradients cost one fused pass over them per step. A log that a module writes in its own `on_train_batch_end` counts
    for the step that follows.

    A trip saves the state to `checkpoints/tripped/`, moves what was saved since the streak began to
    `checkpoints/unhealthy/`, so that the same command resumes from before it, and raises TrippedError; nothing is
    deleted and nothing saved after it.

    With an fp16 loss scaler gradients may be Inf or NaN now and then: there only the skipped steps count, which
    `LossScale` notes, and a loss that is NaN or Inf itself.

    Args:
        settings: what is bad, and for how long
        resume_command: the command that continues the run
        folder: its checkpoints; None where the run keeps none

    """

    def __init__(
        self, settings: BreakerSettings, resume_command: str = "the same command", folder: Path | None = None
    ) -> None:
        self.settings, self.resume_command, self.folder = settings, resume_command, folder
        self.judge = Judge(settings)
        self.names = [LOSS, GRADIENT, SKIPPED, *settings.watched]
        self._rows: list[tuple[int, Row]] = []  # not read yet
        self._row: Row = {}  # of the step that is being done
        self._logged: dict[str, Tensor] = {}  # the newest value of each named metric
        self._noted = self._in_epoch = False

    # --- collect, without asking the device ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy, self._step, self._read_at = trainer.strategy, trainer.global_step, trainer.global_step
        self._rows, self._row, self._in_epoch = [], {}, False
        self._loss_scale = next((call for call in trainer.callbacks if isinstance(call, LossScale)), None)  # type: ignore[attr-defined]
        self._skipped = self._loss_scale.skipped if self._loss_scale else 0.0
        changed = self.settings.spike_factor != BreakerSettings.spike_factor
        if changed and not self.settings.spike and trainer.is_global_zero:
            print("note: breaker.spike_factor has no effect without a metric in breaker.spike")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self.settings.nonfinite or current_scale(trainer) is not None:
            return
        if (largest := largest_gradient(optimizer)) is not None:
            before = self._row.get(GRADIENT)  # of another optimizer in the same step
            self._row[GRADIENT] = largest if before is None else torch.maximum(torch.as_tensor(before), largest)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._in_epoch = bool(self.settings.watched)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.settings.nonfinite and isinstance(loss, Tensor) and loss.numel() == 1:
            self._row[LOSS] = loss.detach().float().reshape(()) + self._row.get(LOSS, 0.0)
        self._row |= self._new_metrics(trainer)
        if trainer.global_step == self._step:
            return  # a pass of a step that is not done
        if self._loss_scale and current_scale(trainer) is not None:
            self._row[SKIPPED] = self._loss_scale.skipped - self._skipped
            self._skipped = self._loss_scale.skipped
        self._step = trainer.global_step
        self._rows.append((self._step, self._row))
        self._row = {}
        every = min(trainer.log_every_n_steps or LATEST, LATEST)  # type: ignore[attr-defined]
        if self._step // every > self._read_at // every:
            self._read_at = self._step
            self._read_and_trip(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.settings.watched and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._judge_metrics(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge what was logged for the epoch before: its sums are settled now, which a resumed run adds to before."""
        self._end_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is left before the end is saved."""
        self._end_epoch(trainer)
        self._read_and_trip(trainer)

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._judge_metrics(trainer)

    def _judge_metrics(self, trainer: Trainer) -> None:
        """Judge what a validation or an epoch has logged as a whole; say once which names nobody has logged."""
        self._rows.append((trainer.global_step, self._new_metrics(trainer)))
        self._read_and_trip(trainer)
        missing = [name for name in self.settings.watched if name not in self._logged]
        if missing and trainer.is_global_zero and not self._noted:
            print(
                f"note: the breaker watches {', '.join(missing)}, which has not been logged so far "
                f"(logged: {', '.join(sorted(trainer.logged_metrics)) or 'nothing'})"
            )
        self._noted = True

    def _new_metrics(self, trainer: Trainer) -> Row:
        """Return the named metrics that were logged since the last call.

        Lightning keeps the value of a metric until the next one and logs it again with every row. A new value lies in
        new memory, as the old one is kept here.
        """
        row: Row = {}
        logged = trainer.logged_metrics if self.settings.watched else {}
        for name in self.settings.watched:
            value, before = logged.get(name), self._logged.get(name)
            if value is not None and (before is None or value.data_ptr() != before.data_ptr()):
                self._logged[name] = value
                row[name] = value.detach().reshape(())
        return row

    # --- read ---

    def _read(self) -> None:
        """Give every rank's rows to the judge of every rank. Collective; each rank has as many rows."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        device = self._strategy.root_device
        exact = torch.float32 if device.type == "mps" else torch.float64
        none = torch.zeros((), device=device, dtype=exact)
        cells = [row.get(name) for _, row in rows for name in self.names]
        values = [
            none if cell is None else torch.as_tensor(cell, dtype=exact, device=device).reshape(()) for cell in cells
        ]
        present = torch.tensor([cell is not None for cell in cells], device=device, dtype=exact)
        gathered = self._strategy.all_gather(torch.stack([torch.stack(values), present]))
        ranks = gathered.reshape(-1, 2, len(rows), len(self.names)).tolist()  # the one synchronisation
        for index, (step, _) in enumerate(rows):
            self.judge.feed(step, [self._present(of_rank, mask, index) for of_rank, mask in ranks])

    def _present(self, values: list[list[float]], mask: list[list[float]], index: int) -> dict[str, float]:
        return {name: values[index][i] for i, name in enumerate(self.names) if mask[index][i]}

    def state_dict(self) -> dict[str, Any]:
        """Return the streaks up to now. Collective, as saving is."""
        self._read()
        return self.judge.state_dict()

    def running_since(self) -> int | None:
        """Return the first step of a streak that has not ended. Collective."""
        self._read()
        return self.judge.running_since()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.judge.load_state_dict(state_dict)

    # --- trip ---

    def _read_and_trip(self, trainer: Trainer) -> None:
        self._read()
        if (verdict := self.judge.verdict) is None:
            return
        self.judge.forgive()  # whoever resumes from the state that is saved here wants another chance
        for saver in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(saver, ModelCheckpoint):
                saver.save_on_exception = False  # the state of a broken run is saved once, where nothing finds it
        text = "" if self.folder is None else self._save(trainer, self.folder)
        if trainer.is_global_zero:
            text = explain(trainer, verdict, self.resume_command, self.folder, text)
        raise TrippedError(trainer.strategy.broadcast(text))

    def _save(self, trainer: Trainer, folder: Path) -> str:
        name = free_name(folder / TRIPPED / f"step={trainer.global_step:08d}.ckpt")
        path = Path(trainer.strategy.broadcast(str(name)))
        error = save_in_front(trainer, path)
        if not trainer.is_global_zero:
            return ""
        return f"The state of now is {path}. " if saved_or_said(path, trainer.global_step, error) else ""


@torch.no_grad()  # in which a sharded tensor's part is had for nothing; else it is an operation of autograd's
def largest_gradient(optimizer: Optimizer) -> Tensor | None:
    """Return the largest absolute value in an optimizer's gradients, NaN if there is one; None without gradients.

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


def explain(trainer: Trainer, verdict: Verdict, resume_command: str, folder: Path | None, saved: str) -> str:
    """Move the checkpoints of the streak away; return what happened and how to continue. For rank 0."""
    where = ""
    if trainer.world_size > 1 and len(verdict.ranks) < trainer.world_size:
        where = f" on rank {', '.join(map(str, verdict.ranks))} of {trainer.world_size}"
    text = (
        f"run stopped at step {trainer.global_step}, as it looks broken (breaker rule {verdict.rule}): {verdict}"
        f"{where}, since step {verdict.first}. "
    )
    advice = ADVICE[verdict.rule]
    if folder is None:
        return f"{text}It keeps no checkpoints. Change first: {advice}"
    moved = move_to(folder, folder / UNHEALTHY, verdict.first)
    for saver in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(saver, ModelCheckpoint) and Path(saver.best_model_path) in moved:
            saver.best_model_path, saver.best_model_score = "", None  # the summary must not name it
    text += saved + (f"Moved to {folder / UNHEALTHY}: {', '.join(path.name for path in moved)}. " if moved else "")
    try:
        healthy = newest(folder)
    except UserError:  # there are files, and none is whole
        healthy = None
    if healthy is None:
        return f"{text}No checkpoint from before is left: start anew with another --run NAME and {advice}"
    return (
        f"{text}The last healthy checkpoint is {healthy[0]} (step {healthy[1]}). A continued run is exact and would "
        f"break in the same way: change {advice}; then continue with: {resume_command}"
    )
