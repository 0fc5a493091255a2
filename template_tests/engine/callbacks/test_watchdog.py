"""Which rank the watchdog names, and one process that hangs."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from src.cli import main
from src.engine import exit_codes
from src.engine.watchdog.callback import Watchdog
from src.engine.watchdog.dump import COLLECTIVES, dump_collectives, dump_stacks, dumps, record_collectives
from src.engine.watchdog.heartbeat import Sign
from src.engine.watchdog.report import explain
from src.engine.watchdog.settings import WatchdogSettings, fit_timeouts
from src.strategies import DDP
from tests.commands import CPU, ROOT, SMALL, environment, read_json
from tests.tiny import Line, loader, quiet_trainer


def sign(rank: int, events: int, doing: str = "backward", line: str = "x.py:1 (f)") -> Sign:
    return Sign(rank, "node1", 41, clock=0.0, step=7, doing=doing, since=300.0, events=events, line=line)


def test_the_rank_that_is_behind_is_at_fault() -> None:
    """Of eight ranks the one with the fewest events is named; those that wait at the same place share one line."""
    ranks = [sign(rank, 20) for rank in range(8)]
    ranks[3] = sign(3, 19, "fetching a batch", "select.py:9 (select)")
    assert explain(ranks, [], 1200).splitlines() == [
        'error: nothing has happened for 20 min (watchdog.minutes): rank 3 on node1 is at "fetching a batch" after '
        "step 7, for 5 min, in select.py:9 (select)",
        '  ranks 0-2, 4-7 are at "backward" after step 7, for 5 min, in x.py:1 (f)',
    ]


def test_where_all_are_equally_far_none_is_singled_out() -> None:
    """All ranks are named in the first line."""
    assert ': ranks 0-1 are at "backward" after step 7' in explain([sign(0, 20), sign(1, 20)], [], 60)


def test_silence_counts_before_being_behind() -> None:
    """A rank without a sign of life is at fault though another is further behind, which then only waits."""
    first, *rest = explain([sign(0, 18), sign(1, 20)], [1], 60).splitlines()
    assert 'rank 1 on node1 gives no sign of life: it was last seen at "backward" after step 7; its process 41' in first
    assert "rank 0" not in first
    assert rest[0].startswith('  rank 0 on node1 is at "backward"')


def test_a_rank_that_ended_by_itself_left_word() -> None:
    """Its exception is named; a rank that never came is named too."""
    text = explain([sign(0, 18), sign(1, 20, "ended with ValueError"), None], [1], 60)
    assert 'rank 1 on node1 gives no sign of life: it was last seen at "ended with ValueError" after step 7;' in text
    assert "; rank 2 never gave a sign of life" in text


def test_the_watchdog_comes_before_the_collective_timeout() -> None:
    """By default after two thirds of it; a limit that comes later is kept, with a note, as is a setting of no use."""
    assert fit_timeouts(DDP(), None, WatchdogSettings()) == (1200, [])
    strategy = DDP()
    assert fit_timeouts(strategy, 9, WatchdogSettings()) == (360, [])
    assert strategy._timeout is not None
    assert strategy._timeout.total_seconds() == 540
    limit, (note,) = fit_timeouts(DDP(), 9, WatchdogSettings(minutes=10))
    assert (limit, "comes too late" in note) == (600, True)
    limit, (note,) = fit_timeouts(SimpleNamespace(), 9, WatchdogSettings())
    assert (limit, "collective_timeout_minutes has no effect" in note) == (1200, True)
    limit, (note,) = fit_timeouts(DDP(), None, WatchdogSettings(enabled=False, minutes=3))
    assert (limit, "watchdog.minutes has no effect" in note) == (None, True)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_a_limit_that_is_no_time_is_refused(run_root: Path, minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert main(["fit", *CPU, *SMALL, "--watchdog.minutes", minutes]) == 2
    assert "watchdog.minutes" in capsys.readouterr().err


class Remembers(Watchdog):
    """Keeps the names of all events."""

    noted: list[str]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "event":
            self.__dict__.setdefault("noted", []).append(value.name)
        super().__setattr__(name, value)


def test_events_are_noted_as_they_come(tmp_path: Path) -> None:
    """Each part of a step, of a validation and of a save has a name, in the order in which they happen."""
    watchdog = Remembers(60, tmp_path)
    trainer = quiet_trainer(callbacks=[watchdog], max_steps=2, limit_val_batches=1, num_sanity_val_steps=0)
    data = torch.ones(4, 1)
    trainer.fit(Line(), loader(trainer, data, 2, train=True), loader(trainer, data, 2, train=False))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    text = " > ".join(dict.fromkeys(watchdog.noted))
    assert re.search(
        "setting up > making optimizers.* > the start of training > the start of an epoch > fetching a batch > "
        "training_step > backward > the optimizer step > the end of a step.* > fetching a batch to evaluate > "
        "the step of an evaluation > the end of an evaluation > the end of an epoch > the end of training.* > "
        "saving a checkpoint",
        text,
    ), text
    assert watchdog._threads == []  # nothing watches a trainer that is done


def test_time_in_which_the_process_did_not_run_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps by far more than the limit is no hang; one that passes the limit bit by bit is."""
    now, ended = [0.0], threading.Event()
    monkeypatch.setattr("src.engine.watchdog.callback.time", SimpleNamespace(monotonic=lambda: now[0]))
    watchdog = Watchdog(1, tmp_path)
    monkeypatch.setattr(watchdog, "_diagnose", lambda limit: ("", True))
    monkeypatch.setattr(watchdog, "_end", lambda report, prints: ended.set())
    trainer: Any = SimpleNamespace(global_rank=0, world_size=1, is_global_zero=True, global_step=0)
    watchdog.setup(trainer, Line(), "fit")
    try:
        now[0] += 1000
        assert not ended.wait(1)
        for _ in range(100):
            now[0] += 0.2
            if ended.wait(0.2):
                break
        assert ended.is_set()
    finally:
        watchdog.teardown(trainer, Line(), "fit")


def test_one_process_with_a_stalled_loader_ends(tmp_path: Path) -> None:
    """Exit code 74, one message with rank, step and what, the stacks in the run directory, the summary says so."""
    command = [
        "--model",
        "template_tests.hangs.Hangs",
        "--data",
        "template_tests.hangs.StallingData",
        "--watchdog.minutes",
        "0.07",
    ]
    more = ["--global_batch_size", "8", "--trainer.num_sanity_val_steps", "0", "--run", "hung"]
    done = subprocess.run(
        [sys.executable, "-m", "src.cli", "fit", *CPU, *command, *more],
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == exit_codes.HUNG
    assert done.stderr.count("error:") == 1
    assert re.search(r'rank 0 on \S+ is at "fetching a batch" after step \d+, for \d+ s, in hangs.py', done.stderr)
    assert "__getitem__" in (tmp_path / "hung" / "hang-rank0.txt").read_text()
    assert read_json(tmp_path / "hung" / "summary.json")["exit_reason"] == "hung"


def test_over_nccl_the_last_collectives_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch recorded goes to one file per rank, and the message says where; over gloo there is none."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    dump_collectives(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    assert COLLECTIVES not in dumps(tmp_path)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"record", raising=False)
    dump_collectives(tmp_path, 3)
    assert (tmp_path / f"{COLLECTIVES}3").read_bytes() == b"record"
    assert str(tmp_path / COLLECTIVES) in dumps(tmp_path)


def test_what_the_user_set_for_the_recorder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults go where nothing is set."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in names:
        monkeypatch.setenv(name, "")  # put back at the end
        monkeypatch.delenv(name)
    record_collectives(tmp_path)
    assert [os.environ[name] for name in names] == [str(tmp_path / COLLECTIVES), "1"]
    for name in names:
        monkeypatch.setenv(name, "0")
    record_collectives(tmp_path)
    assert [os.environ[name] for name in names] == ["0", "0"]


def test_a_link_in_the_place_of_a_dump_is_not_followed(tmp_path: Path) -> None:
    """A group's folder: who may write there cannot have a file of the user's overwritten by a hang."""
    (tmp_path / "victim").write_text("precious")
    for name in ("hang-rank0.txt", ".hang-rank0.txt.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    dump_stacks(tmp_path, 0, "stuck")
    assert (tmp_path / "victim").read_text() == "precious"
    assert "dump_stacks" in (tmp_path / "hang-rank0.txt").read_text()
