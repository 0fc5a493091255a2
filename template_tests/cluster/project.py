"""A project whose jobs run on the cluster: the real launcher, with a stand-in for training or real training."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from template_tests.cluster.jobs import field, wait_for
from template_tests.launching import make_project

PATIENCE = 120


class Project:
    """A project whose jobs run on the cluster.

    Attributes:
        root: of the project: one with the stand-in, unless a test says otherwise
        runs: the folder of its runs
        jobs: those submitted, which the fixture ends

    """

    def __init__(self, folder: Path) -> None:
        self.root, self.runs = make_project(folder / "my project"), folder / "runs"
        self.jobs: list[str] = []

    def command(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """One of the launcher's commands, from another folder."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or "CONF" in name}
        return subprocess.run(
            [sys.executable, str(self.root / "slurm" / script), *arguments],
            cwd=self.root.parent,
            env=own | {"RUN_ROOT": str(self.runs), **variables},
            capture_output=True,
            text=True,
        )

    def submit(self, *arguments: str, **variables: str) -> list[str]:
        """Submit to the local cluster; the jobs' numbers."""
        done = self.command("submit.py", "--cluster", "local", *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"^job (\d+): ", done.stdout, re.MULTILINE)
        self.jobs += found
        return found

    def seen(self, run: str) -> dict[int, dict[str, Any]]:
        """What the ranks of a run wrote, the newest start of each."""
        paths = sorted((self.runs / run).glob("rank*.json"), key=lambda path: path.stat().st_mtime)
        return {int(path.name[4 : path.name.index("-")]): json.loads(path.read_text()) for path in paths}

    def wait(self, job: str, *states: str) -> None:
        wait_for(lambda: field(job, "JobState") in states, PATIENCE, f"job {job} is {states}")

    def wait_ranks(self, run: str, count: int) -> None:
        wait_for(lambda: len(self.seen(run)) == count, PATIENCE, f"{count} ranks of {run} have started")
