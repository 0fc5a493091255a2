import builtins
import errno
import io
import pickle
from pathlib import Path

import pytest
import torch

from src.checkpoint import choose
from src.checkpoint.choose import NoWholeCheckpointError, newest
from src.checkpoint.files import fault, steps_inside


def saved(path: Path, step: int) -> Path:
    torch.save({"global_step": step, "state_dict": {"weight": torch.ones(1000)}}, path)
    return path


def torn(path: Path) -> Path:
    """A file whose write was cut off half way."""
    whole = saved(path, 999).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def test_the_newest_is_the_one_with_the_most_steps_inside(tmp_path):
    """Neither the name nor the file's date decides, only the step in the file."""
    right = saved(tmp_path / "step=00000001.ckpt", 300)
    saved(tmp_path / "step=00000900.ckpt", 200)
    saved(tmp_path / "zzz.ckpt", 100)
    assert newest(tmp_path) == (right, 300)


def test_the_best_by_metric_count_only_where_there_is_no_other(tmp_path):
    """The best is saved in the middle of a step, from where no run goes on exactly; alone it is better than nothing."""
    best = saved(tmp_path / "best-step=00000012.ckpt", 12)
    assert newest(tmp_path) == (best, 12)
    step = saved(tmp_path / "step=00000010.ckpt", 10)
    assert newest(tmp_path) == (step, 10)
    step.write_bytes(b"torn")
    assert newest(tmp_path) == (best, 12)


def test_a_torn_file_is_passed_over_and_said(tmp_path, capsys):
    """A file that cannot be read gives way to the next newest, with a line that names it."""
    right = saved(tmp_path / "step=00000005.ckpt", 5)
    bad = [torn(tmp_path / "step=00000009.ckpt"), tmp_path / "step=00000008.ckpt", tmp_path / "step=00000007.ckpt"]
    bad[1].touch()
    torch.save({"state_dict": {}}, bad[2])
    assert newest(tmp_path) == (right, 5)
    said = capsys.readouterr().out
    assert all(f"warning: {path} is no whole checkpoint" in said for path in bad)
    assert str(right) not in said


def test_files_without_a_readable_one_are_refused(tmp_path):
    """Checkpoints that are all torn raise: starting from scratch would bury the work."""
    torn(tmp_path / "step=00000009.ckpt")
    with pytest.raises(NoWholeCheckpointError, match="none of the 1 checkpoints"):
        newest(tmp_path)


def test_no_file_is_no_checkpoint(tmp_path):
    """An empty or missing folder, or one with other files only, has no checkpoint and is no error."""
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None
    torn(tmp_path / "step=00000009.tmp")
    assert newest(tmp_path) is None


@pytest.fixture
def refuse(monkeypatch):
    """Lets the disk refuse the first so many reads of a file, in whatever way it is opened."""
    real = io.open

    def bar(barred: Path, times: int) -> None:
        left = [times]

        def opened(file, *args, **kwargs):
            if Path(file) == barred and left[0] > 0:
                left[0] -= 1
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(file, *args, **kwargs)

        for place in (builtins, io):
            monkeypatch.setattr(place, "open", opened)

    monkeypatch.setattr(choose, "WAIT_SECONDS", 0, raising=False)
    return bar


@pytest.mark.parametrize("times", [1, 2])
def test_a_disk_that_refuses_for_a_moment_costs_no_state(tmp_path, refuse, times):
    """A file that can be read at the second look is the newest as ever, and stays where it is."""
    saved(tmp_path / "step=00000005.ckpt", 5)
    right = saved(tmp_path / "step=00000009.ckpt", 9)
    refuse(right, times)
    assert newest(tmp_path, quarantine=True) == (right, 9)


def test_a_file_that_cannot_be_read_is_not_damaged(tmp_path, refuse, capsys):
    """It is passed over and never moved; where there is no other, the exit code says that it may pass."""
    older = saved(tmp_path / "step=00000005.ckpt", 5)
    barred = saved(tmp_path / "step=00000009.ckpt", 9)
    refuse(barred, 10**6)
    assert newest(tmp_path, quarantine=True) == (older, 5)
    assert f"{barred} cannot be read right now" in capsys.readouterr().out
    assert barred.exists()
    older.unlink()
    with pytest.raises(NoWholeCheckpointError, match=r"1 checkpoints in .* cannot be read right now") as raised:
        newest(tmp_path, quarantine=True)
    assert raised.value.exit_code == 75


def test_quarantine_replaces_nothing(tmp_path):
    """A second damaged file of the same step is kept beside the first."""
    saved(tmp_path / "step=00000005.ckpt", 5)
    for _ in range(2):
        torn(tmp_path / "step=00000009.ckpt")
        newest(tmp_path, quarantine=True)
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


def test_weights_alone_are_nothing_to_go_on_from(tmp_path):
    """A file of weights that the user saves beside ours is neither chosen nor damaged; a whole state of theirs is."""
    saved(tmp_path / "epoch=1-step=900.ckpt", 900)
    assert newest(tmp_path) is None
    other = tmp_path / "step=500.ckpt"
    torch.save({"global_step": 500, "optimizer_states": []}, other)
    assert newest(tmp_path) == (other, 500)
    right = saved(tmp_path / "step=00000010.ckpt", 10)
    assert newest(tmp_path, quarantine=True) == (right, 10)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


class Trap:
    """Runs code when it is unpickled, as a hostile checkpoint may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_checkpoint_cannot_run_code(tmp_path):
    """A file that would run code when it is read is passed over without running it."""
    torch.save({"global_step": 10**6, "trap": Trap(tmp_path / "sprung")}, tmp_path / "step=00000001.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        steps_inside(tmp_path / "step=00000001.ckpt")
    assert fault(tmp_path / "step=00000001.ckpt") is not None
    assert not (tmp_path / "sprung").exists()
