"""The run directory: one folder that keeps a run's identity over restarts, requeues and machines.

runs/<name>/config.yaml      the merged configuration; feed it back with --config
            manifest.json    how it was started: command, commit, versions, hardware, batch, precision
            code.diff        what differed from that commit
            metrics.csv      one row per logged step
            tensorboard/     the same metrics
            checkpoints/
            summary.json     where it stands, written while it runs, when it ends and when it crashes
            DONE             only in a run that finished
"""

import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from src.checkpoint.choose import newest
from src.checkpoint.files import clear_temporary, fault
from src.errors import UserError

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - names to warn about, not to write to
NODE_LOCAL_VARIABLES = ("TMPDIR", "SLURM_TMPDIR", "LOCAL_SCRATCH", "SLURM_SCRATCH")
VANISHING_FILESYSTEMS = ("overlay", "tmpfs", "ramfs")
DIFF_LIMIT = 2**20  # bytes of code.diff; a larger one is data in git, not code


@dataclass
class Run:
    """What rank 0 found or made; plain types, so that it can be handed to the other ranks."""

    folder: str
    state: str  # new | continued | finished
    checkpoint: str | None = None  # where training goes on
    step: int = 0  # steps done in it
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.folder)

    @property
    def name(self) -> str:
        """The name for --run."""
        return self.path.name

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Replace a file of the run directory in one step, so that no reader meets half of it."""
        write_text(self.path / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """A file of the run directory; {} where there is none yet."""
        path = self.path / name
        return json.loads(path.read_text()) if path.exists() else {}


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name in the same folder, then rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def run_root() -> tuple[Path, list[str]]:
    """Where runs live, `$RUN_ROOT` or ./runs, made if need be; and what is doubtful about it.

    Raises:
        UserError: it cannot be made or written to.

    """
    given = os.environ.get("RUN_ROOT")
    root = Path(given or "runs").expanduser()
    notes = []
    if given and not root.is_absolute():
        notes.append(f"RUN_ROOT {given} is relative and means {root.absolute()} here; another folder elsewhere")
    root = root.absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"the run root {root} cannot be written to ({error.strerror}): set RUN_ROOT to a folder on scratch"
        ) from error
    if why := _vanishes(root):
        notes.append(f"the run root {root} is {why}: set RUN_ROOT to a folder that outlives this machine")
    return root, notes


def _vanishes(root: Path) -> str | None:
    """Why this folder will not be there tomorrow, or on another node; None where nothing says so."""
    resolved = root.resolve()
    local = [Path(value) for name in NODE_LOCAL_VARIABLES if (value := os.environ.get(name))]
    for folder in [*map(Path, NODE_LOCAL), *local]:
        if resolved.is_relative_to(folder):
            return f"node-local ({folder})"
    kind = filesystem(resolved)
    return f"on the container's or node's own {kind} file system" if kind in VANISHING_FILESYSTEMS else None


def filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`; "" where the system does not say."""
    if not mounts.exists():
        return ""
    best, kind = "", ""
    for line in mounts.read_text().splitlines():
        _, point, name, *_ = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)  # a space is \040 there
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, name
    return kind


def require_room(root: Path, checkpoint_bytes: int) -> None:
    """Two checkpoints must fit: the old one is deleted only after the new one is there.

    Raises:
        UserError: how much is needed and how much is free.

    """
    free = shutil.disk_usage(root).free
    if free < 2 * checkpoint_bytes:
        raise UserError(
            f"{root} has {free / 2**30:.1f} GiB free and two checkpoints take {2 * checkpoint_bytes / 2**30:.1f} GiB: "
            "make room or set RUN_ROOT to a larger disk"
        )


def open_run(name: str | None, task: str, config: str, checkpoint_bytes: int) -> Run:
    """Make a new run, or find the one called `name`: finished, or to be continued from its newest checkpoint.

    Args:
        name: from --run; None makes one from task, date and a hash of the configuration
        task: starts a generated name
        config: the merged configuration as YAML, without the run's name
        checkpoint_bytes: expected size of a checkpoint

    Raises:
        UserError: a name that is no folder name, a run root that cannot be used, checkpoints that cannot be read.

    """
    root, notes = run_root()
    _check_name(name)
    if name is None:
        require_room(root, checkpoint_bytes)
        folder = _new_folder(root, task, config)
        run = Run(str(folder), "new", notes=notes)
    else:
        folder = root / name
        if (folder / "DONE").exists():
            return Run(str(folder), "finished", step=_last_step(folder), notes=_changes(folder, config))
        require_room(root, checkpoint_bytes)
        existed = folder.exists()
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"the run folder {folder} cannot be made ({error.strerror})") from error
        _refuse_another_model(folder, config)
        run = Run(str(folder), "continued" if existed else "new", notes=notes)
    _lock(folder)
    clear_temporary(folder / "checkpoints")
    if found := newest(folder / "checkpoints", quarantine=True):
        run.checkpoint, run.step = str(found[0]), found[1]
    (folder / "checkpoints").mkdir(exist_ok=True)
    run.notes += _keep_config(folder, config)
    return run


def _check_name(name: str | None) -> None:
    if name is None:
        return
    if not name or name != Path(name).name or name[0] == "." or not name.isprintable() or len(name.encode()) > 200:
        raise UserError(f"--run {name!r} is no folder name; use up to 200 letters, digits, '.', '_' and '-'")


_locks: dict[Path, IO[str]] = {}  # open until `release` or the end of this process


def _lock(folder: Path) -> None:
    """Two commands on one run would train twice into the same files. The lock goes with the process, however it ends.

    Raises:
        UserError: somebody else holds it; the text says who.
    """
    if folder in _locks:
        return
    lock = (folder / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise UserError(f"run {folder.name} is being trained right now by {owner}") from error
    except OSError:  # a file system without locks
        lock.close()
        return
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    _locks[folder] = lock


def release() -> None:
    """Let go of the runs of this process."""
    while _locks:
        _locks.popitem()[1].close()


def _refuse_another_model(folder: Path, config: str) -> None:
    """A run keeps its model's class: another one must not take over its files."""
    before, after = _model_of(folder), (yaml.safe_load(config) or {}).get("model")
    names = [model.get("class_path") if isinstance(model, dict) else model for model in (before, after)]
    if before is not None and names[0] != names[1]:
        raise UserError(f"run {folder.name} trains {names[0]}, not {names[1]}: use a new --run name")


def _new_folder(root: Path, task: str, config: str) -> Path:
    """A folder that nobody else has: two runs of the same second and configuration get different ones."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = f"{task}-{stamp}-{hashlib.sha256(config.encode()).hexdigest()[:6]}"
    for number in range(1, 1000):
        folder = root / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise UserError(f"{root} already has 999 runs called {base}; name yours with --run")


def _last_step(folder: Path) -> int:
    summary = folder / "summary.json"
    return json.loads(summary.read_text()).get("last_step", 0) if summary.exists() else 0


def _keep_config(folder: Path, config: str) -> list[str]:
    """Write config.yaml; where it changed since the last start, say what and keep the old one as config.<n>.yaml."""
    path = folder / "config.yaml"
    if not path.exists():
        write_text(path, config)
        return []
    changes = _changes(folder, config)
    if changes:
        number = sum(1 for _ in folder.glob("config.*.yaml")) + 1
        path.rename(folder / f"config.{number}.yaml")
        write_text(path, config)
    return changes


def _changes(folder: Path, config: str) -> list[str]:
    """What differs from the configuration that the run was last started with, as a note."""
    path = folder / "config.yaml"
    old = path.read_text() if path.exists() else config
    if old == config:
        return []
    before, after = _flat(yaml.safe_load(old)), _flat(yaml.safe_load(config))
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    shown = ", ".join(f"{key} {before.get(key)} -> {after.get(key)}" for key in changed[:8])
    return [f"changed since the last start: {shown}{' …' if len(changed) > 8 else ''}"]


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix: config}
    return {
        key: value
        for name, child in config.items()
        for key, value in _flat(child, f"{prefix}.{name}"[not prefix :]).items()
    }


def find_run(name: str | None, model: Any) -> Run:
    """The run to evaluate: the one called `name`, else the newest one with this `model` configuration.

    Its `checkpoint` is the best by the run's metric, else the newest.

    Raises:
        UserError: no such run, or it has no checkpoint; the text says where it looked and what is there.

    """
    root, _ = run_root()
    _check_name(name)
    if name is not None:
        folder = root / name
        if not folder.is_dir():
            there = ", ".join(path.name for path in newest_first(root)[:5]) or "none"
            raise UserError(f"there is no run {name!r} in {root}; the newest there: {there}")
    else:
        folders = [path for path in newest_first(root) if _model_of(path) == model]
        if not folders:
            raise UserError(
                f"no run in {root} has this model configuration: train first, or name a run (--run) "
                "or a file (--ckpt_path)"
            )
        folder = folders[0]
    best = [path for path in sorted((folder / "checkpoints").glob("best-*.ckpt")) if fault(path) is None]
    found = (best[-1], 0) if best else newest(folder / "checkpoints")
    if found is None:
        raise UserError(f"{folder} has no checkpoint yet")
    return Run(str(folder), "evaluated", str(found[0]))


def newest_first(root: Path) -> list[Path]:
    """The runs in `root`, the one that was started last first."""
    runs = [path for path in root.iterdir() if (path / "config.yaml").exists()]
    return sorted(
        runs,
        key=lambda path: (path / "manifest.json").stat().st_mtime_ns if (path / "manifest.json").exists() else 0,
        reverse=True,
    )


def _model_of(folder: Path) -> Any:
    path = folder / "config.yaml"
    return (yaml.safe_load(path.read_text()) or {}).get("model") if path.exists() else None


def git(*arguments: str) -> str | None:
    """What git says about the code that runs; None outside a repository or without git."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def describe_start(run: Run, cards: Iterable[str]) -> dict[str, Any]:
    """The part of manifest.json that is about code and machine; writes code.diff where the tree is dirty.

    Environment variables are left out: they hold secrets.
    """
    diff = git("diff", "HEAD", "--no-color") or ""
    status = git("status", "--porcelain")
    untracked = [line[3:] for line in (status or "").splitlines() if line.startswith("??")]
    if diff:
        write_text(
            run.path / "code.diff", diff if len(diff) <= DIFF_LIMIT else f"{len(diff)} bytes, too large to keep\n"
        )
    versions = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "folder": os.getcwd(),
        "commit": (git("rev-parse", "HEAD") or "").strip() or None,
        "dirty": bool(status),
        "diff": "code.diff" if diff else None,
        "untracked": untracked,
        "python": platform.python_version(),
        "packages": dict(sorted(versions.items(), key=lambda item: item[0].lower())),
        "host": socket.gethostname(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "cpus": os.cpu_count(),
        "cards": list(cards),
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "argv": sys.argv,
    }
