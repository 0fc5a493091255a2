"""Which job of a race trains: exactly one, whatever happens."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm import race, sbatch
from slurm.cluster import ROOT

CLAIM = "import sys; from slurm import race; print(race.claim(race.Path(sys.argv[1]), 'r', sys.argv[2]))"


def test_jobs_that_start_at_once_agree_on_one(tmp_path: Path) -> None:
    """Many processes that claim in the same moment all name the same one of them."""
    jobs = [str(number) for number in range(100, 108)]

    def claimed(job: str) -> str:
        command = [sys.executable, "-c", CLAIM, str(tmp_path), job]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with ThreadPoolExecutor(len(jobs)) as pool:
        winners = set(pool.map(claimed, jobs))
    assert len(winners) == 1
    assert winners <= set(jobs)


def test_threads_that_start_at_once_agree_on_one(tmp_path: Path) -> None:
    """The same, many times and closer together."""
    for attempt in range(50):
        with ThreadPoolExecutor(8) as pool:
            winners = list(pool.map(lambda job, name=f"r{attempt}": race.claim(tmp_path, name, str(job)), range(8)))
        assert len(set(winners)) == 1


def test_the_winner_keeps_it_over_a_requeue(tmp_path: Path) -> None:
    """A requeued job comes back under its number and goes on; the other still leaves."""
    assert race.claim(tmp_path, "r", "7") == "7"
    assert race.claim(tmp_path, "r", "8") == "7"
    assert race.claim(tmp_path, "r", "7") == "7"


def test_a_new_race_for_the_same_run_is_open(tmp_path: Path) -> None:
    """Who had an earlier race does not have the next one."""
    race.claim(tmp_path, "r", "7")
    assert race.holder(tmp_path, "s") is None
    assert race.claim(tmp_path, "s", "8") == "8"


def test_nothing_is_left_of_a_claim_but_its_mark(tmp_path: Path) -> None:
    """Losers leave no files behind."""
    for job in ("7", "8", "9"):
        race.claim(tmp_path, "r", job)
    assert [path.name for path in tmp_path.iterdir()] == ["race-r"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue and a scancel that remembers what it was given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "squeue").write_text(
        "#!/bin/sh\nprintf '11 N/A abc.0\\n12 N/A abc.1\\n13 0 abcd.0\\n14\\n15 N/A (null)\\n'\n"
    )
    (programs / "scancel").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/cancelled\n')
    for path in programs.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path / "cancelled"


def test_the_winner_cancels_the_races_other_jobs_and_no_more(slurm: Path) -> None:
    """Neither itself, nor a job of another race, nor one without a comment."""
    assert race.cancel_others("abc", "11") == ["12"]
    assert slurm.read_text().split() == ["12"]


def test_a_node_without_slurms_commands_races_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where squeue is missing nothing is cancelled and nothing fails: the loser leaves when it starts."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert race.cancel_others("abc", "11") == []


@pytest.mark.parametrize("late", ["squeue", "scancel"])
def test_a_slurm_that_does_not_answer_costs_the_winner_nothing(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """It has the race, so the others will leave; were it to fall here, nobody would train."""
    monkeypatch.setattr(sbatch, "SECONDS", 1)
    (slurm.parent / "bin" / late).write_text("#!/bin/sh\nsleep 30\n")
    assert race.cancel_others("abc", "11") == []
