"""Four processes that end well, one start after the other.

$EXIT_CODE_STARTS is how many starts, 3 if it is not set: what goes wrong at the end of a process goes wrong at times.
"""

import os
from pathlib import Path

import pytest

from tests.commands import CPU, SMALL, srun

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
