"""`--debug_collectives true`: what NCCL and PyTorch themselves say is in the log."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.hangs.debug import debug_collectives
from tests.commands import SMALL, TORCHRUN, TWO, train

ON = ["--debug_collectives", "true"]
VARIABLES = ("NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL")


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.distributed.get_debug_level()
    yield
    torch.distributed.set_debug_level(before)


@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "--")], ids=["alone", "torchrun"])
def test_every_rank_reports(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """PyTorch's account of DDP from both ranks, whoever started them, and training as ever."""
    done = train(tmp_path, "fit", *TWO, *SMALL, *ON, launcher=launcher)
    for rank in (0, 1):
        assert f"[Rank {rank}]: DDP Initialized with" in done.stderr
    assert "torch_distributed_debug: INFO" in done.stderr
    assert "finished at step 4" in done.stdout


@pytest.mark.usefixtures("_as_before")
def test_a_clusters_warn_is_raised_and_more_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """INFO is the least of each variable, before there is a process group; what says more is the user's own."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    (note,) = debug_collectives(["not", "this", "process"])
    assert "TORCH_CPP_LOG_LEVEL=INFO before it starts; it is not set" in note
    assert [os.environ.get(name) for name in VARIABLES] == ["INFO", "INFO", None]
    assert torch.distributed.get_debug_level() == torch.distributed.DebugLevel.INFO
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert debug_collectives(sys.argv[1:]) == []
    assert [os.environ.get(name) for name in VARIABLES] == ["TRACE", "DETAIL", "INFO"]


@pytest.mark.usefixtures("_as_before")
def test_a_level_of_ones_own_is_kept_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's messages stay hidden where its level was set, with a note, and nothing starts anew."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    (note,) = debug_collectives(sys.argv[1:])
    assert note.endswith("it is ERROR")
