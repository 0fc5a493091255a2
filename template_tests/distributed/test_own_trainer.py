"""This project's strategies under a user's own Trainer, and what its ranks tell each other."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from src.engine.distributed import gather_objects
from template_tests.distributed.own_trainer import ROWS, SETTINGS
from tests.commands import ROOT, environment
from tests.tiny import Line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script leaves that starts itself twice."""
    folder = tmp_path_factory.mktemp("own")
    command = [sys.executable, "-m", "template_tests.distributed.own_trainer", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict]:
    """What each rank has been told."""
    return [torch.load(folder / f"told-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", ["by_name", "ddp", "fsdp"])
def test_a_trainer_of_ones_own_trains_as_on_one_process(folder: Path, name: str) -> None:
    """Names and objects of `src.strategies` train on two ranks as one process does, and save a plain file."""
    alone = Line()
    Trainer(devices=1, **SETTINGS).fit(alone, DataLoader(ROWS, 16))  # type: ignore[arg-type]
    assert alone.weight.item() > 0.3
    trained = Line()
    trained.load_state_dict(torch.load(folder / f"{name}.ckpt", weights_only=True)["state_dict"])
    torch.testing.assert_close(trained.weight, alone.weight, rtol=0, atol=1e-6)


def test_no_process_group_is_left_to_the_interpreters_exit(folder: Path) -> None:
    """Where nobody has destroyed the group, each rank does before it ends."""
    assert [(folder / f"left-{rank}").read_text() for rank in range(2)] == ["False", "False"]


def test_every_rank_gets_every_ranks_object_in_their_order(told: list[dict]) -> None:
    """Rank i's object is the i-th on all ranks; its tensors may differ in shape."""
    for of_rank in told:
        assert [part["rank"] for part in of_rank["gathered"]] == [0, 1]
        assert [part["rows"][0].tolist() for part in of_rank["gathered"]] == [[0.0], [1.0, 1.0]]


def test_numbers_in_the_hosts_memory_have_a_mean(told: list[dict]) -> None:
    """The mean over ranks of a tensor that is on no GPU, of integers too, where gloo is one backend of two."""
    assert [of_rank["means"] for of_rank in told] == [[0.5, 0.5], [0.5, 0.5]]
    assert [of_rank["total"] for of_rank in told] == [3, 3]


def test_alone_a_process_gets_its_own_object() -> None:
    """Without a process group nothing is asked for and the list has one entry."""
    assert gather_objects({"a": (1, "b")}) == [{"a": (1, "b")}]
