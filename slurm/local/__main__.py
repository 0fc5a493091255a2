"""Run a Slurm of four nodes, n1 to n4 with four pretended A100s each, on this one machine.

    python -m slurm.local up|down|status    # as root on Debian or Ubuntu; or make cluster-up, make cluster-down

Needs no environment, only Python. Everything it writes lies in /var/lib/local-slurm ($LOCAL_SLURM names another
folder), but for a link at /etc/slurm/slurm.conf, by which sbatch finds it, and a line in /etc/hosts; `down` removes
both, also after a restart of the machine. Job numbers and logs stay. The settings are in slurm/local/.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    from src.engine import streams

    streams.survive_closed_streams()

from slurm.errors import LaunchError, Parser
from slurm.local import machine

TEMPLATE = Path(__file__).with_name("slurm.conf.in")
# Slurm 23.11 looks for cgroups in every slurmd, also where nothing uses them; of this plugin it does not ask them.
CGROUP = "CgroupPlugin=cgroup/v1\n"
# The pretended GPUs are /dev/null under four names: Slurm counts them and hands them out, and nothing opens them.
GRES = "NodeName=n[1-4] Name=gpu Type=a100 File={folder}/dev/gpu[0-3]\n"
FOLDER = Path("/var/lib/local-slurm")
NODES = ("n1", "n2", "n3", "n4")
INSTALL = ("apt-get", "install", "-y", "slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
PORT = 16817  # slurmctld's; the four nodes have the next four
READY = {"idle", "mixed", "allocated", "completing", "planned"}  # takes jobs, or soon will
PATIENCE = 90  # seconds for all nodes to come up, on a slow machine


class LocalCluster:
    """The cluster whose state is in `folder`, an absolute path without spaces, as Slurm's configuration takes it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.conf = folder / "etc/slurm.conf"
        self.hosts_line = f"127.0.0.1 {' '.join(NODES)} # the local Slurm in {folder}\n"

    def tool(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command on this cluster, even where SLURM_CONF or a surrounding job names another one."""
        return subprocess.run(
            command, env=machine.environment(SLURM_CONF=str(self.conf)), capture_output=True, text=True, check=False
        )

    def states(self) -> dict[str, str]:
        """Return each node's state as sinfo shows it, such as idle or down*; nothing if slurmctld does not answer."""
        lines = self.tool("sinfo", "--noheader", "--Node", "--format=%N %T").stdout.splitlines()
        return {name: state for name, state in (line.split() for line in lines) if name in NODES}

    def running(self) -> dict[str, int]:
        """Return the process numbers of this cluster's daemons by name: munged, slurmctld, n1 to n4."""
        pids = {}
        for name, command in self._daemons().items():
            with contextlib.suppress(FileNotFoundError, ValueError):
                pid = int((self.folder / f"run/{name}.pid").read_text())
                if machine.command_line(pid) == command:  # else the number belongs to somebody else by now
                    pids[name] = pid
        return pids

    def is_up(self) -> bool:
        """Return whether all six daemons run and all nodes take jobs."""
        if self.running().keys() != self._daemons().keys():
            return False
        states = self.states()
        return len(states) == len(NODES) and set(states.values()) <= READY

    def _daemons(self) -> dict[str, list[str]]:
        run = self.folder / "run"
        munged = ["munged", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid"]
        munged += [f"--key-file={self.folder}/etc/munge.key", f"--seed-file={run}/munge.seed"]
        munged += [f"--log-file={self.folder}/log/munged.log"]
        slurmds = {name: ["slurmd", "-N", name, "-f", str(self.conf)] for name in NODES}
        return {"munged": munged, "slurmctld": ["slurmctld", "-f", str(self.conf)], **slurmds}

    def up(self) -> bool:
        """Start what does not run, and wait until all nodes take jobs; return False if all was running."""
        machine.refuse_another(self.conf)
        for name in ("etc", "dev", "run", "log", "state", "spool"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        with machine.locked(self.folder / "etc"):
            machine.enter(self.conf, self.hosts_line)
            missing = {name: command for name, command in self._daemons().items() if name not in self.running()}
            if missing:
                self._write_files()
            for name, command in missing.items():
                self._start(name, command)
            self._wait_until_ready()
            return bool(missing)

    def _write_files(self) -> None:
        host, ports = socket.gethostname().split(".")[0], f"{PORT + 1}-{PORT + len(NODES)}"
        values = {"FOLDER": str(self.folder), "HOST": host, "PORT": str(PORT), "NODE_PORTS": ports}
        text = TEMPLATE.read_text()
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        self.conf.write_text(text)
        (self.folder / "etc/cgroup.conf").write_text(CGROUP)
        (self.folder / "etc/gres.conf").write_text(GRES.format(folder=self.folder))
        key = self.folder / "etc/munge.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(128))
        for number in range(4):
            device = self.folder / f"dev/gpu{number}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")

    def _start(self, name: str, command: list[str]) -> None:
        """Start a daemon, which goes to the background when it has started."""
        null, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, machine.environment()
        done = subprocess.run(command, cwd="/", env=environment, stdin=null, stdout=null, stderr=pipe, text=True)
        if done.returncode or not machine.wait(lambda: name in self.running(), 20):
            raise self._failure(f"{command[0]} does not start: {done.stderr.strip()}", name)

    def _wait_until_ready(self) -> None:
        resumed: set[str] = set()

        def is_ready() -> bool:
            for name in self._daemons().keys() - self.running().keys():
                raise self._failure(f"{name} has ended", name)
            for name, state in self.states().items():
                # Down or drained since an earlier start, or by a job that could not be killed.
                if name not in resumed and state.rstrip("*").startswith(("down", "drain", "fail")):
                    resumed.add(name)
                    self.tool("scontrol", "update", f"nodename={name}", "state=resume")
            return self.is_up()

        if not machine.wait(is_ready, PATIENCE):
            raise self._failure(f"not all nodes came up in {PATIENCE} s: {self.states()}", "slurmctld")

    def _failure(self, text: str, name: str) -> LaunchError:
        log = self.folder / f"log/{name}.log"
        end = log.read_text(errors="replace").splitlines()[-12:] if log.exists() else []
        afresh = f"To start afresh: make cluster-down, then rm -r {self.folder}"
        return LaunchError("\n".join([text, f"The end of {log}:", *end, afresh]))

    def down(self) -> bool:
        """Cancel all jobs, stop what this cluster started, and restore /etc; return False if nothing was running."""
        running: dict[str, int] = {}
        if self.folder.is_dir():
            with machine.locked(self.folder / "etc"):
                running = self.running()
                self._stop(running)
        machine.leave(self.conf, self.hosts_line)
        return bool(running)

    def _stop(self, running: dict[str, int]) -> None:
        if "slurmctld" in running:
            if jobs := self._jobs():
                self.tool("scancel", *jobs)
            machine.wait(lambda: not self._jobs(), 60)
        for name, command in reversed(self._daemons().items()):  # munged last, the others talk through it
            if name in running:
                self._end(running[name], command)
        for path in (self.folder / "run").glob("*"):
            path.unlink()

    def _jobs(self) -> list[str]:
        return self.tool("squeue", "--noheader", "--format=%A").stdout.split()

    def _end(self, pid: int, command: list[str]) -> None:
        """End a process and return when it is gone; slurmctld removes its pid file earlier than that."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if machine.wait(lambda: machine.command_line(pid) != command, patience):
                return


def _check_machine(install: bool) -> None:
    if os.geteuid() != 0:
        raise LaunchError("starting and stopping daemons needs root: sudo make cluster-up (or cluster-down)")
    path = machine.environment()["PATH"]
    missing = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if missing and install and shutil.which("apt-get", path=path):
        quiet = machine.environment(DEBIAN_FRONTEND="noninteractive")
        subprocess.run(("apt-get", "update", "-qq"), env=quiet, check=False)
        if subprocess.run(INSTALL, env=quiet, check=False).returncode == 0:
            return
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not found; on Debian or Ubuntu `up --install` gets them: {' '.join(INSTALL)}"
        )


def chosen_folder() -> Path:
    """Return $LOCAL_SLURM (a short path without spaces, as sockets lie there) or the usual folder."""
    return Path(os.environ.get("LOCAL_SLURM") or FOLDER).absolute()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; status returns 0 if the cluster is up and 1 if it is not, bad input and failures are 2."""
    parser = Parser(description="A Slurm of four nodes with four pretended A100s each, on this machine.")
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("--install", action="store_true", help="let apt-get install what is missing")
    try:
        asked = parser.parse_args(arguments)
        cluster = LocalCluster(chosen_folder())
        if asked.command == "status":
            up = cluster.is_up()
            print("\n".join(f"{name} {state}" for name, state in cluster.states().items()) if up else "not up")
            return 0 if up else 1
        _check_machine(asked.install and asked.command == "up")
        os.umask(0o022)  # everybody here may submit jobs, whatever root keeps to itself elsewhere
        if asked.command == "up":
            print(f"{'' if cluster.up() else 'already '}up: {len(NODES)} nodes with 4 pretended A100s each")
            print(
                "    python slurm/submit.py --nodes 4    # trains on all four\n"
                "    sinfo                               # the nodes; squeue: the jobs\n"
                "    make cluster-down                   # stops it all"
            )
        else:
            print("stopped" if cluster.down() else "it was not up")
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
