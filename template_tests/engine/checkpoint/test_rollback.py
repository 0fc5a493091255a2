"""`python -m src.checkpoint rollback`: back to an earlier step, and on from there."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest

from src.checkpoint.__main__ import main
from src.checkpoint.compare import differences, outcome
from src.checkpoint.rollback import roll_back
from template_tests.checkpoints import a_run, contents, refused, said, saved, zeroed
from tests.commands import SMALL, fit


def test_later_checkpoints_are_moved_aside(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of N steps or more go to rolled-back, the best too, and DONE goes; nothing is deleted or replaced."""
    run = a_run(run_root, "mine", 186, 187, 188, 189, continue_command="python -m src.cli fit --run mine")
    saved(run / "checkpoints/best-step=00000188.ckpt", 188, 0.5)
    kept = saved(run / "checkpoints/rolled-back/step=00000189.ckpt", 189, fill=7.0).read_bytes()
    tripped = saved(run / "checkpoints/tripped/step=00000500.ckpt", 500)
    (run / "DONE").touch()
    count = len(list(run.rglob("*.ckpt")))
    out = said(capsys, "rollback", "mine", "--before-step", "188")
    assert "resumes from step 187, step=00000187.ckpt" in out
    assert "continue with: python -m src.cli fit --run mine" in out
    folder = run / "checkpoints"
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["step=00000186.ckpt", "step=00000187.ckpt"]
    assert sorted(path.name for path in (folder / "rolled-back").iterdir()) == [
        "best-step=00000188.ckpt",
        "step=00000188.ckpt",
        "step=00000189-2.ckpt",
        "step=00000189.ckpt",
    ]
    assert (folder / "rolled-back/step=00000189.ckpt").read_bytes() == kept
    assert len(list(run.rglob("*.ckpt"))) == count
    assert tripped.exists()
    assert not (run / "DONE").exists()
    assert (run / "DONE.rolled-back").exists()
    assert "no checkpoint is that late" in said(capsys, "rollback", "mine", "--before-step", "188")


def test_without_a_whole_earlier_one_nothing_is_changed(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too early a step, or only a damaged file before it, is refused with the steps there are."""
    run = a_run(run_root, "mine", 187, 188)
    (run / "DONE").touch()
    before = contents(run)
    assert "steps there: 187, 188" in refused(capsys, "rollback", "mine", "--before-step", "187")
    assert contents(run) == before
    zeroed(run / "checkpoints/step=00000187.ckpt")
    before = contents(run)
    assert "before step 188 (1 damaged)" in refused(capsys, "rollback", "mine", "--before-step", "188")
    assert contents(run) == before


def test_a_run_that_is_trained_is_not_rolled_back(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While somebody holds the lock the rollback is refused with who it is, and changes nothing."""
    run = a_run(run_root, "mine", 187, 188)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 1 on node7")
        lock.flush()
        before = contents(run)
        assert "by process 1 on node7" in refused(capsys, "rollback", "mine", "--before-step", "188")
        assert contents(run) == before
    assert main(["rollback", "mine", "--before-step", "188"]) == 0


def test_a_rollback_that_is_killed_leaves_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of moves the next start takes something, never later than before; then it can be repeated."""
    whole = a_run(tmp_path, "whole", 50, 60, 100)
    saved(whole / "checkpoints/best-step=00000110.ckpt", 110, 0.1)
    (whole / "DONE").touch()
    rename = Path.rename
    for moves in range(4):
        run = Path(shutil.copytree(whole, tmp_path / f"killed-{moves}"))
        done: list[Path] = []

        def killed(path: Path, target: Path, done: list[Path] = done, moves: int = moves) -> None:
            if len(done) == moves:
                raise KeyboardInterrupt
            done.append(rename(path, target))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            if moves < 3:
                with pytest.raises(KeyboardInterrupt):
                    roll_back(run, 60)
            else:
                roll_back(run, 60)
        assert not (run / "DONE").exists()
        names = {path.name for path in run.glob("checkpoints/*.ckpt")}
        assert "step=00000050.ckpt" in names
        assert "step=00000060.ckpt" in names or "step=00000100.ckpt" not in names
        assert moves == 0 or not any(name.startswith("best-") for name in names)
        roll_back(run, 60)
        assert [path.name for path in run.glob("checkpoints/*.ckpt")] == ["step=00000050.ckpt"]


def test_a_rolled_back_run_ends_as_if_it_had_gone_through(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run goes on from the chosen step, and ends with the same states and rows as before."""
    keep = ["--checkpoint.every_n_steps", "1", "--checkpoint.keep", "9", "--model.dropout", "0.3"]
    run = fit(run_root, "mine", *SMALL, *keep)
    other = Path(shutil.copytree(run, run_root / "whole"))
    whole = outcome(other)
    capsys.readouterr()
    listed = json.loads(said(capsys, "list", "mine", "--json"))
    assert {entry["monitor"] for entry in listed if entry["kind"] == "best"} == {"val/accuracy"}
    assert "from step 2," in said(capsys, "rollback", "mine", "--before-step", "3")
    fit(run_root, "mine", *SMALL, *keep)
    assert "continues from step 2" in capsys.readouterr().out
    assert list(differences(outcome(run), whole)) == []
    assert said(capsys, "diff", "mine", str(other)) == "identical\n"
    assert "finished" in said(capsys, "status", "mine")


def test_what_a_best_state_means_for_exactness_is_said(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a validation in the middle of a step finds a best that no run goes on from exactly: the note says when."""
    run = a_run(run_root, "mine", 9)
    saved(run / "checkpoints/best-step=00000005.ckpt", 5, 0.1)
    assert "note: if the best was found in the middle of a step" in said(
        capsys, "rollback", "mine", "--before-step", "9"
    )
