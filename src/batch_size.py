"""Finds the micro batch that trains fastest within the memory, and keeps the global batch.

    python -m src.batch_size --config configs/h100_n1_gpu2.yaml --task language
    python -m src.batch_size --headroom 0.2 --smallest 8 --config …

Everything that is not listed here goes to `fit`. Each micro batch is tried for a few steps by the real command, in
processes of its own with runs in a folder that is deleted: real module, data, strategy, precision and compilation, and
what runs out of memory takes nothing along. It doubles the micro batch until one does not fit, then halves in on what
lies between. Exit code 0: the last line is what to paste; 71: not even the smallest fits.
"""

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    from src.installed import need

    need("torch", "lightning", "jsonargparse")

from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import LightningEnvironment

from src import exit_codes
from src.batch_plan import BatchPlan, divisors
from src.cli import ProjectCLI
from src.errors import UserError
from src.files import read_json
from src.hardware import process_environment, read_shape
from src.preparation import prepare_yaml, quieten
from src.resolution import batch_options, class_name, plan_of

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
    """What a micro batch came to."""

    micro_batch_size: int
    peak: float | None  # GiB, of the rank that took most; None where memory ran out
    speed: float = 0.0  # samples/s over all ranks
    card: float | None = None  # GiB that the card has; None on a CPU
    said: str = ""  # where memory ran out


class Settings(ProjectCLI):
    """The settings of `fit`, and nothing built of them: this process must not take any of the card."""

    def before_instantiate_classes(self) -> None:  # noqa: D102
        pass

    def instantiate_classes(self) -> None:  # noqa: D102
        pass


def plan_here(config: Namespace) -> BatchPlan:
    """How the configuration spreads its global batch.

    Raises:
        UserError: its data takes no batch size, its numbers do not fit, or a launcher has started this process.

    """
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
    """Try sizes by doubling, then by halving what lies between the largest that fits and the smallest that does not."""
    trials, index, good, bad = [], 0, -1, len(sizes)
    while index < bad:
        trials.append(attempt(sizes[index]))
        good, bad = (index, bad) if fits(trials[-1]) else (good, index)
        doubled = (place for place, size in enumerate(sizes) if size >= 2 * sizes[index])
        index = next(doubled, len(sizes))
    while bad - good > 1:
        middle = (good + bad) // 2
        trials.append(attempt(sizes[middle]))
        good, bad = (middle, bad) if fits(trials[-1]) else (good, middle)
    return trials


def attempt(root: Path, arguments: list[str], micro_batch_size: int, steps: int) -> Trial:
    """Train for a few steps in processes of their own.

    Raises:
        FailedError: they ended with an error of another kind.

    """
    folder = root / f"micro-{micro_batch_size}"
    folder.mkdir()
    command = [sys.executable, "-m", "src.cli", "fit", *arguments, *TRIAL, "--run", "trial"]
    with (folder / "log.txt").open("w+", errors="replace") as log:
        code = subprocess.call(
            [*command, "--trainer.max_steps", str(steps)],
            env=os.environ | {"RUN_ROOT": str(folder / "runs")},
            stdout=log,
            stderr=log,
        )
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
    """Try, print a row for each trial and what to paste; returns the exit code.

    Raises:
        UserError: there is nothing to find in this configuration.
        FailedError: a trial failed for another reason than memory.

    """
    plan = plan_here(config)
    sizes = [size for size in divisors(plan.share) if size >= options.smallest]
    if not sizes:
        raise UserError(f"--smallest is {options.smallest} and a device's share of the global batch is {plan.share}")
    nodes = config.trainer.num_nodes
    here = ["--trainer.num_nodes", "1", "--global_batch_size", str(plan.global_batch_size // nodes)]
    folder = Path(tempfile.mkdtemp(prefix="batch-size-"))

    def tried(size: int) -> Trial:
        trial = attempt(folder, [*arguments, *batch_options(config, plan, size), *here], size, options.steps)
        print(_row(trial, plan.share // size, _fits(trial, options)), flush=True)
        return trial

    print(f"global batch {plan.global_batch_size}: {plan.share} a step on each of {plan.world_size} device(s)")
    print(f"{'micro batch':>11}  {'accumulation':>12}  {'peak GiB':>8}  {'samples/s':>9}", flush=True)
    try:
        trials = search(sizes, tried, lambda trial: _fits(trial, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = [trial for trial in trials if _fits(trial, options)]
    if not good:
        print(f"error: not even a micro batch of {sizes[0]} fits\n{trials[0].said}".rstrip(), file=sys.stderr)
        return exit_codes.OUT_OF_MEMORY
    best = max(good, key=lambda trial: trial.speed)
    if (room := _room(best, options)) is None:
        print("note: no limit of memory is known on a CPU, so speed alone decides; --limit-gib sets one for a process")
    else:
        print(f"memory: up to {room:.2f} GiB a device, so that {options.headroom:.0%} stay free")
    if nodes > 1:
        print(f"note: tried on one node of {nodes}: fsdp takes less memory over all of them")
    print(
        "the fastest of those that fit, with the same global batch:",
        *batch_options(config, plan, best.micro_batch_size),
    )
    return 0


def _room(trial: Trial, options: argparse.Namespace) -> float | None:
    limit = options.limit_gib or trial.card
    return None if limit is None else limit * (1 - options.headroom)


def _fits(trial: Trial, options: argparse.Namespace) -> bool:
    room = _room(trial, options)
    return trial.peak is not None and (room is None or trial.peak <= room)


def _row(trial: Trial, accumulation: int, fits: bool) -> str:
    start = f"{trial.micro_batch_size:>11}  {accumulation:>12}  "
    if trial.peak is None:
        return f"{start}out of memory"
    return f"{start}{trial.peak:>8.2f}  {trial.speed:>9.1f}{'' if fits else '  over the limit'}"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: found; 1: a trial crashed; 2: bad input; 71: not even the smallest micro batch fits."""
    parser = argparse.ArgumentParser(
        prog="python -m src.batch_size",
        description="Find the fastest micro batch within the memory, for the settings of `fit` that stand behind.",
        allow_abbrev=False,
    )
    parser.add_argument("--headroom", type=float, default=0.1, help="share of the memory to leave free (0.1)")
    parser.add_argument("--limit-gib", type=float, help="memory of a device, where it is not the card's own")
    parser.add_argument("--smallest", type=int, default=1, help="micro batch to begin with (1)")
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
    if options.limit_gib is not None and options.limit_gib <= 0:
        raise UserError(f"--limit-gib is {options.limit_gib}; it is a positive number of GiB")
    for name, least in (("smallest", 1), ("steps", 2)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} is {getattr(options, name)}; it must be at least {least}")


if __name__ == "__main__":
    sys.exit(main())
