"""Test whether a killed and resumed run ends as an uninterrupted one, with your task and your configuration.

    python -m src.selftest resume                                        # the project's task, small, on the CPU
    python -m src.selftest resume --kills 20 -- --config configs/cpu_n1_proc2.yaml --task vision --trainer.max_epochs 2

Everything behind `--` goes to `fit`. It trains once without interruption and once with SIGKILL at random moments, also
during saves, and compares weights, optimizer, schedules, random numbers, counters and every logged row. Exit code 0:
bit-identical; 1: not.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    from src.engine import streams

    streams.survive_closed_streams()

from src.checkpoint.compare import differences, outcome, shown
from src.engine.files import TEMPORARY

# Long enough for a few kills, with a save every few steps.
SMALL = [
    *("--config", "configs/cpu.yaml", "--trainer.max_steps", "60", "--trainer.limit_val_batches", "2"),
    *("--trainer.val_check_interval", "7", "--trainer.log_every_n_steps", "3"),
]
SAVES = ["--checkpoint.every_n_steps", "2"]


class FailedError(Exception):
    """A training failed by itself; the text holds its output."""


class Training:
    """One run under a run root of its own, started as often as needed."""

    def __init__(self, root: Path, arguments: list[str]) -> None:
        self.root, self.run = root, root / "selftest"
        self.command = [sys.executable, "-m", "src.cli", "fit", *arguments, "--run", "selftest"]
        self.log = root / "log.txt"
        root.mkdir()

    def train(self, seconds: float | None = None) -> float | None:
        """Train to the end and return the seconds since the first step; or kill every rank after `seconds`: None."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command,
                env=os.environ | {"RUN_ROOT": str(self.root)},
                stdout=log,
                stderr=log,
                start_new_session=True,  # a process group of its own, so that a kill takes every rank
            )
        begun = self._wait_for_training(process)
        try:
            process.wait(None if seconds is None else max(0.0, begun + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        if process.returncode:
            raise FailedError(f"{' '.join(self.command)}\n{self.log.read_text(errors='replace')[-3000:]}")
        return time.monotonic() - begun

    def _wait_for_training(self, process: subprocess.Popen[bytes]) -> float:
        """Wait for summary.json, which is written anew when training begins."""
        summary, started = self.run / "summary.json", time.time()
        while process.poll() is None and not (summary.exists() and summary.stat().st_mtime > started):
            time.sleep(0.02)
        return time.monotonic()


def resume(folder: Path, arguments: list[str], kills: int, seed: int) -> list[str]:
    """Return what differs between the uninterrupted and the killed training, one line each."""
    whole, killed = Training(folder / "whole", arguments), Training(folder / "killed", arguments)
    seconds = whole.train() or 0.0
    print(f"uninterrupted: {seconds:.1f} s of training", flush=True)
    chance, done, in_saves = random.Random(seed), 0, 0  # noqa: S311 no secret
    while done < kills:
        # On average the kills leave half of the training for the last start, which ends it.
        if killed.train(chance.uniform(0, seconds / kills)) is not None:
            if done == 0:  # other work has slowed the uninterrupted one down
                shutil.rmtree(killed.run)
                seconds /= 2
                continue
            print(f"note: the training was over after {done} kills; more steps would take more", flush=True)
            break
        # What a save has begun and not ended is still there.
        in_save = any((killed.run / "checkpoints").glob(TEMPORARY.format(name="*")))
        done, in_saves = done + 1, in_saves + in_save
        steps = max((path.name for path in killed.run.glob("checkpoints/step=*.ckpt")), default="none")
        print(f"kill {done} of {kills}{', in a save' if in_save else ''}; newest: {steps}", flush=True)
    if not (killed.run / "DONE").exists():
        killed.train()
    print(f"{done} kills, {in_saves} of them in the middle of a save", flush=True)
    return list(differences(outcome(whole.run), outcome(killed.run)))


def main(argv: list[str] | None = None) -> int:
    """Run the test; return the exit code (0 bit-identical, 1 not or a training failed, 2 bad arguments)."""
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m src.selftest", description="Kill a run, resume it, compare.")
    parser.add_argument("what", choices=["resume"])
    parser.add_argument("--kills", type=int, default=5, help="how often to kill it")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    settings = parser.parse_args(argv[:split])
    arguments = argv[split + 1 :] or SMALL
    if settings.kills < 1:
        parser.error(f"--kills is {settings.kills}; it must be at least 1")
    if not any(argument.startswith("--checkpoint.every_n_steps") for argument in arguments):
        arguments = [*arguments, *SAVES]
    folder, lines = Path(tempfile.mkdtemp(prefix="selftest-")), None
    try:
        lines = resume(folder, arguments, settings.kills, settings.seed)
    except FailedError as error:
        print(f"error: a training failed by itself: {error}", file=sys.stderr)
        return 1
    finally:
        if not lines:
            shutil.rmtree(folder)
    if not lines:
        print("bit-identical: weights, optimizer, schedules, random numbers, counters and every logged row")
        return 0
    lines.sort(key=lambda line: not line.startswith("metrics.csv"))  # the first row that differs says when
    print("DIFFERENT:", shown(lines), sep="\n")
    print(f"both runs, with their logs: {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
