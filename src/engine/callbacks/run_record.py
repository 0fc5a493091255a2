"""Write manifest.json and summary.json of the run directory: at the start, with each save, and at every kind of end."""

import math
import socket
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from src.engine.callbacks.throughput import Throughput
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.names import ours
from src.engine.distributed import gather_objects, lost_a_rank
from src.engine.errors import AgreedError, Stopped, TrippedError
from src.engine.memory.usage import is_out_of_memory, peak_memory
from src.engine.resolve.precision import refuse_mixed_cards
from src.engine.run.directory import Run
from src.engine.run.manifest import describe_start
from src.engine.run.storage import refuse_unshared
from src.engine.text import table


class RunRecord(Callback):
    """Checks the processes when they have met, prints the start block, and writes the two files from rank 0.

    Args:
        run: the run directory
        facts: what the manifest says beside code and machine (task, batch, precision, world_size …)
        start_lines: what is printed at the start, as (name, text)
        resume_command: resumes this run
        speed: where samples/s come from

    """

    def __init__(
        self,
        run: Run,
        facts: dict[str, Any],
        start_lines: list[tuple[str, str]],
        resume_command: str,
        speed: Throughput,
    ) -> None:
        self.run, self.world_size, self.facts = run, facts["world_size"], facts
        self.start_lines, self.resume_command, self._speed = start_lines, resume_command, speed
        self._started = time.monotonic()
        self._before = run.read_json("summary.json").get("wall_time_seconds", 0.0)
        self._useful_before = 0.0
        self._useful_since: float | None = None
        self._ended = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there are as many processes as asked for, on cards of one kind, in one shared folder."""
        if trainer.world_size != self.world_size:
            raise AgreedError(
                f"{self.world_size} processes asked for, {trainer.world_size} started: check --ntasks-per-node "
                "and that the command runs under srun"
            )
        device = trainer.strategy.root_device
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        ranks: list[tuple[str, str]] = gather_objects((socket.gethostname(), card))
        self.cards = [card for _, card in ranks]
        refuse_mixed_cards(self.cards)
        if len(ranks) > 1:
            self.start_lines += [(f"rank {rank}", f"{host}, {card}") for rank, (host, card) in enumerate(ranks)]
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None
        self.facts = self.facts | {"card_memory_gib": memory}
        refuse_unshared(self.run.path)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_hyperparams(self.facts)
        print(table(self.start_lines), flush=True)
        old = self.run.read_json("manifest.json")
        earlier = old.pop("earlier_starts", [])
        if old:
            earlier.append({key: old[key] for key in ("started", "host", "commit", "step", "command")})
        start = {"step": self.run.step, "command": self.resume_command, "earlier_starts": earlier}
        self.run.write_json("manifest.json", self.facts | describe_start(self.run, self.cards) | start)
        self.write(trainer, "running")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._useful_since = time.monotonic()

    def _useful_seconds(self) -> float:
        """Return the seconds of training that led to the current state, without steps that were lost."""
        since = 0.0 if self._useful_since is None else time.monotonic() - self._useful_since
        return round(self._useful_before + since, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return how long it took to come to the state that is saved."""
        return {"useful_seconds": self._useful_seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._useful_before = state_dict["useful_seconds"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the summary as far as what a restart finds; `heartbeat` says how far the run is in between."""
        if not self._ended:
            self.write(trainer, "running")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._ended = True  # what is still saved leaves the reason as it is
        if isinstance(exception, Stopped):
            self.write(trainer, f"stopped by {exception}")
            return
        error, reason = f"{type(exception).__name__}: {exception}".strip(": "), _reason(exception)
        summary = self.run.read_json("summary.json")
        if reason == "out of memory" and not trainer.is_global_zero:
            # Rank 0 may wait for this one in a collective until it is killed.
            error = f"rank {trainer.global_rank}: {error}"
            self._keep(summary | {"exit_reason": reason, "error": error, "last_step": trainer.global_step})
        elif reason != "lost a rank" or summary.get("exit_reason") != "out of memory":  # which that rank has written
            self.write(trainer, reason, error)

    def write(self, trainer: Trainer, exit_reason: str, error: str | None = None) -> None:
        """Write summary.json, on rank 0 only and without talking to other ranks: one of them may be gone."""
        if not trainer.is_global_zero:
            return
        best = next((call for call in trainer.callbacks if isinstance(call, SaveBest)), None)  # type: ignore[attr-defined]
        score = None if best is None or best.best_model_score is None else float(best.best_model_score)
        checkpoints = ours(self.run.path / "checkpoints", "newest")
        memory = self._speed.values.get("perf/peak_memory_gib", peak_memory(trainer.strategy.root_device))
        seconds, samples = self._speed.seconds, self._speed.samples * self.world_size
        self._keep(
            {
                "exit_reason": exit_reason,
                "error": error,
                "last_step": trainer.global_step,
                "total_steps": total_steps(trainer),
                "best": {"metric": best.monitor, "value": score, "checkpoint": best.best_model_path}
                if best and score is not None and Path(best.best_model_path).is_file()  # its save may have failed
                else None,
                "last_checkpoint": str(checkpoints[-1]) if checkpoints else None,
                "wall_time_seconds": round(self._before + time.monotonic() - self._started, 1),
                "useful_seconds": self._useful_seconds(),
                "samples_per_sec": round(samples / seconds, 2) if seconds else None,
                "peak_memory_gib": round(memory, 3),
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "continue_command": self.resume_command,
            },
        )

    def _keep(self, summary: dict[str, Any]) -> None:
        try:
            self.run.write_json("summary.json", summary)
        except OSError as error:  # other ranks know nothing of it: no reason to end the training
            print(f"warning: {self.run.path / 'summary.json'} cannot be written ({error.strerror})", flush=True)


def total_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of the whole run; None if only time limits it, or its data has no length."""
    per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    limits = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and math.isfinite(per_epoch):
        limits.append(math.ceil(per_epoch) * trainer.max_epochs)
    if trainer.max_steps >= 0:
        limits.append(trainer.max_steps)
    return min(limits, default=None)


def _reason(exception: BaseException) -> str:
    if isinstance(exception, TrippedError):
        return "tripped"
    if isinstance(exception, KeyboardInterrupt | SystemExit):
        return "interrupted"
    if is_out_of_memory(exception):
        return "out of memory"
    return "lost a rank" if lost_a_rank(exception) else "crashed"
