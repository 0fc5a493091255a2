"""A process that dies takes the others with it, but not before they could say so."""

import signal
import subprocess
import sys

import pytest

from src.engine.sharding import launcher
from src.engine.sharding.launcher import Observer
from tests.commands import ROOT


def test_the_main_process_has_a_while_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lives through the grace, in which it may end by itself; who hangs in a collective is killed after it."""
    main = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    children = [subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"]) for code in (0, 3)]
    seen: list[object] = []
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: seen.append((seconds, main.poll())))
    for child in children:
        child.wait()
    observer = Observer(main.pid, children, sleep_period=0)
    observer.run()
    assert (launcher.GRACE, None) in seen
    assert main.wait() == -signal.SIGKILL
    assert "warning: local rank 2 has ended with exit code 3; all end in 10 s" in capsys.readouterr().out


def test_out_of_memory_stays_the_reason() -> None:
    """A main process that hangs where it cannot be told is left with the exit code of the rank that had no memory."""
    script = (
        "import os, subprocess, sys, time; from src.engine.sharding import launcher; launcher.GRACE = 0\n"
        "child = subprocess.Popen([sys.executable, '-c', 'raise SystemExit(71)'])\n"
        "launcher.Observer(os.getpid(), [child], sleep_period=0).start(); time.sleep(1000)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 71, done.stderr
    assert "local rank 1 has ended with exit code 71" in done.stdout
