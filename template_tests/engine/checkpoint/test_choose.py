import builtins
import errno
import io
import pickle
from pathlib import Path

import pytest
import torch

from src.engine.checkpoint.choose import NoWholeCheckpointError, newest
from src.engine.checkpoint.files import fault, steps_inside
from src.engine.errors import of_a_file


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
    assert all(f"warning: {path} is damaged; passed over" in said for path in bad)
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


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, 75), (errno.EIO, 75), (errno.EACCES, 2)])
def test_a_file_that_the_disk_refuses_to_read_is_not_damaged(tmp_path, monkeypatch, number, code):
    """No older state is taken in its place, nothing is moved, and the exit code says whether a restart may help."""
    saved(tmp_path / "step=00000005.ckpt", 5)
    barred = saved(tmp_path / "step=00000009.ckpt", 9)
    real = io.open

    def opened(file, *args, **kwargs):
        if Path(file) == barred:
            raise OSError(number, "refused", str(barred))
        return real(file, *args, **kwargs)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", opened)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path))
    with pytest.raises(OSError, match="refused") as raised:
        newest(tmp_path, quarantine=True)
    assert barred.exists()
    error = of_a_file(raised.value)
    assert error is not None
    assert error.exit_code == code


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
