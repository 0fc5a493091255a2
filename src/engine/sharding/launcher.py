"""Start the other processes of a node, where no launcher has, and end all when one has failed."""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning import Trainer
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from src.engine import exit_codes

GRACE = 10  # seconds
LOOK = 2  # seconds in which a process whose connections have ended comes to its own end


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, but rank 0 has time to write down what happened when another rank has died.

    Lightning looks every five seconds whether one has, and then kills rank 0 at once: if rank 0 has not noticed by
    itself before, the run has no summary and the command no exit code of its own.
    """

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            Observer(os.getpid(), self.procs).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def ended_badly(launcher: object) -> dict[int, int]:
    """Return the exit codes of those of rank 0's child processes that failed, by local rank."""
    codes = {}
    for rank, child in enumerate(getattr(launcher, "procs", []), 1):
        with suppress(subprocess.TimeoutExpired):
            if code := child.wait(LOOK):
                codes[rank] = code if code > 0 else 128 - code  # of a signal, as shells have it
    return codes


class Observer(_ChildProcessObserver):
    """Watch the other processes, and kill all `GRACE` seconds after one was found dead."""

    def _terminate_all(self) -> None:
        dead = next(rank for rank, child in enumerate(self._child_processes, 1) if child.returncode)
        code = self._child_processes[dead - 1].returncode
        print(f"warning: local rank {dead} has ended with exit code {code}; all end in {GRACE} s", flush=True)
        time.sleep(GRACE)
        if code == exit_codes.OUT_OF_MEMORY:  # a rank that hangs in a collective of the GPU cannot: this thread can
            for child in self._child_processes:
                child.kill()
            os._exit(code)
        super()._terminate_all()
