"""Count the CPUs that this process may use."""

import os


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on: a Slurm job's share, not the whole node."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
