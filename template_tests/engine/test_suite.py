"""The tests themselves end, whatever happens to a process of theirs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT

QUICK = "import time, pytest\n@pytest.mark.parametrize('i', range(4))\ndef test_ok(i): time.sleep(0.05)\n"
FILES = {
    **{f"test_a{number}.py": QUICK for number in range(3)},
    "test_b.py": QUICK.replace("range(4)", "range(12)").replace("0.05", "0.4"),
    "test_c.py": "import os, time\ndef test_1(): pass\ndef test_2(): pass\n"
    "def test_dies():\n    time.sleep(1)\n    os.kill(os.getpid(), 9)\n",
}


def test_a_lost_worker_ends_the_run(tmp_path: Path) -> None:
    """`make test` names the test in which a process died, finishes the others' tests, and fails; it does not wait."""
    (options,) = re.findall("-m pytest (--numprocesses .*)", (ROOT / "Makefile").read_text())
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options.split(), "--numprocesses", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    assert "crashed while running 'test_c.py::test_dies'" in done.stdout


def test_an_exit_of_the_tests_process_fails_one_test() -> None:
    """What ends a rank at once, such as a watchdog, does not end the tests in whose process it runs."""
    with pytest.raises(AssertionError, match=r"os\._exit\(74\) in the process of the tests"):
        os._exit(74)
