"""Describe how a run was started: code, versions and machine, for manifest.json."""

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from src.engine.files import write_text
from src.engine.run.directory import Run

SNAPSHOT = ".snapshot"  # in the copy of the code that a submitted job runs: slurm/snapshot.py
DIFF_LIMIT = 2**20  # bytes of code.diff; a larger one is data in git, not code


def git(*arguments: str) -> str | None:
    """Return what git prints about the code that runs; None outside a repository or without git."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _code() -> tuple[str | None, str, bool, list[str]]:
    """Return commit, diff, whether it is dirty, and untracked files: those of the snapshot where this code is one.

    A snapshot is no repository, but may lie in one, whose state is another by now.
    """
    snapshot = Path(__file__).resolve().parents[3] / SNAPSHOT
    if snapshot.is_dir():
        commit, diff, left_out = (
            (snapshot / name).read_text(errors="replace") for name in ("commit", "dirty.patch", "left_out.txt")
        )
        return commit.strip(), diff, bool(diff), left_out.splitlines()
    status = git("status", "--porcelain")
    untracked = [line[3:] for line in (status or "").splitlines() if line.startswith("??")]
    head = (git("rev-parse", "HEAD") or "").strip() or None
    return head, git("diff", "HEAD", "--no-color") or "", bool(status), untracked


def describe_start(run: Run, cards: Iterable[str]) -> dict[str, Any]:
    """Return the part of manifest.json about code and machine; writes code.diff where the tree is dirty.

    Environment variables are left out: they hold secrets.
    """
    commit, diff, dirty, untracked = _code()
    if diff:
        write_text(
            run.path / "code.diff", diff if len(diff) <= DIFF_LIMIT else f"{len(diff)} bytes, too large to keep\n"
        )
    versions = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "folder": os.getcwd(),
        "commit": commit,
        "dirty": dirty,
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
