"""Find the micro batch that trains fastest within the memory, and keeps the global batch.

    python -m src.batch_size --config configs/h100_n1_gpu2.yaml --task language
    python -m src.batch_size --headroom 0.2 --trial-minutes 10 --config …

Everything that is not listed here goes to `fit`. Each micro batch is tried for a few steps by the real command, in
processes of its own with runs in a folder that is deleted: real module, data, strategy, precision and compilation, and
what runs out of memory takes nothing along. A step of a trial has at most `PASSES` passes: more take the same memory
and time per sample. The first trial is the middle size; then it halves what lies between the largest that fits and the
smallest that does not. Exit code 0: the last line is what to paste; 71: not even the smallest fits.
"""

import argparse
import csv
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    from src.engine import streams

    streams.survive_closed_streams()

from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import LightningEnvironment

from src.cli import ProjectCLI
from src.engine import exit_codes
from src.engine.errors import UserError
from src.engine.files import read_json
from src.engine.preparation import prepare_yaml, quieten
from src.engine.resolve.batch import BatchPlan, divisors
from src.engine.resolve.hardware import process_environment, read_shape
from src.engine.resolve.resolution import batch_options, class_name, plan_of

PASSES = 4  # of a trial's step: from two on gradients are kept between passes, with more the optimizer's share falls
# Behind the user's own options, whose last one counts.
TRIAL = [
    *("--trainer.max_epochs", "-1", "--trainer.max_time", "null", "--trainer.fast_dev_run", "false"),
    *("--trainer.log_every_n_steps", "1", "--trainer.num_sanity_val_steps", "0", "--trainer.limit_val_batches", "0"),
    *("--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar", "false", "--trainer.logger", "true"),
    *("--ckpt_path", "null"),
]


class FailedError(Exception):
    """A trial ended neither well nor for lack of memory; the text is what it said."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Trial:
    """The outcome of training with a micro batch."""

    micro_batch_size: int
    peak: float | None  # GiB, of the rank that took most; None where memory ran out
    speed: float = 0.0  # samples/s over all ranks
    card: float | None = None  # GiB that the card has; None on a CPU
    said: str = ""  # where memory ran out


class Settings(ProjectCLI):
    """The settings of `fit`, and nothing built of them: this process must not take any of the card."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


def plan_here(config: Namespace) -> BatchPlan:
    """Return how the configuration spreads its global batch."""
    shape = read_shape(config.trainer.accelerator, config.trainer.num_nodes, config.trainer.devices)
    environment = process_environment(replace(shape, num_nodes=1))
    if shape.devices > 1 and not isinstance(environment, LightningEnvironment):
        raise UserError("the trials start their processes by themselves: start this command once, without a launcher")
    plan = plan_of(config, shape.world_size)
    if plan is None:
        name = class_name(config.data or config.model)
        raise UserError(f"{name} brings its own loaders and takes no batch_size: there is nothing to find")
    return plan


def search(sizes: list[int], attempt: Callable[[int], Trial], fits: Callable[[Trial], bool]) -> list[Trial]:
    """Find the largest size that fits by halving, in at most `len(sizes).bit_length()` trials."""
    trials: list[Trial] = []
    good, bad = -1, len(sizes)
    while bad - good > 1:
        index = (good + bad) // 2
        trials.append(attempt(sizes[index]))
        good, bad = (index, bad) if fits(trials[-1]) else (good, index)
    return trials


def attempt(root: Path, arguments: list[str], micro_batch_size: int, steps: int, minutes: float) -> Trial:
    """Train for a few steps in processes of their own; what fails for another reason than memory is a FailedError."""
    folder = root / f"micro-{micro_batch_size}"
    folder.mkdir()
    command = [sys.executable, "-m", "src.cli", "fit", *arguments, *TRIAL, "--run", "trial"]
    with (folder / "log.txt").open("w+", errors="replace") as log:
        trial = subprocess.Popen(
            [*command, "--trainer.max_steps", str(steps)],
            env=os.environ | {"RUN_ROOT": str(folder / "runs")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = trial.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            raise FailedError(
                f"error: a micro batch of {micro_batch_size} did not end within {minutes:g} min; give --trial-minutes",
                1,
            ) from None
        finally:
            if trial.poll() is None:  # with all its ranks and their workers
                os.killpg(trial.pid, signal.SIGKILL)
                trial.wait()
        log.seek(0)
        said = log.read()
    if code == exit_codes.OUT_OF_MEMORY:
        return Trial(micro_batch_size, None, said=said[said.find("\nout of memory") + 1 :])
    if code:
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        raise FailedError(errors[-1] if errors else said[-3000:], code)
    with (folder / "runs/trial/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["perf/samples_per_sec"]]
    # The first step starts the loaders and compiles.
    speed = statistics.median(float(row["perf/samples_per_sec"]) for row in rows[1:])
    peak = max(float(row["perf/peak_memory_gib"]) for row in rows)
    return Trial(micro_batch_size, peak, speed, read_json(folder / "runs/trial/manifest.json")["card_memory_gib"])


def find(config: Namespace, arguments: list[str], options: argparse.Namespace) -> int:
    """Try, print a row for each trial and what to paste; return the exit code."""
    plan = plan_here(config)
    sizes = divisors(plan.share)
    nodes = config.trainer.num_nodes
    devices = plan.world_size // nodes
    folder = Path(tempfile.mkdtemp(prefix="batch-size-"))

    def tried(size: int) -> Trial:
        passes = min(PASSES, plan.share // size)
        few = ["--trainer.num_nodes", "1", "--global_batch_size", str(passes * size * devices)]
        if config.trainer.accumulate_grad_batches != 1:
            few += ["--trainer.accumulate_grad_batches", str(passes)]
        given = [*arguments, *batch_options(config, plan, size), *few]
        trial = attempt(folder, given, size, options.steps, options.trial_minutes)
        outcome = "out of memory" if trial.peak is None else f"{trial.peak:>8.2f}  {trial.speed:>9.1f}"
        over = "  over the limit" if trial.peak is not None and not fits(trial) else ""
        print(f"{size:>11}  {plan.share // size:>12}  {outcome}{over}", flush=True)
        return trial

    def fits(trial: Trial) -> bool:
        limit = None if trial.card is None else trial.card * (1 - options.headroom)
        return trial.peak is not None and (limit is None or trial.peak <= limit)

    print(f"global batch {plan.global_batch_size}: {plan.share} a step on each of {plan.world_size} device(s)")
    count = len(sizes).bit_length()
    print(
        f"at most {count} trials of {options.steps} steps with up to {PASSES} passes each, "
        f"{count * options.trial_minutes:g} min in all (--trial-minutes {options.trial_minutes:g})"
    )
    print(f"{'micro batch':>11}  {'accumulation':>12}  {'peak GiB':>8}  {'samples/s':>9}", flush=True)
    try:
        trials = search(sizes, tried, fits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = [trial for trial in trials if fits(trial)]
    if not good:
        print(f"error: not even a micro batch of {sizes[0]} fits\n{trials[-1].said}".rstrip(), file=sys.stderr)
        return exit_codes.OUT_OF_MEMORY
    best = max(good, key=lambda trial: trial.speed)
    if best.card is None:
        print("note: no limit of memory is known on a CPU, so speed alone decides")
    else:
        room = best.card * (1 - options.headroom)
        print(f"memory: up to {room:.2f} GiB a device, so that {options.headroom:.0%} stay free")
    if nodes > 1:
        print(f"note: tried on one node of {nodes}: fsdp takes less memory over all of them")
    paste = batch_options(config, plan, best.micro_batch_size)
    print("the fastest of those that fit, with the same global batch:", *paste)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: found; 1: a trial crashed; 2: bad input; 71: not even the smallest micro batch fits."""
    parser = argparse.ArgumentParser(
        prog="python -m src.batch_size",
        description="Find the fastest micro batch within the memory, for the settings of `fit` that stand behind.",
        allow_abbrev=False,
    )
    parser.add_argument("--headroom", type=float, default=0.1, help="share of the memory to leave free (0.1)")
    parser.add_argument("--trial-minutes", type=float, default=5.0, help="a trial that takes longer is ended (5)")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a trial; the first is not timed (4)")
    options, arguments = parser.parse_known_args(argv)
    quieten()
    prepare_yaml()
    try:
        _check(options)
        return find(Settings(["fit", *arguments]).settings, arguments, options)
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except FailedError as error:
        print(error, file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else 1
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.headroom < 1:
        raise UserError(f"--headroom is {options.headroom}; it is a share of the memory, from 0 to below 1")
    if options.trial_minutes <= 0:
        raise UserError(f"--trial-minutes is {options.trial_minutes}; it is a positive number of minutes")
    if options.steps < 2:
        raise UserError(f"--steps is {options.steps}; it must be at least 2")


if __name__ == "__main__":
    sys.exit(main())
