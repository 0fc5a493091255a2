"""`python -m src.checkpoint export`: weights that load into the plain network."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from src.checkpoint.__main__ import main
from src.engine.checkpoint.shards import IN_PARTS, part_path
from src.engine.checkpoint.write import write_parts
from tests.commands import SMALL, fit, weights
from tests.small_task import SmallModule, SmallNet


class Tied(nn.Module):
    """An output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)
        self.outer.weight = self.inner.weight


def saved(run: Path, state: dict[str, Any], step: int = 5, name: str | None = None) -> Path:
    """A checkpoint of the run with these weights."""
    path = run / "checkpoints" / (name or f"step={step:08d}.ckpt")
    path.parent.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").touch()
    torch.save({"global_step": step, "epoch": 1, "state_dict": state}, path)
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["export", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


FORMATS = pytest.mark.parametrize("suffix", [".pt", ".safetensors"])


def test_a_trained_network_loads_into_the_plain_one(
    run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a real training saved loads with strict=True into the network, or with its whole names into the module."""
    run = fit(run_root, "mine", *SMALL, "--trainer.max_steps", "2")
    trained = weights(run)
    for suffix in (".pt", ".safetensors"):
        out = tmp_path / f"net{suffix}"
        assert main(["export", "mine", str(out)]) == 0
        assert "'model.', which is dropped" in capsys.readouterr().out
        net = SmallNet(depth=2)
        net.load_state_dict(load(out), strict=True)
        assert torch.equal(net.head.weight, trained["model.head.weight"])
        assert main(["export", "mine", str(out), "--prefix", "", "--force"]) == 0
        SmallModule().load_state_dict(load(out), strict=True)


@FORMATS
def test_a_checkpoint_in_parts_becomes_one_file(run_root: Path, tmp_path: Path, suffix: str) -> None:
    """Each tensor is put together from what two ranks have written, and loads with strict=True on one process."""
    path = saved(run_root / "parts", {})
    state = SmallModule().state_dict()
    files: list[Path | None] = [part_path(path, "aaaa", rank, 2) for rank in range(2)]
    for rank in (1, 0):
        rows = {f"state_dict.{name}": value.tensor_split(2)[rank].clone() for name, value in state.items()}
        content = {"global_step": 5, "epoch": 1, "state_dict": dict.fromkeys(state, IN_PARTS)}
        assert write_parts(content, rows, path, files, rank) is None
    out = tmp_path / f"weights{suffix}"
    assert main(["export", "parts", str(out), "--prefix", ""]) == 0
    module = SmallModule()
    module.load_state_dict(load(out), strict=True)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


@FORMATS
def test_tied_weights_are_there_under_both_names(run_root: Path, tmp_path: Path, suffix: str) -> None:
    """Two names of one tensor load with strict=True; .pt keeps it once."""
    net = Tied()
    saved(run_root / "mine", {"model.inner.weight": net.inner.weight, "model.outer.weight": net.outer.weight})
    out = tmp_path / f"net{suffix}"
    assert main(["export", "mine", str(out)]) == 0
    other = Tied()
    other.load_state_dict(load(out), strict=True)
    assert torch.equal(other.outer.weight, net.outer.weight)
    assert out.stat().st_size < (1.5 if suffix == ".pt" else 2.5) * net.inner.weight.numel() * 4


def test_a_transposed_view_is_written_with_its_values_in_order(run_root: Path, tmp_path: Path) -> None:
    """In both formats, of which .safetensors holds contiguous tensors alone."""
    matrix = torch.arange(6.0).reshape(2, 3).T
    saved(run_root / "mine", {"net.w": matrix, "net.b": torch.ones(1)})
    for suffix in (".pt", ".safetensors"):
        assert main(["export", "mine", str(tmp_path / f"net{suffix}")]) == 0
        assert torch.equal(load(tmp_path / f"net{suffix}")["w"], matrix)


@pytest.mark.parametrize(
    ("names", "prefix", "exported"),
    [
        (["model.a.w", "model.b"], None, ["a.w", "b"]),
        (["model.a.w", "head.b"], None, ["head.b", "model.a.w"]),
        (["model.a.w", "head.b"], "model.", ["a.w"]),
        (["model.a.w", "head.b"], "model", ["a.w"]),
        (["model.a.w", "modelled.b"], "model", ["a.w"]),
        (["model.a.w", "model.b"], "", ["model.a.w", "model.b"]),
        (["w", "b"], None, ["b", "w"]),
        (["w"], None, ["w"]),
        (["model._orig_mod.a.w", "model.a._checkpoint_wrapped_module.b"], None, ["a.b", "a.w"]),
    ],
)
def test_names_are_those_of_the_plain_network(
    run_root: Path, tmp_path: Path, names: list[str], prefix: str | None, exported: list[str]
) -> None:
    """Wrappers are no part of a name, nor is what all names begin with; --prefix takes one part, '' everything."""
    saved(run_root / "mine", {name: torch.ones(1) for name in names})
    chosen = [] if prefix is None else ["--prefix", prefix]
    assert main(["export", "mine", str(tmp_path / "net.pt"), *chosen]) == 0
    assert sorted(load(tmp_path / "net.pt")) == exported


def test_names_that_cannot_be(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix that nothing is under is refused with the names there are."""
    out = str(tmp_path / "net.pt")
    saved(run_root / "mine", {"model.w": torch.ones(1), "head.w": torch.ones(1)})
    assert "nothing is under --prefix 'net.'; names begin with head., model." in refused(
        capsys, "mine", out, "--prefix", "net"
    )
    assert list(tmp_path.iterdir()) == [run_root]


def test_the_newest_the_best_or_a_step(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the newest whole state unless --best or --step says another; a file is a choice by itself."""
    run = run_root / "mine"
    for step in (5, 9):
        saved(run, {"w": torch.tensor([float(step)])}, step)
    best = saved(run, {"w": torch.tensor([7.0])}, 7, "best-step=00000007.ckpt")
    saved(run, {"w": torch.tensor([99.0])}, 99).write_bytes(b"torn")
    out = tmp_path / "net.pt"
    for choice, value in (([], 9), (["--best"], 7), (["--step", "5"], 5)):
        assert main(["export", "mine", *choice, str(out), "--force"]) == 0
        assert ("step=00000099.ckpt is damaged" in capsys.readouterr().out) == (choice == [])
        assert load(out)["w"].item() == value
    assert main(["export", str(best), str(out), "--force"]) == 0
    assert load(out)["w"].item() == 7
    capsys.readouterr()
    assert "no checkpoint of step 6; steps there: 5, 7, 9" in refused(capsys, "mine", "--step", "6", "x.pt")
    assert "not allowed with" in refused(capsys, "mine", "--step", "5", "--best", "x.pt")
    assert "is a file, so there is no choice" in refused(capsys, str(best), "--best", "x.pt")
    best.unlink()
    assert "has no best checkpoint" in refused(capsys, "mine", "--best", "x.pt")
    (run_root / "empty/checkpoints").mkdir(parents=True)
    assert "has no checkpoint yet" in refused(capsys, "empty", "x.pt")


def test_a_damaged_state_is_not_exported(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 KB of zeros in the middle of the chosen file are found before anything is written."""
    path = saved(run_root / "mine", {"w": torch.ones(4096)})
    with path.open("rb+") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(4096))
    assert "is damaged (the checksum" in refused(capsys, "mine", "--step", "5", str(tmp_path / "net.pt"))
    assert list(tmp_path.iterdir()) == [run_root]


def test_out_is_never_replaced_unasked(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing OUT stays as it is without --force."""
    saved(run_root / "mine", {"w": torch.ones(1)})
    out = tmp_path / "net.pt"
    out.write_text("mine")
    assert "exists already" in refused(capsys, "mine", str(out))
    assert out.read_text() == "mine"
    assert main(["export", "mine", str(out), "--force"]) == 0
    assert load(out)["w"].item() == 1


def test_an_out_that_cannot_be(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another kind of file, a folder and a missing folder are refused with what would do."""
    saved(run_root / "mine", {"w": torch.ones(1)})
    for name in ("net.onnx", "net"):
        assert "ends in .safetensors or .pt" in refused(capsys, "mine", str(tmp_path / name))
    (tmp_path / "folder.pt").mkdir()
    assert "Is a directory" in refused(capsys, "mine", str(tmp_path / "folder.pt"), "--force")
    assert "cannot be written" in refused(capsys, "mine", str(tmp_path / "no/net.pt"))


@FORMATS
def test_a_write_that_fails_leaves_nothing(
    run_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    """A full disk is one line; the file of before is whole and no half of the new one stays."""
    saved(run_root / "mine", {"w": torch.ones(1)})
    out = tmp_path / f"net{suffix}"
    out.write_text("before")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert "No space left on device" in refused(capsys, "mine", str(out), "--force")
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, run_root.name]


def test_safetensors_say_where_they_are_from(run_root: Path, tmp_path: Path) -> None:
    """Run and step are in the file, as text; others may read it as they may any file made here."""
    saved(run_root / "mine", {"w": torch.ones(1)}, 120)
    out = tmp_path / "net.safetensors"
    assert main(["export", "mine", str(out)]) == 0
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert (metadata["run"], metadata["step"]) == ("mine", "120")
    (tmp_path / "made").touch()
    assert out.stat().st_mode == (tmp_path / "made").stat().st_mode


def test_without_the_package_it_says_what_to_install(
    run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without safetensors only that format is refused, with both ways out."""
    saved(run_root / "mine", {"w": torch.ones(1)})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused(capsys, "mine", str(tmp_path / "net.safetensors"))
    assert "pip install safetensors" in said
    assert "net.pt" in said
    assert main(["export", "mine", str(tmp_path / "net.pt")]) == 0


def test_safetensors_hold_tensors_alone(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a module adds by get_extra_state goes into .pt, and is named where it cannot go."""
    saved(run_root / "mine", {"net.w": torch.ones(1), "net._extra_state": {"scale": 2}})
    assert "_extra_state is none: give a name that ends in .pt" in refused(
        capsys, "mine", str(tmp_path / "net.safetensors")
    )
    assert main(["export", "mine", str(tmp_path / "net.pt")]) == 0
    assert torch.load(tmp_path / "net.pt", weights_only=True)["_extra_state"] == {"scale": 2}
