"""Describe jobs before they are submitted: a summary, and everything in a dry run."""

import shlex
from collections.abc import Sequence

from slurm import sbatch, script, times
from slurm.request import Training, batch_text
from slurm.script import Job
from slurm.snapshot import Plan
from slurm.submission import Submission


def summary(jobs: Sequence[Job], training: Training, plan: Plan | None, points: int) -> list[str]:
    """Return what will be used, in the words of a user."""
    lines = []
    for job in jobs:
        cluster, shape = job.cluster, job.shape
        card = (cluster.gpu or cluster.gpu_type or "GPU").upper() if cluster.gpu_request else "process"
        kind = f"GPU{'s' if shape.world_size > 1 else ''}" if cluster.gpu_request else "in all"
        nodes = f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"
        parts = [f"{nodes} × {shape.gpus_per_node} {card} = {shape.world_size} {kind}"]
        parts += ["computing on CPUs"] if cluster.accelerator == "cpu" and cluster.gpu_request else []
        parts.append(times.format_time(job.time))
        parts += [f"partition {cluster.partition}"] if cluster.partition else []
        parts += [text] if (text := batch_text(training, shape.world_size)) else []
        parts += [f"{points} runs"] if points else []
        lines.append(", ".join(parts))
        if cluster.cost_per_gpu_hour:
            most = cluster.cost_per_gpu_hour * shape.world_size * job.time.total_seconds() / 3600
            lines[-1] += f", at most {most * max(points, 1):.0f} of what the site bills"
    job = jobs[0]
    lines += [restarts(job)] if job.trains else []
    continued = (job.run_root / job.name / "checkpoints").is_dir()
    lines.append(f"run: {job.name} in {job.run_root}{' (resumes from its newest checkpoint)' if continued else ''}")
    if plan is None:
        lines.append(f"code: {job.code}")
    else:
        edits = (
            f" and {len(plan.changed)} uncommitted change{'s' if len(plan.changed) > 1 else ''}" if plan.changed else ""
        )
        lines.append(f"code: {len(plan.files)} files at {plan.commit[:8]}{edits}")
        if plan.left_out:
            names = ", ".join(plan.left_out[:5]) + (" …" if len(plan.left_out) > 5 else "")
            lines.append(f"left out, as git does not track them: {names} (--include)")
    return lines


def restarts(job: Job) -> str:
    """Return what happens at the job's limit."""
    if not job.restarts:
        return "not requeued (--max-restarts 0): its limit ends it"
    total = f", {times.format_time(job.total)} in all" if job.total else ""
    most = f"{job.restarts} restart{'s' if job.restarts > 1 else ''} at most{total}"
    if job.lead is None:
        return f"under five minutes: its limit ends it; a preemption requeues it, {most}"
    return f"stops {job.lead} s before the limit, saves, and resumes in the next start; {most}"


def show(submission: Submission) -> None:
    """Print the whole of a dry run."""
    for job in submission.jobs:
        _section("script", f"sbatch --parsable {shlex.quote(str(job.folder))}/…_submission.sh", script.script(job))
        starts = [
            f"{run}: {script.plain_command(command)}" for run, command in zip(job.runs, job.commands, strict=True)
        ]
        _section("training", *starts)
        _section("environment added", *(f"{name}={value}" for name, value in script.environment(job).items()))
        if plan := submission.snapshot:
            left = [f"left out: {name}" for name in plan.left_out] or ["left out: nothing"]
            changed = [f"with its uncommitted change: {name}" for name in plan.changed]
            _section("code", f"{len(plan.files)} files at commit {plan.commit}", *changed, *left)
        if estimate := sbatch.start_estimate(job):
            _section("sbatch --test-only", estimate)
    print("nothing was submitted or written", flush=True)


def _section(title: str, *lines: str) -> None:
    print(f"--- {title} ---", *lines, "", sep="\n")
