"""The error of every launcher command."""


class LaunchError(ValueError):
    """Bad input, or a Slurm that refuses: what it got, what is allowed, what to do, in one line; exit code 2."""
