"""`python -m src.checkpoint`: list, verify and bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from src.checkpoint.__main__ import main
from template_tests.checkpoints import a_run, refused, said, saved, steps, truncated, zeroed
from tests.commands import ROOT, environment


def test_it_starts_without_lightning(run_root: Path) -> None:
    """`list` imports neither Lightning nor jsonargparse, which take seconds."""
    a_run(run_root, "mine", 3)
    code = (
        "import runpy, sys; sys.argv = ['checkpoint', 'list', 'mine']\n"
        "try: runpy.run_module('src.checkpoint', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "print('heavy:', sorted({'lightning', 'pytorch_lightning', 'jsonargparse', 'tensorboard'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(run_root), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "step=00000003.ckpt" in done.stdout
    assert "heavy: []" in done.stdout


def test_every_run_has_a_line(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name each run is shown with state, last step and candidates; a broken summary is none."""
    assert f"no run in {run_root} yet" in said(capsys, "list")
    done = a_run(run_root, "whole", 10, 20, exit_reason="finished", last_step=20)
    (done / "DONE").touch()
    saved(done / "checkpoints/quarantine/step=00000005.ckpt", 5)
    (a_run(run_root, "broken") / "summary.json").write_text("{")
    lines = {line.split()[0]: line.split()[1:4] for line in said(capsys, "list").splitlines()}
    assert lines["whole"] == ["finished", "20", "2"]
    assert lines["broken"] == ["new", "-", "0"]
    runs = {run["name"]: run for run in json.loads(said(capsys, "list", "--json"))}
    newest = max(path.stat().st_mtime for path in done.glob("checkpoints/*.ckpt"))
    assert runs["whole"] == {
        "name": "whole",
        "state": "finished",
        "last_step": 20,
        "checkpoints": 2,
        "newest_modified": newest,
        "folder": str(done),
    }
    assert runs["broken"]["newest_modified"] is None


def test_checkpoints_are_listed_by_the_step_inside(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest step comes first, whatever the file is called, and each kind is told."""
    run = a_run(run_root, "mine", 9, 100)
    (run / "checkpoints/step=00000009.ckpt").rename(run / "checkpoints/step=00000999.ckpt")
    saved(run / "checkpoints/best-step=00000050.ckpt", 50, 0.25)
    saved(run / "checkpoints/copy.ckpt", 60)
    for kind, step in (("quarantine", 1), ("tripped", 110), ("unhealthy", 70), ("rolled-back", 80)):
        saved(run / f"checkpoints/{kind}/step={step:08d}.ckpt", step)
    rows = [line.split() for line in said(capsys, "list", "mine").splitlines()]
    assert rows[0] == ["STEP", "EPOCH", "METRIC", "SIZE", "AGE", "VALID", "KIND", "FILE"]
    assert [(row[0], row[1], row[2], row[-2], row[-1]) for row in rows[1:]] == [
        ("110", "11", "-", "tripped", "step=00000110.ckpt"),
        ("100", "10", "-", "newest", "step=00000100.ckpt"),
        ("80", "8", "-", "rolled-back", "step=00000080.ckpt"),
        ("70", "7", "-", "unhealthy", "step=00000070.ckpt"),
        ("60", "6", "-", "other", "copy.ckpt"),
        ("50", "5", "val/loss=0.25", "best", "best-step=00000050.ckpt"),
        ("9", "0", "-", "newest", "step=00000999.ckpt"),
        ("1", "0", "-", "quarantine", "step=00000001.ckpt"),
    ]
    assert said(capsys, "list", str(run)) == said(capsys, "list", f"{run}/") == said(capsys, "list", "mine")


def test_before_step_is_strict(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--before-step 188 shows 187 and not 188; a file whose step cannot be read stays in the list, as the last."""
    run = a_run(run_root, "mine", 186, 187, 188, 189)
    assert steps(said(capsys, "list", "mine", "--before-step", "188")) == ["187", "186"]
    assert steps(said(capsys, "list", "mine", "--before-step", "189")) == ["188", "187", "186"]
    assert "has no checkpoint before step 186" in said(capsys, "list", "--before-step", "186", "mine")
    truncated(run / "checkpoints/step=00000186.ckpt")
    assert steps(said(capsys, "list", "mine", "--before-step", "188")) == ["187", "-"]
    listed = json.loads(said(capsys, "list", "mine", "--before-step", "188", "--json"))
    assert [entry["step"] for entry in listed] == [187, None]


def test_an_empty_run_says_so(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without checkpoints is no error, neither as text nor as JSON."""
    a_run(run_root, "mine")
    assert "has no checkpoint yet" in said(capsys, "list", "mine")
    assert json.loads(said(capsys, "list", "mine", "--json")) == []
    assert "no checkpoint yet" in said(capsys, "verify", "mine")


def test_json_has_values(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes, seconds since the epoch, metric and reason come as values; a metric that is no number as null."""
    run = a_run(run_root, "mine", 9)
    best = saved(run / "checkpoints/best-step=00000050.ckpt", 50, 0.25)
    diverged = saved(run / "checkpoints/best-step=00000040.ckpt", 40, float("nan"))
    bad = truncated(saved(run / "checkpoints/step=00000060.ckpt", 60))
    listed = {entry["file"]: entry for entry in json.loads(said(capsys, "list", "mine", "--json"))}
    stat = best.stat()
    assert listed[str(best)] == {
        "step": 50,
        "epoch": 5,
        "monitor": "val/loss",
        "metric": 0.25,
        "bytes": stat.st_size,
        "modified": stat.st_mtime,
        "valid": True,
        "reason": None,
        "weights_only": False,
        "kind": "best",
        "file": str(best),
    }
    assert listed[str(diverged)]["metric"] is None
    assert (listed[str(bad)]["valid"], listed[str(bad)]["step"]) == (False, None)
    assert listed[str(bad)]["reason"] == "BadZipFile: File is not a zip file"


def test_a_truncated_file_is_listed_last_with_the_reason(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be opened is in the list, without a step and with what is wrong."""
    run = a_run(run_root, "mine", 9, 100)
    truncated(run / "checkpoints/step=00000100.ckpt")
    listed = said(capsys, "list", "mine")
    assert steps(listed) == ["9", "-"]
    assert "damaged: BadZipFile: File is not a zip file" in listed.splitlines()[-1]


def test_verify_reads_every_byte(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 KB of zeros, which `list` does not see, are found: exit code 65, and a restart takes the one before."""
    run = a_run(run_root, "mine", 9, 100)
    assert "a restart resumes from step 100" in said(capsys, "verify", "mine")
    bad = zeroed(run / "checkpoints/step=00000100.ckpt")
    assert "damaged" not in said(capsys, "list", "mine")
    out = said(capsys, "verify", "mine", code=65)
    assert "mine/checkpoints/step=00000009.ckpt  ok\n" in out
    assert "mine/checkpoints/step=00000100.ckpt  damaged: the checksum of" in out
    assert out.endswith("a restart resumes from step 9, step=00000009.ckpt\n")
    assert "damaged: the checksum of" in said(capsys, "verify", str(bad), code=65)
    assert "ok" in said(capsys, "verify", str(run / "checkpoints/step=00000009.ckpt"))
    assert bad.exists()


def test_what_was_moved_aside_is_no_candidate(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged file in quarantine is said and does not make the run damaged."""
    run = a_run(run_root, "mine", 9)
    truncated(saved(run / "checkpoints/quarantine/step=00000100.ckpt", 100))
    out = said(capsys, "verify", "mine")
    assert "quarantine/step=00000100.ckpt  damaged: " in out
    assert "(quarantine, no candidate)" in out


def test_without_a_whole_one_verify_says_what_a_restart_would(
    run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None whole: exit code 65 and the line of a restart; without a name the other runs are verified all the same."""
    truncated(a_run(run_root, "bad", 9) / "checkpoints/step=00000009.ckpt")
    a_run(run_root, "good", 5)
    assert main(["verify", "bad"]) == 65
    assert capsys.readouterr().err.startswith("error: none of the 1 checkpoints in")
    assert main(["verify"]) == 65
    assert "good: a restart resumes from step 5" in capsys.readouterr().out


def test_bad_input_is_one_line(run_root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Unknown runs, folders, numbers, options and commands: one line with what would do, exit code 2."""
    a_run(run_root, "letters-1", 9)
    unknown = refused(capsys, "list", "leters-1")
    assert f"no run 'leters-1' in {run_root}; like it: letters-1" in unknown
    assert "the newest there: letters-1" in refused(capsys, "status", "zzz")
    assert "is neither a checkpoint file nor a run directory" in refused(capsys, "list", str(tmp_path))
    assert "is neither a checkpoint file nor a run directory" in refused(capsys, "verify", str(tmp_path / "x.ckpt"))
    assert "'-5' is no number of steps" in refused(capsys, "list", "letters-1", "--before-step=-5")
    assert "'x' is no number of steps" in refused(capsys, "rollback", "letters-1", "--before-step", "x")
    assert "required: --before-step" in refused(capsys, "rollback", "letters-1")
    assert "unrecognized arguments: --js" in refused(capsys, "list", "--js")
    assert "choose from" in refused(capsys, "lst")
    assert "--help" in refused(capsys)
    assert "give a RUN as well" in refused(capsys, "list", "--before-step", "5")
