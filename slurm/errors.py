"""Refuse bad input, in every launcher command, with one line and exit code 2."""

import argparse
from typing import NoReturn


class LaunchError(ValueError):
    """Bad input, or a Slurm that refuses: what it got, what is allowed, what to do, in one line; exit code 2."""


class Parser(argparse.ArgumentParser):
    """Raise what argparse would print with its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as a LaunchError."""
        raise LaunchError(message)
