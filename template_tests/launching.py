"""A small project for tests of the launcher: the real slurm/, a site, a task, and a src.cli that trains nothing."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = """\
accelerator: gpu
gpu_request: gpus-per-node
gpu: a100
gpus_per_node: 4
cpus_per_gpu: 8
mem_per_gpu: 32G
time: 2:59:00
needs: [account]
cost_per_gpu_hour: 2
gpus:
  a100: {memory_gib: 80, capability: 8.0}
"""
TASK = "global_batch_size: 64\nmodel:\n  class_path: my.Module\ndata:\n  class_path: my.Data\n"
CLI = '''"""Stands in for training: each rank writes what it sees, and does what --act says.

--act train: a step each 0.1 s, up to --steps or until there is a file `go`; rank 0 saves each. All stop after a signal,
whose save takes --save seconds. --act lose-a-rank: rank 1 gets SIGKILL at the step --at, once. --act deaf: as train,
but heeds no signal. --act exit: ends with the code --code.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from src.engine import stopped

VERSION = "as submitted"
SEEN = ("SLURM_", "STOP", "MASTER_", "OMP_", "PYTHON", "NCCL_", "RUN_ROOT", "WORLD_SIZE", "RANK")


def option(name, default=""):
    return ([*sys.argv, default][sys.argv.index(name) + 1]) if name in sys.argv else default


run, rank, act = Path(os.environ["RUN_ROOT"], option("--run")), int(os.environ["SLURM_PROCID"]), option("--act")
run.mkdir(exist_ok=True)
facts = {
    "argv": sys.argv[1:],
    "version": VERSION,
    "file": __file__,
    "environment": {name: value for name, value in os.environ.items() if name.startswith(SEEN)},
}
name = f"rank{rank}-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', 0)}.json"
(run / f".{name}").write_text(json.dumps(facts))
(run / f".{name}").rename(run / name)
print(f"rank {rank} is here", flush=True)
if act == "raise" and rank == 1:
    raise ModuleNotFoundError("No module named 'flash'")
if act in ("wait", "raise"):
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # child of {run}"])
    while not (run / "go").exists():
        time.sleep(0.2)
    child.kill()
if act == "exit":
    sys.exit(int(option("--code")))
if act in ("train", "deaf", "lose-a-rank"):
    came = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda got, _: came.append(signal.Signals(got).name))
    saved, step = run / "checkpoints", 0
    saved.mkdir(exist_ok=True)
    step = max((int(path.stem[5:]) for path in saved.glob("step=*.ckpt")), default=0)
    while step < int(option("--steps", "3000")) and not (run / "go").exists():
        time.sleep(0.1)
        step += 1
        if act == "lose-a-rank" and rank == 1 and step >= int(option("--at")) and not (run / "lost").exists():
            (run / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and not option("--stuck"):
            (saved / f"step={step:08d}.ckpt").touch()
        if came and act == "train":
            (run / "saving").touch()
            until = time.monotonic() + float(option("--save", "0"))
            while time.monotonic() < until:
                time.sleep(0.1)
            print("signals", *came, flush=True)
            if rank == 0:
                stopped.mark(run, step, came[0])
            for number in (signal.SIGTERM, signal.SIGUSR2):  # one that comes now must not change the exit code
                signal.signal(number, signal.SIG_IGN)
            sys.exit(0)
if rank == 0:
    (run / "DONE").touch()
'''


CHECK = '''"""Stands in for src.check: every command is right that has no --typo."""

import json
import sys

sys.exit("error: unknown key typo" if "--typo" in str(json.load(sys.stdin)) else 0)
'''


def make_project(root: Path) -> Path:
    """Fill `root` and commit it."""
    shutil.copytree(ROOT / "slurm", root / "slurm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src/engine", root / "src/engine", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "src/__init__.py", root / "src/__init__.py")
    for path in (ROOT / "configs").glob("*.yaml"):
        (root / "configs").mkdir(exist_ok=True)
        shutil.copy(path, root / "configs" / path.name)
    files = {
        "src/cli.py": CLI,
        "src/check.py": CHECK,
        "configs/clusters/here.yaml": SITE,
        "configs/clusters/local.yaml": (ROOT / "configs/clusters/local.yaml").read_text(),
        "configs/tasks/tiny.yaml": TASK,
        "project.yaml": "task: tiny\ncluster: here\naccount: lab\n",
        ".gitignore": "runs/\n__pycache__/\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root
