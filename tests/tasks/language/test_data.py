import os
import random
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from src.engine.errors import UserError
from src.tasks.language import LanguageModule, TextBytes
from src.tasks.language.data import SPLITS, Windows, store, text_files
from tests.tiny import quiet_trainer


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder of 60 short texts whose first line is their name, enough for all three splits."""
    folder = tmp_path / "texts"
    for number in range(60):
        file = folder / f"part{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"<{number}>".encode() + random.Random(number).randbytes(50).replace(b"\0", b"\xff"))
    return folder


def stored(folder: Path, cache: Path) -> dict[str, bytes]:
    where = store(*text_files(folder), cache)
    return {split: (where / f"{split}.bin").read_bytes() for split in SPLITS}


def splits(parts: dict[str, bytes]) -> dict[str, str]:
    """The split of each file, by the first bytes of its text."""
    return {
        text[: text.index(b">")].decode(): split
        for split, part in parts.items()
        for text in part.split(b"\0")
        if text.startswith(b"<")
    }


def test_every_byte_of_every_file_is_stored(texts, tmp_path):
    """The splits together hold each file whole, once, byte by byte, with a zero after it."""
    parts = stored(texts, tmp_path / "cache")
    expected = sorted(file.read_bytes() for file in text_files(texts)[1])
    assert sorted(text for part in parts.values() for text in part.split(b"\0")[:-1]) == expected
    assert all(part.endswith(b"\0") for part in parts.values())


def test_about_a_tenth_is_held_out(tmp_path):
    """Of many files about a twentieth is for validation and another one for the test."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(1000):
        (folder / f"{number}.txt").write_text(f"<{number}>")
    found = list(splits(stored(folder, tmp_path / "cache")).values())
    assert len(found) == 1000
    assert 30 < found.count("val") < 75
    assert 30 < found.count("test") < 75


def test_a_new_file_moves_no_other(texts, tmp_path):
    """Adding, changing and removing files leaves every other file in its split."""
    before = splits(stored(texts, tmp_path / "cache"))
    for number in range(100, 130):
        (texts / f"{number}.txt").write_text(f"<{number}> new")
    (texts / "part0" / "0.txt").write_text("<0> changed")
    (texts / "part1" / "1.txt").unlink()
    after = splits(stored(texts, tmp_path / "cache"))
    assert set(before.values()) == set(SPLITS)
    assert len(after) == 60 + 30 - 1
    assert {name: split for name, split in after.items() if name in before} == {
        name: split for name, split in before.items() if name != "<1"
    }


def test_what_is_stored_once_is_used_again(texts, tmp_path, monkeypatch):
    """The same files are read once; a changed file is noticed."""
    cache, reads = tmp_path / "cache", []
    read = Path.read_bytes

    def watched(path: Path) -> bytes:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    first = store(*text_files(texts), cache)
    assert len(reads) == 60
    assert store(*text_files(texts), cache) == first
    assert len(reads) == 60
    (texts / "part0" / "0.txt").write_text("<0> changed")
    assert store(*text_files(texts), cache) != first
    assert len(reads) == 120


def test_processes_may_store_at_the_same_time(texts, tmp_path):
    """Callers that start at once get the same complete folder, and nothing else is left in the cache."""
    cache, files = tmp_path / "cache", text_files(texts)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: store(*files, cache), range(8)))
    assert list(cache.iterdir()) == [folders[0]]
    assert folders == [folders[0]] * 8
    sizes = [(folders[0] / f"{split}.bin").stat().st_size for split in SPLITS]
    assert sum(sizes) == sum(file.stat().st_size + 1 for file in files[1])


def test_only_text_is_taken(texts):
    """Files with a zero byte are left out and any other kind of name is taken, in sorted order."""
    (texts / "image.txt").write_bytes(b"\x89PNG\0")
    (texts / "no_ending").write_text("text")
    root, files = text_files(texts)
    assert root == texts
    assert files == sorted(files)
    assert texts / "no_ending" in files
    assert texts / "image.txt" not in files


def test_the_standard_library_is_its_own_sources(tmp_path, monkeypatch):
    """Without a folder it is the .py files of the standard library, without its tests and installed packages."""
    names = ["ast.py", "json/decoder.py", "test/test_ast.py", "lib2to3/tests/data.py", "site-packages/torch/a.py"]
    for name in [*names, "LICENSE.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert text_files(None) == (tmp_path, [tmp_path / "ast.py", tmp_path / "json" / "decoder.py"])


@pytest.mark.parametrize(
    ("name", "says"), [("missing", "missing is no folder"), ("empty", "empty holds no text files")]
)
def test_a_folder_without_text_is_refused(tmp_path, name, says):
    """A folder that is missing, or has no text in it, is refused with its path."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "binary").write_bytes(b"\0")
    with pytest.raises(UserError, match=says):
        text_files(tmp_path / name)


@pytest.mark.parametrize(("size", "windows"), [(5, 1), (8, 1), (9, 2), (41, 10)])
def test_windows_share_only_the_byte_between_them(tmp_path, size, windows):
    """Window i is the bytes from i × context on and one more, which is the first of window i + 1."""
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(range(size)))
    data = Windows(path, 4)
    assert len(data) == windows
    for index in range(windows):
        assert data[index].tolist() == list(range(4 * index, 4 * index + 5))
    batch = data.__getitems__([windows - 1, 0])
    assert batch.dtype == torch.uint8
    assert torch.equal(batch, torch.stack([data[windows - 1], data[0]]))


@pytest.mark.parametrize("size", [0, 1, 4])
def test_less_than_a_window_is_refused(tmp_path, size):
    """A file with fewer bytes than a window and the byte after it is refused with both numbers."""
    (tmp_path / "val.bin").write_bytes(bytes(size))
    with pytest.raises(UserError, match=rf"val\.bin has {size} bytes, fewer than one window of context 4"):
        Windows(tmp_path / "val.bin", 4)


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    """Arrays are kept below XDG_CACHE_HOME, below ~/.cache without it, and where `cache` says before both."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TextBytes().cache == tmp_path / "xdg" / "language-data"
    assert TextBytes(cache="~/mine").cache == tmp_path / "mine" / "language-data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert TextBytes().cache == tmp_path / ".cache" / "language-data"


def test_loaders_give_the_bytes_of_their_splits(texts, tmp_path, monkeypatch):
    """Under a Trainer, each loader's batches are windows of its split, of the model's context."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data = TextBytes(str(texts), batch_size=3)
    module = LanguageModule(width=8, depth=1, heads=1, context=16, sample_bytes=0)
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, data)
    assert os.listdir(tmp_path / "xdg") == ["language-data"]
    parts = stored(texts, data.cache)
    for split, loader in zip(
        SPLITS, (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()), strict=True
    ):
        batches = list(loader)
        assert batches[0].shape == (3, 17)
        expected = np.frombuffer(parts[split], np.uint8)
        windows = sorted(row.tolist() for row in torch.cat(batches))
        assert windows == sorted(expected[16 * i : 16 * i + 17].tolist() for i in range((len(expected) - 1) // 16))
    assert torch.equal(next(iter(data.predict_dataloader())), next(iter(data.test_dataloader())))


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("text", [None, b"short"])
def test_a_folder_with_too_few_texts_is_refused(texts, tmp_path, split, text):
    """A folder whose files leave a split empty, or shorter than a window, is refused with that split and its size."""
    for name, place in splits(stored(texts, tmp_path / "cache")).items():
        number = int(name.removeprefix("<"))
        file = texts / f"part{number % 3}" / f"{number}.txt"
        if place == split and text is None:
            file.unlink()
        elif place == split:
            file.write_bytes(text)
    data = TextBytes(str(texts), cache=str(tmp_path / "cache"))
    module = LanguageModule(width=8, depth=1, heads=1, context=64, sample_bytes=0)
    size = "0" if text is None else r"\d+"
    with pytest.raises(UserError, match=rf"{split}\.bin has {size} bytes, fewer than one window of context 64"):
        quiet_trainer(max_steps=1).fit(module, data)
