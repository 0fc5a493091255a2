"""Turn the way a command ends into its last lines and its exit code (all of them: src/engine/exit_codes.py)."""

import json
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.connectors.callback_connector import _validate_callbacks_list
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from src.engine import exit_codes
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.names import step_in_name
from src.engine.distributed import lost_a_rank
from src.engine.errors import AgreedError, TrippedError, UserError, hint, of_a_file
from src.engine.files import write_text
from src.engine.memory.report import explain as explain_memory
from src.engine.memory.usage import is_out_of_memory
from src.engine.sharding.launcher import ended_badly

# Where Lightning refuses a setting with a plain ValueError or RuntimeError: `val_check_interval` beyond the epoch,
# EarlyStopping on a metric that nobody logs, a callback twice. What the user's code raises there comes from a function
# of its own.
REFUSALS = {
    _FitLoop.setup_data.__code__,
    EarlyStopping._validate_condition_metric.__code__,
    _validate_callbacks_list.__code__,
}


def run_to_its_end(cli: Any) -> int:
    """Run the subcommand of a ProjectCLI; return the exit code, whichever way it ends."""
    try:
        cli.run_subcommand()
    except AgreedError as error:
        code = complain(error) if cli.trainer.is_global_zero else error.exit_code
        if isinstance(error, TrippedError) and torch.distributed.is_initialized():
            torch.distributed.barrier()  # a launcher ends all ranks when one leaves: not before rank 0 has said it
        return code
    except UserError as error:
        return complain(error)
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit code 1, `signals` SIGTERM into 143; any other is the user's own.
        interrupted = isinstance(stop.__context__, KeyboardInterrupt)
        code = exit_codes.INTERRUPTED if interrupted else _exit_code(stop)
        if cli.trainer.is_global_zero:
            step, resume = cli.trainer.global_step, cli.resume_command
            print(f"interrupted at step {step}; continue with: {resume}", file=sys.stderr)
        return code
    except Exception as error:
        if is_out_of_memory(error):
            facts = (cli.memory.usage, cli.trainer, cli.model, cli.resolved, cli.settings, cli.resume_command)
            explain_memory(error, *facts)
            return exit_codes.OUT_OF_MEMORY
        code, launcher = report(error), cli.trainer.strategy.launcher
        started = [child.poll() for child in getattr(launcher, "procs", [])]
        lost = code == exit_codes.LOST_A_RANK or exit_codes.OUT_OF_MEMORY in started
        return _of_the_lost(launcher) if lost else code
    return cli.exit_code


def _of_the_lost(launcher: object) -> int:
    """Return the failed child's exit code, so that the command ends with it."""
    ended = ended_badly(launcher)
    for rank, code in ended.items():
        print(f"local rank {rank} ended with exit code {code}", file=sys.stderr)
    if exit_codes.OUT_OF_MEMORY in ended.values():
        return exit_codes.OUT_OF_MEMORY
    return next((code for code in ended.values() if code != exit_codes.LOST_A_RANK), exit_codes.LOST_A_RANK)


def _exit_code(stop: SystemExit) -> int:
    """Return the code as Python has it: a text is printed and counts as 1."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return exit_codes.CRASHED


def report(error: Exception) -> int:
    """Print one line for what is not the code's fault, else the traceback and a hint; return the exit code."""
    if refused := as_user_error(error):
        return complain(refused)
    if lost_a_rank(error):  # where this rank was says nothing
        what = " ".join(str(error).split())[:300]
        print(f"another rank has ended, so this one ends too ({what})", file=sys.stderr)
        time.sleep(1)  # launchers name the rank that ends first, and torchrun counts in seconds
        return exit_codes.LOST_A_RANK
    traceback.print_exception(error)
    if is_out_of_memory(error):
        print("out of memory while the model and the data were built", file=sys.stderr)
        return exit_codes.OUT_OF_MEMORY
    if advice := hint(error):
        print(f"hint: {advice}", file=sys.stderr)
    return exit_codes.CRASHED


def as_user_error(error: Exception) -> UserError | None:
    """Return the line to print for bad input, a file that cannot be used or another model's checkpoint; else None."""
    if isinstance(error, UserError):
        return error
    if is_refused_setting(error):
        return UserError(str(error))
    if refused := of_a_file(error):
        return refused
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
        what = str(error).replace("\n", " ")
        name = re.search(r"Unsupported global: GLOBAL (\S+)", what)
        return UserError(
            f"the checkpoint holds more than tensors and plain types ({name[1] if name else what[:200]}), and "
            "loading that could run code: if you trust where it comes from, --weights_only false"
        )
    if "Error(s) in loading state_dict" in str(error):
        text = f"the checkpoint is of another model, give the --model settings it was trained with: {error}"
        return UserError(text[:500])
    return None


def is_refused_setting(error: Exception) -> bool:
    """Return whether Lightning itself refuses a setting, by the error's class or by the function that raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, MisconfigurationException) or any(frame.f_code in REFUSALS for frame in frames[-1:])


def out_of_time(trainer: Trainer) -> bool:
    """Return whether a Timer that the user brought has ended training."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)


def results(trainer: Trainer) -> str:
    """Return the metric that decides, last and best, and why training ended early, for the line of the end."""
    text = ""
    for call in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(call, SaveBest) and call.monitor in trainer.callback_metrics:
            text += f"; {call.monitor} {float(trainer.callback_metrics[call.monitor]):.4g}"
            if call.best_model_score is not None:
                step = step_in_name(Path(call.best_model_path))
                text += f" (best {float(call.best_model_score):.4g} at step {step})"
        if isinstance(call, EarlyStopping) and call.stopping_reason_message:
            text += f"; ended by EarlyStopping: {call.stopping_reason_message}"
    return text


def keep_metrics(path: Path, checkpoint: str | None, metrics: Sequence[Mapping[str, float]]) -> None:
    """Write the metrics of an evaluation of `checkpoint`, one mapping for each loader; Lightning has printed them."""
    merged = {key: value for of_loader in metrics for key, value in of_loader.items()}
    content = {"checkpoint": checkpoint, "metrics": merged}
    try:
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"note: {path.parent} takes no {path.name} ({error.strerror}); --output FOLDER names another")


def complain(error: UserError) -> int:
    """Print one line per node, since a node may differ from the others; on every rank once they have met."""
    met = torch.distributed.is_initialized()
    launched = "LOCAL_RANK" if "WORLD_SIZE" in os.environ else "SLURM_LOCALID"  # else one that is left over
    if met or int(os.environ.get(launched, 0)) == 0:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return error.exit_code


def leave(trainer: Trainer, code: int) -> None:
    """Leave at once where other ranks wait: tearing down a process group that one rank has left can hang."""
    if not torch.distributed.is_initialized() or trainer.world_size == 1:
        return
    kill = getattr(trainer.strategy.launcher, "kill", None)
    if kill is not None:
        kill(signal.SIGKILL)  # the processes that this one has started
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
