"""The entry point, to be read top to bottom.

    python -m src.cli fit --config configs/a100_n1_gpu4.yaml
    python -m src.cli test --config configs/cpu.yaml --run NAME

`configs/defaults.yaml` comes first, then the task, then every --config in order, then the options of the command line.
"""

import functools
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # what follows takes seconds, on a network's file system many: a signal is noted meanwhile
    from src import installed, signals, streams

    streams.outlast_readers()
    installed.need("torch", "lightning", "jsonargparse")
    signals.listen()

import torch
import yaml
from jsonargparse import ActionYesNo, ArgumentError, Namespace
from jsonargparse.typing import PositiveFloat
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, _InstantiatorFn
from lightning.pytorch.plugins.io import CheckpointIO

from src import exit_codes, signals, stopped
from src.agreement import agree
from src.attach import Wanted, attach, watch
from src.batching import in_micro_batches, stop_workers
from src.callbacks.breaker_rules import BreakerSettings
from src.callbacks.ema import EMA
from src.callbacks.out_of_memory import OutOfMemory
from src.callbacks.predictions import WritePredictions
from src.callbacks.preemption import Preemption
from src.changes import ESSENTIAL
from src.checkpoint.schedule import CheckpointSettings
from src.checkpoint.write import WholeFiles
from src.command_line import config_files, explain, raised_by_import, with_defaults
from src.endings import complain, crash, results, run_to_its_end
from src.errors import NotSavedError, Stopped, UserError
from src.files import write_text
from src.hangs.debug import debug_collectives
from src.hangs.limit import WatchdogSettings, fit_timeouts
from src.lock import release
from src.precision import BF16Mixed
from src.preparation import prepare_environment, prepare_yaml, quieten
from src.resolution import asked_batch, resolve
from src.run import Run, find_run, open_run
from src.start import block as start_block
from src.start import continue_command, refuse_without_data
from src.start import facts as start_facts
from src.strategies import is_ours
from src.strategies.fsdp import choose_format
from src.strategies.wrapping import checkpoint_activations, compile_blocks
from src.trainer import ProjectTrainer

OF_ONE_START = ("run", "allow_changed", "fresh", "output")  # options that are no part of an experiment


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 crashed, 2 bad input; all: src/exit_codes.py).

    A hang ends the process from the watchdog's thread. The process has its own signal handlers afterwards.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    finally:
        signals.restore()


def _run(argv: list[str]) -> int:
    signals.listen()
    quieten()
    prepare_environment()
    prepare_yaml()
    try:
        cli = ProjectCLI(argv)
    except UserError as error:
        return complain(error)
    except Exception as error:
        return crash(error)
    code = run_to_its_end(cli)
    if code not in (exit_codes.DONE, exit_codes.STOPPED):
        cli.leave(code)
        return code
    if torch.distributed.is_initialized():
        # A group that is left to the interpreter's exit can abort a run that was perfect.
        torch.distributed.destroy_process_group()
    return code


class Carried(BaseException):
    """Takes an exception through code that catches every Exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class ProjectCLI(LightningCLI):
    """Parse, resolve what depends on the machine, build, open the run, go: in this order."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.again = "the same command"  # with --run, as soon as there is a run
        self.memory = OutOfMemory()
        self.exit_code = exit_codes.DONE
        strict = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            args=with_defaults(argv),
            trainer_class=ProjectTrainer,
            save_config_callback=None,  # it refuses to continue a run; open_run keeps the configuration
            seed_everything_default=42,
            parser_kwargs=strict | {name: dict(strict) for name in self.subcommands()},
            auto_configure_optimizers=False,  # optimizers belong to the module
        )

    # --- parse ---

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The settings beside trainer, model and data."""
        parser.add_argument(
            "--task", type=str | None, default=None, help="configs/tasks/<task>.yaml, if no model is named"
        )
        parser.add_argument(
            "--run", type=str | None, default=None, help="name of the run; an existing one is continued"
        )
        parser.add_argument(
            "--allow_changed",
            "--allow-changed",
            type=str | None,
            default=None,
            help=f"continue a run although these have changed, with commas between: {', '.join(ESSENTIAL)}",
        )
        parser.add_argument(
            "--fresh", action=ActionYesNo, default=False, help="start another run, NAME-2, if --run NAME is there"
        )
        parser.add_argument(
            "--output", type=str | None, default=None, help="folder for what an evaluation writes; default: the run's"
        )
        parser.add_argument("--global_batch_size", type=int | None, help="samples per optimizer step over all devices")
        parser.add_argument("--micro_batch_size", type=int | None, help="samples per device and pass")
        parser.add_argument("--compile", type=bool, default=False, help="compile the model block by block")
        parser.add_argument(
            "--activation_checkpointing", type=bool, default=False, help="recompute blocks' activations"
        )
        parser.add_class_arguments(CheckpointSettings, "checkpoint")
        parser.add_class_arguments(BreakerSettings, "breaker")
        parser.add_class_arguments(WatchdogSettings, "watchdog")
        parser.add_argument(
            "--collective_timeout_minutes",
            type=PositiveFloat | None,
            default=None,
            help="how long a rank waits for the others in a collective; null: what the strategy says, 30",
        )
        parser.add_argument("--debug_collectives", type=bool, default=False, help="NCCL and PyTorch report at INFO")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse strictly; an error becomes one line, but for one of a module that is imported for its class."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            if own := raised_by_import(error):
                raise own from None
            inner = self._subcommand_parsers.get(args[0], parser)
            raise UserError(explain(error, inner, self.argv)) from error

    def _parse_ckpt_path(self) -> None:
        """Lightning would let the checkpoint's hyperparameters override explicit options here."""

    # --- resolve ---

    def before_instantiate_classes(self) -> None:
        """Find out what this machine makes of the configuration; refuse what cannot be."""
        self.config_text = self._dump_for_run()
        self.here = resolve(self.settings, config_files(self.argv))
        self.here.notes += debug_collectives(self.argv) if self.settings.debug_collectives else []
        if self.here.plan is not None:
            self.settings.data.init_args.batch_size = self.here.plan.micro_batch_size

    @property
    def command(self) -> str:
        """fit, validate, test or predict."""
        assert self.subcommand is not None
        return self.subcommand

    @property
    def settings(self) -> Namespace:
        """The merged configuration of the subcommand."""
        return self.config[self.command]

    def _dump_for_run(self) -> str:
        """The configuration as given, without the run's name: fed back with --config it starts a run of its own."""
        config = self.settings.clone()
        config.pop("config", None)
        for name in OF_ONE_START:
            config[name] = self._parser(self.subcommand).get_default(name)
        return self._parser(self.subcommand).dump(config, skip_validation=True)

    # --- build ---

    def _add_instantiators(self) -> None:
        """Let what a class raises that the configuration names pass the parser, which would reword it."""

        def carrying(instantiate: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(instantiate)
            def call(class_type: type, *args: Any, **kwargs: Any) -> Any:
                try:
                    return instantiate(class_type, *args, **kwargs)
                except Exception as error:
                    if not self.building:  # later, by a factory that the module was given
                        raise
                    raise Carried(error) from None

            return call

        for key, kind in (("model", LightningModule), ("data", LightningDataModule)):
            self.parser.add_instantiator(carrying(_InstantiatorFn(cli=self, key=key)), kind)
        self.parser.add_instantiator(carrying(lambda kind, *args, **kwargs: kind(*args, **kwargs)), object)

    def instantiate_classes(self) -> None:
        """Build what the configuration names; an exception of its code arrives as it was raised."""
        self.building, error = True, None
        try:
            super().instantiate_classes()
        except Carried as carried:
            error = carried.error
        self.building = False
        if error:  # here, where no other is being handled: its own traceback says all
            raise error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with what was resolved; loggers and our callbacks join when the run directory is known."""
        config = self.config_init[self.command].trainer
        callbacks = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
        plugins = [
            plugin for plugin in (config.plugins if isinstance(config.plugins, list) else [config.plugins]) if plugin
        ]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(WholeFiles())
        ours = is_ours(self.here.strategy if isinstance(self.here.strategy, str) else config.strategy)
        if own_precision := ours and self.here.precision.value == "bf16-mixed":
            plugins.append(BF16Mixed("bf16-mixed", "cuda" if self.here.shape.accelerator == "gpu" else "cpu"))
        own_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        given = self.config_init[self.command]
        self.wanted = Wanted(
            progress=config.enable_progress_bar is not False and not own_bar,
            loggers=config.logger is not False,
            checkpoints=given.checkpoint if config.enable_checkpointing is not False else None,
            breaker=given.breaker,
            plan=self.here.plan,
            asked=asked_batch(self.settings),
        )
        # Lightning's Timer asks the other ranks in every step, and stops with an extra validation.
        if config.max_time and self.wanted.checkpoints:
            self.wanted.seconds = Timer(config.max_time)._duration
        limits = self._training_limits(config)
        counts = in_micro_batches(config.as_dict(), self.here.plan.accumulation) if self.here.plan else {}
        trainer = super().instantiate_trainer(
            accelerator=self.here.shape.accelerator,
            devices=list(self.here.shape.indices) if self.here.shape.indices else self.here.shape.devices,
            precision=None if own_precision else self.here.precision.value,
            strategy=self.here.strategy if isinstance(self.here.strategy, str) else config.strategy,
            accumulate_grad_batches=self.here.plan.accumulation if self.here.plan else config.accumulate_grad_batches,
            plugins=[*plugins, self.here.environment],
            logger=False if config.logger in (None, True) else config.logger,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=own_bar,
            enable_model_summary=config.enable_model_summary is True,
            max_time=None if self.wanted.seconds else config.max_time,
            **limits,
            **counts,
            **kwargs,
        )
        timeout = self.settings.collective_timeout_minutes
        self.wanted.hang_limit, notes = fit_timeouts(trainer.strategy, timeout, given.watchdog)
        self.here.notes += [*notes, *choose_format(trainer.strategy, given.checkpoint.format)]
        return trainer

    @staticmethod
    def _training_limits(config: Namespace) -> dict[str, int]:
        """One epoch where neither epochs, steps nor time are given (Lightning would train 1000)."""
        if config.max_epochs is not None:
            return {}
        return {"max_epochs": -1 if config.max_steps > 0 or config.max_time is not None else 1}

    # --- go ---

    def _run_subcommand(self, subcommand: str) -> None:
        """Lightning calls this at the end of __init__; `run_subcommand` does it when `main` asks for it."""

    def run_subcommand(self) -> None:
        """Train or evaluate in a run directory."""
        refuse_without_data(self.command, self.model, self.datamodule)
        if self.settings.activation_checkpointing:
            checkpoint_activations(self.model)
        if self.settings.compile:
            compile_blocks(self.model)
        self.trainer.callbacks.insert(0, self.memory)  # type: ignore[attr-defined]
        arguments = self._prepare_subcommand_kwargs(self.command)
        if (path := arguments["ckpt_path"]) and not Path(path).is_file():
            use = "is continued by its name alone, --run" if self.command == "fit" else "has its best: --run NAME"
            raise UserError(f"--ckpt_path {path}: no such file; a run {use}")
        # Tensors and plain types: a checkpoint must not run code, unless the user trusts this one.
        arguments["weights_only"] = arguments["weights_only"] is not False or not arguments["ckpt_path"]
        try:
            if self.command == "fit" and self.settings.trainer.fast_dev_run:
                self.trainer.callbacks.append(Preemption())  # type: ignore[attr-defined]
                self.trainer.fit(**arguments)
                if self.trainer.is_global_zero:
                    steps = self.settings.trainer.fast_dev_run
                    print(f"fast_dev_run: {int(steps)} batch(es) of training and validation, and nothing is kept of it")
            elif self.command == "fit":
                self._fit(arguments)
            else:
                self._evaluate(arguments)
        finally:
            self.stop_workers()
            release()
            signals.forget()

    def leave(self, code: int) -> None:
        """Where other ranks wait, leave at once: tearing down a process group that one rank has left can hang."""
        if not torch.distributed.is_initialized() or self.trainer.world_size == 1:
            return
        kill = getattr(self.trainer.strategy.launcher, "kill", None)
        if kill is not None:
            kill(signal.SIGKILL)  # the processes that this one has started
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def stop_workers(self) -> None:
        """End the loaders' processes, so that the command ends when it is done."""
        trainer = self.trainer
        for loaders in (trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders):
            stop_workers(loaders)
        stop_workers(trainer.predict_dataloaders)

    def _fit(self, arguments: dict[str, Any]) -> None:
        name, start = self.settings.run, arguments["ckpt_path"]
        size = sum(p.numel() * p.element_size() for p in self.model.parameters()) * 3  # weights and two Adam moments
        facts = start_facts(self.model, self.here, self.trainer, self.settings)
        # Beside the newest the best, and one that is being written: the old one goes when the new one is there.
        count = self.settings.checkpoint.keep + 2 if self.wanted.checkpoints else 0
        choice = {"allowed": self.settings.allow_changed, "fresh": self.settings.fresh, "checkpoints": count}
        essentials = {name: facts[name] for name in ESSENTIAL}
        run = agree(
            self.trainer,
            lambda: open_run(name, facts["task"], self.config_text, size, essentials=essentials, **choice),
        )
        if run.state == "finished":
            if self.trainer.is_global_zero:
                print(f"run {run.name} is finished (step {run.step}), nothing to do: {run.folder}")
                further = f"rm {shlex.quote(str(run.path / 'DONE'))} && {continue_command(self.argv, run)}"
                print("".join(f"note: {note}; to train it further: {further}\n" for note in run.notes), end="")
            return
        if run.checkpoint and start:
            self.here.notes.append(f"--ckpt_path is not used: the run has checkpoints of its own, {run.checkpoint}")
        arguments["ckpt_path"] = run.checkpoint = run.checkpoint or start
        self.again = continue_command(self.argv, run)
        saves = str(self.wanted.checkpoints) if self.wanted.checkpoints else None
        block = start_block(run, facts, self.here, self.settings, saves, self.again)
        record, end = attach(self.trainer, run, self.wanted, facts, block, self.again), "finished"
        try:
            self.trainer.fit(**arguments)
            # A Timer that the user brought ends this start, too.
            clocks = [call for call in self.trainer.callbacks if isinstance(call, Timer)]  # type: ignore[attr-defined]
            if any((left := clock.time_remaining()) is not None and left <= 0 for clock in clocks):
                end = "stopped by max_time"
            record.write(self.trainer, end)
        except Stopped as stop:
            end = f"stopped by {stop}"  # this start, not the run
            record.write(self.trainer, end)  # with the checkpoint of its end
            self.exit_code = stopped.exit_code(str(stop), self.trainer.global_rank)
        except NotSavedError as error:  # of a validation that was cut off, too, which the record calls a stop
            record.write(self.trainer, "not saved", str(error))
            raise
        if not self.trainer.is_global_zero:
            return
        again = "" if end == "finished" else f"; continue with: {self.again}"
        if end == "finished":
            write_text(run.path / "DONE", f"{self.trainer.global_step}\n")
        print(f"run {run.folder} {end} at step {self.trainer.global_step}{results(self.trainer)}{again}")

    def _evaluate(self, arguments: dict[str, Any]) -> None:
        model, path = yaml.safe_load(self.config_text).get("model"), arguments["ckpt_path"]
        if path and self.settings.run is None:
            folder = Path(path).resolve().parent
            run = Run(str(folder.parent if folder.name == "checkpoints" else folder), "evaluated", path)
        else:
            run = agree(self.trainer, lambda: find_run(self.settings.run, model))
        arguments["ckpt_path"] = path or run.checkpoint
        self.again = continue_command(self.argv, run)
        if not any(isinstance(callback, EMA) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            self.trainer.callbacks += [EMA()]  # type: ignore[attr-defined]  # a file's average is what is evaluated
        watchers = watch(self.trainer, run, self.wanted, self.again)
        self.trainer.callbacks += [*watchers, Preemption()]  # type: ignore[attr-defined]
        folder = Path(self.settings.output) if self.settings.output else run.path
        if self.command == "predict":
            if not os.access(folder, os.W_OK):
                raise UserError(f"the predictions cannot be written to {folder}: name another folder with --output")
            arguments["return_predictions"] = False
            self.trainer.callbacks += [WritePredictions(folder / "predictions.pt")]  # type: ignore[attr-defined]
        if self.trainer.is_global_zero:
            print(f"{self.command}: {arguments['ckpt_path']}")
            print("".join(f"note: {note}\n" for note in self.here.notes), end="")
        if isinstance(files := self.trainer.strategy.checkpoint_io, WholeFiles):
            files.lazily = ("optimizer_states",)  # nobody asks for it: of a checkpoint in parts it stays on the disk
        metrics = getattr(self.trainer, self.command)(**arguments)
        if self.trainer.is_global_zero and metrics:
            merged = {key: value for part in metrics for key, value in part.items()}
            result = {"checkpoint": arguments["ckpt_path"], "metrics": merged}
            try:
                Run(str(folder), "evaluated").write_json(f"{self.command}.json", result)
            except OSError as error:
                print(f"note: {folder} takes no {self.command}.json ({error.strerror}); --output FOLDER names another")


if __name__ == "__main__":
    code = main()
    signals.ignore()
    sys.exit(code)
