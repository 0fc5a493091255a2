"""Submitting with a pretended Slurm: what is written when, what is refused, and nothing twice."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.submission import _card
from src.check import read_cards
from src.engine.resolve.precision import resolve_precision
from template_tests.launcher.test_script import SHIPPED, site
from template_tests.launching import make_project

Submit = Callable[..., subprocess.CompletedProcess[str]]
SHAPE = ("--cluster", "local", "--nodes", "1", "--gpus-per-node", "1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in a git repository."""
    return make_project(tmp_path / "my project")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """An sbatch that accepts, a squeue that says what is in the file `queue`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "queue").touch()
    program(tmp_path / "bin", "sbatch", "echo 70")
    program(tmp_path / "bin", "squeue", f"cat {tmp_path}/queue")
    for name in ("scancel", "sacct"):  # the machine's own would speak of other jobs
        program(tmp_path / "bin", name, "exit 1")
    return tmp_path / "bin"


def program(programs: Path, name: str, body: str) -> None:
    (programs / name).write_text(f"#!/bin/bash\necho {name} >> {programs.parent}/calls\n{body}\n")
    (programs / name).chmod(0o755)


@pytest.fixture
def submit(project: Path, programs: Path, tmp_path: Path) -> Submit:
    """Runs the command from another folder."""

    def run(
        *arguments: str, umask: int = 0o022, script: str = "submit.py", run_root: str = str(tmp_path / "runs")
    ) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        own |= {"PATH": f"{programs}:/usr/bin:/bin", "RUN_ROOT": run_root}
        options = SHAPE if script == "submit.py" else ()
        command = [sys.executable, str(project / "slurm" / script), *options, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, umask=umask)

    return run


def test_a_record_stands_beside_the_run(submit: Submit, tmp_path: Path) -> None:
    """With number and command, and without a variable of the environment; no mark is left."""
    assert submit("--name", "gpt").returncode == 0
    record = json.loads((tmp_path / "runs/gpt/slurm/70.json").read_text())
    assert (record["job"], record["argv"][-1]) == ("70", "gpt")
    assert not list((tmp_path / "runs").rglob("*.submitting"))
    assert os.environ["PATH"] not in json.dumps(record)


def test_what_was_submitted_and_never_recorded_is_not_submitted_again(
    submit: Submit, programs: Path, tmp_path: Path
) -> None:
    """A submission that ended between Slurm's yes and the record is found by its comment, and then listed."""
    program(programs, "sbatch", "kill -9 $(ps -o ppid= -p $PPID)")  # the launcher, above `timeout`
    assert submit("--name", "gpt").returncode == -9
    (mark,) = (tmp_path / "runs/gpt/slurm").glob("*.submitting")
    (tmp_path / "queue").write_text(f"71 N/A {mark.stem}\n")
    again = submit("--name", "gpt")
    assert again.returncode == 2
    assert "run gpt has job 71 already" in again.stderr
    assert (programs.parent / "calls").read_text().split().count("sbatch") == 1
    (tmp_path / "queue").write_text(f"71|N/A|71|RUNNING|n1|{mark.stem}|None\n")
    assert "gpt  71   RUNNING" in submit("list", script="jobs.py").stdout


def test_ctrl_c_says_where_to_look(submit: Submit, programs: Path) -> None:
    """sbatch goes on by itself; no traceback."""
    program(programs, "sbatch", "kill -INT $(ps -o ppid= -p $PPID); sleep 1")
    done = submit("--name", "gpt")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "interrupted; whether a job was submitted: python slurm/jobs.py list"


def test_a_running_task_of_an_array_keeps_its_run(submit: Submit, programs: Path, tmp_path: Path) -> None:
    """Slurm gives every task a number of its own: what counts is the array's."""
    program(programs, "squeue", 'case "$*" in *%F*) echo "70 1 x.0";; *) echo "71 RUNNING";; esac')
    assert submit("--name", "g", "--grid", "model.lr=1,2").returncode == 0
    assert "has job 70 already" in submit("--name", "g", "--grid", "model.lr=1,2").stderr


def test_a_grids_run_is_not_submitted_beside_its_grid(submit: Submit, tmp_path: Path) -> None:
    """g-1 has a job, though its record stands under g."""
    assert submit("--name", "g", "--grid", "model.lr=1,2").returncode == 0
    (tmp_path / "queue").write_text("70 1 x.0\n")
    assert "run g-1 has job 70 already: python slurm/jobs.py cancel g-1 ends it" in submit("--name", "g-1").stderr


def test_a_run_of_a_grid_is_resumed_while_others_of_it_run(submit: Submit, programs: Path, tmp_path: Path) -> None:
    """Which task of the array is alive counts, not the array; of the whole grid those that run are left alone."""
    assert submit("--name", "g", "--grid", "model.lr=1,2,3").returncode == 0
    (tmp_path / "queue").write_text("70 0 x.0\n")
    refused = submit("--name", "g", "--grid", "model.lr=1,2,3", "--points", "0,1")
    assert "run g-0 has job 70 already" in refused.stderr
    program(programs, "sbatch", "echo 75")
    rows = {"%F|%K": "70|0|71|RUNNING|n1|x.0|None", "%F %K": "70 0 x.0"}
    cases = "\n".join(f"*'{asked}'*) echo '{row}';;" for asked, row in rows.items())
    program(programs, "squeue", f'case "$*" in {cases} esac')
    resumed = submit("resume", "g", script="jobs.py")
    assert resumed.returncode == 0, resumed.stderr
    assert "run g-0 has job 70_0 (RUNNING): it is left alone" in resumed.stdout
    assert ", 2 runs" in resumed.stdout
    refused = submit("resume", "g-0", script="jobs.py")
    assert "run g-0 has job 70_0 (RUNNING): nothing to resume" in refused.stderr


def test_a_grid_of_the_same_name_and_other_values_is_refused(submit: Submit, tmp_path: Path) -> None:
    """Its runs would go on under settings that are not theirs, or count as finished."""
    assert "logs g-0 -f; " in submit("--name", "g", "--grid", "model.lr=1,2").stdout
    for run in ("g-0", "g-1"):
        (tmp_path / "runs" / run).mkdir()
        (tmp_path / "runs" / run / "DONE").touch()
    assert "run g-1 was submitted with model.lr=2, not model.lr=3: give another --name" in (
        submit("--name", "g", "--grid", "model.lr=1,3").stderr
    )
    assert "finished: nothing to submit" in submit("--name", "g", "--grid", "model.lr=1,2").stdout


def test_a_queue_that_does_not_answer_is_no_empty_one(submit: Submit, programs: Path) -> None:
    """Whether the run has a job cannot be said, so nothing is submitted."""
    submit("--name", "gpt")
    program(programs, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    refused = submit("--name", "gpt")
    assert refused.returncode == 2
    assert "error: squeue: slurm_load_jobs error" in refused.stderr


def test_settings_are_read_with_the_jobs_code(submit: Submit, project: Path, tmp_path: Path) -> None:
    """A module that git does not track is missing there, and that is said before the job waits."""
    check = project / "src/check.py"
    check.write_text(f"import src.new\n{check.read_text()}")
    (project / "src/new.py").touch()
    refused = submit("--name", "gpt")
    assert refused.returncode == 2
    assert "No module named 'src.new'" in refused.stderr
    assert submit("--name", "gpt", "--include", "src/new.py").returncode == 0


def test_every_value_of_a_grid_is_read(submit: Submit, project: Path) -> None:
    """Not those of its first run alone: the last one may wait in the queue as long as any."""
    check = project / "src/check.py"
    check.write_text(check.read_text().replace('"--typo" in', '"1e-x" in'))
    refused = submit("--name", "g", "--grid", "model.depth=1,2 model.lr=1e-3,1e-x")
    assert refused.returncode == 2
    assert "error: unknown key typo" in refused.stderr


def test_a_configuration_from_elsewhere_is_submitted(submit: Submit, project: Path, tmp_path: Path) -> None:
    """The check finds the copy that the job will read; so does a resume, whatever became of the original."""
    check = project / "src/check.py"
    check.write_text(
        "import json, sys\n(command,) = json.load(sys.stdin)\nopen(command[command.index('--config') + 1])\n"
    )
    (tmp_path / "mine.yaml").write_text("global_batch_size: 128\n")
    done = submit("--name", "gpt", "--config", "mine.yaml")
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.yaml").write_text("global_batch_size: 3\n")
    again = submit("resume", "gpt", script="jobs.py")
    assert again.returncode == 0, again.stderr
    assert "global batch 128" in again.stdout
    assert (
        "fit --config .included/mine.yaml" in json.loads((tmp_path / "runs/gpt/slurm/70.json").read_text())["command"]
    )


def test_a_run_whose_code_is_gone_is_not_resumed(submit: Submit, tmp_path: Path) -> None:
    """A scratch file system purges old files; the line says what to do."""
    submit("--name", "gpt")
    (tmp_path / "runs/.snapshots").rename(tmp_path / "purged")
    refused = submit("resume", "gpt", script="jobs.py")
    assert refused.returncode == 2
    assert "the code of that submission is gone" in refused.stderr


def test_a_run_is_resumed_where_it_is(submit: Submit, tmp_path: Path) -> None:
    """Though RUN_ROOT was given relative to another folder than the one it was submitted from."""
    assert submit("--name", "gpt", run_root="runs").returncode == 0
    path = tmp_path / "runs/gpt/slurm/70.json"
    record = json.loads(path.read_text()) | {"folder": str(tmp_path / "bin")}
    path.write_text(json.dumps(record))
    again = submit("resume", "gpt", script="jobs.py", run_root="runs")
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "bin/runs").exists()


def test_a_run_is_resumed_by_training_it(submit: Submit, programs: Path) -> None:
    """Though it was evaluated since it was submitted."""
    assert submit("--name", "gpt", "--", "--model.lr", "0.5").returncode == 0
    program(programs, "sbatch", "echo 71")
    assert submit("--name", "gpt", "--", "test").returncode == 0
    program(programs, "sbatch", 'cp "${@: -1}" ' + f"{programs.parent}/script; echo 72")
    assert submit("resume", "gpt", script="jobs.py").returncode == 0
    assert "arguments=(fit --model.lr 0.5 " in (programs.parent / "script").read_text()


def test_a_run_is_resumed_with_other_settings(submit: Submit, programs: Path) -> None:
    """They come behind those it had, whose last one counts, and stay with it from then on."""
    script = programs.parent / "script"
    for job, (given, expected) in enumerate(
        [
            (["resume", "gpt", "--", "--model.lr", "0.2"], "arguments=(fit --model.lr 0.2 "),
            (["resume", "gpt", "--", "--model.lr=0.3"], "arguments=(fit --model.lr 0.2 --model.lr=0.3 "),
            (["resume", "gpt"], "arguments=(fit --model.lr 0.2 --model.lr=0.3 "),
        ]
    ):
        if not job:
            assert submit("--name", "gpt").returncode == 0
        program(programs, "sbatch", f'cp "${{@: -1}}" {script}; echo {71 + job}')
        done = submit(*given, script="jobs.py")
        assert done.returncode == 0, done.stderr
        assert expected in script.read_text()


def test_settings_of_a_resume_are_checked(submit: Submit) -> None:
    """Before anything waits in the queue; and no other command takes any."""
    assert submit("--name", "gpt").returncode == 0
    for settings, said in (
        (["--run", "other"], "--run belongs before `--`, as --name"),
        (["--model.lr=1", "--time", "4:00:00"], "--time is no setting of training: python slurm/submit.py --name gpt"),
        (["--config", "x.yaml"], "--config is no setting of training"),
        (["test"], "test is no setting of training"),
    ):
        refused = submit("resume", "gpt", "--", *settings, script="jobs.py")
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
    refused = submit("resume", "gpt", "--model.lr", "1", script="jobs.py")
    assert (refused.returncode, "settings of training belong behind --" in refused.stderr) == (2, True), refused.stderr
    for command in ("list", "logs", "cancel", "report"):
        refused = submit(command, "gpt", "--", "--model.lr", "1", script="jobs.py")
        assert (refused.returncode, refused.stderr) == (
            2,
            f"error: {command} takes no settings behind `--`: resume does\n",
        )


def test_a_grids_runs_are_given_other_settings_together(submit: Submit, programs: Path, tmp_path: Path) -> None:
    """One of them alone would pass its own on to the others, and what the grid varies stands behind them."""
    assert submit("--name", "g", "--grid", "model.lr=1,2").returncode == 0
    (tmp_path / "runs/g-0").mkdir(exist_ok=True)
    (tmp_path / "runs/g-0/DONE").touch()
    for settings, said in (
        (["g-1", "--", "--model.depth", "1"], "error: g-1 is of the grid g, whose runs have their settings in common"),
        (["g", "--", "--model.lr", "1"], "error: --model.lr is what the grid g varies"),
    ):
        refused = submit("resume", *settings, script="jobs.py")
        assert (refused.returncode, refused.stderr.startswith(said)) == (2, True), refused.stderr
    program(programs, "sbatch", 'cp "${@: -1}" ' + f"{programs.parent}/script; echo 72")
    done = submit("resume", "g", "--", "--model.depth", "1", script="jobs.py")
    assert done.returncode == 0, done.stderr
    script = (programs.parent / "script").read_text()
    assert "--model.depth 1 --model.lr 2 --run g-1" in script
    assert "g-0" not in script


def test_a_single_run_does_not_become_a_grids(submit: Submit) -> None:
    """It would go on under settings that are not its own."""
    assert submit("--name", "g-0", "--", "--model.lr", "5").returncode == 0
    assert "run g-0 was submitted with no grid" in submit("--name", "g", "--grid", "model.lr=1,2").stderr


def test_a_check_that_was_killed_says_so(submit: Submit, project: Path) -> None:
    """As a login node does it to what takes much memory."""
    (project / "src/check.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    refused = submit("--name", "gpt")
    assert refused.returncode == 2
    assert "error: the check was killed by signal 9" in refused.stderr
    assert "--no-check" in refused.stderr


def test_no_folder_is_writable_by_a_group(submit: Submit, tmp_path: Path) -> None:
    """Whatever the umask, and so the run root that it has made is not refused by the next start."""
    assert submit("--name", "gpt", umask=0o002).returncode == 0
    for folder in ("runs", "runs/gpt", "runs/gpt/slurm"):
        assert (tmp_path / folder).stat().st_mode & 0o022 == 0


def test_a_run_root_that_cannot_be_made_is_one_line(submit: Submit, tmp_path: Path) -> None:
    """No traceback."""
    (tmp_path / "runs").touch()
    refused = submit("--name", "gpt")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: ")


def test_a_closed_pipe_and_a_plain_terminal_are_no_errors(project: Path, tmp_path: Path) -> None:
    """`submit.py --dry-run | head -1`, and an encoding without ×."""
    command = f"'{sys.executable}' '{project}/slurm/submit.py' --cluster local --dry-run"
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "RUN_ROOT": str(tmp_path / "runs")}
    done = subprocess.run(["bash", "-c", f"{command} | true"], env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    shown = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert shown.stdout.startswith("1 node ? 4 A100")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_check_knows_the_card_of_each_cluster(name: str) -> None:
    """fp16 is accepted on every cluster with GPUs, also where its file does not say which; on CPUs it is not."""
    cluster = site(name)
    cards = read_cards(_card(cluster))
    assert bool(cards) == (cluster.accelerator == "gpu")
    for precision in ("auto", "32-true", *(["16-mixed"] if cards else [])):
        assert resolve_precision(precision, cards).value
