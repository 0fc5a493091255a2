"""Resolve commands of `src.cli` for another machine, and say here what would be refused there.

    python -m src.check a100:8.0 fit --config configs/a100_n1_gpu4.yaml    # the card and its compute capability
    python -m src.check cpu - < commands.json                              # lists of arguments: the first that is wrong

Nothing is built and nothing is written. Exit code 0, or 2 with one line.
"""

import json
import sys

from src.cli import ProjectCLI
from src.engine import exit_codes
from src.engine.errors import UserError
from src.engine.outcome import report
from src.engine.preparation import prepare_environment, prepare_yaml, quieten
from src.engine.resolve.precision import Card


class ResolvedCLI(ProjectCLI):
    """The command, which ends as soon as it is resolved."""

    def before_instantiate_classes(self) -> None:
        """Resolve what is asked for, and end."""
        super().before_instantiate_classes()
        sys.exit(exit_codes.DONE)


def main(argv: list[str] | None = None) -> int:
    """Check one command, or those that standard input has as JSON."""
    words = sys.argv[1:] if argv is None else argv
    quieten()
    prepare_environment()
    prepare_yaml()
    try:
        if len(words) < 2:
            raise UserError("give a card and a command: python -m src.check a100:8.0 fit …")
        cards, command = read_cards(words[0]), words[1:]
        for arguments in read_commands() if command == ["-"] else [command]:
            _resolve(arguments, cards)
    except Exception as error:
        return report(error)
    return exit_codes.DONE


def _resolve(arguments: list[str], cards: list[Card]) -> None:
    try:
        ResolvedCLI(arguments, cards)
    except SystemExit as ended:
        if ended.code:
            raise


def read_commands() -> list[list[str]]:
    """Return the commands on standard input, a JSON list of lists of arguments."""
    try:
        return json.load(sys.stdin)
    except ValueError as error:
        raise UserError(f"standard input is no JSON list of commands ({error})") from error


def read_cards(text: str) -> list[Card]:
    """Return the card that `name:capability` names, as a list; [] for `cpu`."""
    if text == "cpu":
        return []
    name, _, capability = text.rpartition(":")
    major, _, minor = capability.partition(".")
    if not (name and major.isdecimal() and minor.isdecimal()):
        raise UserError(f"{text!r} is no card: give its name and compute capability, such as a100:8.0, or cpu")
    return [Card(name, (int(major), int(minor)))]


if __name__ == "__main__":
    sys.exit(main())
