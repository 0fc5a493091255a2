"""Look at the checkpoints of runs, check them, go back to an earlier one, take the weights out.

    python -m src.checkpoint list                        # every run: state, step, checkpoints
    python -m src.checkpoint list RUN --before-step 188  # a run's checkpoints, newest step first
    python -m src.checkpoint status RUN                  # alive or not, and what a restart would do again
    python -m src.checkpoint verify RUN                  # reads every byte; exit code 65 where one is damaged
    python -m src.checkpoint rollback RUN --before-step 188
    python -m src.checkpoint export RUN --best weights.safetensors
    python -m src.checkpoint diff RUN OTHER              # exit code 0: identical to the last bit

RUN is a folder's name in the run root or a path. Reads files with torch alone: it starts fast and needs no GPU.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    from src.engine import streams

    streams.survive_closed_streams()

from src.checkpoint.compare import diff
from src.checkpoint.entries import run_folder, run_or_file
from src.checkpoint.export import export
from src.checkpoint.listing import list_checkpoints, list_runs, verify
from src.checkpoint.rollback import roll_back
from src.checkpoint.status import show
from src.engine import exit_codes
from src.engine.errors import FileError, UserError
from src.engine.run.directory import newest_first
from src.engine.run.storage import run_root

DIFFERENT = 1


class Parser(argparse.ArgumentParser):
    """A parser that complains in one line, like the rest of the project."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help says what there is")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code (0 done, 1 different, 2 bad input, 65 a damaged checkpoint)."""
    try:
        return _run(_parser().parse_args(argv))
    except (UserError, OSError) as error:
        return _complain(error)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def _complain(error: UserError | OSError) -> int:
    told = FileError(error) if isinstance(error, OSError) else error
    print("error: " + " ".join(str(told).split()), file=sys.stderr)
    return told.exit_code


def _parser() -> Parser:
    parser = Parser(prog="python -m src.checkpoint", description="The checkpoints of runs.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    run, json = "name of a run in the run root, or path of a run directory", "values for a program"
    one = command("list", "runs, or the checkpoints of one, newest step first; `verify` reads every byte")
    one.add_argument("run", nargs="?", metavar="RUN", help=run)
    one.add_argument("--before-step", type=_count, metavar="N", help="only those of fewer than N steps")
    one.add_argument("--json", action="store_true", help=json)
    one = command("status", "whether a run is alive, how it ended, and how to continue it")
    one.add_argument("run", metavar="RUN", help=run)
    one.add_argument("--json", action="store_true", help=json)
    one = command("verify", "read every byte of each checkpoint; exit code 65 if a candidate is damaged")
    one.add_argument("run", nargs="?", metavar="RUN|FILE", help="one run or one file; without it every run")
    one = command("rollback", "let the next start resume from an earlier checkpoint; later ones move to a subfolder")
    one.add_argument("run", metavar="RUN", help=run)
    one.add_argument("--before-step", type=_count, metavar="N", required=True, help="resume from fewer than N steps")
    one = command("export", "the weights alone, under the names of the plain network; the newest unless chosen")
    one.add_argument("run", metavar="RUN|FILE", help=f"{run}, or a checkpoint file")
    one.add_argument("out", type=Path, metavar="OUT", help="a name that ends in .safetensors or .pt")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--step", type=_count, metavar="N", help="the checkpoint of N steps")
    which.add_argument("--best", action="store_true", help="the best by the run's metric")
    one.add_argument("--prefix", help="only what is under it, without it; '' keeps every name")
    one.add_argument("--trained", action="store_true", help="the optimizer's weights, also if their average is kept")
    one.add_argument("--force", action="store_true", help="replace OUT")
    one = command("diff", "whether two runs or two checkpoints are the same to the last bit; exit code 1 if not")
    one.add_argument("first", metavar="A", help="run or checkpoint file")
    one.add_argument("second", metavar="B", help="run or checkpoint file")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps, 0 or more")
    return int(text)


def _run(chosen: argparse.Namespace) -> int:
    match chosen.command:
        case "list" if chosen.run is not None:
            list_checkpoints(run_folder(chosen.run), chosen.before_step, chosen.json)
        case "list":
            if chosen.before_step is not None:
                raise UserError("--before-step is about the checkpoints of one run: give a RUN as well")
            list_runs(run_root(written=False)[0], chosen.json)
        case "status":
            show(run_folder(chosen.run), chosen.json)
        case "verify":
            runs = [run_or_file(chosen.run)] if chosen.run else newest_first(run_root(written=False)[0])
            return max(map(_verify, runs), default=0)
        case "rollback":
            roll_back(run_folder(chosen.run), chosen.before_step)
        case "export":
            options = {name: getattr(chosen, name) for name in ("step", "best", "prefix", "force", "trained")}
            export(run_or_file(chosen.run), chosen.out, **options)
        case "diff":
            return DIFFERENT if diff(run_or_file(chosen.first), run_or_file(chosen.second)) else 0
    return 0


def _verify(run: Path) -> int:
    """Verify one run; one without a whole checkpoint hides no other."""
    try:
        return verify(run)
    except (UserError, OSError) as error:
        return _complain(error)


if __name__ == "__main__":
    sys.exit(main())
