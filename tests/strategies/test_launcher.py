"""A process that dies takes the others with it, but not before they could say so."""

import signal
import subprocess
import sys

import pytest

from src.strategies import launcher
from src.strategies.launcher import Observer


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
