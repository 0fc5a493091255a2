"""Standard streams that are closed, full or without a reader are no error of any command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "slurm/local/__main__.py": "status",
    "slurm/jobs.py": "list",
    "src/checkpoint/__main__.py": "list",
    "src/doctor/__main__.py": "--storage",
}


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-", "| true", "> /dev/full"])
def test_what_is_printed_goes_into_no_file_of_the_process(redirection: str, tmp_path: Path) -> None:
    """A file that is opened does not get the number of a closed stream, and the end is the program's own."""
    program = (
        "import os, sys; from src.engine import streams; streams.survive_closed_streams();"
        "file = open(sys.argv[1], 'w');"
        "print('x' * 100000, flush=True); print('y', file=sys.stderr); os.system('echo z; echo z >&2');"
        "file.write(str(file.fileno() > 2)); sys.exit(7)"
    )
    command = f"'{sys.executable}' -c \"{program}\" '{tmp_path}/file' {redirection}"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "file").read_text() == "True"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("file", COMMANDS)
def test_every_command_outlasts_its_reader(file: str, tmp_path: Path) -> None:
    """`doctor | head`, `make cluster-up | head` and the like end as they do with a reader."""
    start = file if file == "slurm/jobs.py" else f"-m {file.removesuffix('/__main__.py').replace('/', '.')}"
    start = f"'{sys.executable}' {start} {COMMANDS[file]}"
    environment = os.environ | {"RUN_ROOT": str(tmp_path), "PYTHONUNBUFFERED": "1", "LOCAL_SLURM": str(tmp_path)}
    pipes = f"{start} > /dev/null; a=$?; {start} | true; b=${{PIPESTATUS[0]}}; {start} >&-; echo $a $b $?"
    done = subprocess.run(["bash", "-c", pipes], cwd=ROOT, env=environment, capture_output=True, text=True)
    codes = done.stdout.split()
    assert len(set(codes)) == 1, done.stdout
    assert "BrokenPipe" not in done.stderr
    assert "Traceback" not in done.stderr
