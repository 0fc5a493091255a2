"""The finder of the micro batch: what it tries, what it takes for the best, and that the global batch stays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from src import batch_size, exit_codes
from src.batch_plan import divisors
from src.batch_size import FailedError, Settings, Trial, search
from src.cli import ProjectCLI
from src.resolution import batch_options
from tests.commands import BORING, CPU, TASK, TWO

CRAMPED = [*TASK, "--model", "tests.crash.Cramped"]  # room for 4 samples
Finder = Callable[..., tuple[int, str, str]]


@pytest.fixture
def finder(
    run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Finder:
    """The command with its trials in a folder of their own: code, stdout and stderr. It must leave nothing behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*arguments: str) -> tuple[int, str, str]:
        code = batch_size.main(list(arguments))
        said = capsys.readouterr()
        assert list(tmp_path.iterdir()) == []
        return code, said.out, said.err

    return call


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """In place of real trials: 2 GiB a sample on a card of 40, fastest with 6 samples; what was tried, with what."""
    seen: list[tuple[int, list[str]]] = []

    def attempt(root: Path, arguments: list[str], micro_batch_size: int, steps: int) -> Trial:
        seen.append((micro_batch_size, arguments))
        if micro_batch_size > 20:
            return Trial(micro_batch_size, None, said="out of memory: all is full")
        return Trial(micro_batch_size, 2.0 * micro_batch_size, 100.0 - abs(6 - micro_batch_size), card=40.0)

    monkeypatch.setattr(batch_size, "attempt", attempt)
    return seen


# --- what is tried ---


@pytest.mark.parametrize(
    ("share", "most", "tried", "best"),
    [
        (16, 4, [1, 2, 4, 8], 4),
        (16, 100, [1, 2, 4, 8, 16], 16),
        (24, 6, [1, 2, 4, 8, 6], 6),
        (96, 40, [1, 2, 4, 8, 16, 32, 96, 48], 32),
        (7, 7, [1, 7], 7),
        (7, 6, [1, 7], 1),
        (1, 1, [1], 1),
        (12, 0, [1], None),
        (60, 14, [1, 2, 4, 10, 20, 12, 15], 12),
    ],
)
def test_it_doubles_and_then_halves_in(share: int, most: int, tried: list[int], best: int | None) -> None:
    """The largest divisor that fits is always found, and none is tried twice."""
    trials = search(divisors(share), lambda size: Trial(size, None), lambda trial: trial.micro_batch_size <= most)
    assert [trial.micro_batch_size for trial in trials] == tried
    assert max((size for size in tried if size <= most), default=None) == best
    assert best == max((size for size in divisors(share) if size <= most), default=None)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["--global_batch_size", "16"], ["--micro_batch_size", "4"]),
        (["--global_batch_size", "16", "--micro_batch_size", "8"], ["--micro_batch_size", "4"]),
        (["--micro_batch_size", "16"], ["--micro_batch_size", "4", "--global_batch_size", "16"]),
        (
            ["--data.batch_size", "16"],
            ["--data.batch_size", "4", "--micro_batch_size", "4", "--global_batch_size", "16"],
        ),
        (
            ["--data.batch_size", "8", "--micro_batch_size", "8", "--global_batch_size", "16"],
            ["--data.batch_size", "4", "--micro_batch_size", "4"],
        ),
        (
            ["--micro_batch_size", "8", "--trainer.accumulate_grad_batches", "2"],
            ["--micro_batch_size", "4", "--global_batch_size", "16", "--trainer.accumulate_grad_batches", "4"],
        ),
    ],
)
@pytest.mark.usefixtures("run_root")
def test_however_the_batch_was_said(given: list[str], options: list[str]) -> None:
    """Pasted behind, the options change the micro batch and nothing else, and contradict nothing."""
    task = [part for part in TASK if part not in ("--global_batch_size", "8")]
    config = Settings(["fit", *CPU, *task, *given]).settings
    plan = batch_size.plan_here(config)
    assert (plan.global_batch_size, batch_options(config, plan, 4)) == (16, options)
    again = ProjectCLI(["fit", *CPU, *task, *given, *options]).here.plan
    assert again is not None
    assert (again.micro_batch_size, again.global_batch_size) == (4, 16)


# --- what is chosen ---


def test_the_fastest_that_leaves_room_is_chosen(finder: Finder, world: list[tuple[int, list[str]]]) -> None:
    """A larger micro batch is not always faster; one that fills the card to the last tenth is too large."""
    code, said, _ = finder(*CPU, *CRAMPED, "--global_batch_size", "60")
    assert code == 0
    assert [size for size, _ in world] == [1, 2, 4, 10, 20, 12, 15]
    rows = {line.split()[0]: line for line in said.splitlines()[2:]}
    assert rows["20"].endswith("over the limit")
    assert rows["10"].split() == ["10", "6", "20.00", "96.0"]
    assert "memory: up to 36.00 GiB a device, so that 10% stay free" in said
    assert said.splitlines()[-1].endswith(": --micro_batch_size 4")


@pytest.mark.parametrize(("limit", "largest"), [(["--limit-gib", "20"], 6), (["--headroom", "0.5"], 10)])
def test_the_limit_can_be_set(
    limit: list[str], largest: int, finder: Finder, world: list[tuple[int, list[str]]]
) -> None:
    """As another card's memory, or as another share to leave free."""
    _, said, _ = finder(*limit, *CPU, *CRAMPED, "--global_batch_size", "60")
    fits = [int(line.split()[0]) for line in said.splitlines()[2:] if line.strip()[0].isdigit() and "over" not in line]
    assert max(fits) == largest


def test_several_nodes_are_tried_on_one(finder: Finder, world: list[tuple[int, list[str]]]) -> None:
    """Each device has the share that it has on all of them, and what is to be pasted is for all of them."""
    code, said, _ = finder(*TWO, *CRAMPED, "--trainer.num_nodes", "2", "--smallest", "4", "--global_batch_size", "16")
    assert code == 0
    assert world[0][1][-6:] == [*("--micro_batch_size", "4", "--trainer.num_nodes", "1"), "--global_batch_size", "8"]
    assert "note: tried on one node of 2" in said


def test_nothing_fits(finder: Finder, world: list[tuple[int, list[str]]]) -> None:
    """What the trial said of its memory is passed on, with its exit code."""
    code, _, error = finder(*CPU, *CRAMPED, "--global_batch_size", "64", "--smallest", "32")
    assert code == exit_codes.OUT_OF_MEMORY
    assert error == "error: not even a micro batch of 32 fits\nout of memory: all is full\n"


# --- the real command ---


def test_one_process_finds_what_fits(finder: Finder, run_root: Path) -> None:
    """A module that takes 4 samples: 8 is out of memory, which harms nothing; no run is left."""
    code, said, _ = finder("--smallest", "4", *CPU, *CRAMPED, "--run", "mine")
    assert code == 0
    fits, full = (line.split() for line in said.splitlines()[2:4])
    assert fits[:2] == ["4", "2"]
    assert all(float(number) > 0 for number in fits[2:])
    assert full == ["8", "1", "out", "of", "memory"]
    assert "note: no limit of memory is known on a CPU" in said
    assert said.splitlines()[-1].endswith(": --micro_batch_size 4")
    assert not run_root.exists()


def test_two_processes_agree(finder: Finder) -> None:
    """Where one of two ranks has no memory the size does not fit, and the next trial is not disturbed."""
    two = ["--smallest", "4", *TWO, *CRAMPED, "--model.rank", "1", "--global_batch_size", "16"]
    code, said, _ = finder(*two)
    assert code == 0
    rows = [line.split() for line in said.splitlines()[2:]]
    assert (rows[0][:2], rows[1]) == (["4", "2"], ["8", "1", "out", "of", "memory"])
    assert said.splitlines()[-1].endswith(": --micro_batch_size 4")


def test_a_trial_that_fails_otherwise_ends_the_search(finder: Finder) -> None:
    """With its one line and its exit code."""
    code, _, error = finder(*CPU, *CRAMPED, "--model.depth", "0")
    assert (code, error.count("\n")) == (2, 1)
    assert "model: depth is 0; it must be at least 1" in error


def test_a_crash_shows_what_it_said(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed processes count as a crash, too."""

    def crash(*_: object) -> Trial:
        raise FailedError("Traceback: the end", -9)

    monkeypatch.setattr(batch_size, "attempt", crash)
    code, _, error = finder(*CPU, *CRAMPED)
    assert (code, error) == (1, "Traceback: the end\n")


# --- bad input ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--headroom", "1"], "--headroom is 1.0; it is a share of the memory, from 0 to below 1"),
        (["--limit-gib", "0"], "--limit-gib is 0.0; it is a positive number of GiB"),
        (["--steps", "1"], "--steps is 1; it must be at least 2"),
        (["--smallest", "0"], "--smallest is 0; it must be at least 1"),
        ([*CPU, *TASK, "--smallest", "9"], "--smallest is 9 and a device's share of the global batch is 8"),
        ([*CPU, *TASK, "--trainer.max_epoch", "1"], "did you mean trainer.max_epochs?"),
        ([*CPU, *BORING], "BoringModel brings its own loaders and takes no batch_size: there is nothing to find"),
        ([*CPU, *BORING, "--global_batch_size", "8"], "global_batch_size 8 cannot be enforced"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, finder: Finder) -> None:
    """What it got and what would do, exit code 2, nothing tried."""
    code, out, error = finder(*arguments)
    assert (code, out) == (2, "")
    assert said in error
    assert error.count("\n") == 1


def test_a_launcher_is_refused(
    finder: Finder, world: list[tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun each of two processes would start trials of its own."""
    launched = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    code, _, error = finder(*TWO, *TASK)
    assert code == 2
    assert "start this command once, without a launcher" in error
    assert world == []
