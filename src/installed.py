"""Whether this Python is the project's. Nothing but the standard library, so that it can be said."""

import importlib.util
import sys

from src import exit_codes


def need(*packages: str) -> None:
    """End with one line and exit code 2 where a package is missing: most often an environment was not activated."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: {sys.executable} has no {', '.join(missing)}: activate the project's environment first "
            "(source .venv/bin/activate; make setup makes it)",
            file=sys.stderr,
        )
        raise SystemExit(exit_codes.BAD_INPUT)
