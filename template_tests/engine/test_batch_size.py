"""The finder of the micro batch: what it tries, what it takes for the best, and that the global batch stays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from src import batch_size
from src.batch_size import FailedError, Settings, Trial, search
from src.cli import ProjectCLI
from src.engine import exit_codes
from src.engine.resolve.batch import divisors
from src.engine.resolve.resolution import batch_options
from tests.commands import BORING, CPU, TASK, TWO

CRAMPED = [*TASK, "--model", "template_tests.crash.Cramped"]  # room for 4 samples
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

    def attempt(root: Path, arguments: list[str], micro_batch_size: int, steps: int, minutes: float) -> Trial:
        seen.append((micro_batch_size, arguments))
        if micro_batch_size > 20:
            return Trial(micro_batch_size, None, said="out of memory: all is full")
        return Trial(micro_batch_size, 2.0 * micro_batch_size, 100.0 - abs(6 - micro_batch_size), card=40.0)

    monkeypatch.setattr(batch_size, "attempt", attempt)
    return seen


# --- what is tried ---


@pytest.mark.parametrize(
    ("share", "most", "tried"),
    [
        (256, 100, [16, 64, 128]),
        (256, 256, [16, 64, 128, 256]),
        (256, 3, [16, 2, 4]),
        (96, 40, [8, 24, 48, 32]),
        (7, 6, [1, 7]),
        (1, 1, [1]),
        (12, 0, [3, 1]),
    ],
)
def test_it_begins_in_the_middle_and_halves(share: int, most: int, tried: list[int]) -> None:
    """The largest divisor that fits is found, none is tried twice, and the trials are as few as was said."""
    sizes = divisors(share)
    trials = search(sizes, lambda size: Trial(size, 1.0), lambda trial: trial.micro_batch_size <= most)
    assert [trial.micro_batch_size for trial in trials] == tried
    best = max((size for size in sizes if size <= most), default=None)
    assert best == max((size for size in tried if size <= most), default=None)
    assert len(tried) <= len(sizes).bit_length()


@pytest.mark.parametrize("count", [1, 2, 3, 9, 16, 20])
def test_no_search_has_more_trials_than_was_said(count: int) -> None:
    """Whatever fits."""
    sizes = list(range(1, count + 1))

    def tried(most: int) -> list[int]:
        trials = search(sizes, lambda size: Trial(size, 1.0), lambda trial: trial.micro_batch_size <= most)
        return [trial.micro_batch_size for trial in trials]

    for most in range(count + 1):
        found = tried(most)
        assert len(found) <= count.bit_length()
        assert max((size for size in found if size <= most), default=0) == most


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
    again = ProjectCLI(["fit", *CPU, *task, *given, *options]).resolved.plan
    assert again is not None
    assert (again.micro_batch_size, again.global_batch_size) == (4, 16)


# --- what is chosen ---


def test_the_fastest_that_leaves_room_is_chosen(finder: Finder, world: list[tuple[int, list[str]]]) -> None:
    """A larger micro batch is not always faster; one that fills the card to the last tenth is too large."""
    code, said, _ = finder(*CPU, *CRAMPED, "--global_batch_size", "60")
    assert code == 0
    assert [size for size, _ in world] == [6, 15, 30, 20]  # 2 GiB a sample: 15 fit into 36, 20 do not
    rows = {line.split()[0]: line for line in said.splitlines()[3:]}
    assert rows["20"].endswith("over the limit")
    assert rows["15"].split() == ["15", "4", "30.00", "91.0"]
    assert "at most 4 trials of 4 steps with up to 4 passes each, 20 min in all" in said
    assert "memory: up to 36.00 GiB a device, so that 10% stay free" in said
    assert said.splitlines()[-1].endswith(": --micro_batch_size 6")


def test_a_trial_is_a_bounded_number_of_passes(finder: Finder, world: list[tuple[int, list[str]]]) -> None:
    """A micro batch of 1 in a global batch of 256 would take 256 passes a step; its trial takes 4."""
    finder("--headroom", "0.925", *CPU, *CRAMPED, "--global_batch_size", "256")
    batches = {size: int(arguments[-1]) for size, arguments in world}
    assert batches == {16: 64, 2: 8, 1: 4}
    finder(*CPU, *CRAMPED, "--trainer.accumulate_grad_batches", "8", "--global_batch_size", "256")
    assert world[-1][1][-4:] == ["--global_batch_size", "128", "--trainer.accumulate_grad_batches", "4"]


def test_the_share_to_leave_free_can_be_set(finder: Finder, world: list[tuple[int, list[str]]]) -> None:
    """Of a card of 40 GiB a half is for 10 samples."""
    _, said, _ = finder("--headroom", "0.5", *CPU, *CRAMPED, "--global_batch_size", "60")
    fits = [int(line.split()[0]) for line in said.splitlines()[3:] if line.strip()[0].isdigit() and "over" not in line]
    assert max(fits) == 10


def test_several_nodes_are_tried_on_one(finder: Finder, world: list[tuple[int, list[str]]]) -> None:
    """Each device has the share that it has on all of them, and what is to be pasted is for all of them."""
    code, said, _ = finder(*TWO, *CRAMPED, "--trainer.num_nodes", "2", "--global_batch_size", "16")
    assert code == 0
    assert world[0][1][-6:] == [*("--micro_batch_size", "2", "--trainer.num_nodes", "1"), "--global_batch_size", "8"]
    assert "note: tried on one node of 2" in said


def test_nothing_fits(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trial said of its memory is passed on, with its exit code."""
    monkeypatch.setattr(batch_size, "attempt", lambda *given: Trial(given[2], None, said="out of memory: all is full"))
    code, _, error = finder(*CPU, *CRAMPED, "--global_batch_size", "64")
    assert code == exit_codes.OUT_OF_MEMORY
    assert error == "error: not even a micro batch of 1 fits\nout of memory: all is full\n"


# --- the real command ---


def test_one_process_finds_what_fits(finder: Finder, run_root: Path) -> None:
    """A module that takes 4 samples: 5 is out of memory, which harms nothing; no run is left."""
    code, said, _ = finder(*CPU, *CRAMPED, "--global_batch_size", "5", "--run", "mine")
    assert code == 0
    fits, full = (line.split() for line in said.splitlines()[3:5])
    assert fits[:2] == ["1", "5"]
    assert all(float(number) > 0 for number in fits[2:])
    assert full == ["5", "1", "out", "of", "memory"]
    assert "note: no limit of memory is known on a CPU" in said
    assert said.splitlines()[-1].endswith(": --micro_batch_size 1")
    assert not run_root.exists()


def test_two_processes_agree(finder: Finder) -> None:
    """Where one of two ranks has no memory the size does not fit, and the next trial is not disturbed."""
    code, said, _ = finder(*TWO, *CRAMPED, "--model.rank", "1", "--global_batch_size", "10")
    assert code == 0
    rows = [line.split() for line in said.splitlines()[3:]]
    assert (rows[0][:2], rows[1]) == (["1", "5"], ["5", "1", "out", "of", "memory"])
    assert said.splitlines()[-1].endswith(": --micro_batch_size 1")


def test_a_trial_that_takes_too_long_is_ended(finder: Finder) -> None:
    """With the option that gives it more time; its processes are gone."""
    code, _, error = finder("--trial-minutes", "0.0001", *CPU, *CRAMPED)
    assert (code, error.count("\n")) == (1, 1)
    assert "did not end within 0.0001 min; give --trial-minutes" in error


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
        (["--steps", "1"], "--steps is 1; it must be at least 2"),
        (["--trial-minutes", "0"], "--trial-minutes is 0.0; it is a positive number of minutes"),
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
