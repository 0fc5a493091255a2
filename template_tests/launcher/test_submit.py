"""`python slurm/submit.py`: what a user reads before anything is submitted, and what is refused."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from slurm import plan
from src.engine import exit_codes
from template_tests.launching import ROOT, make_project

SLURM = ROOT / "docs/slurm.md"
Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a site of its own, in a git repository with one commit."""
    return make_project(tmp_path_factory.mktemp("my project"))


@pytest.fixture
def submit(project: Path, tmp_path: Path) -> Submit:
    """Runs the command without Slurm, from another folder."""

    def run(*arguments: str, path: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RUN_ROOT"))}
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        if not (tools / "git").exists():
            (tools / "git").symlink_to(str(shutil.which("git")))
        own |= {"PATH": path or str(tools), "RUN_ROOT": str(tmp_path / "runs"), **environment}
        command = [sys.executable, str(project / "slurm/submit.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)

    return run


def first_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout.splitlines() or [""])[0]


def error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "1 node × 4 A100 = 4 GPUs, 2:59:00, global batch 64 = 16 micro × 1 accumulation × 4 devices"),
        (["--nodes", "4"], "4 nodes × 4 A100 = 16 GPUs"),
        (["--nodes", "4", "--gpus-per-node", "1"], "4 nodes × 1 A100 = 4 GPUs"),
        (["--config", "configs/a100_n2_gpu2.yaml"], "2 nodes × 2 A100 = 4 GPUs"),
        (["--config", "configs/a100_n2_gpu2.yaml", "--nodes", "2"], "2 nodes × 2 A100 = 4 GPUs"),
        (["--config", "configs/a100_n2_gpu2.yaml", "--nodes", "4"], "4 nodes × 4 A100 = 16 GPUs"),
        (["--config", "configs/a100_n2_gpu2.yaml", "--gpus-per-node", "1"], "2 nodes × 1 A100 = 2 GPUs"),
        (["--", "--trainer.num_nodes", "2", "--trainer.devices=1"], "2 nodes × 1 A100 = 2 GPUs"),
        (["--nodes", "2", "--", "--trainer.devices=2"], "2 nodes × 2 A100 = 4 GPUs"),
        (["--", "--micro_batch_size", "2"], "global batch 64 = 2 micro × 8 accumulation × 4 devices"),
        (["--time", "24:00"], "= 4 GPUs, 0:24:00, "),
        (["--time", "1-12"], "= 4 GPUs, 1-12:00:00, "),
        (["--time", "3:00:00"], "at most 24 of what the site bills"),
        (["--partition", "big"], "partition big"),
    ],
    ids=" ".join,
)
def test_it_says_what_it_will_use(submit: Submit, arguments: list[str], said: str) -> None:
    """Shape, time and batch, from flags, else overrides, else configs, else the cluster's node; as Slurm reads them."""
    own, behind = (arguments, []) if "--" not in arguments else (arguments[: arguments.index("--")], arguments)
    done = submit(*own, "--dry-run", *behind[len(own) :])
    assert done.returncode == 0, done.stderr
    assert said in first_line(done)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--node", "4"], ["--node is no option", "did you mean --nodes?"]),
        (["--gpus", "4"], ["--gpus is no option", "did you mean --gpus-per-node?"]),
        (["--exclude", "n1"], ["--exclude is no option", "a key of the cluster file, exclude: …"]),
        (["--mem=4G"], ["--mem is no option", "a key of the cluster file, mem: …"]),
        (["--model", "x"], ["--model is no option", "behind --: -- --model …"]),
        (["--dependency=1"], ["--dependency is no option", "into the cluster file, sbatch: […]"]),
        (["--trainer.max_steps", "5"], ["--trainer.max_steps is no option", "behind --"]),
        (["--nodes", "0"], ["--nodes 0", "from 1 up"]),
        (["--gpus-per-node", "8"], ["has 4", "take more nodes"]),
        (["--nodes", "2", "--", "--trainer.num_nodes", "4"], ["--nodes 2 contradicts --trainer.num_nodes 4"]),
        (["--", "--trainer.devices", "[0,1]"], ["trainer.devices", "whole number"]),
        (["--nodes", "3"], ["global_batch_size 64 cannot be shared by 12 devices", "60 or 72"]),
        (["--config", "configs/a100_n2_gpu3.yaml"], ["no such file", "did you mean"]),
        (["--cluster", "her"], ["did you mean here?"]),
        (["--time", "3h"], ["--time", "2:59:00"]),
        (["--name", "bash"], ["--name bash", "interactive"]),
        (["--name", "a/b"], ["--name 'a/b'", "letters"]),
        (["--race", "1x4"], ["two or more"]),
        (["--race", "1x4,4"], ["'4' is no shape", "4x1"]),
        (["--race", "1x4,4x1", "--nodes", "2"], ["--race brings its own shapes"]),
        (["--", "--fresh"], ["--fresh cannot be submitted", "leave it out"]),
        (["--grid", "fresh=true,false"], ["fresh is the same in all runs"]),
        (["--grid", "a"], ["name=value"]),
        (["--grid", "a=1,1"], ["same value twice"]),
        (["--grid", ""], ["--grid is empty"]),
        (["--name", ""], ["--name is empty"]),
        (["--include", ""], ["--include is empty"]),
        (["--name", "é" * 100], ["letters"]),
        (["--name", "a", "--", "--run", "b"], ["--run belongs before `--`, as --name"]),
        (["--", "--run=b"], ["--run belongs before `--`, as --name"]),
        (["--", "--config", "configs/a100_n2_gpu2.yaml"], ["--config belongs before `--`"]),
        (["--grid", "logger.api_key=abc,abd"], ["--logger.api_key", "environment"]),
        (["--", "--url=https://ghp_abc@host/x"], ["--url holds"]),
        (["--", "--logger", "{api_key: abc}"], ["--logger holds"]),
        (["--include", "nowhere"], ["nowhere"]),
        (["--", "--logger.api_key", "abc"], ["--logger.api_key", "environment"]),
        (["--", "--url=https://me:pass@host/x"], ["--url holds", "environment"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_one_line(submit: Submit, arguments: list[str], named: list[str]) -> None:
    """A refusal names what it got and what to do; nothing is written."""
    said = error(submit(*arguments))
    assert all(text in said for text in named), said


def test_a_secret_is_not_repeated(submit: Submit) -> None:
    """What looks like a credential is refused without being printed."""
    for arguments in (
        ["--", "--x.api_key", "hunter22"],
        ["--", "--x.token=hunter22"],
        ["--", "--url=https://me:hunter22@host"],
        ["--", "--url", "https://hunter22@host"],
        ["--", "--x", "{api_key: hunter22}"],
        ["--", '--trainer.logger={"init_args": {"token": "hunter22hunter22"}}'],
        ["--", "--url=https://host/x?sv=1&sig=hunter22"],
        ["--", "--x", "AccountName=a;AccountKey=hunter22"],
        ["--", "--header", "Authorization: Bearer hunter22"],
        ["--", "--x.passphrase=hunter22"],
        ["--", "--x", "hf_hunter22hunter22"],
        ["--grid", "x.api_key=hunter22,y"],
        ["--x.api_key", "hunter22"],
    ):
        done = submit(*arguments)
        assert "hunter22" not in done.stdout + done.stderr
        assert done.returncode == 2


def test_the_environments_secrets_reach_no_dry_run(submit: Submit) -> None:
    """Neither the script nor what is printed of the environment holds the user's variables."""
    done = submit("--dry-run", WANDB_API_KEY="hunter22", MY_PASSWORD="hunter23")  # noqa: S106 that is the point
    assert "hunter2" not in done.stdout + done.stderr


def test_a_dry_run_writes_nothing(submit: Submit, project: Path, tmp_path: Path) -> None:
    """Neither a run, nor a snapshot, nor anything in the project."""

    def there() -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in project.rglob("*")}

    submit("--dry-run", "--nodes", "2")  # Python's own caches
    before = there()
    done = submit("--dry-run", "--nodes", "2")
    assert "nothing was submitted or written" in done.stdout
    assert there() == before
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_everything(submit: Submit) -> None:
    """The sbatch command, the script, the training command, the environment, the code and what it leaves out."""
    done = submit("--dry-run", "--name", "gpt", "--nodes", "2", "--", "--model.lr", "1e-3")
    for part in (
        "sbatch --parsable ",
        "#SBATCH --nodes=2",
        "gpt: python -m src.cli fit --model.lr 1e-3 --run gpt --trainer.accelerator gpu --trainer.num_nodes 2",
        "PYTHONUNBUFFERED=1",
        "left out: nothing",
    ):
        assert part in done.stdout, part


def test_without_slurm_nothing_is_submitted_and_that_is_said(submit: Submit) -> None:
    """Plain submit.py shows the dry run; on a real site's file that is an error, on `local` a note."""
    assert "no Slurm here, nothing was submitted" in error(submit())
    done = submit("--cluster", "local")
    assert done.returncode == 0
    assert "note: no Slurm here, nothing was submitted" in done.stdout


@pytest.mark.parametrize("behind", ["--nodes", "--time", "--dry-run"])
def test_a_launcher_option_behind_the_dashes_is_named(submit: Submit, behind: str) -> None:
    """It goes on, and warns by name."""
    done = submit("--dry-run", "--", behind, "2")
    assert done.returncode == 0
    assert f"warning: {behind} stands behind --" in done.stderr


def test_nodes_and_devices_come_from_one_place(submit: Submit) -> None:
    """What Slurm is asked for is what the Trainer gets, last on its command line."""
    done = submit("--dry-run", "--config", "configs/a100_n2_gpu2.yaml", "--nodes", "1", "--gpus-per-node", "4")
    assert "#SBATCH --ntasks-per-node=4" in done.stdout
    assert done.stdout.count("--trainer.num_nodes 1 --trainer.devices 4") == 2  # in the script and by itself
    assert "warning: 1x4 (nodes x GPUs of each) is used, not 2x2 of" in done.stderr


def test_a_configuration_that_git_does_not_track_travels(submit: Submit, tmp_path: Path) -> None:
    """--config takes files of any place along, and the job reads its copy."""
    (tmp_path / "mine.yaml").write_text("global_batch_size: 128\n")
    done = submit("--dry-run", "--config", "mine.yaml")
    assert "global batch 128" in first_line(done)
    assert "--config .included/mine.yaml" in done.stdout


def test_a_relative_path_in_an_override_is_warned_about(submit: Submit, tmp_path: Path) -> None:
    """In the job it would start from the snapshot."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").touch()
    done = submit("--dry-run", "--", "--data.root", "data/x")
    assert f"warning: data/x is a relative path; in the job it starts from the snapshot: give {tmp_path}" in done.stderr


def test_a_surrounding_jobs_variables_are_not_handed_on(submit: Submit) -> None:
    """Submitted from inside a job, sbatch and the new job see nothing of it, but which Slurm is meant."""
    kept = {"SLURM_CONF": "/x", "SLURM_CLUSTERS": "big"}
    done = submit("--dry-run", SLURM_JOB_ID="7", MASTER_ADDR="n1", SQUEUE_STATES="R", **kept)
    (line,) = [line for line in done.stderr.splitlines() if "not handed on" in line]
    assert set(line.rpartition(": ")[2].split(", ")) == {"SLURM_JOB_ID", "MASTER_ADDR", "SQUEUE_STATES"}


def test_a_run_root_of_nobody_is_refused(submit: Submit) -> None:
    """In one line."""
    assert "RUN_ROOT=~nobody-here/x: there is no such user" in error(submit("--dry-run", RUN_ROOT="~nobody-here/x"))


def test_a_run_root_that_a_group_can_write_to_is_warned_about(submit: Submit, tmp_path: Path) -> None:
    """Not where that is accepted by name."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o775)
    assert f"warning: its group can write to {tmp_path / 'runs'}" in submit("--dry-run").stderr
    assert "its group" not in submit("--dry-run", "--trust-run-root").stderr


def test_an_included_file_is_the_one_of_the_current_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the project has one of that name."""
    monkeypatch.setattr(plan, "ROOT", project)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("mine\n")
    taken = plan._snapshot(argparse.Namespace(include=["README.md"], dry_run=False), [], [])
    assert taken is not None
    assert tmp_path / "README.md" in taken.files.values()


def test_a_finished_run_is_not_submitted(submit: Submit, tmp_path: Path) -> None:
    """It says so and ends well."""
    (tmp_path / "runs/gpt").mkdir(parents=True)
    (tmp_path / "runs/gpt/DONE").touch()
    done = submit("--name", "gpt")
    assert done.returncode == 0
    assert "run gpt is finished: nothing to submit" in done.stdout


def test_a_finished_run_is_evaluated(submit: Submit, tmp_path: Path) -> None:
    """Only training has nothing to do there; the job is told so."""
    (tmp_path / "runs/gpt").mkdir(parents=True)
    (tmp_path / "runs/gpt/DONE").touch()
    done = submit("--name", "gpt", "--dry-run", "--", "validate")
    assert "slurm.node.start --tasks 4 --evaluate" in done.stdout
    assert "gpt: python -m src.cli validate --run gpt" in done.stdout


def test_runs_of_one_second_have_names_of_their_own(submit: Submit, tmp_path: Path) -> None:
    """Without --name a run is called after its configuration, whatever that file is called."""
    (tmp_path / "my first %.yaml").write_text("global_batch_size: 128\n")
    shown = submit("--dry-run", "--config", "my first %.yaml")
    assert "run: my-first-2" in shown.stdout, shown.stderr
    assert plan.new_name("gpt") != plan.new_name("gpt")


def test_a_grid_is_one_array_of_runs(submit: Submit) -> None:
    """Every combination is a run with a name of its own, and its settings stand behind the common ones."""
    done = submit("--dry-run", "--name", "g", "--grid", "model.lr=1e-3,3e-4 model.depth=2,4", "--", "--model.lr", "1")
    assert "#SBATCH --array=0-3%4" in done.stdout
    assert "g-2: python -m src.cli fit --model.lr 1 --model.lr 3e-4 --model.depth 2 --run g-2" in done.stdout
    assert "4 runs" in first_line(done)


def test_a_race_has_the_same_run_and_batch_in_each_shape(submit: Submit) -> None:
    """Two jobs, one name, one global batch."""
    done = submit("--dry-run", "--name", "gpt", "--race", "1x4,4x1")
    lines = done.stdout.splitlines()
    assert "4 nodes × 1 A100" in lines[0]  # what starts more easily comes first, in whatever order it is given
    assert "1 node × 4 A100" in lines[1]
    assert all("global batch 64 = 16 micro × 1 accumulation × 4 devices" in line for line in lines[:2])
    assert done.stdout.count("--run gpt ") == 4


def test_nothing_heavy_is_imported(project: Path) -> None:
    """The launcher is quick because it never loads PyTorch or Lightning."""
    probe = (
        "import sys; from slurm import submit; submit.main(['--dry-run']); "
        "print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=project, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_without_a_repository_the_way_round_is_named(tmp_path: Path, project: Path) -> None:
    """No git, no commit yet: one line with --no-snapshot; a dry run shows the rest and warns."""
    copy = tmp_path / "copy"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    command = [sys.executable, str(copy / "slurm/submit.py")]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path), "RUN_ROOT": str(tmp_path / "runs")}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "--no-snapshot" in error(refused)
    shown = subprocess.run([*command, "--dry-run"], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "warning: submitting would be refused" in shown.stderr


DOCUMENTED = sorted(
    set(re.findall(r"python slurm/submit\.py(?: [^#`\n]*)?", (ROOT / "README.md").read_text() + SLURM.read_text()))
)


@pytest.mark.parametrize("command", DOCUMENTED)
def test_what_is_documented_is_accepted(submit: Submit, command: str) -> None:
    """Every launcher command of the README and of docs/slurm.md can be shown."""
    arguments = shlex.split(command)[2:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    done = submit(*arguments[:cut], "--dry-run", *arguments[cut:])
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "behind --" in line]


def test_the_cloud_task_names_codes_that_another_start_can_mend() -> None:
    """docs/cloud.md's tasks are YAML; what they restart is a hang, a stop and a kill, never what comes again."""
    text = (ROOT / "docs/cloud.md").read_text()
    sky, dstack = (yaml.safe_load(found) for found in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    recovered = sky["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert recovered == [code for code in exit_codes.AGAIN if code != exit_codes.KILLED]  # that one is a lost machine
    loops = re.findall(r"case \$code in ([\d|]+)\)", text)
    assert [[int(code) for code in loop.split("|")] for loop in loops] == [list(exit_codes.AGAIN)] * 2
    assert sky["envs"]["RUN_ROOT"].startswith(tuple(sky["volumes"]))
    assert dstack["env"] == [f"RUN_ROOT={dstack['volumes'][0]['path']}/runs"]


def restart_loops(command: str) -> list[str]:
    """Those of docs/cloud.md, with another command that never waits."""
    text = (ROOT / "docs/cloud.md").read_text()
    loops = re.findall(r"^ *trap .*?^ *done$", text, re.DOTALL | re.MULTILINE)
    assert len(loops) == 2
    quick = "sleep() { :; }\n"
    return [quick + re.sub(r"(?:\.venv/bin/)?python -m src\.cli[^&]*", f"{command} ", loop) for loop in loops]


@pytest.mark.parametrize(("codes", "starts"), [([85, 137, 143, 74, 75, 0], 6), ([85, 70, 0], 2), ([2, 0], 1), ([0], 1)])
def test_the_restart_loops_start_again_after_what_a_start_can_mend(
    codes: list[int], starts: int, tmp_path: Path
) -> None:
    """In a real shell, with a command that ends with these codes one after the other; they end with the last one."""
    for number, loop in enumerate(restart_loops("train")):
        count, given = tmp_path / f"{number}", " ".join(map(str, codes))
        train = f"codes=({given}); train() {{ echo >> '{count}'; return ${{codes[$(wc -l < '{count}') - 1]}}; }}\n"
        done = subprocess.run(["bash", "-c", train + loop], capture_output=True, text=True)
        assert (len(count.read_text()), done.returncode) == (starts, codes[starts - 1]), done.stderr


def test_the_restart_loops_hand_a_signal_on(tmp_path: Path) -> None:
    """A shell by itself would end and leave the training, or as a container's first process ignore the signal."""
    for number, loop in enumerate(restart_loops("train")):
        ready, heard = tmp_path / f"ready-{number}", tmp_path / f"heard-{number}"
        act = f"trap 'touch {heard}; exit 85' TERM; touch {ready}; while true; do command sleep 0.1; done"
        process = subprocess.Popen(["bash", "-c", f"train() {{ {act}; }}\n{loop}"])
        until = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == exit_codes.STOPPED
        assert heard.exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "stops 300 s before the limit, saves, and resumes in the next start; 20 restarts at most"),
        (["--time", "10:00"], "stops 120 s before the limit"),
        (["--time", "4:59"], "under five minutes: its limit ends it; a preemption requeues it, 20 restarts at most"),
        (["--max-restarts", "0"], "not requeued (--max-restarts 0): its limit ends it"),
        (["--max-restarts", "1"], "1 restart at most"),
        (["--time", "2:00:00", "--total-time", "2-00:00:00"], "44 restarts at most, 2-00:00:00 in all"),
    ],
)
def test_what_happens_at_the_limit_is_said(submit: Submit, options: list[str], line: str) -> None:
    """Before anything is submitted; the script asks Slurm for the same signal, or for none."""
    shown = submit("--nodes", "1", *options, "--dry-run").stdout
    assert line in shown
    lead = re.search(r"stops (\d+) s", shown)
    signal = re.search(r"--signal=USR2@(\d+)", shown)
    assert (lead and lead[1]) == (signal and signal[1])
    assert ("#SBATCH --no-requeue" in shown) == ("0" in options)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--max-restarts", "-1"], "--max-restarts -1: a whole number, 0 or more"),
        (["--time", "2:00:00", "--total-time", "1:00:00"], "--total-time 1:00:00 needs a chain of jobs"),
        (["--time", "4:00", "--total-time", "1:00:00"], "a --time of five minutes or more (here 0:04:00)"),
        (["--total-time", "long"], "--total-time: got 'long'"),
        (["--total-time", "9:00:00", "--", "test"], "--total-time is for training: test is not requeued by itself"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(submit: Submit, options: list[str], refused: str) -> None:
    """In one line."""
    assert refused in error(submit("--nodes", "1", *options, "--dry-run" if "--" not in options else "--"))
