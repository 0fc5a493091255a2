"""A checkpoint in parts is whole only where every part is, and no part outlives its checkpoints."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from src.engine.checkpoint import shards
from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.files import bytes_of, clear_temporary, fault
from src.engine.checkpoint.shards import FAILED, IN_PARTS, Rows, await_parts, join, load, part_path, sweep
from src.engine.checkpoint.write import IN_FRONT, WholeFiles, give_name, write_parts
from src.engine.files import replacing
from src.strategies import FSDP

WHOLE = {"a.weight": torch.arange(15.0).view(5, 3), "b": torch.arange(2.0)}


def save(folder: Path, step: int, start: str = "aaaa", name: str = "step={step:08d}", world: int = 2) -> Path:
    """A checkpoint as so many ranks write it, rank 0 last; `a.weight` is tied to another name."""
    path = folder / f"{name.format(step=step)}.ckpt"
    names = dict.fromkeys((*WHOLE, "tied"), IN_PARTS)
    files: list[Path | None] = [part_path(path, start, rank, world) for rank in range(world)]
    for rank in reversed(range(world)):
        parts = {f"state_dict.{key}": value.tensor_split(world)[rank].clone() for key, value in WHOLE.items()}
        parts["state_dict.tied"] = parts["state_dict.a.weight"]
        content: dict[str, Any] = {"global_step": step, "epoch": 0, "state_dict": names, "loops": {}}
        assert write_parts(content, parts, path, files, rank) is None
    return path


def parts(folder: Path) -> list[Path]:
    return sorted((folder / "shards").iterdir())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parts_come_together(tmp_path: Path, world: int) -> None:
    """In the order of the ranks, also where a rank has no row of a tensor; tied weights stay one tensor."""
    path = save(tmp_path, 3, world=world)
    found = load(path)
    assert "parts" not in found
    for name, value in WHOLE.items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=0, atol=0)
    assert found["state_dict"]["tied"] is found["state_dict"]["a.weight"]
    assert fault(path) is None
    assert bytes_of(path) == path.stat().st_size + sum(part.stat().st_size for part in parts(tmp_path))


def missing(part: Path) -> None:
    part.unlink()


def truncated(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


def zeroed(part: Path) -> None:
    content = bytearray(part.read_bytes())
    at = content.find(WHOLE["a.weight"][3:].numpy().tobytes())
    content[at : at + 16] = bytes(16)
    part.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(missing, "is missing"), (truncated, "bytes and had"), (zeroed, "the checksum of")],
    ids=["missing", "truncated", "zeroed"],
)
def test_one_bad_part_is_a_damaged_checkpoint(
    tmp_path: Path, damage: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, the checkpoint is put aside, and the one before is taken."""
    save(tmp_path, 2)
    last = save(tmp_path, 4)
    part = part_path(last, "aaaa", 1, 2)
    damage(part)
    reason = fault(last)
    assert reason is not None
    assert f"shards/{part.name}, a part of it" in reason
    assert said in reason
    assert newest(tmp_path, quarantine=True) == (tmp_path / "step=00000002.ckpt", 2)
    assert "damaged; moved to" in capsys.readouterr().out
    clear_temporary(tmp_path)  # as the next start does: what was put aside keeps the parts it has
    assert part_path(last, "aaaa", 0, 2).exists()


def test_parts_stay_as_long_as_a_checkpoint_has_them(tmp_path: Path) -> None:
    """Another name of it counts, also a renamed file and one that was moved aside; later steps may be on their way."""
    first, second, third = (save(tmp_path, step) for step in (1, 2, 3))
    give_name(first, tmp_path / "best-step=00000001.ckpt")
    (tmp_path / "rolled-back").mkdir()
    second.rename(tmp_path / "rolled-back/mine.ckpt")
    first.unlink()
    third.unlink()
    sweep(tmp_path, below=3)
    assert len(parts(tmp_path)) == 6
    sweep(tmp_path, below=4)
    assert [part.name[:13] for part in parts(tmp_path)] == ["step=00000001"] * 2 + ["step=00000002"] * 2
    assert fault(tmp_path / "best-step=00000001.ckpt") is fault(tmp_path / "rolled-back/mine.ckpt") is None
    (tmp_path / "best-step=00000001.ckpt").unlink()
    sweep(tmp_path)
    assert len(parts(tmp_path)) == 2


def test_a_torn_file_keeps_the_parts_of_its_step(tmp_path: Path) -> None:
    """What it has cannot be read any more, and may be mended; its name says the step."""
    torn, other = save(tmp_path, 1), save(tmp_path, 2)
    torn.write_bytes(b"PK")
    other.unlink()
    sweep(tmp_path)
    assert {part.name[:13] for part in parts(tmp_path)} == {"step=00000001"}


def test_a_start_clears_what_a_killed_save_has_left(tmp_path: Path) -> None:
    """Parts without the file that names them, and half written ones."""
    save(tmp_path, 1)
    save(tmp_path, 2, start="bbbb").unlink()
    (tmp_path / "shards/.step=00000003-cccc.0-of-2.pt.tmp").touch()
    clear_temporary(tmp_path)
    assert {part.name[:18] for part in parts(tmp_path)} == {"step=00000001-aaaa"}


def test_a_step_that_is_saved_again_takes_no_part_of_the_save_before(tmp_path: Path) -> None:
    """A start that was killed in a save of step 1 has left rank 1's part; the next one waits for its own."""
    save(tmp_path, 1, start="aaaa").unlink()
    path = save(tmp_path, 1, start="bbbb")
    assert {part.name[:18] for part in shards.parts_of(torch.load(path), path)} == {"step=00000001-bbbb"}


def test_rank_0_waits_for_the_others(tmp_path: Path) -> None:
    """The file that makes a checkpoint of the parts is written when the last one is there."""
    path = tmp_path / "step=00000001.ckpt"
    files: list[Path | None] = [part_path(path, "aaaa", rank, 2) for rank in range(2)]
    first = threading.Thread(target=write_parts, args=({"global_step": 1}, {"x": torch.ones(1)}, path, files, 0))
    first.start()
    time.sleep(0.3)
    assert not path.exists()
    assert write_parts({}, {"x": torch.ones(1)}, path, files, 1) is None
    first.join(30)
    assert fault(path) is None


def test_a_rank_that_cannot_write_ends_the_save(tmp_path: Path) -> None:
    """Rank 0 says whose part is missing and why, and takes its own away; nothing is there that looks like a file."""
    path = tmp_path / "step=00000001.ckpt"
    files: list[Path | None] = [part_path(path, "aaaa", rank, 2) for rank in range(2)]
    unsafe = {"x": threading.Lock()}
    assert write_parts({}, unsafe, path, files, 1) is not None  # type: ignore[arg-type]
    error = write_parts({"global_step": 1}, {"x": torch.ones(1)}, path, files, 0)
    assert isinstance(error, OSError)
    assert str(error).startswith("step=00000001-aaaa.1-of-2.pt: cannot pickle")
    assert [part.name for part in parts(tmp_path)] == [f"step=00000001-aaaa.1-of-2.pt{FAILED}"]
    assert list(tmp_path.glob("*.ckpt")) == []


def test_a_silent_rank_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its file grows it is; then the text says what may be wrong."""
    monkeypatch.setattr(shards, "SILENCE_SECONDS", 1.0)
    part = tmp_path / "step=00000001-aaaa.1-of-2.pt"
    begun = time.monotonic()
    grown = []

    def grow() -> None:
        for _ in range(4):
            time.sleep(0.5)
            with (tmp_path / f".{part.name}.tmp").open("ab") as file:
                file.write(b"more")
            grown.append(time.monotonic())

    writer = threading.Thread(target=grow)
    writer.start()
    with pytest.raises(OSError, match=r"its rank has died, or .* is not the same folder on all nodes"):
        await_parts([part])
    writer.join()
    assert time.monotonic() - begun > grown[-1] - begun
    with replacing(part) as temporary:
        temporary.touch()
    await_parts([part])


def test_each_save_has_names_of_its_own(tmp_path: Path) -> None:
    """Of the same step too: what another start has left there is never taken for a part of this one."""
    path = tmp_path / "step=00000001.ckpt"
    for _ in range(2):
        WholeFiles().save_parts({"global_step": 1, "w": IN_PARTS}, {"w": torch.ones(2)}, path, IN_FRONT)
        assert torch.equal(load(path)["w"], torch.ones(2))
    assert len(parts(tmp_path)) == 2


def test_what_need_not_be_in_memory_stays_on_the_disk(tmp_path: Path) -> None:
    """Under the keys that are asked for, each tensor is put together when somebody wants it; others are not read."""
    path = save(tmp_path, 1)
    content = torch.load(path, weights_only=True)
    lazy = join(content, path, ("state_dict",))["state_dict"]["a.weight"]
    assert lazy.shape == (5, 3)
    assert torch.equal(lazy.whole(), WHOLE["a.weight"])
    assert load(path, ("global_step",)) == {"global_step": 1}


def test_a_sharded_strategy_leaves_an_optimizers_state_there(tmp_path: Path) -> None:
    """Every rank loads, and the whole state of all would not fit into a node's memory."""
    strategy = FSDP()
    strategy.checkpoint_io = WholeFiles()
    path = tmp_path / "step=00000001.ckpt"
    state = {"state_dict": {"w": IN_PARTS}, "optimizer_states": [{"state": {0: {"exp_avg": IN_PARTS}}}]}
    rows = {"state_dict.w": torch.ones(2), "optimizer_states[0].state.0.exp_avg": torch.ones(2)}
    strategy.checkpoint_io.save_parts({"global_step": 1, **state}, rows, path, IN_FRONT)
    found = strategy.load_checkpoint(path, weights_only=True)
    assert torch.equal(found["state_dict"]["w"], torch.ones(2))
    assert isinstance(found["optimizer_states"][0]["state"][0]["exp_avg"], Rows)
