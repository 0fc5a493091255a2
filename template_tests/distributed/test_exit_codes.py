"""Processes that end well, one start after the other, and what a rank says and ends with that has lost another.

$EXIT_CODE_STARTS is how many starts, 3 if it is not set: what goes wrong at the end of a process goes wrong at times.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from src.checkpoint.status import state_of
from src.engine import exit_codes
from template_tests.launchers import PROBE, srun
from tests.commands import CPU, SMALL, rows

WORLD = 4
STARTS = int(os.environ.get("EXIT_CODE_STARTS", "3"))
SHAPE = ["--trainer.devices", str(WORLD), "--run", "ended"]
# A run that is trained, the same command once it is finished, its evaluation, and the other engine.
WAYS = (
    ("fit", "--trainer.strategy", "fsdp_full_shard"),
    ("fit", "--trainer.strategy", "fsdp_full_shard"),
    ("test", "--trainer.strategy", "fsdp_full_shard"),
    ("fit", "--trainer.strategy", "ddp", "--fresh"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them have their run."""
    return tmp_path_factory.mktemp("starts")


@pytest.mark.parametrize("start", range(STARTS))
def test_every_rank_of_a_start_that_ends_well_exits_with_0(root: Path, start: int) -> None:
    """Trained, evaluated or already finished: exit code 0 on each of four ranks, and no rank is aborted."""
    command, *settings = WAYS[start % len(WAYS)]
    run_root = root / f"runs-{start // len(WAYS)}"
    processes = srun(run_root, 1, WORLD, command, *CPU, *SMALL, *SHAPE, *settings)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * WORLD, outputs
    assert not any("terminate called" in output for output in outputs), outputs
    assert ("nothing to do" in outputs[0]) == (start % len(WAYS) == 1), outputs[0]


def test_a_rank_that_lost_another_says_so_and_does_not_take_the_blame(tmp_path: Path) -> None:
    """SIGKILL to one: the other ends with a code of its own and without a traceback, which would lead nowhere."""
    endless = ["--trainer.max_steps", "1000000", "--trainer.devices", "2", "--run", "lost"]
    processes = srun(tmp_path, 1, 2, "fit", *CPU, *SMALL, *endless)
    until = time.monotonic() + 120
    while not (tmp_path / "lost/metrics.csv").exists() or len(rows(tmp_path / "lost")) < 3:
        assert time.monotonic() < until, processes[0].communicate()
        time.sleep(0.1)
    processes[1].kill()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [exit_codes.LOST_A_RANK, -signal.SIGKILL], outputs
    assert "another rank has ended, so this one ends too (" in outputs[0]
    assert "Traceback" not in outputs[0]
    state = state_of(tmp_path / "lost")
    assert (state.name, state.why) == ("crashed", "lost a rank")


def test_only_the_rank_that_broke_ends_as_crashed(tmp_path: Path) -> None:
    """An error of one rank's own: its traceback is the only one."""
    settings = [*CPU, *PROBE, "--model.fail_at", "2", "--trainer.max_steps", "5", "--trainer.devices", "2"]
    processes = srun(tmp_path, 1, 2, "fit", *settings, "--global_batch_size", "8")
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [exit_codes.LOST_A_RANK, exit_codes.CRASHED], outputs
    assert ["Traceback" in output for output in outputs] == [False, True]
