import os

import pytest
import torch

from tests.tiny import Rows

LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "NODE_RANK")


def pytest_configure(config: pytest.Config) -> None:
    """What Lightning says about a GPU, a Slurm or a validation that a test leaves unused on purpose."""
    unused = ("GPU available but not used", "The `srun` command is available", "You defined a `validation_step` but")
    for message in unused:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    torch.set_num_threads(1)  # models this small only lose time on more


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests mean the same in a shell, in a job and under a launcher."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in ("RUN_ROOT", "PL_GLOBAL_SEED"):
            monkeypatch.delenv(name)


@pytest.fixture
def rows() -> Rows:
    return Rows()
