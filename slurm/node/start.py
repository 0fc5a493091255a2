"""Run before and after training on a job's first node: `python -m slurm.node.start --tasks 4 RUN_FOLDER`.

Before training it ends the start if the run is finished, if another job of its race was first, or if the run has been
restarted often enough; it checks that the code is the snapshot's and chooses where the ranks meet. After training
`requeue` decides. It prints shell lines for the batch script; messages go to batch.out.
"""

import argparse
import contextlib
import datetime
import os
import re
import shlex
import socket
import sys
from pathlib import Path

from slurm import race
from slurm.errors import LaunchError
from slurm.node import history, requeue

# Below the ephemeral range (32768 and up on Linux), whose ports any connection may hold.
FIRST_PORT, PORTS = 10000, 20000


def say(text: str) -> None:
    """Print to batch.out: stdout is the script's."""
    print(text, file=sys.stderr, flush=True)


def address(host: str) -> str:
    """Return the host's name, or if it cannot be resolved the address that Slurm itself uses for the node."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(host, None)
        return host
    node = re.search(r"\bNodeAddr=(\S+)", requeue.scontrol("node", host))
    return node[1] if node else host


def free_port(job: int, host: str = "") -> int:
    """Return a port that follows from the job's number, so that no other job takes it, and that is free here."""
    for attempt in range(PORTS):
        port = FIRST_PORT + (job + attempt * 97) % PORTS
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise LaunchError("no free port between 10000 and 29999 on this node")


def foreign_code(code: Path) -> str | None:
    """Return where Python would take `src` from instead of `code`; None where it is right."""
    import importlib.util

    spec = importlib.util.find_spec("src")
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    return None if origin and origin.is_relative_to(code.resolve()) else str(origin)


def begin(
    run: Path, tasks: int, race_name: str, *, evaluate: bool = False, limits: requeue.Limits | None = None
) -> str:
    """Return the shell lines that the batch script evaluates: where the ranks meet, or `exit`."""
    job, start = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", 0))
    nodes = os.environ["SLURM_JOB_NODELIST"]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    say(f"job {job}, {'first start' if start == 0 else f'restart {start}'}, on {nodes}, {now}: run {run}")
    if (run / "DONE").exists() and not evaluate:
        say("the run is finished: nothing to do")
        return "exit 0"
    if other := foreign_code(Path.cwd()):
        raise LaunchError(f"src would be imported from {other}, not from {Path.cwd()}: see setup: and PYTHONPATH")
    from src.engine import exit_codes, stopped  # another folder's `src` may lack them

    own = history.own_job(os.environ)
    if limits and (why := limits.used_up(run, own, start) or requeue.stuck(run, own)):
        say(f"not started again: {why}; python slurm/jobs.py resume {run.name} resumes it")
        history.note(run, own, "end", code=exit_codes.STOPPED, why=why)
        return f"exit {exit_codes.STOPPED}"
    # Before the claim: a job that cannot train leaves the race to the others.
    if (given := os.environ.get("SLURM_NTASKS")) and int(given) != tasks:
        raise LaunchError(f"Slurm starts {given} tasks, the run wants {tasks}")
    if race_name:
        if (winner := race.claim(run / "slurm", race_name, job)) != job:
            say(f"job {winner} was first: this one leaves")
            return "exit 0"
        race.cancel_others(race_name, job)
    stopped.rotate(run)
    step = requeue.saved_step(run)
    history.note(run, own, "start", restart=start, nodes=nodes, step=step)
    # Slurm runs the batch script on the job's first node, that of rank 0.
    exports = {"MASTER_ADDR": address(os.environ["SLURMD_NODENAME"]), "MASTER_PORT": str(free_port(int(job)))}
    from_where = f"resumes from step {step}" if step >= 0 else "begins"
    say(f"{from_where}, " + " ".join(f"{name}={value}" for name, value in exports.items()))
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items())


def end(run: Path, logs: Path, code: int, limits: requeue.Limits) -> int:
    """Return the exit code for the job, if that ends here."""
    batch = logs / f"{history.own_job(os.environ)}_batch.out"
    return requeue.decide(run, limits, code, batch.read_text(errors="replace") if batch.exists() else "", say)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how often the job is started again by itself."""
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--total-seconds", type=int)
    parser.add_argument("--max-crash-retries", type=int, default=0)


def limits(options: argparse.Namespace) -> requeue.Limits:
    """Return these options' values."""
    return requeue.Limits(options.max_restarts, options.total_seconds, options.max_crash_retries)


def main() -> int:
    """Print the shell lines, or after training the job's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tasks", type=int, help="how many Slurm must start")
    parser.add_argument("--race", default="", help="leave if another job has it")
    parser.add_argument("--evaluate", action="store_true", help="there is work although the run is finished")
    parser.add_argument("--ended", type=int, metavar="CODE", help="srun has ended with this exit code")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where batch.out is")
    add_limits(parser)
    options = parser.parse_args()
    try:
        if options.ended is not None:
            print(end(options.run, options.logs, options.ended, limits(options)))
        else:
            print(begin(options.run, options.tasks, options.race, evaluate=options.evaluate, limits=limits(options)))
    except LaunchError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        from src.engine.errors import FileError

        say(f"error: {FileError(error)}")
        return FileError(error).exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
