import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch

from src.engine.checkpoint.choose import NoWholeCheckpointError
from src.engine.errors import UserError
from src.engine.run import directory as module
from src.engine.run import lock, temporary
from src.engine.run.directory import Run, find_run, newest_first, open_run
from src.engine.run.lock import owner, release
from src.engine.run.manifest import describe_start
from src.engine.run.storage import require_room, run_root
from src.engine.run.temporary import filesystem
from template_tests.checkpoints import saved

CONFIG = "model:\n  width: 8\nseed_everything: 1\n"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A run root that nothing is doubtful about, wherever the tests keep their files."""
    monkeypatch.setattr(temporary, "NODE_LOCAL", ())
    monkeypatch.setattr(temporary, "filesystem", lambda _: "lustre")
    for name in temporary.NODE_LOCAL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def checkpoint(folder: Path, step: int, name: str | None = None) -> Path:
    path = folder / "checkpoints" / (name or f"step={step:08d}.ckpt")
    torch.save({"global_step": step}, path)
    return path


def test_a_run_root_is_made_where_it_is_missing(root):
    """The folder that RUN_ROOT names is made, and nothing else is left in it."""
    assert run_root() == (root, [])
    assert list(root.iterdir()) == []


@pytest.mark.usefixtures("root")
def test_without_run_root_runs_are_in_runs(monkeypatch, tmp_path):
    """Without RUN_ROOT runs live in ./runs, which is no reason for a note."""
    monkeypatch.delenv("RUN_ROOT")
    monkeypatch.chdir(tmp_path)
    assert run_root() == (tmp_path / "runs", [])


@pytest.mark.usefixtures("root")
def test_a_relative_run_root_is_said(monkeypatch, tmp_path):
    """A relative RUN_ROOT works and its absolute meaning is noted; one in the home folder is not relative."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ROOT", "here/runs")
    found, notes = run_root()
    assert found == tmp_path / "here" / "runs"
    assert len(notes) == 1
    assert f"means {found} here" in notes[0]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUN_ROOT", "~/mine")
    assert run_root() == (tmp_path / "mine", [])


@pytest.mark.usefixtures("root")
def test_a_run_root_that_cannot_be_written_to_is_refused(monkeypatch, tmp_path):
    """A RUN_ROOT that cannot be made is refused with the path and what to set."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "file" / "runs"))
    with pytest.raises(UserError, match=r"file/runs cannot be written to \(.+\): set RUN_ROOT"):
        run_root()


@pytest.mark.parametrize(
    ("mode", "said"),
    [(0o777, "refused"), (0o757, "refused"), (0o1777, ""), (0o775, "its group can write"), (0o755, ""), (0o700, "")],
)
def test_a_run_root_that_others_can_write_to_is_refused(root, monkeypatch, mode, said):
    """Everybody could change what a resumed run loads; a group's folder is noted; a launched job was asked before."""
    root.mkdir()
    root.chmod(mode)
    if said == "refused":
        with pytest.raises(UserError, match=f"everybody can write to the run root {root}.*chmod o-w"):
            run_root()
        monkeypatch.setenv("STOPPED_IS_READ", "1")
    assert [said in note for note in run_root()[1]] == [True] * (said != "refused" and bool(said))


@pytest.mark.usefixtures("root")
def test_a_run_root_that_is_made_is_its_owners(root):
    """Whatever the umask, so that no later start finds it open to others."""
    before = os.umask(0)
    try:
        assert run_root() == (root, [])
    finally:
        os.umask(before)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("name", ["TMPDIR", "SLURM_TMPDIR"])
def test_a_node_local_run_root_is_said(monkeypatch, tmp_path, name):
    """A run root inside of the node's temporary folder works and gets a note."""
    monkeypatch.setenv(name, str(tmp_path))
    assert [f"node-local ({tmp_path})" in note for note in run_root()[1]] == [True]
    monkeypatch.setenv(name, str(tmp_path / "scra"))
    assert run_root()[1] == []


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(("kind", "noted"), [("overlay", True), ("tmpfs", True), ("nfs4", False), ("ext4", False)])
def test_a_file_system_that_vanishes_is_said(monkeypatch, kind, noted):
    """A run root on a container's or in-memory file system gets a note, one on a disk does not."""
    monkeypatch.setattr(temporary, "filesystem", lambda _: kind)
    assert [f"own {kind} file system" in note for note in run_root()[1]] == [True] * noted


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", "overlay"),
        ("/scratch/me/runs", "lustre"),
        ("/scratch2/me", "overlay"),
        ("/scratch/fast/runs", "tmpfs"),
        ("/my disk/runs", "ext4"),
        ("/größe/runs", "xfs"),
        ("/over/me", "nfs4"),
    ],
)
def test_the_longest_mount_point_decides(tmp_path, path, kind):
    """The file system is that of the longest mount point above the path, the last one where two share a point."""
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "overlay / overlay rw 0 0\n10.0.0.1@tcp:/x /scratch lustre rw 0 0\nnone /scratch/fast tmpfs rw 0 0\n"
        "/dev/sdb /my\\040disk ext4 rw 0 0\n/dev/sdc /over ext4 rw 0 0\nserver:/y /over nfs4 rw 0 0\n"
        "/dev/sdd /größe xfs rw 0 0\n"
    )
    assert filesystem(Path(path), mounts) == kind
    assert filesystem(Path(path), tmp_path / "none") == ""


def test_all_checkpoints_must_fit(root, monkeypatch):
    """A run without room for the checkpoints that it will keep and does not have is refused, before it is made."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**30))
    require_room(root, 2**30, 3)
    for name in (None, "mine"):
        with pytest.raises(UserError, match=r"has 3\.0 GiB free and 4 checkpoints take 4\.0 GiB"):
            open_run(name, "letters", CONFIG, 2**30, checkpoints=4)
    assert list(root.iterdir()) == []
    open_run("mine", "letters", CONFIG, 0)
    saved(root / "mine/checkpoints/step=00000003.ckpt", 3)
    open_run("mine", "letters", CONFIG, 2**30, checkpoints=4)
    with pytest.raises(UserError, match="4 checkpoints"):
        open_run("mine", "letters", CONFIG, 2**30, checkpoints=5)


@pytest.mark.parametrize("name", [".lock", "checkpoints"])
def test_a_run_folder_that_takes_no_files_is_refused(root, name):
    """Before training, not at its end: neither the lock nor a checkpoint could be written."""
    run = open_run("mine", "letters", CONFIG, 0)
    release()
    place = run.path / name
    if place.is_dir():
        place.rmdir()
        place.touch()
    else:
        place.unlink()
        place.mkdir()
    with pytest.raises(UserError, match=f"mine/{name}: .* start again"):
        open_run("mine", "letters", CONFIG, 0)


def test_two_runs_of_the_same_second_never_share_a_folder(root, monkeypatch):
    """Runs that start at once with the same configuration get folders of their own."""
    root.mkdir()
    monkeypatch.setattr(module, "run_root", lambda: (root, []))  # its probe is per process, these are threads
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: open_run(None, "letters", CONFIG, 0), range(24)))
    assert len({run.folder for run in runs}) == 24
    assert {run.state for run in runs} == {"new"}
    assert all(run.name.startswith("letters-") and run.path.parent == root for run in runs)


@pytest.mark.usefixtures("root")
def test_a_restart_by_torchrun_continues_its_run(monkeypatch):
    """Without a name too: the newest run of the same configuration; by hand that is a new run, and a note."""
    first = open_run(None, "letters", CONFIG, 0)
    checkpoint(first.path, 3)
    assert open_run(None, "letters", CONFIG + "more: 1", 0).notes == []
    second = open_run(None, "letters", CONFIG, 0)
    assert second.notes == []  # the first one is being trained
    (second.path / "DONE").touch()
    release()
    third = open_run(None, "letters", CONFIG, 0)
    assert third.notes == [
        f"run {first.name} has the same configuration and is not finished: --run {first.name} continues it"
    ]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert open_run(None, "letters", CONFIG, 0).folder == first.folder  # the third one is being trained
    release()
    assert open_run(None, "letters", CONFIG, 0).folder == third.folder


@pytest.mark.usefixtures("root")
def test_a_named_run_is_new_then_continued_then_finished():
    """A run's name finds it again: new, then continued from its newest checkpoint, then finished."""
    run = open_run("mine", "letters", CONFIG, 0)
    assert (run.state, run.checkpoint, run.step, run.notes) == ("new", None, 0, [])
    assert (run.path / "config.yaml").read_text() == CONFIG
    assert open_run("mine", "letters", CONFIG, 0).state == "continued"
    newest = checkpoint(run.path, 30, "step=00000003.ckpt")
    checkpoint(run.path, 20)
    again = open_run("mine", "letters", CONFIG, 0)
    assert (again.state, again.checkpoint, again.step) == ("continued", str(newest), 30)
    run.write_json("summary.json", {"last_step": 40})
    (run.path / "DONE").touch()
    done = open_run("mine", "letters", "other: 1\n", 10**18)
    assert (done.state, done.step) == ("finished", 40)
    assert (run.path / "config.yaml").read_text() == CONFIG


def test_a_changed_configuration_is_said_and_the_old_one_kept(root):
    """Each start with another configuration notes old and new values and keeps the old file under the next number."""
    open_run("mine", "letters", CONFIG, 0)
    second = open_run("mine", "letters", CONFIG.replace("8", "16"), 0)
    assert second.notes == ["changed since the last start: model.width 8 -> 16"]
    third = open_run("mine", "letters", "model:\n  width: 16\n  depth: 2\n", 0)
    assert third.notes == ["changed since the last start: seed_everything 1 -> None, model.depth None -> 2"]
    assert (root / "mine" / "config.1.yaml").read_text() == CONFIG
    assert (root / "mine" / "config.2.yaml").read_text() == CONFIG.replace("8", "16")
    assert "depth: 2" in (root / "mine" / "config.yaml").read_text()
    assert open_run("mine", "letters", "model:\n  width: 16\n  depth: 2\n", 0).notes == []


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("name", ["", "a/b", "../up", "..", ".hidden", "/abs", "two\nlines"])
def test_a_name_that_is_no_folder_name_is_refused(name):
    """A run cannot be named out of the run root, nor be the run root itself."""
    with pytest.raises(UserError, match="is no folder name"):
        open_run(name, "letters", CONFIG, 0)


@pytest.mark.usefixtures("root")
def test_a_run_with_unreadable_checkpoints_only_is_not_started_anew():
    """Where checkpoints are and none can be read, the run is refused instead of trained from scratch."""
    run = open_run("mine", "letters", CONFIG, 0)
    (run.path / "checkpoints" / "step=00000005.ckpt").write_bytes(b"torn")
    with pytest.raises(UserError, match="none of the 1 checkpoints"):
        open_run("mine", "letters", CONFIG, 0)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("aside", ["unhealthy/step=00000005.ckpt", "quarantine/best-step=00000005-2.ckpt", None])
def test_a_run_whose_checkpoints_are_all_gone_is_not_started_anew(aside):
    """Where they were moved aside, or deleted after the summary named one, the run is refused; --fresh starts anew."""
    run = open_run("mine", "letters", CONFIG, 0)
    assert open_run("mine", "letters", CONFIG, 0).checkpoint is None  # killed before its first save
    run.write_json("summary.json", {"last_checkpoint": None if aside else "gone/step=00000005.ckpt"})
    if aside:
        (run.path / "checkpoints" / aside).parent.mkdir()
        checkpoint(run.path, 5, aside)
    told = aside.split("/")[0] if aside else "gone/step=00000005.ckpt is gone"
    with pytest.raises(NoWholeCheckpointError, match=f"(?s)there is no checkpoint in .*{told}.*--fresh"):
        open_run("mine", "letters", CONFIG, 0)
    assert open_run("mine", "letters", CONFIG, 0, fresh=True).name == "mine-2"
    checkpoint(run.path, 4)
    assert open_run("mine", "letters", CONFIG, 0).step == 4


@pytest.mark.usefixtures("root")
def test_the_lock_goes_with_the_trainer_and_not_with_its_children():
    """A child that was forked while the run is held keeps nobody from it, and takes nothing from the parent."""
    run, (stays, ends) = open_run("mine", "letters", CONFIG, 0), os.pipe()
    if not (child := os.fork()):
        os.close(ends)
        os.read(stays, 1)  # until the parent closes its end
        os._exit(0)
    try:
        assert owner(run.path) is not None
        release()
        until = time.monotonic() + 5  # the child may not have run yet
        while owner(run.path) is not None:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        os.close(ends)
        os.close(stays)
        os.waitpid(child, 0)


def beat(run, host, step=1):
    sign = {"written": time.time(), "host": host, "pid": os.getppid(), "step": step}
    (run.path / "heartbeat").write_text(json.dumps(sign))


@pytest.mark.parametrize(("host", "locks"), [("elsewhere", True), ("elsewhere", False), ("here", False)])
@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.usefixtures("root")
def test_a_heartbeat_keeps_others_from_a_run_where_locks_do_not(host, locks, lives, monkeypatch):
    """No locks at all, or one that holds on its own node alone: refused with 75 while the heartbeat goes on."""
    run = open_run("mine", "letters", CONFIG, 0)
    release()

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.2)
    host = socket.gethostname() if host == "here" else host
    beat(run, host)
    timer = Timer(0.1, beat, (run, host, 2))
    if not lives:
        assert open_run("mine", "letters", CONFIG, 0).state == "continued"
        return
    timer.start()
    with pytest.raises(UserError, match=f"is being trained right now by process {os.getppid()} on {host}") as refused:
        open_run("mine", "letters", CONFIG, 0)
    assert refused.value.exit_code == 75
    assert run.path not in lock._locks


@pytest.mark.usefixtures("root")
def test_a_restart_after_a_kill_waits_for_nobody_on_the_same_machine(capsys):
    """The lock is free, so the process that wrote the heartbeat is gone, whatever has its number now."""
    run = open_run("mine", "letters", CONFIG, 0)
    release()
    beat(run, socket.gethostname())
    assert open_run("mine", "letters", CONFIG, 0).state == "continued"
    assert "waiting" not in capsys.readouterr().out


@pytest.mark.usefixtures("root")
def test_a_look_at_a_run_keeps_nobody_from_it(monkeypatch):
    """A start waits for a moment where the lock is held for a look, and no longer; the exit code is its own."""
    run = open_run("mine", "letters", CONFIG, 0)
    release()
    with (run.path / ".lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        Timer(0.2, fcntl.flock, (look, fcntl.LOCK_UN)).start()
        assert open_run("mine", "letters", CONFIG, 0).state == "continued"
        release()
        monkeypatch.setattr(lock, "LOOK_SECONDS", 0.1)
        fcntl.flock(look, fcntl.LOCK_SH)
        with pytest.raises(UserError, match="is being trained right now by") as refused:
            open_run("mine", "letters", CONFIG, 0)
    assert refused.value.exit_code == 75


@pytest.mark.usefixtures("root")
def test_a_run_is_found_by_name():
    """The named run is found with its best checkpoint, or its newest where no best one is kept."""
    run = open_run("mine", "letters", CONFIG, 0)
    newest = checkpoint(run.path, 20)
    assert find_run("mine", {"anything": 1}).checkpoint == str(newest)
    best = checkpoint(run.path, 10, "best-step=00000010.ckpt")
    assert find_run("mine", None).checkpoint == str(best)


@pytest.mark.usefixtures("root")
def test_a_torn_checkpoint_is_not_evaluated(capsys):
    """Where the best file is torn the newest is found, with a line on the torn one; without any the run is refused."""
    run = open_run("mine", "letters", CONFIG, 0)
    newest = checkpoint(run.path, 20)
    best = run.path / "checkpoints" / "best-step=00000030.ckpt"
    best.write_bytes(b"torn")
    assert find_run("mine", None).checkpoint == str(newest)
    assert f"warning: {best} is damaged" in capsys.readouterr().out
    older = checkpoint(run.path, 10, "best-step=00000010.ckpt")
    assert find_run("mine", None).checkpoint == str(older)
    for path in (newest, older):
        path.write_bytes(b"torn")
    with pytest.raises(UserError, match="none of the 3 checkpoints"):
        find_run("mine", None)


def test_a_run_is_found_by_its_model(root):
    """Without a name it is the run of this model configuration that was started last, whatever its name."""
    for name, width in (("b", 8), ("a", 8), ("c", 16)):
        run = open_run(name, "letters", f"model:\n  width: {width}\n", 0)
        checkpoint(run.path, 1)
        run.write_json("manifest.json", {})
    assert find_run(None, {"width": 8}).name == "a"
    open_run("b", "letters", "model:\n  width: 8\n", 0).write_json("manifest.json", {})
    assert find_run(None, {"width": 8}).name == "b"
    assert newest_first(root)[0].name == "b"


@pytest.mark.usefixtures("root")
def test_a_run_that_is_not_there_is_refused_with_those_that_are():
    """An unknown name is refused with the names that exist, an unknown model and a run without checkpoint too."""
    open_run("mine", "letters", CONFIG, 0)
    with pytest.raises(UserError, match=r"no run 'other' in .*; the newest there: mine"):
        find_run("other", None)
    with pytest.raises(UserError, match="has this model configuration"):
        find_run(None, {"width": 9})
    with pytest.raises(UserError, match="has no checkpoint yet"):
        find_run("mine", None)


def test_files_of_a_run_are_replaced_whole(tmp_path):
    """A file that is written again holds the new content only, and no temporary file stays."""
    run = Run(str(tmp_path), "new")
    assert run.read_json("summary.json") == {}
    run.write_json("summary.json", {"ü": list(range(1000))})
    run.write_json("summary.json", {"ü": 1})
    assert run.read_json("summary.json") == {"ü": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.usefixtures("root")
def test_environment_values_never_end_in_the_run(monkeypatch):
    """Secrets in environment variables are in no file of the run directory."""
    secret = uuid.uuid4().hex  # not in this file, whose own changes are in code.diff
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_TOKEN"):
        monkeypatch.setenv(name, secret)
    run = open_run("mine", "letters", CONFIG, 0)
    run.write_json("manifest.json", describe_start(run, ["CPU"]))
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert json.loads((run.path / "manifest.json").read_text())["python"]
    assert files
    assert not any(secret.encode() in path.read_bytes() for path in files)
