"""`--debug_collectives true`: what NCCL and PyTorch themselves report is in the log."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.engine.watchdog.settings import debug_collectives
from tests.commands import SMALL, TWO, train

VARIABLES = ("NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG")


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # put back at the end
        monkeypatch.delenv(name)
    before = torch.distributed.get_debug_level()
    yield
    torch.distributed.set_debug_level(before)


def test_every_rank_reports(tmp_path: Path) -> None:
    """PyTorch's account of DDP from both ranks, where its C++ log is shown, and training as ever."""
    command = ("fit", *TWO, *SMALL, "--debug_collectives", "true")
    done = train(tmp_path, *command, TORCH_CPP_LOG_LEVEL="INFO")
    for rank in (0, 1):
        assert f"[Rank {rank}]: DDP Initialized with" in done.stderr
    assert "torch_distributed_debug: INFO" in done.stderr
    assert "finished at step 4" in done.stdout


@pytest.mark.usefixtures("_as_before")
def test_a_clusters_warn_is_raised_and_more_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """INFO is the least of each variable, before there is a process group; what says more is the user's own."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    debug_collectives()
    assert [os.environ.get(name) for name in VARIABLES] == ["INFO", "INFO"]
    assert torch.distributed.get_debug_level() == torch.distributed.DebugLevel.INFO
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    debug_collectives()
    assert [os.environ.get(name) for name in VARIABLES] == ["TRACE", "DETAIL"]
