"""Make and find run directories: one folder keeps a run's identity over restarts, requeues and machines.

runs/<name>/config.yaml      the merged configuration; feed it back with --config
            manifest.json    how it was started: command, commit, versions, hardware, batch, precision
            code.diff        what differed from that commit
            metrics.csv      one row per logged step
            tensorboard/     the same metrics
            checkpoints/
            summary.json     its state, written while it runs, when it ends, crashes or is tripped
            heartbeat        when it was last alive, and where; only while it runs, or if it was killed
            STOPPED          a signal came and the state is saved; the next start removes it
            DONE             only in a run that finished
"""

import datetime
import difflib
import glob
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from src.engine import stopped
from src.engine.checkpoint.choose import NoWholeCheckpointError, newest
from src.engine.checkpoint.files import clear_temporary, fault, place_inside, rows_inside
from src.engine.checkpoint.names import moved_aside, ours
from src.engine.config import read_config
from src.engine.errors import FileError, UserError
from src.engine.files import read_json, write_text
from src.engine.run.changes import changes, keep_config, refuse_changed
from src.engine.run.lock import hold, owner
from src.engine.run.storage import require_room, run_root

NAME = "{task}-{date}-{hash}"  # of a run that the user gave none; the hash is the configuration's


@dataclass
class Run:
    """A run as rank 0 found or made it; plain types, so that it can be handed to the other ranks."""

    folder: str
    state: str  # new | continued | finished
    checkpoint: str | None = None  # where training resumes
    step: int = 0  # steps done in it
    rows: int = 0  # of its steps, as loggers count them
    place: str = ""  # in the data, for people to read
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return Path(self.folder)

    @property
    def name(self) -> str:
        """Return the name for --run."""
        return self.path.name

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Replace a file of the run directory in one step, so that no reader meets half of it."""
        write_text(self.path / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a file of the run directory; {} where there is none yet."""
        return read_json(self.path / name)


@contextmanager
def _system_errors() -> Iterator[None]:
    """Turn what the system says of a file of the run into a UserError, which reaches every rank."""
    try:
        yield
    except OSError as error:
        raise FileError(error) from error


@_system_errors()
def open_run(
    name: str | None,
    task: str,
    config: str,
    checkpoint_bytes: int,
    *,
    checkpoints: int = 2,
    essentials: dict[str, Any] | None = None,
    allowed: str | None = None,
    fresh: bool = False,
) -> Run:
    """Make a new run, or find the one called `name`: finished, or to be continued from its newest checkpoint.

    A run that had checkpoints is never started from scratch: where all are damaged or gone, it is refused.

    Args:
        name: from --run; None makes one from task, date and a hash of the configuration
        task: starts a generated name
        config: the merged configuration as YAML, without the run's name
        checkpoint_bytes: expected size of a checkpoint
        checkpoints: how many of them there will be at most, the one that is being written too
        essentials: what a run that has begun must keep, by name (`ESSENTIAL`)
        allowed: names of these that may have changed, with commas between
        fresh: where there is a run called `name`, start another one called `name-2` (3, …)

    """
    run = _find_or_make(name, task, config, checkpoint_bytes, checkpoints, fresh)
    if run.state == "finished":
        return run
    folder = run.path
    hold(folder)
    stopped.rotate(folder)
    _require_writable(folder / "checkpoints")
    clear_temporary(folder / "checkpoints")
    if chosen := newest(folder / "checkpoints", quarantine=True):
        run.checkpoint, run.step, run.rows = str(chosen[0]), chosen[1], rows_inside(chosen[0])
        run.place = place_inside(chosen[0])
        refuse_changed(folder, essentials or {}, allowed)
    else:
        _refuse_lost(folder)
    run.notes += keep_config(folder, config)
    return run


def _find_or_make(name: str | None, task: str, config: str, size: int, checkpoints: int, fresh: bool) -> Run:
    root, notes = run_root()
    _check_name(name)
    earlier = None if name else _unfinished(root, task, config)
    if earlier and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        name = earlier.name  # torchrun has lost a process and starts the same run again
    if name is None:
        require_room(root, size, checkpoints)
        if earlier and ours(earlier / "checkpoints", "newest"):
            same = f"run {earlier.name} has the same configuration and is not finished"
            notes.append(f"{same}: --run {earlier.name} continues it")
        return Run(str(_new_folder(root, task, config)), "new", notes=notes)
    folder = root / (_free_name(root, name) if fresh else name)
    if (folder / "DONE").exists():
        return Run(str(folder), "finished", step=_last_step(folder), notes=changes(folder, config))
    saved = len(ours(folder / "checkpoints", "newest") + ours(folder / "checkpoints", "best"))
    require_room(root, size, max(1, checkpoints - saved))
    existed = folder.exists()
    folder.mkdir(exist_ok=True)
    return Run(str(folder), "continued" if existed else "new", notes=notes)


def _require_writable(folder: Path) -> None:
    """Make the folder of checkpoints; refuse one that cannot be written to, or listed, as it would look empty."""
    try:
        folder.mkdir(exist_ok=True)
        os.listdir(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        error.filename = str(folder)
        raise


def _refuse_lost(folder: Path) -> None:
    """Refuse a run that has saved checkpoints which were all moved aside or deleted."""
    checkpoints = folder / "checkpoints"
    aside = moved_aside(checkpoints)
    last = read_json(folder / "summary.json").get("last_checkpoint")
    if not aside and not last:
        return
    where = ", ".join(sorted({path.parent.name for path in aside}))
    raise NoWholeCheckpointError(
        f"run {folder.name} has been trained and there is no checkpoint in {checkpoints} to resume from: "
        + (f"those in {where} were moved aside, put one back or " if aside else f"{last} is gone, restore it or ")
        + "start another run with --fresh"
    )


def _check_name(name: str | None) -> None:
    if name is None:
        return
    if not name or name != Path(name).name or name[0] == "." or not name.isprintable() or len(name.encode()) > 200:
        raise UserError(f"--run {name!r} is no folder name; use up to 200 letters, digits, '.', '_' and '-'")


def _free_name(root: Path, name: str) -> str:
    """Return `name`, or `name-2`, `name-3` …, the first that no run has."""
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next((free for free in names if not (root / free).exists()), name)


def _new_folder(root: Path, task: str, config: str) -> Path:
    """Make a folder; two runs of the same second and configuration get different ones."""
    base = NAME.format(task=task, date=f"{datetime.datetime.now():%Y%m%d-%H%M%S}", hash=_hash(config))
    for number in range(1, 1000):
        folder = root / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise UserError(f"{root} already has 999 runs called {base}; name yours with --run")


def _unfinished(root: Path, task: str, config: str) -> Path | None:
    """Return the newest run of the very same configuration that is neither finished nor being trained."""
    pattern = NAME.format(task=glob.escape(task), date="*", hash=_hash(config)) + "*"
    alike = sorted(root.glob(pattern), reverse=True)
    return next((run for run in alike if not (run / "DONE").exists() and owner(run) is None), None)


def _hash(config: str) -> str:
    return hashlib.sha256(config.encode()).hexdigest()[:6]


def _last_step(folder: Path) -> int:
    return read_json(folder / "summary.json").get("last_step", 0)


@_system_errors()
def find_run(name: str | None, model: Any) -> Run:
    """Return the run to evaluate: the one called `name`, else the newest one with this `model` configuration.

    Its `checkpoint` is the best by the run's metric, else the newest.
    """
    root, _ = run_root(written=False)
    if name is not None:
        folder = existing_run(root, name)
    else:
        folders = [path for path in newest_first(root) if _model_of(path) == model]
        if not folders:
            raise UserError(
                f"no run in {root} has this model configuration: train first, or name a run (--run) "
                "or a file (--ckpt_path)"
            )
        folder = folders[0]
    best = [path for path in ours(folder / "checkpoints", "best") if fault(path) is None]
    chosen = (best[-1], 0) if best else newest(folder / "checkpoints")
    if chosen is None:
        raise UserError(f"{folder} has no checkpoint yet")
    return Run(str(folder), "evaluated", str(chosen[0]))


def existing_run(root: Path, name: str) -> Path:
    """Return the directory of the run called `name`; refuse a missing one with the names that are like it."""
    _check_name(name)
    folder = root / name
    if not folder.is_dir():
        names = [path.name for path in newest_first(root)]
        near = difflib.get_close_matches(name, names, n=3)
        known = f"like it: {', '.join(near)}" if near else f"the newest there: {', '.join(names[:5]) or 'none'}"
        raise UserError(f"there is no run {name!r} in {root}; {known}")
    return folder


def newest_first(root: Path) -> list[Path]:
    """Return the runs in `root`, the latest start first; folders that may not be looked into are among them."""
    runs = []
    for path in root.iterdir():
        try:
            if (path / "config.yaml").exists():
                manifest = path / "manifest.json"
                runs.append((manifest.stat().st_mtime_ns if manifest.exists() else 0, path))
        except OSError:
            runs.append((0, path))
    return [path for _, path in sorted(runs, reverse=True)]


def _model_of(folder: Path) -> Any:
    """Return the model that a run's configuration names; None where it cannot be read."""
    with suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
        return yaml.safe_load((folder / "config.yaml").read_text()).get("model")
    return None


def model_of_run(name: str) -> str:
    """Return the model and the data of a run's own configuration, as YAML."""
    path = existing_run(run_root(written=False)[0], name) / "config.yaml"
    config = read_config(str(path), str(path))
    if not config.get("model"):
        raise UserError(f"{path} names no model: add --model")
    return yaml.safe_dump({name: config[name] for name in ("model", "data") if config.get(name)})
