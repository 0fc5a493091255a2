"""The launcher on a real Slurm, with a stand-in for training (launching.py) that says what each rank saw."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from template_tests.cluster.jobs import NODES, field, slurm, start_now, wait_for
from template_tests.cluster.project import PATIENCE, Project


@pytest.fixture
def closed(_turn: None) -> Iterator[None]:
    """No node takes jobs until the test opens them."""
    slurm("scontrol", "update", f"nodename={','.join(NODES)}", "state=drain", "reason=test")
    yield
    subprocess.run(["scontrol", "update", f"nodename={','.join(NODES)}", "state=resume"], check=False)


def open_nodes() -> None:
    slurm("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume")


def test_every_rank_has_its_place_and_its_cores(project: Project) -> None:
    """Two nodes of two: four ranks, one address and port, the cores that were asked for, the snapshot's code."""
    text = (project.root / "configs/clusters/local.yaml").read_text().replace("cpus_per_gpu: 1", "cpus_per_gpu: 3")
    (project.root / "configs/clusters/local.yaml").write_text(text)
    (job,) = project.submit("--nodes", "2", "--gpus-per-node", "2", "--name", "gpt", "--", "--model.x", "it's 1 $y")
    project.wait(job, "COMPLETED")
    assert field(job, "ExitCode") == "0:0"
    seen = project.seen("gpt")
    assert sorted(seen) == [0, 1, 2, 3]
    environments = [facts["environment"] for facts in seen.values()]
    assert {found["SLURM_NTASKS"] for found in environments} == {"4"}
    assert {found["SLURM_CPUS_PER_TASK"] for found in environments} == {"3"}
    assert len({(found["MASTER_ADDR"], found["MASTER_PORT"]) for found in environments}) == 1
    assert 10000 <= int(environments[0]["MASTER_PORT"]) < 30000
    assert {Path(facts["file"]).parents[2] for facts in seen.values()} == {project.runs / ".snapshots"}
    argv = seen[0]["argv"]
    assert argv[argv.index("--model.x") + 1] == "it's 1 $y"
    assert argv[-4:] == ["--trainer.num_nodes", "2", "--trainer.devices", "2"]
    folder = project.runs / "gpt/slurm"
    logs = {path.name for path in folder.glob("*.out")}
    assert logs == {f"{job}_batch.out", *(f"{job}_{rank}_log.out" for rank in range(4))}
    assert "rank 3 is here" in (folder / f"{job}_3_log.out").read_text()


def test_the_script_is_the_dry_runs(project: Project) -> None:
    """What a dry run shows is what is submitted, but for the number of the submission."""
    options = ["--nodes", "1", "--gpus-per-node", "1", "--name", "gpt"]
    shown = project.command("submit.py", "--cluster", "local", "--dry-run", *options).stdout
    (job,) = project.submit(*options)
    stored = (project.runs / f"gpt/slurm/{job}_submission.sh").read_text()
    comment = re.compile(r"--comment=\w+")
    assert comment.sub("", stored).strip() in comment.sub("", shown)


def test_edits_after_submission_do_not_reach_the_job(project: Project, closed: None) -> None:
    """The job runs the code as it was, with the edits that were there then."""
    cli = project.root / "src/cli.py"
    cli.write_text(cli.read_text().replace("as submitted", "edited before"))
    (job,) = project.submit("--nodes", "1", "--gpus-per-node", "1", "--name", "gpt")
    cli.write_text("raise SystemExit(9)\n")
    open_nodes()
    project.wait(job, "COMPLETED", "FAILED")
    assert project.seen("gpt")[0]["version"] == "edited before"


def test_two_jobs_on_a_node_get_different_ports(project: Project) -> None:
    """They run at the same time on this one machine and would take each other's ranks."""
    for name in ("one", "two"):
        project.submit("--nodes", "1", "--gpus-per-node", "1", "--name", name, "--no-check", "--", "--act", "wait")
    for name in ("one", "two"):
        project.wait_ranks(name, 1)
    found = [project.seen(name)[0]["environment"] for name in ("one", "two")]
    assert found[0]["MASTER_PORT"] != found[1]["MASTER_PORT"]


def test_a_rank_that_raises_ends_the_job_and_is_shown(project: Project) -> None:
    """The others, which would wait for ever, are ended; `logs --err` shows the traceback of the one that fell."""
    (job,) = project.submit("--nodes", "2", "--gpus-per-node", "1", "--name", "gpt", "--", "--act", "raise")
    project.wait(job, "FAILED")
    assert field(job, "ExitCode") == "1:0"
    said = project.command("jobs.py", "logs", "gpt", "--err").stdout
    assert re.search(r"rank 1 on n\d: Exited with exit code 1 +<- fell first", said), said
    assert "ModuleNotFoundError: No module named 'flash'" in said
    listed = project.command("jobs.py", "list").stdout
    assert re.search(rf"gpt +{job} +FAILED", listed), listed


def test_cancelling_leaves_no_process(project: Project) -> None:
    """jobs.py cancel ends that run's job, its ranks and what they have started, and no other run."""
    (job,) = project.submit("--nodes", "2", "--gpus-per-node", "1", "--name", "gpt", "--", "--act", "wait")
    (other,) = project.submit("--nodes", "1", "--gpus-per-node", "1", "--name", "other", "--", "--act", "wait")
    project.wait_ranks("gpt", 2)
    project.wait_ranks("other", 1)
    assert "cancelled: " + job in project.command("jobs.py", "cancel", "gpt").stdout
    project.wait(job, "CANCELLED")

    def left() -> str:
        return subprocess.run(["pgrep", "-f", f"{project.runs}/gpt"], capture_output=True, text=True).stdout

    wait_for(lambda: not left(), 30, "no process of the run is left")
    assert field(other, "JobState") == "RUNNING"


def test_a_run_that_has_a_job_is_not_submitted_again(project: Project, closed: None) -> None:
    """Two jobs of one run would wait for each other; the refusal names the first."""
    (job,) = project.submit("--nodes", "1", "--gpus-per-node", "1", "--name", "gpt")
    refused = project.command("submit.py", "--cluster", "local", "--nodes", "1", "--name", "gpt")
    assert refused.returncode == 2
    assert f"run gpt has job {job} already: " in refused.stderr


def test_a_finished_run_that_is_requeued_ends_at_once(project: Project) -> None:
    """By hand, or by Slurm after a node has failed: it trains nothing and ends well."""
    (job,) = project.submit("--nodes", "1", "--gpus-per-node", "1", "--name", "gpt")
    project.wait(job, "COMPLETED")
    slurm("scontrol", "requeue", job)
    start_now(job)
    wait_for(lambda: field(job, "Restarts") == "1" and field(job, "JobState") == "COMPLETED", PATIENCE, "it has ended")
    assert len(list((project.runs / "gpt").glob("rank*.json"))) == 1
    assert "the run is finished: nothing to do" in (project.runs / f"gpt/slurm/{job}_batch.out").read_text()


def test_submitted_from_inside_a_job(project: Project) -> None:
    """The new job takes nothing of the old one's: neither tasks, nor cores, nor memory, nor addresses."""
    script = [sys.executable, str(project.root / "slurm/submit.py"), "--cluster", "local"]
    options = ["--nodes", "2", "--gpus-per-node", "1", "--name", "inner"]
    said = slurm(
        *("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--mem=100M"),
        *("env", f"RUN_ROOT={project.runs}", "MASTER_ADDR=nowhere", "RANK=7", *script, *options),
    )
    (job,) = re.findall(r"^job (\d+): ", said, re.MULTILINE)
    project.jobs.append(job)
    project.wait(job, "COMPLETED")
    seen = project.seen("inner")
    assert sorted(seen) == [0, 1]
    assert seen[0]["environment"]["MASTER_ADDR"] != "nowhere"
    assert "RANK" not in seen[0]["environment"]
    assert seen[0]["environment"]["SLURM_CPUS_PER_TASK"] == "1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "nope"], "sinfo -s lists the partitions"),
        (["--nodes", "5", "--gpus-per-node", "1"], "nodes"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words_with_a_hint(project: Project, options: list[str], said: str) -> None:
    """One line, exit code 2, nothing in the queue."""
    done = project.command(
        "submit.py", "--cluster", "local", "--name", "gpt", *options, "--", "--global_batch_size", "80"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: sbatch refused gpt: ") or "error: sbatch refused gpt: " in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_account_is_said_with_what_lists_yours(project: Project) -> None:
    """Account and partition must go together; nothing is left in the queue or on the disk that looks like a job."""
    slurm("scontrol", "update", "PartitionName=urgent", "AllowAccounts=lab")
    try:
        options = ["--partition", "urgent", "--account", "other", "--nodes", "1", "--name", "gpt"]
        done = project.command("submit.py", "--cluster", "local", *options)
    finally:
        slurm("scontrol", "update", "PartitionName=urgent", "AllowAccounts=ALL")
    assert done.returncode == 2
    assert "Invalid account or account/partition combination specified" in done.stderr
    assert "sacctmgr show assoc user=$USER lists yours" in done.stderr
    assert list((project.runs / "gpt/slurm").glob("*.json")) == []


def test_a_typo_does_not_reach_the_queue(project: Project) -> None:
    """src.cli reads its settings before the job waits."""
    done = project.command("submit.py", "--cluster", "local", "--nodes", "1", "--name", "gpt", "--", "--typo", "1")
    assert done.returncode == 2
    assert "error: unknown key typo" in done.stderr
    assert not (project.runs / "gpt").exists()


def test_a_node_that_is_down_is_explained(project: Project, closed: None) -> None:
    """The list says why the job waits; it runs when the node is back."""
    (job,) = project.submit("--nodes", "4", "--gpus-per-node", "1", "--name", "gpt")
    wait_for(lambda: field(job, "Reason") not in ("None", "Priority"), PATIENCE, "Slurm says why it waits")
    listed = project.command("jobs.py", "list").stdout
    assert re.search(rf"gpt +{job} +PENDING +\S+", listed), listed
    assert re.search(r"^(Resources|ReqNodeNotAvail.*|Nodes required.*): .*nodes", listed, re.MULTILINE), listed
    open_nodes()
    project.wait(job, "COMPLETED")
    assert len(project.seen("gpt")) == 4


def test_a_grid_is_an_array_and_what_failed_is_submitted_alone(project: Project) -> None:
    """A run directory for each point; resume takes the points that are not finished."""
    (job,) = project.submit(
        *("--nodes", "1", "--gpus-per-node", "2", "--name", "g", "--grid", "act=ok,raise,fine", "--parallel", "2")
    )
    wait_for(lambda: not slurm("squeue", "--noheader", f"--jobs={job}").strip(), PATIENCE, "the array has ended")
    assert [(project.runs / f"g-{index}/DONE").exists() for index in range(3)] == [True, False, True]
    assert project.seen("g-2")[0]["argv"][-6:-4] == ["--trainer.accelerator", "cpu"]
    report = project.command("jobs.py", "report", "g").stdout
    assert re.search(r"g-0 +ok +FINISHED", report), report
    assert re.search(r"g-1 +raise +FAILED", report), report
    done = project.command("jobs.py", "resume", "g")
    (again,) = re.findall(r"^job (\d+): g", done.stdout, re.MULTILINE)
    project.jobs.append(again)
    wait_for(
        lambda: f"rank0-{again}" in " ".join(path.name for path in (project.runs / "g-1").iterdir()), PATIENCE, "g-1"
    )
    assert len(list((project.runs / "g-0").glob("rank*.json"))) == 2


@pytest.mark.parametrize("order", ["narrow first", "wide first", "both at once", "requeued"])
def test_a_race_is_trained_once(project: Project, closed: None, order: str) -> None:
    """Whichever shape starts, that one trains; the other never writes, and leaves the queue."""
    wide, narrow = project.submit("--race", "1x4,4x1", "--name", "gpt", "--", "--act", "wait")
    held = {"narrow first": wide, "wide first": narrow, "requeued": wide}.get(order)
    if held:
        slurm("scontrol", "hold", held)
    open_nodes()
    project.wait_ranks("gpt", 4)
    winner = project.seen("gpt")[0]["environment"]["SLURM_JOB_ID"]
    loser = wide if winner == narrow else narrow
    if held:
        assert loser == held
    project.wait(loser, "CANCELLED", "COMPLETED")
    if order == "requeued":
        slurm("scontrol", "requeue", winner)
        start_now(winner)
        wait_for(lambda: field(winner, "Restarts") == "1", PATIENCE, "the winner has been requeued")
    (project.runs / "gpt/go").touch()
    project.wait(winner, "COMPLETED")
    trained = {path.name.split("-")[1] for path in (project.runs / "gpt").glob("rank*.json")}
    assert trained == {winner}
    expected = ["--trainer.num_nodes", "1", "--trainer.devices", "4"] if winner == narrow else None
    assert project.seen("gpt")[0]["argv"][-4:] == (expected or ["--trainer.num_nodes", "4", "--trainer.devices", "1"])


def test_a_race_does_not_block_itself(project: Project, submit: Callable[..., str]) -> None:
    """Another job has a GPU of each node: four nodes of one GPU start at once, and do not wait behind a whole node."""
    submit("sleep 600", "--nodes=4", "--gpus-per-node=1", "--output=/dev/null")
    wide, narrow = project.submit("--race", "1x4,4x1", "--name", "gpt", "--no-check", "--", "--act", "wait")
    project.wait_ranks("gpt", 4)
    assert project.seen("gpt")[0]["environment"]["SLURM_JOB_ID"] == wide
    project.wait(narrow, "CANCELLED")


def test_one_refused_shape_of_a_race_leaves_the_other(project: Project) -> None:
    """It is said, and the run trains all the same."""
    done = project.command(
        "submit.py", "--cluster", "local", "--race", "1x4,5x1", "--name", "gpt", "--", "--global_batch_size", "80"
    )
    assert done.returncode == 0, done.stderr
    (job,) = re.findall(r"^job (\d+): gpt", done.stdout, re.MULTILINE)
    project.jobs.append(job)
    assert "the other shape stays in the queue" in done.stderr
    project.wait(job, "COMPLETED")
    assert len(project.seen("gpt")) == 4


def test_gpu_hours_are_counted_without_accounting(project: Project) -> None:
    """From the job's own notes of its starts and its end."""
    (job,) = project.submit("--nodes", "2", "--gpus-per-node", "1", "--name", "gpt", "--", "--act", "wait")
    project.wait_ranks("gpt", 2)
    time.sleep(2)
    (project.runs / "gpt/go").touch()
    project.wait(job, "COMPLETED")
    lines = (project.runs / f"gpt/slurm/{job}_history.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["start", "end"]
    assert events[1]["code"] == 0
    assert events[1]["time"] - events[0]["time"] > 2
