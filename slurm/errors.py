"""How every launcher command refuses: one line and exit code 2."""

import argparse
from typing import NoReturn


class LaunchError(ValueError):
    """Bad input, or a Slurm that refuses: what it got, what is allowed, what to do, in one line; exit code 2."""


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print with its usage."""

    def error(self, message: str) -> NoReturn:
        """In one line.

        Raises:
            LaunchError: always.

        """
        raise LaunchError(message)
