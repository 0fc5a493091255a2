"""`python slurm/jobs.py`: what it makes of records, of Slurm's words and of the runs' own files."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm import race, status
from slurm.cluster import ROOT
from slurm.node import failed_rank, history

Jobs = Callable[..., subprocess.CompletedProcess[str]]


def submitted(root: Path, name: str, job: str, runs: list[str] | None = None, **more: Any) -> None:
    """A record as submit.py leaves it."""
    content = {
        "job": job,
        "name": name,
        "runs": runs or [name],
        "points": [],
        "race": "",
        "token": f"{job}.0",
        "submitted": f"2026-01-01T00:00:{int(job) % 60:02}",
        "cluster": "local",
        "nodes": 2,
        "gpus_per_node": 1,
        "time_seconds": 3600,
        "cost_per_gpu_hour": None,
        "code": str(ROOT),
        "argv": ["--name", name],
        "folder": str(root),
    }
    folder = root / name / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job}.json").write_text(json.dumps(content | more))


def queue(bin_folder: Path, *rows: str) -> None:
    """What squeue will say: ARRAY|INDEX|JOB|STATE|REASON|NODES."""
    parts = [row.split("|") for row in rows]
    lines = [f"{array}|{index}|{job}|{state}|{nodes}|c.0|{reason}" for array, index, job, state, reason, nodes in parts]
    program(bin_folder, "squeue", "\n".join(["cat <<'END'", *lines, "END"]))


def program(bin_folder: Path, name: str, body: str) -> None:
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (bin_folder / name).chmod(0o755)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The run root."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """Where Slurm's commands are; it starts with an empty queue and no accounting, and never is the machine's own."""
    queue(tmp_path / "bin")
    program(tmp_path / "bin", "sbatch", "echo 'no test of jobs.py submits' >&2; exit 1")
    program(tmp_path / "bin", "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    program(tmp_path / "bin", "scancel", f'echo "$@" > {tmp_path}/cancelled')
    return tmp_path / "bin"


@pytest.fixture
def run_jobs(root: Path, bin_folder: Path) -> Jobs:
    """Runs the command."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"RUN_ROOT": str(root), "PATH": f"{bin_folder}:/usr/bin:/bin"}
        command = [sys.executable, str(ROOT / "slurm/jobs.py"), *arguments]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)

    return run


def row(done: subprocess.CompletedProcess[str], run: str) -> dict[str, str]:
    """The line of a run in a table, by column."""
    lines = done.stdout.splitlines()
    header, line = lines[0], next(line for line in lines[1:] if line.startswith(run))
    names = header.split("  ")
    places = [(name.strip(), header.index(name.strip())) for name in names if name.strip()]
    ends = [start for _, start in places[1:]] + [None]
    return {name: line[start:end].strip() for (name, start), end in zip(places, ends, strict=True)}


def test_a_waiting_job_says_why_in_words(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """Slurm's reason stands in the row, and what to do about it below."""
    submitted(root, "gpt", "11")
    queue(bin_folder, "11|N/A|11|PENDING|Resources|")
    done = run_jobs("list")
    assert row(done, "gpt") | {"STATE": "PENDING", "WHY": "Resources"} == row(done, "gpt")
    assert "Resources: waits for nodes to be free; fewer GPUs, another GPU type or a shorter --time" in done.stdout


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("(Resources)", "free"),
        ("Priority", "front"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "reserved"),
        ("QOSMaxJobsPerUserLimit", "limit of your account"),
        ("AssocGrpGRES", "limit of your account"),
        ("launch failed requeued held", "scontrol release"),
        ("JobHeldUser", "scontrol release"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "sinfo -R"),
        ("BeginTime", "two minutes"),
    ],
)
def test_reasons_are_explained(reason: str, word: str) -> None:
    """Those that users meet have a sentence each, however Slurm writes them."""
    assert word in status.hint(reason)
    assert status.hint("SomethingNew") == ""


def test_a_running_job_shows_step_checkpoint_and_hours(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """From the run's files and the job's own history, without accounting."""
    submitted(root, "gpt", "11", cost_per_gpu_hour=3.0)
    run = root / "gpt"
    (run / "checkpoints").mkdir()
    (run / "checkpoints/step=00000040.ckpt").touch()
    (run / "summary.json").write_text('{"last_step": 42, "exit_reason": "running"}')
    history.note(run, "11", "start")
    line = json.loads((run / "slurm/11_history.jsonl").read_text())
    (run / "slurm/11_history.jsonl").write_text(json.dumps(line | {"time": time.time() - 1800}))
    queue(bin_folder, "11|N/A|11|RUNNING|None|n[1-2]")
    found = row(run_jobs("list"), "gpt")
    assert (found["STATE"], found["NODES"], found["STEP"], found["CHECKPOINT"]) == (
        "RUNNING",
        "n[1-2]",
        "42",
        "0 min old",
    )
    assert found["ELAPSED/LIMIT"].startswith("0:30:0")
    assert (found["GPU HOURS"], found["COST"]) == ("1.00", "3.00")


def test_a_chain_of_starts_shows_how_far_it_is_and_what_was_lost(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """Part done, restarts, allocated time by the job's history that led nowhere; of a job that has ended, why."""
    submitted(root, "gpt", "11")
    summary = {"last_step": 300, "total_steps": 1200, "useful_seconds": 8100.0}
    (root / "gpt/summary.json").write_text(json.dumps(summary | {"exit_reason": "stopped by SIGUSR2"}))
    for event in ("start", "end", "start", "end", "start"):
        history.note(root / "gpt", "11", event)
    history.note(root / "gpt", "11", "end", why="stopped by SIGUSR2 at step 300, saved; --max-restarts 2 is reached")
    path = root / "gpt/slurm/11_history.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    moments = (0.0, 3000.0, 4000.0, 7000.0, 8000.0, 11000.0)  # three starts of 3000 s
    lines = [json.dumps(event | {"time": moment}) for event, moment in zip(events, moments, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    queue(bin_folder, "11|N/A|11|FAILED|NonZeroExitCode|")
    found = row(run_jobs("list"), "gpt")
    assert (found["DONE"], found["RESTARTS"], found["LOST"]) == ("25 %", "2", "0:15:00")
    assert found["WHY"].endswith("--max-restarts 2 is reached")


@pytest.mark.parametrize(
    ("code", "why"), [(1, "crashed"), (2, "bad input"), (70, "tripped"), (71, "out of memory"), (9, "NonZeroExitCode")]
)
def test_a_job_that_failed_says_why(root: Path, bin_folder: Path, run_jobs: Jobs, code: int, why: str) -> None:
    """By the code that its training ended with, of which Slurm says only that it was not zero."""
    submitted(root, "gpt", "11")
    for event, ended in (("start", {}), ("end", {"code": code, "why": ""})):
        history.note(root / "gpt", "11", event, **ended)
    queue(bin_folder, "11|N/A|11|FAILED|NonZeroExitCode|")
    assert row(run_jobs("list"), "gpt")["WHY"] == why


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL"])
def test_what_slurm_does_not_start_again_can_be_resumed_at_once(
    root: Path, bin_folder: Path, run_jobs: Jobs, state: str
) -> None:
    """Slurm shows such a job for minutes; the list says what to do."""
    submitted(root, "gpt", "11")
    queue(bin_folder, f"11|N/A|11|{state}|None|")
    assert f"{state}: " in run_jobs("list").stdout
    assert "jobs.py resume RUN resumes it" in run_jobs("list").stdout
    assert "nothing to resume" not in run_jobs("resume", "gpt").stderr


@pytest.mark.parametrize("state", ["REQUEUED", "COMPLETING", "SUSPENDED"])
def test_what_comes_back_is_no_end(root: Path, bin_folder: Path, run_jobs: Jobs, state: str) -> None:
    """A job in such a state is still cancelled by name, and not submitted a second time."""
    submitted(root, "gpt", "11")
    queue(bin_folder, f"11|N/A|11|{state}|None|")
    refused = run_jobs("resume", "gpt")
    assert (refused.returncode, f"has job 11 ({state})" in refused.stderr) == (2, True)
    assert run_jobs("cancel", "gpt").stdout == "cancelled: 11\n"


def test_a_job_that_slurm_has_forgotten_is_told_by_the_run(root: Path, run_jobs: Jobs) -> None:
    """Finished by DONE; else how the run says it ended."""
    for name, job in (("good", "11"), ("bad", "12"), ("killed", "13")):
        submitted(root, name, job)
    (root / "good/DONE").touch()
    (root / "bad/summary.json").write_text('{"exit_reason": "crashed"}')
    (root / "killed/summary.json").write_text('{"exit_reason": "running"}')
    done = run_jobs("list")
    assert row(done, "good")["STATE"] == "FINISHED"
    assert (row(done, "bad")["STATE"], row(done, "bad")["WHY"]) == ("GONE", "crashed")
    assert row(done, "killed")["WHY"] == "ended without a word"


def test_accounting_is_used_where_it_is(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """sacct's state counts for a job that has left the queue; a broken sacct is passed over."""
    submitted(root, "gpt", "11")
    program(bin_folder, "sacct", "echo '11|CANCELLED by 0'")
    assert row(run_jobs("list"), "gpt")["STATE"] == "CANCELLED"
    program(bin_folder, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert row(run_jobs("list"), "gpt")["STATE"] == "GONE"


def test_cancel_is_for_one_run(root: Path, bin_folder: Path, run_jobs: Jobs, tmp_path: Path) -> None:
    """The user's other jobs stay; of a race both go."""
    submitted(root, "gpt", "11", race="abc")
    submitted(root, "gpt", "12", race="abc")
    submitted(root, "other", "13")
    queue(bin_folder, *(f"{job}|N/A|{job}|PENDING|Priority|" for job in (11, 12, 13)))
    run_jobs("cancel", "gpt")
    assert (tmp_path / "cancelled").read_text().split() == ["11", "12"]


def test_an_unknown_run_is_one_line_with_the_newest(root: Path, run_jobs: Jobs) -> None:
    """So is a misspelt command."""
    submitted(root, "gpt", "11")
    done = run_jobs("logs", "gtp")
    assert (done.returncode, done.stderr.count("\n"), "the newest there: gpt" in done.stderr) == (2, 1, True)
    assert run_jobs("lst").returncode == 2


def test_a_grid_is_shown_and_cancelled_as_one(root: Path, bin_folder: Path, run_jobs: Jobs, tmp_path: Path) -> None:
    """Its points are runs of their own, its jobs JOB_INDEX."""
    points = [{"model.lr": "1e-3"}, {"model.lr": "3e-4"}]
    submitted(root, "g", "20", ["g-0", "g-1"], points=points)
    (root / "g-0").mkdir()
    (root / "g-0/DONE").touch()
    best = {"metric": "val/bpb", "value": 2.5, "checkpoint": "x"}
    (root / "g-0/summary.json").write_text(json.dumps({"last_step": 100, "best": best}))
    queue(bin_folder, "20|1|21|RUNNING|None|n3")
    done = run_jobs("report", "g")
    assert row(done, "g-0") | {"model.lr": "1e-3", "STATE": "FINISHED", "val/bpb": "2.5 *"} == row(done, "g-0")
    assert row(done, "g-1")["STATE"] == "RUNNING"
    assert run_jobs("cancel", "g").stdout == "cancelled: 20_1\n"


def test_the_winner_of_a_race_stands_for_the_run(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """The loser, submitted after it and cancelled, hides neither its state nor its output, now and later."""
    submitted(root, "gpt", "11", race="r")
    submitted(root, "gpt", "12", race="r")
    race.claim(root / "gpt/slurm", "r", "11")
    queue(bin_folder, "11|N/A|11|RUNNING|None|n1", "12|N/A|12|CANCELLED|None|")
    assert row(run_jobs("list"), "gpt") | {"JOB": "11", "STATE": "RUNNING"} == row(run_jobs("list"), "gpt")
    queue(bin_folder)
    assert row(run_jobs("list"), "gpt")["JOB"] == "11"
    queue(bin_folder, "11|N/A|11|FAILED|None|n1", "12|N/A|12|PENDING|None|")
    assert run_jobs("cancel", "gpt").stdout == "cancelled: 12\n"


def test_a_job_that_waits_comes_before_one_that_has_just_failed(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """Slurm shows ended jobs for some minutes: the run that was submitted again is pending, and can be cancelled."""
    submitted(root, "gpt", "11")
    submitted(root, "gpt", "12")
    queue(bin_folder, "11|N/A|11|FAILED|NonZeroExitCode|n1", "12|N/A|12|PENDING|Priority|")
    found = row(run_jobs("list"), "gpt")
    assert (found["JOB"], found["STATE"]) == ("12", "PENDING")
    assert run_jobs("cancel", "gpt").stdout == "cancelled: 12\n"


def test_a_job_that_only_accounting_knows_does_not_come_back(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """Preempted without a requeue, long ago: the run can be resumed, and there is nothing to cancel."""
    submitted(root, "gpt", "11")
    program(bin_folder, "sacct", "echo '11|PREEMPTED'; echo '12|'")
    assert row(run_jobs("list"), "gpt")["STATE"] == "PREEMPTED"
    assert "nothing to cancel: gpt is PREEMPTED" in run_jobs("cancel", "gpt").stdout
    assert "nothing to resume" not in run_jobs("resume", "gpt").stderr


def test_a_slurm_that_does_not_answer_is_no_end(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """The job is not said to be gone."""
    submitted(root, "gpt", "11")
    program(bin_folder, "squeue", "exit 1")
    assert row(run_jobs("list"), "gpt")["STATE"] == "UNKNOWN"


def test_what_is_damaged_is_named_and_the_rest_is_shown(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """A record that is cut off or empty, a line of a history, and what a site's squeue says beside its rows."""
    for name in ("cut", "empty", "odd", "fine"):
        submitted(root, name, "11")
    record = root / "cut/slurm/11.json"
    record.write_text(record.read_text()[:50])
    (root / "empty/slurm/11.json").write_text("{}")
    (root / "odd/slurm/11.json").write_text("[1]")
    history.note(root / "fine", "11", "start")
    with (root / "fine/slurm/11_history.jsonl").open("a") as file:
        file.write('{"event": "en')
    queue(bin_folder, "11|N/A|11|RUNNING|None|n1")
    program(bin_folder, "squeue", f"echo maintenance on Monday\n{(bin_folder / 'squeue').read_text()}")
    done = run_jobs("list")
    assert row(done, "fine")["STATE"] == "RUNNING"
    for name in ("cut", "empty", "odd"):
        assert f"warning: {root}/{name}/slurm/11.json is damaged: job 11 is not shown" in done.stderr


def test_one_odd_run_hides_no_other(root: Path, run_jobs: Jobs) -> None:
    """A race whose winner has no record, a checkpoint that goes while it is looked at, a record without a number."""
    submitted(root, "race", "12", race="abc")
    (root / "race/slurm/race-abc").write_text("11\n")
    submitted(root, "gone", "13")
    (root / "gone/checkpoints").mkdir()
    (root / "gone/checkpoints/step=00000001.ckpt").symlink_to("nowhere")
    submitted(root, "none", "14")
    (root / "none/slurm/14.json").write_text((root / "none/slurm/14.json").read_text().replace('"14"', "null"))
    submitted(root, "fine", "15")
    done = run_jobs("list")
    assert done.returncode == 0, done.stderr
    assert [row(done, name)["JOB"] for name in ("race", "gone", "fine")] == ["12", "13", "15"]


def test_the_gpus_of_a_grids_run_are_asked_by_its_own_number(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """srun does not take ARRAY_INDEX."""
    submitted(root, "g", "20", ["g-0", "g-1"], points=[{"a": "1"}, {"a": "2"}])
    queue(bin_folder, "20|0|20|RUNNING|None|n1", "20|1|21|RUNNING|None|n2")
    program(bin_folder, "srun", 'echo "$@"')
    assert "--jobid=21 " in run_jobs("gpu", "g-1").stdout


def test_runs_of_different_metrics_have_no_best(root: Path, run_jobs: Jobs) -> None:
    """A loss and an accuracy are shown with their names, and compared with nothing; nor is nan the best."""
    best = {"a": ("loss", 2.0), "b": ("acc", 0.5), "c": ("loss", float("nan"))}
    for job, (name, (metric, value)) in enumerate(best.items()):
        submitted(root, name, str(job))
        text = json.dumps({"best": {"metric": metric, "value": value}})
        (root / name / "summary.json").write_text(text)
    done = run_jobs("report")
    assert [row(done, name)["BEST"] for name in "abc"] == ["2 loss", "0.5 acc", "nan loss"]
    (root / "b/slurm/1.json").unlink()
    assert [row(run_jobs("report"), name)["loss"] for name in "ac"] == ["2 *", "nan"]


def test_a_run_of_a_grid_has_to_be_named(root: Path, run_jobs: Jobs) -> None:
    """Which of them `logs GRID` would mean cannot be said."""
    submitted(root, "g", "20", ["g-0", "g-1"], points=[{"a": "1"}, {"a": "2"}])
    for command in ("logs", "gpu"):
        assert "g is a grid: name one of its runs, g-0 to g-1" in run_jobs(command, "g").stderr


def test_logs_are_followed_from_before_the_job_starts(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """Batch script and rank, though neither file is there yet."""
    submitted(root, "gpt", "11")
    queue(bin_folder, "11|N/A|11|PENDING|Resources|")
    program(bin_folder, "tail", 'echo "$@"')
    said = run_jobs("logs", "gpt", "-f", "--rank", "1").stdout
    assert "job 11 is PENDING; this waits for its output, Ctrl-C ends it" in said
    assert f"-F {root}/gpt/slurm/11_batch.out {root}/gpt/slurm/11_1_log.out" in said


def test_a_run_whose_folder_is_gone_is_resumed_from_here(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """The folder in which it was submitted only mattered for relative paths."""
    submitted(root, "gpt", "11", folder=str(root / "gone"), argv=["--name", "gpt", "--cluster", "nowhere"])
    refused = run_jobs("resume", "gpt")
    assert "nowhere" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_logs_err_names_the_rank_that_fell_first(root: Path, run_jobs: Jobs) -> None:
    """Each rank's end, then the output of the one whose own fault it was: the others were only ended with it."""
    submitted(root, "gpt", "11")
    folder = root / "gpt/slurm"
    (folder / "11_batch.out").write_text(
        "job 11, first start\nsrun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Exited with exit code 1\n"
    )
    (folder / "11_0_log.out").write_text("step 10\n")
    (folder / "11_1_log.out").write_text(
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'\n"
    )
    said = run_jobs("logs", "gpt", "--err").stdout
    assert "rank 0 on n1: Terminated\n" in said
    assert "rank 1 on n2: Exited with exit code 1  <- fell first" in said
    assert said.rstrip().endswith("ModuleNotFoundError: No module named 'x'")


def test_logs_are_there_without_slurm(root: Path, bin_folder: Path, run_jobs: Jobs) -> None:
    """A controller that is down hides no file."""
    submitted(root, "gpt", "11")
    (root / "gpt/slurm/11_1_log.out").write_text("hello from rank 1\n")
    (root / "gpt/slurm/11_0_log.out").write_text("hello from rank 0\n")
    program(bin_folder, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    done = run_jobs("logs", "gpt", "--rank", "1")
    assert "hello from rank 1" in done.stdout
    assert "the controller does not answer" in done.stderr
    assert run_jobs("cancel", "gpt").returncode == 2
    assert "has the ranks 0 to 1" in run_jobs("logs", "gpt", "--rank", "2").stderr


@pytest.mark.parametrize(("text", "ranks"), [("3", [3]), ("0-2,5", [0, 1, 2, 5])])
def test_slurms_task_lists(text: str, ranks: list[int]) -> None:
    """As srun writes them."""
    assert failed_rank.task_numbers(text) == ranks


BATCH = "job 11, first start, on n1\nsrun: error: n1: task 9: Exited with exit code 3\njob 11, restart 1, on n1\n"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("", 0),
        ("srun: error: n1: task 0: Exited with exit code 143\nsrun: error: n2: task 1: Exited with exit code 2\n", 2),
        ("srun: error: n1: tasks 0-1: Exited with exit code 70\n", 70),
        ("srun: error: n1: task 0: Killed\nsrun: error: n2: task 1: Exited with exit code 143\n", 137),
        ("srun: error: n1: task 0: Exited with exit code 76\nsrun: error: n2: task 1: Killed\n", 137),
        ("srun: error: n1: task 0: Exited with exit code 76\nsrun: error: n2: task 1: Exited with exit code 1\n", 1),
        ("srun: error: n1: task 0: Out Of Memory\n", 137),
        ("srun: error: n2: task 2: Killed\nsrun: error: n1: tasks 0-1: Terminated\n", 137),
        ("srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Segmentation fault (core dumped)\n", 139),
        ("srun: error: n1: task 0: User defined signal 2\nsrun: error: n2: task 1: Terminated\n", 140),
    ],
)
def test_a_job_ends_with_the_code_of_the_rank_that_fell(said: str, code: int) -> None:
    """Not with that of a rank that was ended with it, nor with that of an earlier start."""
    srun = 0 if not said else 137 if "143" not in said and "Termin" not in said else 143
    assert failed_rank.job_exit_code(BATCH + said, srun) == code


def test_what_is_free_is_shown(bin_folder: Path, run_jobs: Jobs) -> None:
    """By partition and state, in words of a table; without a scheduler one line says so."""
    program(bin_folder, "sinfo", "echo 'a100*|idle|2|gpu:a100:4|64|500000|4:00:00'")
    done = run_jobs("nodes")
    assert row(done, "a100*") | {"STATE": "idle", "NODES": "2", "GPUS": "gpu:a100:4"} == row(done, "a100*")
    (bin_folder / "sinfo").write_text(
        "#!/bin/sh\necho 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1"
    )
    refused = run_jobs("nodes")
    assert (refused.returncode, "know no cluster" in refused.stderr) == (2, True)
