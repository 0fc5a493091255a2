"""Train and evaluate: the entry point, to be read top to bottom.

    python -m src.cli fit --config configs/a100_n1_gpu4.yaml
    python -m src.cli test --config configs/cpu.yaml --run NAME

`configs/defaults.yaml` comes first, then the task, then every --config in order, then the options of the command line.
The callbacks of every training are listed in `ProjectCLI.training_callbacks`.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the imports below take seconds, on a network's file system many
    from src.engine import signals, streams

    signals.listen_while_importing()
    streams.survive_closed_streams()

import torch
import yaml
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.cli import LightningArgumentParser

from src.engine import exit_codes, signals, stopped
from src.engine.agreement import agree
from src.engine.breaker.callback import CircuitBreaker
from src.engine.callbacks.counts import TrainingCounts
from src.engine.callbacks.ema import EMA
from src.engine.callbacks.frozen import Frozen
from src.engine.callbacks.global_batch import GlobalBatch
from src.engine.callbacks.loss_scale import LossScale
from src.engine.callbacks.predictions import WritePredictions
from src.engine.callbacks.preemption import Preemption
from src.engine.callbacks.progress import Progress
from src.engine.callbacks.run_record import RunRecord
from src.engine.callbacks.step_costs import FreeGradients, FreezeGarbage
from src.engine.callbacks.throughput import Throughput
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.write import WholeFiles
from src.engine.config import config_files
from src.engine.data.loader import stop_workers
from src.engine.errors import NotSavedError, Stopped, UserError
from src.engine.files import write_text
from src.engine.lightning_cli import StrictCLI
from src.engine.memory.callback import OutOfMemory
from src.engine.options import OF_ONE_START, add_options
from src.engine.outcome import keep_metrics, leave, out_of_time, report, results, run_to_its_end
from src.engine.preparation import prepare_environment, prepare_yaml, quieten
from src.engine.resolve.precision import Card
from src.engine.resolve.resolution import asked_batch, resolve
from src.engine.run.changes import ESSENTIAL
from src.engine.run.directory import Run, find_run, open_run
from src.engine.run.lock import release
from src.engine.run.loggers import keep_wandb_run, run_loggers
from src.engine.run.start_block import (
    finished_text,
    manifest_fields,
    refuse_missing,
    refuse_without_data,
    resume_command,
    start_lines,
)
from src.engine.sharding.wrapping import checkpoint_activations, compile_blocks
from src.engine.trainer import ProjectTrainer, as_list, trainer_settings
from src.engine.watchdog.callback import Watchdog
from src.engine.watchdog.dump import record_collectives
from src.engine.watchdog.settings import debug_collectives, fit_timeouts
from src.strategies import is_ours, resolve_strategy
from src.strategies.fsdp import choose_format


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code (0 done, 1 crashed, 2 bad input; all: src/engine/exit_codes.py).

    A hang ends the process from the watchdog's thread. The process has its own signal handlers afterwards.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before training, when there is nothing to save
        return exit_codes.INTERRUPTED
    finally:
        signals.restore()


def _run(argv: list[str]) -> int:
    signals.listen()
    quieten()
    prepare_environment()
    prepare_yaml()
    try:
        cli = ProjectCLI(argv)
    except Exception as error:
        return report(error)
    code = run_to_its_end(cli)
    if code == exit_codes.BAD_INPUT:
        cli.remove_new_run()
    if code not in (exit_codes.DONE, exit_codes.STOPPED):
        leave(cli.trainer, code)
    elif torch.distributed.is_initialized():
        # A group that is left to the interpreter's exit can abort a run that was perfect.
        torch.distributed.destroy_process_group()
    return code


class ProjectCLI(StrictCLI):
    """Parse, resolve what depends on the machine, build; then open the run and train, or evaluate: in this order."""

    def __init__(self, argv: list[str], cards: list[Card] | None = None) -> None:
        self.cards = cards  # of another machine, for which src.check resolves; None: this one
        self.run: Run | None = None
        self.resume_command = "the same command"  # with --run, as soon as there is a run
        self.memory = OutOfMemory()
        self.exit_code = exit_codes.DONE
        super().__init__(argv, trainer_class=ProjectTrainer, seed_everything_default=42)

    # --- parse ---

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_options(parser)

    # --- resolve ---

    def before_instantiate_classes(self) -> None:
        """Find out what this machine makes of the configuration; refuse what cannot be."""
        self.config_text = self.dump(without=OF_ONE_START)  # fed back with --config it starts a run of its own
        self.resolved = resolve(self.settings, config_files(self.argv), resolve_strategy, self.cards)
        if self.settings.debug_collectives:
            debug_collectives()
        if self.resolved.plan is not None:
            self.settings.data.init_args.batch_size = self.resolved.plan.micro_batch_size

    # --- build ---

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer with what was resolved; the run's loggers and callbacks join it when there is a run."""
        given = self.config_init[self.command]
        self.saves = given.trainer.enable_checkpointing is not False
        limit = given.trainer.max_time if self.saves else None  # else Lightning's own Timer ends it
        self.max_seconds = Timer(limit)._duration if limit else None
        try:
            trainer = super().instantiate_trainer(**trainer_settings(self.resolved, given.trainer, is_ours), **kwargs)
        except (TypeError, ValueError) as error:  # of Lightning's checks: the user's objects are built
            raise UserError(str(error)) from error
        self.resolved.can_shard = is_ours(trainer.strategy)
        trainer.model_settings = yaml.safe_load(self.config_text).get("model")  # type: ignore[attr-defined]
        timeout = self.settings.collective_timeout_minutes
        self.hang_limit, notes = fit_timeouts(trainer.strategy, timeout, given.watchdog)
        self.resolved.notes += [*notes, *choose_format(trainer.strategy, given.checkpoint.format)]
        return trainer

    def training_callbacks(self, run: Run, record: RunRecord, speed: Throughput) -> list[Callback | None]:
        """Return the callbacks of every training, in the order in which their hooks are called; None is left out.

        To have one more in every run, add it here; in one run, name it in the configuration (trainer.callbacks): those
        come before these.
        """
        given, folder = self.config_init["fit"], run.path / "checkpoints"
        shown = given.trainer.enable_progress_bar is not False
        shown = shown and not any(isinstance(callback, ProgressBar) for callback in as_list(given.trainer.callbacks))
        loss = GlobalBatch()
        breaker = CircuitBreaker(given.breaker, self.resume_command, folder if self.saves else None)
        newest = SaveNewest(
            folder, given.checkpoint, {"loss": loss}, speed.restart_clock, self.max_seconds, breaker.running_since
        )
        return [
            self._watchdog(run, record),  # before whatever may hang
            record,  # its checks come before all other work, and it sees every exception
            TrainingCounts(run, self.resolved.plan, asked_batch(self.settings)),
            FreeGradients(),
            FreezeGarbage(),
            Frozen(),
            loss,
            LossScale(),
            # After what it judges and before saving, so that the end of a broken run is not saved.
            breaker if given.breaker.enabled else None,
            Preemption(lambda: newest.first_save_seconds, saves=True) if self.saves else Preemption(),
            newest if self.saves else None,  # after the callbacks whose state it saves
            SaveBest(folder, given.checkpoint, newest) if self.saves else None,
            speed,  # after saving, which its clock leaves out
            Progress(loss, speed) if shown else None,
        ]

    def _watchdog(self, run: Run, record: RunRecord | None = None) -> Watchdog:
        record_collectives(run.path)
        record_hang = None if record is None else lambda text: record.write(self.trainer, "hung", text)
        return Watchdog(self.hang_limit, run.path, record_hang, self.resume_command)

    # --- go ---

    def run_subcommand(self) -> None:
        """Train or evaluate in a run directory."""
        refuse_without_data(self.command, self.model, self.datamodule)
        if self.settings.activation_checkpointing:
            checkpoint_activations(self.model)
        if self.settings.compile:
            compile_blocks(self.model)
        self.trainer.callbacks.insert(0, self.memory)  # type: ignore[attr-defined]  # it measures before others free
        arguments = self._prepare_subcommand_kwargs(self.command)
        refuse_missing(self.command, arguments["ckpt_path"])
        # Tensors and plain types: a checkpoint must not run code, unless the user trusts this one.
        arguments["weights_only"] = arguments["weights_only"] is not False or not arguments["ckpt_path"]
        try:
            if self.command != "fit":
                self._evaluate(arguments)
            elif self.settings.trainer.fast_dev_run:
                self._try_out(arguments)
            else:
                self._fit(arguments)
        finally:
            trainer = self.trainer
            stop_workers([trainer.train_dataloader, trainer.val_dataloaders])
            stop_workers([trainer.test_dataloaders, trainer.predict_dataloaders])
            release()
            signals.clear()

    def remove_new_run(self) -> None:
        """Remove the folder that this start has made, where training was refused before its first step."""
        run = self.run
        if run and run.state == "new" and self.trainer.global_step == 0 and self.trainer.is_global_zero:
            shutil.rmtree(run.path, ignore_errors=True)

    def _fit(self, arguments: dict[str, Any]) -> None:
        facts = manifest_fields(self.model, self.resolved, self.trainer, self.settings)
        self.run = run = agree(self.trainer, lambda: self._open_run(facts))
        if run.state == "finished":
            if self.trainer.is_global_zero:
                print(finished_text(run, self.argv))
            return
        if run.checkpoint and (given := arguments["ckpt_path"]):
            self.resolved.notes.append(f"--ckpt_path {given} is not used: the run has its own, {run.checkpoint}")
        arguments["ckpt_path"] = run.checkpoint = run.checkpoint or arguments["ckpt_path"]
        self.resume_command = resume_command(self.argv, run)
        record, end = self._join_run(run, facts), "finished"
        try:
            self.trainer.fit(**arguments)
            if out_of_time(self.trainer):
                end = "stopped by max_time"
        except Stopped as stop:
            end = f"stopped by {stop}"  # this start, not the run
            self.exit_code = stopped.exit_code(str(stop), self.trainer.global_rank)
        except NotSavedError as error:  # of a validation that was cut off, too, which the record calls a stop
            record.write(self.trainer, "not saved", str(error))
            raise
        record.write(self.trainer, end)  # with the checkpoint of its end
        if self.trainer.is_global_zero:
            if end == "finished":
                write_text(run.path / "DONE", f"{self.trainer.global_step}\n")
            resume = "" if end == "finished" else f"; continue with: {self.resume_command}"
            print(f"run {run.folder} {end} at step {self.trainer.global_step}{results(self.trainer)}{resume}")

    def _open_run(self, facts: dict[str, Any]) -> Run:
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return open_run(
            self.settings.run,
            facts["task"],
            self.config_text,
            weights * 3,  # and Adam's two moments
            # Beside the newest the best, and one that is being written: the old one goes when the new one is there.
            checkpoints=self.settings.checkpoint.keep + 2 if self.saves else 0,
            essentials={name: facts[name] for name in ESSENTIAL},
            allowed=self.settings.allow_changed,
            fresh=self.settings.fresh,
        )

    def _join_run(self, run: Run, facts: dict[str, Any]) -> RunRecord:
        """Give the Trainer the run's folder, loggers and callbacks; return the callback that keeps the record."""
        given, trainer = self.config_init["fit"], self.trainer
        trainer._default_root_dir = run.folder  # type: ignore[attr-defined]  # what Lightning's callbacks write by themselves
        keep_wandb_run(run, trainer.loggers)
        if given.trainer.logger is not False:
            trainer.loggers = [*trainer.loggers, *run_loggers(run)]
        saves = str(given.checkpoint) if self.saves else None
        lines = start_lines(run, facts, self.resolved, self.settings, saves, self.resume_command)
        speed = Throughput()
        record = RunRecord(run, facts, lines, self.resume_command, speed)
        self._add_callbacks(*self.training_callbacks(run, record, speed))
        return record

    def _try_out(self, arguments: dict[str, Any]) -> None:
        self._add_callbacks(Preemption())
        self.trainer.fit(**arguments)
        if self.trainer.is_global_zero:
            steps = int(self.settings.trainer.fast_dev_run)
            print(f"fast_dev_run: {steps} batch(es) of training and validation; nothing is kept")

    def _evaluate(self, arguments: dict[str, Any]) -> None:
        run = self._run_to_evaluate(arguments["ckpt_path"])
        arguments["ckpt_path"] = run.checkpoint
        self.resume_command = resume_command(self.argv, run)
        folder = Path(self.settings.output) if self.settings.output else run.path
        if self.command == "predict":
            if not os.access(folder, os.W_OK):
                raise UserError(f"the predictions cannot be written to {folder}: name another folder with --output")
            arguments["return_predictions"] = False
        self._add_callbacks(
            # The weights' average, where the checkpoint has one, is what is evaluated.
            None if any(isinstance(callback, EMA) for callback in self.trainer.callbacks) else EMA(),  # type: ignore[attr-defined]
            self._watchdog(run),
            Preemption(),
            WritePredictions(folder / "predictions.pt") if self.command == "predict" else None,
        )
        if self.trainer.is_global_zero:
            print(f"{self.command}: {run.checkpoint}")
            print("".join(f"note: {note}\n" for note in self.resolved.notes), end="")
        if isinstance(files := self.trainer.strategy.checkpoint_io, WholeFiles):
            files.lazily = ("optimizer_states",)  # nobody asks for it: of a checkpoint in parts it stays on the disk
        metrics = getattr(self.trainer, self.command)(**arguments)
        if self.trainer.is_global_zero and metrics:
            keep_metrics(folder / f"{self.command}.json", run.checkpoint, metrics)

    def _run_to_evaluate(self, path: str | None) -> Run:
        if path and self.settings.run is None:
            folder = Path(path).resolve().parent
            return Run(str(folder.parent if folder.name == "checkpoints" else folder), "evaluated", path)
        model = yaml.safe_load(self.config_text).get("model")
        run = agree(self.trainer, lambda: find_run(self.settings.run, model))
        run.checkpoint = path or run.checkpoint
        return run

    def _add_callbacks(self, *callbacks: Callback | None) -> None:
        self.trainer.callbacks += [callback for callback in callbacks if callback is not None]  # type: ignore[attr-defined]


if __name__ == "__main__":
    code = main()
    signals.ignore()
    sys.exit(code)
