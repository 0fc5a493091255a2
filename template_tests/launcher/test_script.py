"""The batch script: golden files of one node and of several for each cluster, and what must never stand in one.

python template_tests/launcher/test_script.py       # writes the golden files anew; look at what changed before a commit
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

if not __package__:
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from slurm import nccl
from slurm.cluster import ROOT, load_cluster
from slurm.cluster_file import Cluster
from slurm.errors import LaunchError
from slurm.request import Shape
from slurm.script import Job, script

GOLDEN = ROOT / "template_tests/golden"
SHIPPED = sorted(path.stem for path in (ROOT / "configs/clusters").glob("*.yaml") if path.stem != "mine")
ONE = Shape(1, 1)
SHAPES = [Shape(1, 4), Shape(4, 1)]  # the text of others differs in these numbers alone
IDS = [f"{cluster}-n{shape.nodes}_gpu{shape.gpus_per_node}" for cluster in SHIPPED for shape in SHAPES]
PAIRS = [(cluster, shape) for cluster in SHIPPED for shape in SHAPES]


def site(name: str) -> Cluster:
    """A shipped cluster as a user has it who has filled in what it asks for; without this project's project.yaml."""
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(ROOT / "configs/clusters", Path(root, "configs/clusters"))
        cluster = load_cluster(name, Path(root))
    return replace(cluster, account="lab" if "account" in cluster.needs else None)


def job(cluster: Cluster, shape: Shape = ONE, **more: Any) -> Job:
    """A job whose text depends on nothing of this machine."""
    arguments = ["fit", "--config", "configs/tasks/language.yaml", "--run", "gpt", "--trainer.devices", "1"]
    standard: dict[str, Any] = {
        "time": cluster.time,
        "name": "gpt",
        "folder": Path("/scratch/me/runs/gpt/slurm"),
        "run_root": Path("/scratch/me/runs"),
        "code": Path("/scratch/me/runs/.snapshots/0123"),
        "commands": [arguments],
        "runs": ["gpt"],
        "token": "0123abcd.0",
        "python": "/home/me/project/.venv/bin/python",
    }
    return Job(cluster=cluster, shape=shape, **standard | more)


def golden(cluster: str, shape: Shape) -> Path:
    return GOLDEN / f"{cluster}_n{shape.nodes}_gpu{shape.gpus_per_node}.sh"


@pytest.mark.parametrize(("cluster", "shape"), PAIRS, ids=IDS)
def test_the_script_of_every_cluster_and_shape_is_the_stored_one(cluster: str, shape: Shape) -> None:
    """A change of what is submitted shows as a change of a file."""
    assert script(job(site(cluster), shape)) == golden(cluster, shape).read_text()


@pytest.mark.parametrize(("cluster", "shape"), PAIRS, ids=IDS)
def test_bash_accepts_the_script(cluster: str, shape: Shape) -> None:
    """Every script is valid shell."""
    assert subprocess.run(["bash", "-n", golden(cluster, shape)], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(("cluster", "shape"), PAIRS, ids=IDS)
def test_tasks_are_counted_per_node_and_see_all_its_gpus(cluster: str, shape: Shape) -> None:
    """Nodes and tasks per node are fixed, srun has the cores, and nothing binds GPUs to tasks or asks for a wckey."""
    text = script(job(site(cluster), shape))
    assert f"#SBATCH --nodes={shape.nodes}\n" in text
    assert f"#SBATCH --ntasks-per-node={shape.gpus_per_node}\n" in text
    srun = next(line for line in text.splitlines() if line.startswith("srun "))
    assert f" --cpus-per-task={site(cluster).cpus_per_gpu} " in srun
    assert " --kill-on-bad-exit=1 " in srun
    assert " --wait=" in srun
    for absent in (
        "--ntasks=",
        "gpu-bind",
        "gpus-per-task",
        "tres-bind",
        "wckey",
        "=None",
        "=False",
        "=\n",
    ):
        assert absent not in text


@pytest.mark.parametrize("cluster", SHIPPED)
def test_one_node_hears_nothing_of_the_network_and_several_nothing_of_nvlink(cluster: str) -> None:
    """A job exports the variables of the one section that concerns it."""
    variables: Any = {"nvlink": {"NCCL_P2P_LEVEL": "NVL"}, "infiniband": {"NCCL_SOCKET_IFNAME": "=ib0"}}
    made = replace(site(cluster), accelerator="gpu", nccl=variables)
    one, several = (script(job(made, shape)) for shape in (Shape(1, 4), Shape(4, 1)))
    assert "export NCCL_P2P_LEVEL=NVL\n" in one
    assert "NCCL_SOCKET_IFNAME" not in one
    assert "export NCCL_SOCKET_IFNAME==ib0\n" in several
    assert "NCCL_P2P_LEVEL" not in several
    assert nccl.refusal("nvlink", "NCCL_IB_HCA") is not None


ODD = ["fit", "--model.text", 'it\'s "odd" $HOME `id` größe\nnext', "--model.list", "[1, 2]", "--x", "", "a\\b*"]


def test_odd_words_reach_training_as_they_are(tmp_path: Path) -> None:
    """Spaces, quotes, dollars, newlines and UTF-8 in arguments and paths come through the script unchanged."""
    code = tmp_path / "it's größe & co"
    code.mkdir()
    made = job(site("local"), commands=[ODD], code=code, python=str(code / "py thon"))
    lines = script(made).splitlines()
    setup = "\n".join(lines[: next(i for i, line in enumerate(lines) if "slurm/node/start.py" in line)])
    probe = f'{setup}\ncd "$project"; printf "%s\\0" "$PWD" "$python" "$run" "${{arguments[@]}}"'
    said = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert said == [str(code), str(code / "py thon"), "gpt", *ODD]


def test_each_task_of_an_array_has_its_own_run_and_arguments() -> None:
    """A grid is one array whose tasks pick their settings by their index."""
    made = job(site("local"), commands=[["fit", "--a", "1"], ["fit", "--a", "2 3"]], runs=["g-0", "g-1"], parallel=1)
    text = script(made)
    assert "#SBATCH --array=0-1%1\n" in text
    block = text[text.index("case ") : text.index("esac") + 4]
    for index, expected in enumerate([["g-0", "fit", "--a", "1"], ["g-1", "fit", "--a", "2 3"]]):
        probe = f'SLURM_ARRAY_TASK_ID={index}\n{block}\nprintf "%s\\0" "$run" "${{arguments[@]}}"'
        said = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True).stdout
        assert said.split("\0")[:-1] == expected


@pytest.mark.parametrize("name", ["bash", "Interactive"])
def test_a_name_that_lightning_takes_for_an_interactive_job_is_refused(name: str) -> None:
    """Under these names Lightning would start one process and train on it."""
    with pytest.raises(LaunchError, match=name):
        job(site("local"), name=name)


def test_what_a_site_wants_is_asked_for_and_nothing_else() -> None:
    """Every key of a cluster file that concerns sbatch reaches it, in its own form."""
    cluster = replace(
        site("rivanna"),
        partition="gpu",
        qos="high",
        reservation="course",
        exclude="n[01-03]",
        mail="me@example.org",
        setup=("module load cuda",),
        container=["apptainer", "exec", "--nv", "my.sif"],
        sbatch=("--wckey=course", "--exclusive"),
    )
    text = script(job(cluster, Shape(1, 2), time=timedelta(minutes=90)))
    for line in (
        "--account=lab",
        "--partition=gpu",
        "--qos=high",
        "--reservation=course",
        "--exclude='n[01-03]'",
        "--mail-user=me@example.org",
        "--constraint='gpupod&a100_80gb'",
        "--gres=gpu:a100:2",
        "--mem-per-gpu=32G",
        "--time=1:30:00",
        "--wckey=course",
        "--exclusive",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --mem=" not in text
    assert "gpus-per-node" not in text
    assert "module load cuda\nset +eu " in text
    assert '\n  apptainer exec --nv my.sif python -u -m src.cli "${arguments[@]}"\n' in text


def test_the_users_allocator_setting_stays() -> None:
    """Under its name of today or its older one; both then say the same, as which one is read depends on PyTorch."""
    text = script(job(site("gilbreth")))
    lines = "\n".join(line for line in text.splitlines() if "ALLOC_CONF" in line)
    for given, expected in (
        ("", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "max_split_size_mb:128"),
        ("PYTORCH_ALLOC_CONF=max_split_size_mb:64 PYTORCH_CUDA_ALLOC_CONF=x:1", "max_split_size_mb:64"),
    ):
        probe = f'{given and "export " + given}\n{lines}\nprintf "%s " "$PYTORCH_ALLOC_CONF" "$PYTORCH_CUDA_ALLOC_CONF"'
        environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
        said = subprocess.run(["bash", "-c", probe], env=environment, capture_output=True, text=True).stdout
        assert said == f"{expected} " * 2


@pytest.mark.parametrize("option", ["--nodes=4", "--comment=x", "--mem=1G", "--requeue"])
def test_what_the_launcher_decides_is_no_option_of_the_site(option: str) -> None:
    """It would take the place of what the script and jobs.py count on."""
    with pytest.raises(LaunchError, match=f"{option.split('=')[0]} is what the launcher decides"):
        script(job(replace(site("local"), sbatch=(option,))))


def rest(made: Job, after: str) -> str:
    """The script from the line behind the first one that holds this."""
    return script(made).partition(after)[2].partition("\n")[2]


@pytest.mark.parametrize(("stopped", "code", "ends"), [(True, 0, 85), (True, 137, 85), (False, 0, 0), (False, 1, 1)])
@pytest.mark.parametrize("lost", ["python", "code"])
def test_a_saved_run_is_never_done_because_nobody_could_decide(
    tmp_path: Path, stopped: bool, code: int, ends: int, lost: str
) -> None:
    """The Python that requeues may be gone at the end, as with the file system it is on, or the job's code."""
    (tmp_path / "gpt").mkdir()
    (tmp_path / "slurm").mkdir()
    python = tmp_path / "python"
    if lost == "python":
        (tmp_path / "slurm/node").mkdir(parents=True, exist_ok=True)
        (tmp_path / "slurm/node/start.py").touch()
    else:  # as an editable install has it, the project's own slurm/ would answer
        python.write_text("#!/bin/sh\necho 7\n")
        python.chmod(0o755)
    if stopped:
        (tmp_path / "gpt/STOPPED").touch()
    given = f"code={code} RUN_ROOT={tmp_path} run=gpt python={python} logs={tmp_path}\n"
    end = rest(job(site("local")), "code=$?")
    done = subprocess.run(["bash", "-c", given + end], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == ends
    assert ("python slurm/jobs.py resume gpt resumes it" in done.stderr) == stopped


@pytest.mark.parametrize("left", [[], ["src/cli.py"], ["slurm/node/start.py"], ["src/cli.py", "slurm/node/start.py"]])
def test_a_job_whose_code_is_gone_ends_with_one_line(tmp_path: Path, left: list[str]) -> None:
    """Purged in whole or in part; where the project is installed, Python would find its code of today instead."""
    code = tmp_path / "snapshot"
    for name in left:
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).touch()
    text = script(job(site("local"), code=code, python="/usr/bin/true"))
    done = subprocess.run(["bash", "-c", text.partition("srun ")[0]], capture_output=True, text=True)
    gone = len(left) < 2
    assert done.returncode == (2 if gone else 0)
    assert (
        f"the code of this job is gone from {code}: submit the run anew with submit.py --name" in done.stderr
    ) == gone


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, form in PAIRS:
        golden(name, form).write_text(script(job(site(name), form)))
