"""Decide from the options which jobs to submit, before anything is written."""

import argparse
import dataclasses
import datetime
import math
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm import grid, race, snapshot, times
from slurm.cluster import ROOT, load_cluster
from slurm.cluster_file import KEYS, Cluster, read_value
from slurm.describe import summary
from slurm.errors import LaunchError
from slurm.permissions import group_warning
from slurm.request import Shape, Training, choose_shape, given, read_training, refuse_secrets
from slurm.script import CRASH_RETRIES, RESTARTS, SHORTEST, Job
from slurm.submission import Submission, refuse_other_points
from src.engine.run.temporary import is_temporary

CODE_IS_GONE = "the code of that submission is gone, {code}: submit the run anew with submit.py --name"


def prepare(options: argparse.Namespace, overrides: Sequence[str], argv: Sequence[str]) -> Submission:
    """Read what has to be read and decide; write nothing."""
    cluster = _cluster(options)
    if options.code and not options.code.is_dir():
        raise LaunchError(CODE_IS_GONE.format(code=options.code))
    configs = [_config(file, options.code) for file in options.config]
    training = read_training(configs, overrides)
    run_root = find_run_root(cluster)
    name = new_name(training.experiment) if options.name is None else options.name
    _check_name(name)
    shapes, notes = _shapes(options, training, cluster)
    warnings = [*cluster.warnings, *notes, *_doubts(training, cluster, run_root)]
    warnings += [] if options.trust_run_root else group_warning(run_root)
    points = _points(options, run_root, name)
    plan = None if options.no_snapshot or options.code else _snapshot(options, configs, warnings)
    code = options.code or (run_root / ".snapshots" / plan.digest if plan else ROOT)
    inside = [_inside(config, plan, code) for config in configs]
    jobs = _jobs(options, cluster, training, shapes, points, inside, run_root / name, code)
    runs = jobs[0].runs
    finished = [run for run in runs if jobs[0].trains and (run_root / run / "DONE").exists()]
    warnings += [f"run {run} is finished and will not be trained again" for run in finished if points]
    return Submission(
        name=name,
        jobs=tuple(jobs),
        snapshot=plan,
        points=tuple(points),
        summary=tuple(summary(jobs, training, plan, len(points))),
        warnings=tuple(warnings),
        finished=len(finished) == len(runs),
        trust=options.trust_run_root,
        argv=tuple(argv),
    )


def _jobs(
    options: argparse.Namespace,
    cluster: Cluster,
    training: Training,
    shapes: Sequence[Shape],
    points: Sequence[grid.Point],
    configs: Sequence[str],
    run: Path,
    code: Path,
) -> list[Job]:
    """Return the job of each shape; more than one are a race for the same run."""
    time = _time(options.time) or cluster.time
    race_name = uuid.uuid4().hex[:8] if options.race else ""
    variants = [(point.run, point.overrides) for point in points] or [(run.name, [])]
    return [
        Job(
            cluster=cluster,
            shape=shape,
            time=time,
            name=run.name,
            folder=run / "slurm",
            run_root=run.parent,
            code=code,
            commands=[_command(training, cluster, shape, configs, name, more) for name, more in variants],
            runs=[name for name, _ in variants],
            parallel=options.parallel,
            token=race.token(race_name or uuid.uuid4().hex[:8], index),
            race=race_name,
            **_restarts(options, time, training.subcommand),
        )
        for index, shape in enumerate(shapes)
    ]


def _doubts(training: Training, cluster: Cluster, run_root: Path) -> list[str]:
    """Return warnings about what can be submitted and may not be meant."""
    found = [*_relative_paths(training), *_accelerator(training, cluster)]
    if cluster.name != "local" and (why := is_temporary(run_root)):
        found.append(f"the run root {run_root} is {why}: set RUN_ROOT or scratch: to a folder that all nodes share")
    return found


def _points(options: argparse.Namespace, run_root: Path, name: str) -> list[grid.Point]:
    """Return the combinations of --grid; of these, those that jobs.py resume has chosen."""
    points = grid.points(options.grid, name) if options.grid else []
    refuse_secrets([part for point in points for part in point.overrides])
    refuse_other_points(run_root, points)
    if options.points:
        chosen = {int(index) for index in options.points.split(",")}
        points = [point for index, point in enumerate(points) if index in chosen]
    return points


def _cluster(options: argparse.Namespace) -> Cluster:
    given: dict[str, Any] = {}
    for key in ("partition", "account", "qos"):
        if (value := getattr(options, key)) is not None:
            try:
                given[key] = read_value(value, KEYS[key])
            except ValueError as error:
                raise LaunchError(f"--{key}: {error}") from error
    cluster = dataclasses.replace(load_cluster(options.cluster), **given)
    if missing := cluster.missing():
        raise LaunchError(missing)
    return cluster


def _config(file: str, code: Path | None) -> str:
    """Return a configuration file's path: below the current folder, else below the project.

    With the `code` of an earlier submission, that of the copy in it.
    """
    places = [Path(file).resolve(), (ROOT / file).resolve()]
    if code and code != ROOT:
        places = [
            code / (place.relative_to(ROOT) if place.is_relative_to(ROOT) else Path(snapshot.OUTSIDE, place.name))
            for place in places
        ]
    # Where none is, src.cli's message names what is there.
    return next((str(place) for place in places if place.is_file()), file)


def _inside(config: str, plan: snapshot.Plan | None, code: Path) -> str:
    """Return a configuration file's name for the job, which runs in `code`."""
    if plan:
        return next((name for name, path in plan.files.items() if path == Path(config)), config)
    return str(Path(config).relative_to(code)) if Path(config).is_relative_to(code) else config


def _time(text: str | None, option: str = "--time") -> datetime.timedelta | None:
    try:
        return times.time_limit(text) if text else None
    except ValueError as error:
        raise LaunchError(f"{option}: {error}") from error


def find_run_root(cluster: Cluster) -> Path:
    """Return `$RUN_ROOT`, else runs/<project> on the cluster's scratch, else ./runs of the project; absolute."""
    if given := os.environ.get("RUN_ROOT"):
        place = os.path.expanduser(given)
        if place.startswith("~"):
            raise LaunchError(f"RUN_ROOT={given}: there is no such user here")
    elif scratch := cluster.scratch_folder():
        place = str(scratch / "runs" / ROOT.name)
    else:
        place = str(ROOT / "runs")
    root = Path(os.path.abspath(place))
    if set(str(root)) & {"%", "\\"} or not str(root).isprintable():
        raise LaunchError(
            f"the run root {str(root)!r} has a %, a \\ or a control character in it, which Slurm takes for its own"
        )
    return root


def new_name(experiment: str) -> str:
    """Return a run's name that no other submission gets, not even one of the same second."""
    readable = re.sub(r"[^\w.+=@-]+", "-", experiment)[:60].strip("-._") or "run"
    return f"{readable}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[^\W_][\w.+=@-]*", name) or len(name.encode()) > 150:
        raise LaunchError(
            f"--name {name!r}: use up to 150 letters, digits and . _ - + = @, beginning with a letter or digit"
        )


def _shapes(options: argparse.Namespace, training: Training, cluster: Cluster) -> tuple[list[Shape], list[str]]:
    if not options.race:
        shape, notes = choose_shape(training, cluster, options.nodes, options.gpus_per_node)
        return [shape], notes
    # What starts more easily comes first: a job in front of it would reserve the nodes on which it could start at once.
    shapes = [Shape.read(part.strip()) for part in options.race.split(",")]
    asked = sorted(shapes, key=lambda shape: (shape.gpus_per_node, shape.nodes))
    if len(set(asked)) < 2:
        raise LaunchError(f"--race {options.race}: give two or more different shapes, such as 1x4,4x1")
    found = [choose_shape(training, cluster, shape.nodes, shape.gpus_per_node) for shape in asked]
    if len({shape.world_size for shape in asked}) > 1:
        found[0][1].append("the shapes of this race have different numbers of GPUs: the run keeps its global batch")
    return [shape for shape, _ in found], list(dict.fromkeys(note for _, notes in found for note in notes))


def _relative_paths(training: Training) -> list[str]:
    """Return warnings about values that are paths here and mean another place in a job."""
    values = [part.partition("=")[2] if part.startswith("--") else part for part in training.overrides]
    paths = [value for value in values if "/" in value and not value.startswith("/") and Path(value).exists()]
    return [
        f"{path} is a relative path; in the job it starts from the snapshot: give {Path(path).resolve()}"
        for path in paths
    ]


def _accelerator(training: Training, cluster: Cluster) -> list[str]:
    own = training.own.get("trainer.accelerator")
    if given(training, "trainer.accelerator") or own in (None, "auto", cluster.accelerator):
        return []
    what = f"computes on {'GPUs' if cluster.accelerator == 'gpu' else 'CPUs'}"
    return [f"trainer.accelerator {own} is not used: cluster {cluster.name} {what} (behind --, it would be)"]


def _restarts(options: argparse.Namespace, limit: datetime.timedelta, subcommand: str) -> dict[str, Any]:
    """Return how often the job restarts by itself: with a total time, often enough for it and 20 interruptions more."""
    total = _time(options.total_time, "--total-time")
    names = ("total_time", "max_restarts", "max_crash_retries")
    asked = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if asked and subcommand != "fit":
        raise LaunchError(f"{asked[0]} is for training: {subcommand} is not requeued by itself")
    if total and (total < limit or limit < SHORTEST or options.max_restarts == 0):
        raise LaunchError(
            f"--total-time {options.total_time} needs a chain of jobs: a --time of five minutes or more (here "
            f"{times.format_time(limit)}) that is not longer than it, and restarts"
        )
    most = RESTARTS + (math.ceil(total / limit) if total else 0)
    return {
        "restarts": most if options.max_restarts is None else options.max_restarts,
        "total": total,
        "crash_retries": CRASH_RETRIES if options.max_crash_retries is None else options.max_crash_retries,
    }


def _snapshot(options: argparse.Namespace, configs: Sequence[str], warnings: list[str]) -> snapshot.Plan | None:
    """Return the code that travels, with the configuration files, tracked or not."""
    include = [Path(path).absolute() if Path(path).exists() else ROOT / path for path in options.include]
    try:
        plan = snapshot.plan(ROOT, include)
        taken = set(plan.files.values())
        if more := [Path(config) for config in configs if Path(config) not in taken and Path(config).is_file()]:
            plan = snapshot.plan(ROOT, [*include, *more])
    except LaunchError as error:
        if not options.dry_run:
            raise
        warnings.append(f"submitting would be refused: {error}")
        return None
    warnings += plan.warnings
    return plan


def _command(
    training: Training,
    cluster: Cluster,
    shape: Shape,
    configs: Sequence[str],
    run: str,
    more: Sequence[str],
) -> list[str]:
    """Return the arguments of `python -m src.cli`. Nodes and devices stand last: they are what Slurm was asked for."""
    files = [part for file in configs for part in ("--config", file)]
    counts = {"trainer.num_nodes": shape.nodes, "trainer.devices": shape.gpus_per_node}
    fixed = [part for name, count in counts.items() for part in (f"--{name}", str(count))]
    accelerator = [] if given(training, "trainer.accelerator") else ["--trainer.accelerator", cluster.accelerator]
    return [training.subcommand, *files, *training.overrides, *more, "--run", run, *accelerator, *fixed]
