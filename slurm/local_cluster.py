"""A Slurm of four nodes, n1 to n4 with four pretended A100s each, on this one machine: to see a four-node job run.

    python slurm/local_cluster.py up|down|status    # as root on Debian or Ubuntu; or make cluster-up, make cluster-down

Needs no environment, only Python. Everything it writes lies in /var/lib/local-slurm ($LOCAL_SLURM names another
folder), but for a link at /etc/slurm/slurm.conf, by which sbatch finds it, and a line in /etc/hosts; `down` takes both
away. Job numbers and logs stay. The settings are in slurm/local/.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a script, Python puts slurm/ on the path, where its files would shadow others' modules
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]
    from src import streams

    streams.outlast_readers()

from slurm.errors import LaunchError, Parser
from slurm.local import places, processes

TEMPLATES = Path(__file__).resolve().parent / "local"
FOLDER = Path("/var/lib/local-slurm")
NODES = ("n1", "n2", "n3", "n4")
INSTALL = ("apt-get", "install", "-y", "slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
PORT = 16817  # slurmctld's; the four nodes have the next four
READY = {"idle", "mixed", "allocated", "completing", "planned"}  # takes jobs, or soon will
PATIENCE = 90  # seconds for all nodes to come up, on a slow machine


class LocalCluster:
    """The cluster whose state is in `folder`.

    Args:
        folder: an absolute path without spaces, as Slurm's configuration takes it
        port: slurmctld's; the nodes have the next four
        private: leave /etc alone; it is found through SLURM_CONF

    """

    def __init__(self, folder: Path = FOLDER, port: int = PORT, private: bool = False) -> None:
        self.folder, self.port, self.private = folder, port, private
        self.conf = folder / "etc/slurm.conf"
        self.hosts_line = f"127.0.0.1 {' '.join(NODES)} # the local Slurm in {folder}\n"

    # What is there

    def tool(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A Slurm command on this cluster, whichever another one SLURM_CONF or a surrounding job names."""
        return subprocess.run(
            command, env=processes.environment(SLURM_CONF=str(self.conf)), capture_output=True, text=True, check=False
        )

    def states(self) -> dict[str, str]:
        """Each node's state as sinfo has it, such as idle or down*; nothing when slurmctld does not answer."""
        lines = self.tool("sinfo", "--noheader", "--Node", "--format=%N %T").stdout.splitlines()
        return {name: state for name, state in (line.split() for line in lines) if name in NODES}

    def running(self) -> dict[str, int]:
        """The processes of this cluster by name: munged, slurmctld, n1 to n4."""
        found = {}
        for name, command in self._daemons().items():
            with contextlib.suppress(FileNotFoundError, ValueError):
                pid = int((self.folder / f"run/{name}.pid").read_text())
                if processes.command_line(pid) == command:  # else the number belongs to somebody else by now
                    found[name] = pid
        return found

    def is_up(self) -> bool:
        """All six processes run and all nodes take jobs."""
        return len(self.running()) == len(self._daemons()) and self._ready()

    def _ready(self) -> bool:
        states = self.states()
        return len(states) == len(NODES) and set(states.values()) <= READY

    def _daemons(self) -> dict[str, list[str]]:
        run = self.folder / "run"
        munged = ["munged", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid"]
        munged += [f"--key-file={self.folder}/etc/munge.key", f"--seed-file={run}/munge.seed"]
        munged += [f"--log-file={self.folder}/log/munged.log"]
        slurmds = {name: ["slurmd", "-N", name, "-f", str(self.conf)] for name in NODES}
        return {"munged": munged, "slurmctld": ["slurmctld", "-f", str(self.conf)], **slurmds}

    # Up

    def up(self) -> bool:
        """Start what does not run, and wait until all nodes take jobs; False when there was nothing to do.

        Raises:
            LaunchError: another Slurm is configured here, a daemon does not start, or a node does not come up

        """
        if not self.private:
            places.claim(self.conf)
        for part in ("etc", "dev", "run", "log", "state", "spool"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        with processes.locked(self.folder / "etc"):
            if not self.private:
                places.enter(self.conf, self.hosts_line, NODES)
            files = self._files()
            if self.is_up():
                if any(path.read_text() != text for path, text in files.items()):
                    print("note: it runs with older settings; make cluster-down, then up takes the new ones")
                return False
            missing = {name: command for name, command in self._daemons().items() if name not in self.running()}
            if missing:  # else a node is on its way back, as from a job that has just ended
                self._write(files)
            for name, command in missing.items():
                self._start(name, command)
            self._wait_until_ready()
            return bool(missing)

    def _files(self) -> dict[Path, str]:
        values = {
            "FOLDER": str(self.folder),
            "HOST": socket.gethostname().split(".")[0],
            "PORT": str(self.port),
            "NODE_PORTS": f"{self.port + 1}-{self.port + len(NODES)}",
        }
        files = {}
        for template in TEMPLATES.glob("*.in"):
            text = template.read_text()
            for name, value in values.items():
                text = text.replace(f"@{name}@", value)
            files[self.folder / "etc" / template.stem] = text
        return files

    def _write(self, files: dict[Path, str]) -> None:
        for path, text in files.items():
            path.write_text(text)
        key = self.folder / "etc/munge.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(128))
        for number in range(4):
            device = self.folder / f"dev/gpu{number}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")

    def _start(self, name: str, command: list[str]) -> None:
        """Daemons go to the background when they have come as far as that."""
        if complaint := processes.start(command):
            raise self._failure(f"{command[0]} does not start: {complaint}", name)
        if not processes.wait(lambda: name in self.running(), 20):
            raise self._failure(f"{command[0]} came to nothing", name)

    def _wait_until_ready(self) -> None:
        asked: set[str] = set()

        def ready() -> bool:
            for name in self._daemons().keys() - self.running().keys():
                raise self._failure(f"{name} has ended", name)
            for name, state in self.states().items():
                # Down or drained from an earlier life, or by a job that could not be killed.
                if name not in asked and state.rstrip("*").startswith(("down", "drain", "fail")):
                    asked.add(name)
                    self.tool("scontrol", "update", f"nodename={name}", "state=resume")
            return self._ready()

        if not processes.wait(ready, PATIENCE):
            states = self.states()
            bad = [name for name in NODES if states.get(name) not in READY]
            told = ", ".join(f"{name} {state}" for name, state in states.items()) or "slurmctld does not answer"
            raise self._failure(f"not all nodes came up in {PATIENCE} s: {told}", bad[0] if states else "slurmctld")

    def _failure(self, text: str, name: str) -> LaunchError:
        log = self.folder / f"log/{name}.log"
        with contextlib.suppress(OSError):
            lines = log.read_text(errors="replace").splitlines()[-12:]
            cause = next((line for line in reversed(lines) if "error:" in line or "fatal:" in line), None)
            text = "\n".join([f"{text}{f': {cause}' if cause else ''}", f"The end of {log}:", *lines])
        return LaunchError(f"{text}\nTo start afresh: make cluster-down, then rm -r {self.folder}")

    # Down

    def down(self) -> bool:
        """Cancel all jobs, stop what this cluster started, and leave /etc as it was; False if nothing was there."""
        was_up = False
        if self.folder.is_dir():
            with processes.locked(self.folder / "etc"):
                was_up = self._stop()
        places.leave(self.conf, self.hosts_line)
        return was_up

    def _stop(self) -> bool:
        running = self.running()
        if "slurmctld" in running:
            self._cancel_jobs()
        for name, command in reversed(self._daemons().items()):  # munged last, the others talk through it
            if name in running:
                self._end(running[name], command)
        left = processes.of_jobs(self.conf, NODES)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in (self.folder / "run").glob("*"):
            path.unlink()
        return bool(running or left)

    def _cancel_jobs(self) -> None:
        def jobs() -> list[str]:
            return self.tool("squeue", "--noheader", "--format=%A").stdout.split()

        if first := jobs():
            self.tool("scancel", *first)
            self.tool("scancel", "--signal=KILL", "--full", *first)
        processes.wait(lambda: not jobs(), 60)

    def _end(self, pid: int, command: list[str]) -> None:
        """Return when it has ended; slurmctld takes its pid file away earlier than that."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if processes.wait(lambda: processes.command_line(pid) != command, patience):
                return


def _check_machine(install: bool) -> None:
    if sys.platform != "linux":
        raise LaunchError(f"the local Slurm needs Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise LaunchError("starting and stopping daemons needs root: sudo make cluster-up (or cluster-down)")
    path = processes.environment()["PATH"]
    missing = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if missing and install and shutil.which("apt-get", path=path):
        quiet = processes.environment(DEBIAN_FRONTEND="noninteractive")
        subprocess.run(("apt-get", "update", "-qq"), env=quiet, check=False)
        missing = list(PROGRAMS) if subprocess.run(INSTALL, env=quiet, check=False).returncode else []
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not found; on Debian or Ubuntu `up --install` gets them: {' '.join(INSTALL)}"
        )


def chosen_folder() -> Path:
    """$LOCAL_SLURM or the usual place."""
    folder = Path(os.environ.get("LOCAL_SLURM") or FOLDER)
    if not re.fullmatch("/[A-Za-z0-9._/-]{1,59}", str(folder)):  # a socket's path may have 108 characters
        raise LaunchError(
            f"LOCAL_SLURM: got {str(folder)!r}; expected an absolute path of at most 60 letters, digits and ._-/"
        )
    return folder


def _say_up(cluster: LocalCluster, started: bool) -> None:
    print(f"{'' if started else 'already '}up: {len(NODES)} nodes with 4 pretended A100s each")
    if cluster.private:
        print(f"    export SLURM_CONF={cluster.conf}    # it is private: here nothing finds it without this")
    print(
        "    python slurm/submit.py --nodes 4    # trains on all four\n"
        "    sinfo                               # the nodes; squeue: the jobs\n"
        "    make cluster-down                   # stops it all"
    )


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked; status is 0 when the cluster is up and 1 when it is not, bad input and failures are 2."""
    parser = Parser(description="A Slurm of four nodes with four pretended A100s each, on this machine.")
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("--install", action="store_true", help="let apt-get install what is missing")
    parser.add_argument("--private", action="store_true", help="leave /etc alone; only SLURM_CONF leads to it")
    parser.add_argument("--port", type=int, default=PORT, help=f"slurmctld's; the nodes have the next four ({PORT})")
    try:
        asked = parser.parse_args(arguments)
        cluster = LocalCluster(chosen_folder(), asked.port, asked.private)
        if asked.command == "status":
            up = cluster.is_up()
            print("\n".join(f"{name} {state}" for name, state in cluster.states().items()) if up else "not up")
            return 0 if up else 1
        _check_machine(asked.install and asked.command == "up")
        os.umask(0o022)  # everybody here may submit jobs, whatever root keeps to itself elsewhere
        if asked.command == "up":
            _say_up(cluster, cluster.up())
        else:
            print("stopped" if cluster.down() else "it was not up")
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
