"""What `python -m src.doctor` says before a run is started."""

import errno
import os
from pathlib import Path

import pytest
import torch

from src.doctor import __main__ as doctor
from src.engine.run import temporary


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run root that outlives the machine, whatever lies under it here."""
    monkeypatch.setattr(temporary, "NODE_LOCAL", ())
    monkeypatch.setattr(temporary, "VANISHING_FILESYSTEMS", ())
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_a_good_place_for_runs_is_described(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Place, room and speed; exit code 0, and no trace of the measurement."""
    assert doctor.main(["--storage"]) == 0
    said = capsys.readouterr().out
    assert f"{root} (RUN_ROOT;" in said
    assert "GiB are free" in said
    assert "MiB/s" in said
    assert "gpu" not in said
    assert list(root.iterdir()) == []


def test_the_whole_machine_is_described(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an option: versions and cards too."""
    assert doctor.main([]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= {"python", "cpus", "room"}


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [("echo 570.86.15\necho 570.86.15", 0, "570.86.15\n"), ("echo No devices; exit 9", 1, "warning: nvidia-smi does")],
    ids=["answers", "fails"],
)
def test_a_gpus_driver_and_nccl_are_named(
    script: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their versions are what a report of an NCCL error needs; a driver that does not answer is a warning."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert doctor.main([]) == code
    output = capsys.readouterr().out
    assert f"driver        {said}" in output
    assert "nccl          2.27.3, CUDA" in output


def test_a_place_that_vanishes_is_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node's own disk may cost the run: said, and exit code 1."""
    monkeypatch.setattr(temporary, "NODE_LOCAL", (str(root.parent),))
    assert doctor.main(["--storage"]) == 1
    assert f"warning: the run root {root} is node-local" in capsys.readouterr().out


def test_a_full_disk_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No room for the measurement: what to do, exit code 2, and no half file left."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert doctor.main(["--storage"]) == 2
    assert capsys.readouterr().err == (
        f"error: {root} does not take 64 MiB (No space left on device): make room or set RUN_ROOT\n"
    )
    assert list(root.iterdir()) == []


def test_a_place_that_cannot_be_made_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run root inside of a file: exit code 2."""
    root.parent.joinpath("file").touch()
    monkeypatch.setenv("RUN_ROOT", str(root.parent / "file/runs"))
    assert doctor.main([]) == 2
    assert "cannot be written to (Not a directory)" in capsys.readouterr().err
