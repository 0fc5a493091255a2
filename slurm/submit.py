"""Submit a training job to Slurm.

    python slurm/submit.py --nodes 4                                          # four whole nodes of the cluster
    python slurm/submit.py --config configs/a100_n4_gpu1.yaml --dry-run       # show everything, do nothing
    python slurm/submit.py --nodes 2 --gpus-per-node 2 --name wide -- --trainer.max_steps 500 --model.lr 1e-3
    python slurm/submit.py --race 1x4,4x1                                     # one node of four GPUs or four of one
    python slurm/submit.py --nodes 1 --grid "trainer.max_steps=100,200 model.lr=1e-3,3e-4"

What stands behind `--` goes to `python -m src.cli fit`. The job runs the code as it is now, whatever changes later.
"""

import argparse
import dataclasses
import difflib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script, Python puts slurm/ on the path, where its files would shadow others' modules
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]
    from src.engine import streams

    streams.survive_closed_streams()

from slurm import sbatch
from slurm.cluster_file import KEYS
from slurm.describe import show
from slurm.errors import LaunchError, Parser
from slurm.plan import prepare
from slurm.submission import Submission, submit_all


def refuse_unknown(unknown: Sequence[str], options: Sequence[str]) -> None:
    """Refuse what is no option of this command, with the nearest one or the place where it belongs."""
    if not unknown:
        return
    name = unknown[0].split("=")[0]
    near = [option for option in options if option.startswith(name)]
    near += difflib.get_close_matches(name, options, n=1, cutoff=0.8)
    key = name.removeprefix("--").replace("-", "_")
    if near:
        advice = f"did you mean {near[0]}?"
    elif key in KEYS:
        advice = f"it is a key of the cluster file, {key}: … (python slurm/cluster.py shows which file that is)"
    else:
        advice = (
            f"settings of training belong behind --: -- {name} …; sbatch's options into the cluster file, sbatch: […]"
        )
    raise LaunchError(f"{name} is no option of submit.py; {advice}")


def parser() -> Parser:
    """Return the parser of this command's options."""
    made = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("--nodes", type=int, metavar="N", help="nodes; alone, each gives all its GPUs")
    made.add_argument("--gpus-per-node", type=int, metavar="G", help="GPUs of each node, one process on each")
    made.add_argument("--config", action="append", default=[], metavar="FILE", help="as for src.cli; may be repeated")
    made.add_argument(
        "--cluster", metavar="NAME", help="a file of configs/clusters; else mine.yaml, project.yaml, local"
    )
    made.add_argument("--time", metavar="LIMIT", help="such as 2:59:00 (24:00 is minutes); else the cluster's")
    made.add_argument("--total-time", metavar="LIMIT", help="resume in further starts until so much time is used")
    made.add_argument("--max-restarts", type=int, metavar="N", help="0: the limit ends the job (20, more with a total)")
    made.add_argument("--max-crash-retries", type=int, metavar="N", help="restarts after a rank was lost (2)")
    made.add_argument("--name", help="of the run; the run of that name is continued")
    made.add_argument("--partition", help="instead of the cluster file's")
    made.add_argument("--account", help="instead of the cluster file's")
    made.add_argument("--qos", help="instead of the cluster file's")
    made.add_argument("--race", metavar="NxG,NxG", help="submit these shapes for one run: the first that starts trains")
    made.add_argument("--grid", "--array", metavar='"a=1,2 b=3,4"', help="a run for each combination, as one array")
    made.add_argument("--parallel", type=int, default=256, metavar="N", help="runs of a grid at a time (256)")
    made.add_argument("--include", action="append", default=[], metavar="PATH", help="untracked files that travel too")
    made.add_argument("--no-snapshot", action="store_true", help="run the code where it is; edits reach a waiting job")
    made.add_argument("--no-check", action="store_true", help="submit without the check of its settings by src.check")
    made.add_argument("--trust-run-root", action="store_true", help="although others can write there")
    made.add_argument("--dry-run", action="store_true", help="show what would be submitted; writes nothing")
    made.add_argument("--points", help=argparse.SUPPRESS)  # of a grid, to submit again: jobs.py resume
    made.add_argument("--code", type=Path, help=argparse.SUPPRESS)  # a snapshot that is there: jobs.py resume
    return made


def _names(made: Parser) -> list[str]:
    return [option for action in made._actions for option in action.option_strings]


def read_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's options, and what stands behind `--`."""
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    made = parser()
    options, unknown = made.parse_known_args(argv[:cut])
    refuse_unknown(unknown, _names(made))
    for name in ("nodes", "gpus_per_node", "parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise LaunchError(f"--{name.replace('_', '-')} {value}: a whole number from 1 up")
    for name in ("max_restarts", "max_crash_retries"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise LaunchError(f"--{name.replace('_', '-')} {value}: a whole number, 0 or more")
    for name, value in vars(options).items():  # as of a shell variable that is not set
        if value == "" or (isinstance(value, list) and "" in value):
            raise LaunchError(f"--{name.replace('_', '-')} is empty: give a value, or leave it out")
    if options.race and (options.nodes or options.gpus_per_node or options.grid):
        raise LaunchError("--race brings its own shapes and one run: leave out --nodes, --gpus-per-node and --grid")
    return options, argv[cut + 1 :]


def misplaced(overrides: Sequence[str]) -> list[str]:
    """Return warnings about launcher options that stand behind `--`, where `src.cli` gets them."""
    ours = set(_names(parser()))
    names = [part.split("=")[0] for part in overrides]
    return [
        f"{name} stands behind --, where it goes to src.cli: as an option of submit.py it belongs before --"
        for name in names
        if name in ours - {"-h", "--help"}
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Submit. Exit code 0: submitted, or shown; 2: refused, in one line; 130: Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        options, overrides = read_options(argv)
        foreign = sbatch.scrub()
        submission = prepare(options, overrides, argv)
        notes = []
        if foreign:
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            why = "of a surrounding job, or for Slurm's own commands"
            notes = [f"not handed on, as they are {why}: {', '.join(foreign[:3])}{more}"]
        warnings = [*misplaced(overrides), *submission.warnings, *notes]
        return _go(dataclasses.replace(submission, warnings=tuple(warnings)), options)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a folder that cannot be written, a quota
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; whether a job was submitted: python slurm/jobs.py list", file=sys.stderr)
        return 130


def _go(submission: Submission, options: argparse.Namespace) -> int:
    print("\n".join(submission.summary), flush=True)
    for warning in submission.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if submission.finished:
        print(f"run {submission.name} is finished: nothing to submit")
        return 0
    slurm = shutil.which("sbatch") is not None
    if options.dry_run or not slurm:
        show(submission)
    if not options.dry_run and not slurm:
        here = "no Slurm here, nothing was submitted: run this on the login node, or try `make cluster-up` as root"
        if submission.jobs[0].cluster.name == "local":
            print(f"note: {here}")
            return 0
        raise LaunchError(here)
    return 0 if options.dry_run else submit_all(submission, check=not options.no_check)


if __name__ == "__main__":
    sys.exit(main())
