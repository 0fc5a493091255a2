"""A checkpoint holds tensors and plain types, and what it holds is the state of its moment."""

import collections
import enum
import threading
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.contents import HostCopies, plain, refuse_unsafe
from src.engine.checkpoint.files import fault
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.write import WholeFiles
from src.engine.errors import UserError
from tests.tiny import Line, loaders, quiet_trainer

DATA = torch.linspace(-1, 1, 24)[:, None]


class Size(enum.Enum):
    SMALL = "small"


Pair = collections.namedtuple("Pair", "left right")


class Labelled(Line):
    """Hyperparameters as people give them."""

    def __init__(self, folder: Any, rate: Any, more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def train(folder: Path, module: Line, io: WholeFiles | None = None, **settings: Any) -> None:
    saver = SaveNewest(folder, CheckpointSettings(**{"every_n_steps": 2, "keep": 99} | settings))
    trainer = quiet_trainer(callbacks=[saver], plugins=[io or WholeFiles()], max_steps=6)
    trainer.fit(module, *loaders(trainer, DATA, 2))


def test_hyperparameters_become_plain(tmp_path: Path) -> None:
    """Paths, NumPy numbers, enums and named tuples are saved as what they stand for, and load safely."""
    more = {"size": Size.SMALL, "pair": Pair(1, np.int64(2)), "table": np.arange(3.0), "loss": torch.nn.MSELoss()}
    train(tmp_path, Labelled(PurePosixPath("/data/x"), np.float32(0.5), more))
    found = newest(tmp_path)
    assert found is not None
    saved = torch.load(found[0], weights_only=True)["hyper_parameters"]
    assert (saved["folder"], saved["rate"]) == ("/data/x", 0.5)
    assert (saved["more"]["size"], saved["more"]["pair"]) == ("small", (1, 2))
    assert torch.equal(saved["more"]["table"], torch.arange(3.0, dtype=torch.float64))
    assert saved["more"]["loss"] == "MSELoss()"
    assert type(saved["rate"]) is float


def test_an_object_in_the_state_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """It could not be loaded safely; the line names it, and no time is lost on training."""

    class Stateful(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"lock": object()}

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            raise AssertionError("it trained")

    with pytest.raises(UserError, match=r"mine\.lock is a object"):
        train(tmp_path, Stateful())


def test_a_key_that_is_no_plain_type_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """No file with such a key could be loaded; the line names the part of the state that has it."""

    class Keyed(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"seen": {Size.SMALL: 1}}

    with pytest.raises(UserError, match="a key in mine"):
        train(tmp_path, Keyed())
    assert list(tmp_path.glob("*.ckpt")) == []


def test_what_pytorch_hangs_on_a_state_stays() -> None:
    """The metadata of a state_dict, by which modules know the version of their buffers, survives."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert plain({"state_dict": state})["state_dict"]._metadata == state._metadata  # type: ignore[attr-defined]
    refuse_unsafe({"state_dict": state, "names": {"a"}, "count": collections.defaultdict(int, {"x": 1})})
    assert type(plain({"count": collections.defaultdict(int, {"x": 1})})["count"]) is dict  # that one does not load


def test_a_copy_is_of_its_moment() -> None:
    """What changes after it is not in it, tied weights stay one, and the next copy uses the same memory."""
    weight = torch.ones(3)
    state = {"a": weight, "tied": weight, "nested": [{"step": torch.tensor(1)}, "text"]}
    copies = HostCopies()
    first = copies.of(state)
    weight.add_(1)
    state["nested"][0]["step"].add_(1)  # type: ignore[index]
    assert torch.equal(first["a"], torch.ones(3))
    assert first["a"] is first["tied"]
    assert int(first["nested"][0]["step"]) == 1
    second = copies.of(state)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], torch.full((3,), 2.0))


class Slow(WholeFiles):
    """Writes only when it is let, and counts what training did meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write, self.writing = threading.Event(), threading.Event()

    def _write_behind(self, *args: Any) -> None:
        self.writing.set()
        assert self.may_write.wait(60)
        super()._write_behind(*args)


class Watching(Line):
    """Lets the save of step 2 go through only when two more steps are done."""

    def __init__(self, files: Slow, folder: Path) -> None:
        super().__init__()
        self.files, self.folder = files, folder
        self.weights: dict[int, Tensor] = {}

    def on_train_batch_end(self, *args: Any) -> None:
        self.weights[self.global_step] = self.weight.detach().clone()
        if self.global_step == 3:
            assert self.files.writing.wait(60)
            assert list(self.folder.glob("*.ckpt")) == []
            self.files.may_write.set()


def test_training_goes_on_while_a_state_is_written(tmp_path: Path) -> None:
    """A step is made before the file is there, and the file holds the weights of the step that it is named after."""
    files = Slow()
    module = Watching(files, tmp_path)
    train(tmp_path, module, files)
    for path in tmp_path.glob("*.ckpt"):
        assert fault(path) is None
        step = int(path.stem.removeprefix("step="))
        assert torch.equal(torch.load(path, weights_only=True)["state_dict"]["weight"], module.weights[step])
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


def test_a_save_that_is_not_asynchronous_is_there_at_once(tmp_path: Path) -> None:
    """With `asynchronous: false` nothing is written in the background."""
    files = Slow()
    train(tmp_path, Line(), files, asynchronous=False)
    assert not files.writing.is_set()
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


def test_the_older_one_goes_when_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write in the background costs that state alone; the one before stays though only one is to be kept."""
    from src.engine.checkpoint import write

    real = write.torch.save

    def fail_at_four(state: Any, path: Path) -> None:
        if "00000004" in str(path):
            path.write_bytes(b"half")
            raise OSError("the disk is gone")
        assert sorted(file.name for file in tmp_path.glob("*.ckpt")) in ([], ["step=00000002.ckpt"])
        real(state, path)

    monkeypatch.setattr(write.torch, "save", fail_at_four)
    train(tmp_path, Line(), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step=00000006.ckpt"]


def test_copies_keep_the_order_in_memory() -> None:
    """A tensor in channels_last is copied as one, as a save in front of training keeps it; the buffer is used again."""
    copies, value = HostCopies(), torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    first = copies.of({"w": value})["w"]
    again = copies.of({"w": value + 1})["w"]
    assert first.stride() == value.stride()
    assert again.data_ptr() == first.data_ptr()
    assert torch.equal(again, value + 1)


def test_without_memory_for_a_copy_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state that cannot be copied is written all the same, at once, and one note says so."""

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore of it")

    monkeypatch.setattr(HostCopies, "of", refuse)
    files = WholeFiles()
    told: list[Exception | None] = []
    for step in (1, 2):
        path = tmp_path / f"{step}.ckpt"
        files.save_checkpoint({"global_step": step}, path, told.append)
        assert fault(path) is None
    assert told == [None, None]
    assert capsys.readouterr().out.count("training waits for the disk (CUDA error: out of memory\n") == 1


def test_a_wait_that_is_interrupted_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while training waits for a write does not lose that write: who cleans up waits for its end."""
    gate, files = threading.Event(), WholeFiles()
    files.save_checkpoint({"global_step": 1}, tmp_path / "1.ckpt", lambda _: gate.wait(5))
    pending = files._pending
    assert pending is not None
    with monkeypatch.context() as patch:

        def terminated() -> None:
            raise SystemExit(143)

        patch.setattr(pending, "result", terminated)
        with pytest.raises(SystemExit):
            files.wait()
    threading.Timer(0.2, gate.set).start()
    files.wait()
    assert pending.done()
    files.teardown()
