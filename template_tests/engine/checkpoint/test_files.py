"""A checkpoint file is whole or it is not there, and one that is damaged is known to be."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from src.engine.checkpoint import write as write_module
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.files import clear_temporary, fault, steps_inside
from src.engine.checkpoint.names import ours, step_in_name
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.write import WholeFiles
from src.engine.errors import NotSavedError
from tests.commands import ROOT
from tests.tiny import Line, loaders, quiet_trainer

DATA = torch.linspace(-1, 1, 24)[:, None]
# For each line it is sent: a new process that saves for ever, a state of 4 MB per step, keeping two as training does.
SAVERS = """
import os, sys, torch
from pathlib import Path
from src.engine.checkpoint.write import WholeFiles
folder, files = Path(sys.argv[1]), WholeFiles()

def save_for_ever():
    step = max([int(path.stem[5:]) for path in folder.glob("step=*.ckpt")], default=0)
    while True:
        step += 1
        state = {"global_step": step, "state_dict": {"w": torch.full((1_000_000,), float(step))}}
        files.save_checkpoint(state, folder / f"step={step:08d}.ckpt")
        for old in sorted(folder.glob("step=*.ckpt"))[:-2]:
            old.unlink()

for _ in sys.stdin:
    if not (child := os.fork()):
        save_for_ever()
    print(child, flush=True)
    os.waitpid(child, 0)
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A whole checkpoint of 400 KB."""
    return write(tmp_path, 7)


def write(folder: Path, step: int) -> Path:
    path = folder / f"step={step:08d}.ckpt"
    WholeFiles().save_checkpoint({"global_step": step, "state_dict": {"w": torch.rand(100_000)}}, path)
    return path


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:200_000]),
    "4 KB of zeros in the middle": lambda path: overwrite(path, 200_000, bytes(4096)),
    "no zip": lambda path: path.write_bytes(b"x" * 1000),
    "another content": lambda path: torch.save({"weights": torch.ones(3)}, path),
}


def test_a_whole_file_has_no_fault(saved: Path) -> None:
    """What was written is found whole, with its step, and nothing else is left in the folder."""
    assert fault(saved) is None
    assert steps_inside(saved) == 7
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(
    damage: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged newest file is said, moved to quarantine/ with its content as it is, and the next one is chosen."""
    broken = write(saved.parent, 9)
    DAMAGE[damage](broken)
    content = broken.read_bytes()
    assert fault(broken)
    assert newest(saved.parent) == (saved, 7)
    assert broken.exists()
    assert newest(saved.parent, quarantine=True) == (saved, 7)
    assert not broken.exists()
    assert (saved.parent / "quarantine" / broken.name).read_bytes() == content
    assert f"{broken} is damaged; moved to {saved.parent / 'quarantine'}" in capsys.readouterr().out
    assert newest(saved.parent, quarantine=True) == (saved, 7)


def test_twenty_kills_during_saves_leave_whole_files(tmp_path: Path) -> None:
    """SIGKILL at random moments of saving: every file under its own name is whole, and the newest never goes back."""
    chance, step = random.Random(0), 0
    pipe = subprocess.PIPE
    start = [sys.executable, "-c", SAVERS, str(tmp_path)]
    with subprocess.Popen(start, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as savers:
        assert savers.stdin is not None
        assert savers.stdout is not None
        for _ in range(20):
            print("go", file=savers.stdin, flush=True)
            child = int(savers.stdout.readline())
            saves = chance.randrange(1, 4)
            while not any(step_in_name(path) >= step + saves for path in ours(tmp_path, "newest")):
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.02))
            os.kill(child, signal.SIGKILL)
            step = check_after_kill(tmp_path, step)
        savers.stdin.close()
    assert step >= 20


def check_after_kill(folder: Path, before: int) -> int:
    """The newest step, no older than the one before the kill; every file is whole."""
    assert [path.name for path in folder.glob("*.ckpt") if fault(path)] == []
    found = newest(folder)
    step = found[1] if found else 0
    assert step >= before
    return step


def test_what_a_killed_save_has_left_is_cleared(saved: Path) -> None:
    """The temporary file goes, checkpoints stay."""
    (saved.parent / ".step=00000008.ckpt.tmp").write_bytes(b"half")
    clear_temporary(saved.parent)
    assert list(saved.parent.iterdir()) == [saved]


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Lets files grow to a number of bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Heavy(Line):
    """Its checkpoint has 4 MB; from `full_at` on the disk takes no more than 1 MB."""

    def __init__(self, limit: Callable[[int], None], full: range) -> None:
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.zeros(1_000_000), requires_grad=False)
        self.limit, self.full = limit, full
        self.best_there: dict[int, list[str]] = {}

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        folder = Path(str(self.trainer.checkpoint_callback.dirpath))  # type: ignore[union-attr]
        self.best_there |= {self.global_step: [path.name for path in folder.glob("best-*")]}
        self.limit(2**20 if self.global_step in self.full else resource.RLIM_INFINITY)


def fit(folder: Path, module: Line, *, asynchronous: bool = False) -> None:
    settings = CheckpointSettings(every_n_steps=2, keep=1, asynchronous=asynchronous)
    newest = SaveNewest(folder, settings)
    savers = [newest, SaveBest(folder, settings, newest)]
    trainer = quiet_trainer(callbacks=savers, plugins=[WholeFiles()], max_steps=10, val_check_interval=3)
    trainer.fit(module, *loaders(trainer, DATA, 2))


def test_a_full_disk_costs_a_save_and_nothing_else(
    tmp_path: Path, limit: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Training goes on, each failed save is said, older files stay until a newer one is whole, no scrap is left."""
    module = Heavy(limit, range(4, 8))
    fit(tmp_path, module)
    assert module.best_there[5] == module.best_there[7] == ["best-step=00000003.ckpt"]
    said = capsys.readouterr().out
    assert "step 6 could not be saved" in said
    assert "older checkpoints stay" in said
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if name.startswith("step=")] == ["step=00000010.ckpt"]
    assert len([name for name in names if name.startswith("best-")]) == 1
    assert all(fault(path) is None for path in tmp_path.iterdir())


def test_a_run_whose_end_cannot_be_saved_does_not_end_well(tmp_path: Path, limit: Callable[[int], None]) -> None:
    """The last state is the result: without it the command fails, and the newest older state is still there."""
    with pytest.raises(NotSavedError, match="the end of this start, step 10, is not saved"):
        fit(tmp_path, Heavy(limit, range(8, 11)))
    found = newest(tmp_path)
    assert found is not None
    assert found[1] == 8


class Barred(Heavy):
    """While it is `full`, the folder is a file: nothing can be made in it."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        folder = Path(str(self.trainer.checkpoint_callback.dirpath))  # type: ignore[union-attr]
        away = folder.with_name("away")
        if self.global_step in self.full and folder.is_dir():
            folder.rename(away)
            folder.touch()
        elif self.global_step not in self.full and folder.is_file():
            folder.unlink()
            away.rename(folder)


def test_a_folder_that_cannot_be_written_to_costs_saves_and_nothing_else(
    tmp_path: Path, limit: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Training goes on and says why nothing is saved; the older state stays until a newer one is there."""
    fit(tmp_path / "checkpoints", Barred(limit, range(3, 7)))
    said = capsys.readouterr().out
    for step in (4, 6):
        assert f"warning: step {step} could not be saved" in said
    assert "inline_container" not in said
    assert "step 8 could not be saved" not in said
    assert max(steps_inside(path) for path in (tmp_path / "checkpoints").glob("step=*.ckpt")) == 10


@pytest.mark.parametrize(
    ("error", "free", "said"),
    [
        ("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0", 0, "no space left on the disk"),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0", 2**30, "unexpected pos 64 vs 0"),
        (
            "[enforce fail at inline_container.cc:747] . open file failed with strerror: Read-only file system",
            2**30,
            "Read-only file system",
        ),
    ],
)
def test_a_disk_that_refuses_is_said_in_its_own_words(
    error: str, free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's words for a full or a read-only disk become the disk's; other words stay."""

    def refuse(*_: object) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    reason = write_module.write({}, tmp_path / "step=1.ckpt")
    assert str(reason).startswith(said) or str(reason).endswith(said)


def test_a_failed_save_of_somebody_elses_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ModelCheckpoint of the user's, which deletes its last file next, gets the error; that file stays."""

    class FullAtThree(Line):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            if self.global_step == 3:
                monkeypatch.setattr(torch, "save", refuse)

    user = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    trainer = quiet_trainer(callbacks=[user], plugins=[WholeFiles()], max_steps=4)
    with pytest.raises(OSError, match="no room"):
        trainer.fit(FullAtThree(), *loaders(trainer, DATA, 2))
    assert steps_inside(tmp_path / "step=2.ckpt") == 2


def refuse(*_: object, **__: object) -> None:
    raise OSError("no room")


def test_a_torn_copy_of_the_best_is_not_its_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file has no links and its copy comes out damaged, the other name keeps what it was."""
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("shutil.copyfile", lambda path, other: Path(other).write_bytes(Path(path).read_bytes()[:9999]))
    best = saved.with_name("best-step=00000007.ckpt")
    with pytest.raises(OSError, match="the copy is damaged"):
        write_module.give_name(saved, best)
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_will_not_delete_costs_no_run(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes after a save may fail: it is said, training ends well, and later files of others are left alone."""
    unlink = Path.unlink

    def barred(path: Path, missing_ok: bool = False) -> None:
        if path.name == "step=00000004.ckpt":
            raise PermissionError("not yours")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", barred)
    later = write(tmp_path, 99)
    fit(tmp_path, Line(), asynchronous=asynchronous)
    assert "step 6 is saved, but older files were not put in order (not yours)" in capsys.readouterr().out
    assert steps_inside(tmp_path / "step=00000010.ckpt") == 10
    assert later.exists()
    assert not (tmp_path / "step=00000002.ckpt").exists()
