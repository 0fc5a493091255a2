import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.engine import signals
from tests.commands import LAUNCHERS, ROOT
from tests.tiny import Rows


def pytest_configure(config: pytest.Config) -> None:
    """What Lightning says about a GPU, a Slurm or a validation that a test leaves unused on purpose."""
    unused = ("GPU available but not used", "The `srun` command is available", "You defined a `validation_step` but")
    for message in unused:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # as the command does; of calls that Lightning makes
    torch.set_num_threads(1)  # models this small only lose time on more


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests mean the same in a shell, in a job and under a launcher."""
    for name in list(os.environ):
        if (name.startswith(LAUNCHERS) and name != "SLURM_CONF") or name in ("RUN_ROOT", "PL_GLOBAL_SEED"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """What a command that runs in this process has set is undone, and Ctrl-C interrupts.

    Whoever runs the tests in the background has them and what they start ignore it; Lightning does once it has come.
    """
    before = {number: signal.getsignal(number) for number in signals.STOPS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signals.clear()
    signals.restore()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that fires in pytest's own process fails its test, and does not end all tests that are to come."""
    tests, leave = os.getpid(), os._exit

    def exit_or_fail(code: int) -> None:
        assert os.getpid() != tests, f"os._exit({code}) in the process of the tests"
        leave(code)

    monkeypatch.setattr(os, "_exit", exit_or_fail)


@pytest.fixture
def run_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stand in the project's folder with an empty run root, which is returned."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def rows() -> Rows:
    return Rows()
