"""Look after the jobs that submit.py has submitted.

    python slurm/jobs.py list                       # every run: its job, state and why, step, age of its checkpoint
    python slurm/jobs.py logs RUN [--rank R] [-f]   # a rank's output; --err shows how each rank ended
    python slurm/jobs.py gpu RUN                    # what its GPUs do right now
    python slurm/jobs.py cancel RUN                 # that run's jobs and no others
    python slurm/jobs.py resume RUN                 # submit it again as it was: of a grid, what is not finished
    python slurm/jobs.py resume RUN -- --micro_batch_size 4    # with other settings for training
    python slurm/jobs.py report [GRID]              # results as a table
    python slurm/jobs.py nodes                      # what is free right now

RUN is a run's name, or a grid's with all its runs. Works with squeue alone; sacct is asked where there is one.
"""

import argparse
import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:  # run as a script, Python puts slurm/ on the path, where its files would shadow others' modules
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]
    from src.engine import streams

    streams.survive_closed_streams()

from slurm import sbatch
from slurm.cluster import load_cluster
from slurm.errors import LaunchError, Parser
from slurm.node import failed_rank
from slurm.plan import find_run_root
from slurm.resume import resume
from slurm.status import State, hint, states
from src.engine.errors import FileError
from src.engine.text import table

GPU_QUERY = "index,name,utilization.gpu,memory.used,memory.total,power.draw"
GPU_SECONDS = 30
TAIL = 40  # lines


def _one(found: Sequence[State], name: str) -> State:
    if len(found) > 1:
        raise LaunchError(f"{name} is a grid: name one of its runs, {found[-1].run} to {found[0].run}")
    return found[0]


def list_runs(found: Sequence[State]) -> None:
    """Print a row for each run, and below what a reason means."""
    rows = []
    for state in found:
        hours, price = state.gpu_seconds / 3600, state.record.get("cost_per_gpu_hour")
        row = {"RUN": state.run, "JOB": state.job, "STATE": state.state, "WHY": state.reason, "NODES": state.nodes}
        row |= {"ELAPSED/LIMIT": state.elapsed, "STEP": "" if state.step is None else str(state.step)}
        row |= {"DONE": state.part_done, "RESTARTS": str(state.restarts or ""), "LOST": state.lost}
        row |= {"CHECKPOINT": f"{age} old" if (age := state.checkpoint_age) else "", "GPU HOURS": f"{hours:.2f}"}
        rows.append(row | {"COST": "" if price is None else f"{hours * price:.2f}"})
    _print_table(rows)
    for reason in dict.fromkeys(state.reason if state.live else state.state for state in found):
        if text := hint(reason):
            print(f"{reason}: {text}")


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print aligned columns of equal keys; one that is empty in every row is left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    if names:
        print(table([names, *([row[name] for name in names] for row in rows)]))


def logs(state: State, rank: int, err: bool, follow: bool, lines: int) -> None:
    """Show a rank's output, or how each rank ended."""
    folder = state.folder.parent / state.record["name"] / "slurm"
    batch, ranks = folder / f"{state.job}_batch.out", _rank_logs(folder, state.job)
    if err:
        _show_ends(batch, ranks, lines)
        return
    if not 0 <= rank < (count := state.record["nodes"] * state.record["gpus_per_node"]):
        raise LaunchError(f"--rank {rank}: job {state.job} has the ranks 0 to {count - 1}")
    files = [path for path in (batch, ranks.get(rank)) if path is not None and path.exists()]
    if follow and (state.live or files):  # also what is not there yet
        files = [batch, folder / f"{state.job}_{rank}_log.out"]
        if not all(path.exists() for path in files):
            print(f"job {state.job} is {state.state}; this waits for its output, Ctrl-C ends it", flush=True)
    if not files:
        raise LaunchError(f"job {state.job} ({state.state}) has written nothing yet in {folder}")
    command = ["tail", "-n", str(lines), *(["-F"] if follow else []), *map(str, files)]
    sys.stdout.flush()
    subprocess.run(command, check=False)


def _rank_logs(folder: Path, job: str) -> dict[int, Path]:
    matches = [(re.fullmatch(rf"{job}_(\d+)_log\.out", path.name), path) for path in folder.glob(f"{job}_*_log.out")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def _show_ends(batch: Path, ranks: dict[int, Path], lines: int) -> None:
    """Print how each rank ended, and the output of the one that failed first: the others often only lost it."""
    said = batch.read_text(errors="replace") if batch.exists() else ""
    texts = {rank: path.read_text(errors="replace") for rank, path in ranks.items()}
    ends = failed_rank.ends(said)
    first = failed_rank.first(ends, texts)
    for rank in sorted({*ends, *ranks}):
        mark = "  <- fell first" if rank == first else ""
        print(f"rank {rank} {ends.get(rank, 'ended well, or runs')}{mark}")
    if not texts:
        print("\n".join(["no rank has started; the batch script said:", *said.splitlines()[-lines:]]))
        return
    rank = min(texts) if first is None else first
    print(f"--- rank {rank}, its last {lines} lines ---")
    print("\n".join(texts.get(rank, "").splitlines()[-lines:]))


def gpu(state: State) -> None:
    """Ask every node of the job, from inside the job, as ssh to a node is often not allowed."""
    if state.state != "RUNNING":
        raise LaunchError(
            f"job {state.job} of run {state.run} is {state.state}: only a running job has GPUs to look at"
        )
    query = f"nvidia-smi --query-gpu={GPU_QUERY} --format=csv,noheader"
    look = f'if command -v nvidia-smi >/dev/null; then {query} | sed "s/^/$SLURMD_NODENAME GPU /"; '
    look += 'else echo "$SLURMD_NODENAME has no nvidia-smi; load $(cut -d" " -f1-3 /proc/loadavg)"; fi'
    # --overlap and no memory of its own: a look must not wait for what the job holds.
    step = ["srun", f"--jobid={state.number or state.job}", "--overlap", f"--nodes={state.record['nodes']}"]
    step += ["--ntasks-per-node=1", "--mem=0", "env", "-u", "CUDA_VISIBLE_DEVICES", "bash", "-c", look]
    done = sbatch.ask(*step, seconds=GPU_SECONDS)
    print("\n".join(sorted(done.stdout.splitlines())))
    if done.returncode:
        raise LaunchError(f"srun: {sbatch.advice(done.stderr)}")


def nodes() -> None:
    """Print the nodes by partition, state and GPUs, with the longest time that each partition gives."""
    done = sbatch.ask("sinfo", "--noheader", "--format=%P|%T|%D|%G|%c|%m|%l")
    if done.returncode:
        raise LaunchError(f"sinfo: {sbatch.advice(done.stderr)}")
    names = ("PARTITION", "STATE", "NODES", "GPUS", "CPUS", "MEMORY MB", "LONGEST")
    parts = [line.split("|", 6) for line in done.stdout.splitlines()]
    _print_table([dict(zip(names, row, strict=True)) for row in parts if len(row) == len(names)])


def cancel(found: Sequence[State]) -> None:
    """End these runs' jobs, in whatever state, and no others."""
    numbers = sorted({job for state in found for job in state.live})
    if not numbers:
        print(f"nothing to cancel: {', '.join(f'{state.run} is {state.state}' for state in found)}")
        return
    done = sbatch.ask("scancel", *numbers)
    if done.returncode:
        raise LaunchError(f"scancel: {sbatch.advice(done.stderr)}")
    print(f"cancelled: {', '.join(numbers)}")


def report(found: Sequence[State]) -> None:
    """Print settings, state, steps and the best value of each run's metric; `*` marks the best of all."""
    names = list(dict.fromkeys(name for state in found for name in _point(state)))
    best = {state.run: state.summary.get("best") or {} for state in found}
    values = {run: value["value"] for run, value in best.items() if isinstance(value.get("value"), int | float)}
    metrics = {run: str(best[run].get("metric")) for run in values}
    alike = len(set(metrics.values())) == 1  # else there is no best of all
    comparable = [value for value in values.values() if alike and math.isfinite(value)]
    top = (max if _larger_is_better(found) else min)(comparable, default=None)
    column = next(iter(metrics.values())) if alike else "BEST"
    rows = []
    for state in sorted(found, key=lambda state: state.run):
        value = values.get(state.run)
        shown = "" if value is None else f"{value:.6g}{' *' if value == top else ''}"
        shown += "" if alike or value is None else f" {metrics[state.run]}"
        row = {"RUN": state.run, **{name: _point(state).get(name, "") for name in names}, "STATE": state.state}
        row |= {"STEP": "" if state.step is None else str(state.step), column: shown}
        rows.append(row | {"GPU HOURS": f"{state.gpu_seconds / 3600:.2f}"})
    _print_table(rows)


def _point(state: State) -> dict[str, str]:
    points, runs = state.record.get("points") or [], state.record["runs"]
    return dict(points[runs.index(state.run)]) if points else {}


def _larger_is_better(found: Sequence[State]) -> bool:
    """Return whether checkpoint.mode in the runs' configuration is max."""
    import yaml

    for state in found:
        with contextlib.suppress(OSError, ValueError, AttributeError, yaml.YAMLError):  # none, or not readable
            config = yaml.safe_load((state.folder / "config.yaml").read_text())
            return (config.get("checkpoint") or {}).get("mode") == "max"
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 0: done; 2: refused, in one line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("nodes")
    for name in ("list", "logs", "gpu", "cancel", "resume", "report"):
        command = commands.add_parser(name)
        command.add_argument("run", nargs="?" if name in ("list", "report") else None)
        command.add_argument("--cluster", help="whose scratch to look in, where RUN_ROOT is not set")
        if name == "resume":
            command.usage = "jobs.py resume [-h] [--cluster CLUSTER] run [-- settings of training]"
        if name == "logs":
            command.add_argument("--rank", type=int, default=0)
            command.add_argument("--err", action="store_true", help="how each rank ended, and which failed first")
            command.add_argument("-f", "--follow", action="store_true")
            command.add_argument("--lines", type=int, default=TAIL)
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    try:
        options, unknown = parser.parse_known_args(argv[:cut])
        options.overrides = argv[cut + 1 :]
        if unknown:
            place = "; settings of training belong behind --" if options.command == "resume" else ""
            raise LaunchError(f"{unknown[0]} is no argument of {options.command}{place}")
        if options.overrides and options.command != "resume":
            raise LaunchError(f"{options.command} takes no settings behind `--`: resume does")
        sbatch.scrub()
        if options.command == "nodes":
            nodes()
            return 0
        asks = options.command in ("gpu", "cancel", "resume")
        found = states(find_run_root(load_cluster(options.cluster)), options.run, ask_slurm=asks)
        return _run(options, found)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {FileError(error)}", file=sys.stderr)
        return FileError(error).exit_code
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace, found: Sequence[State]) -> int:
    match options.command:
        case "list":
            list_runs(found)
            print(f"runs, logs (slurm/) and checkpoints: {find_run_root(load_cluster(options.cluster))}")
        case "logs":
            logs(_one(found, options.run), options.rank, options.err, options.follow, options.lines)
        case "gpu":
            gpu(_one(found, options.run))
        case "cancel":
            cancel(found)
        case "resume":
            return resume(found, options.run, options.overrides)
        case "report":
            report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
