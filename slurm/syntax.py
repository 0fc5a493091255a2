"""How a cluster file is written: text in, checked values out.

The files are read without YAML's guesses: to YAML 1.1 `2:59:00` is the number 10740 and `007` is 7, here both stay
what was typed. Each reader returns its value or raises a ValueError that says what it got and what is allowed.
"""

import difflib
import math
import re
import reprlib
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from slurm.errors import LaunchError

NULL = ("null", "~")  # how YAML spells "no value"
SWITCHES = ("true", "false", "yes", "no", "on", "off")
# Options of sbatch that follow from the command line or have a key.
DECIDED = (
    *("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task", "array"),
    *("mem", "mem-per-cpu", "mem-per-gpu", "account", "partition", "qos", "constraint", "reservation", "exclude"),
    *("time", "job-name", "output", "error", "open-mode", "comment", "signal", "requeue", "no-requeue", "export"),
    *("mail-user", "mail-type", "parsable", "wrap", "test-only", "wait", "chdir", "cpu-bind", "gpu-bind"),
)
LONGEST = timedelta(days=365)
SHORT = reprlib.Repr()
SHORT.maxstring = 60


def refusal(value: object, allowed: str) -> ValueError:
    """The error for a value that is not `allowed`."""
    return ValueError(f"got {SHORT.repr(value)}; expected {allowed}")


def nearest(name: str, candidates: Iterable[str]) -> str:
    """` (did you mean …?)` for a likely misspelling, else nothing."""
    found = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def text(value: object) -> str:
    """One line without control characters. It will stand in scripts and logs, so no secret (nor is that repeated)."""
    from src.secret import SECRET

    if isinstance(value, str) and SECRET.search(value):
        raise ValueError(
            "a key, token or password in clear; keep it in a file that only you can read, and let a line of `setup` "
            "read that: export MY_TOKEN=$(cat ~/.my_token)"
        )
    if not isinstance(value, str) or not value.isprintable():
        raise refusal(value, "one line of text")
    return value.strip()


def word(value: object) -> str:
    """A name or an expression as Slurm takes them. `reservation: no` would ask for a reservation of that name."""
    if len(text(value).split()) != 1:
        raise refusal(value, "one word without spaces")
    if text(value).lower() in SWITCHES:
        raise refusal(value, "a name; to set nothing leave the key out")
    return text(value)


def form(pattern: str, allowed: str) -> Callable[[object], str]:
    """Return a reader of text that `pattern` matches."""

    def read(value: object) -> str:
        if not re.fullmatch(pattern, text(value)):
            raise refusal(value, allowed)
        return text(value)

    return read


gpu_or_cpu = form("gpu|cpu", "gpu or cpu")
gpu_request = form("gpus-per-node|gres", "gpus-per-node or gres")
# Slurm takes a bare number for megabytes, and nobody who writes `64` means those.
SIZE = "[1-9][0-9]{0,8}[KMGT]"
memory = form(SIZE, "a size with its unit, such as 64G (K, M, G or T)")
node_memory = form(f"0|{SIZE}", "a size with its unit, such as 64G (K, M, G or T), or 0 for the whole node")
# A relative path would mean another folder in a job.
path = form("[/~$].*", "an absolute path (~ and $VARIABLES may be in it)")


def count(value: object) -> int:
    """A whole number from 1 up."""
    return int(form("[1-9][0-9]{0,5}", "a whole number from 1 up")(value))


def price(value: object) -> float:
    """Money, or whatever the site bills in."""
    try:
        number = float(text(value))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise refusal(value, "a number from 0 up")
    return number


def capability(value: object) -> tuple[int, int]:
    """A GPU's compute capability; precision is chosen by it."""
    major, minor = form("[0-9]{1,2}[.][0-9]", "a compute capability such as 8.0")(value).split(".")
    return int(major), int(minor)


def choices(*allowed: str) -> Callable[[object], tuple[str, ...]]:
    """A reader of a list of these words."""

    def read(value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or any(item not in allowed for item in value):
            raise refusal(value, f"a list, [{', '.join(allowed)}] or a part of it")
        return tuple(name for name in allowed if name in value)

    return read


def shell_lines(value: object) -> tuple[str, ...]:
    """Lines of shell."""
    if not isinstance(value, list):
        raise refusal(value, "a list of shell lines, each behind a dash")
    lines = tuple(text(line) for line in value)
    for line in lines:
        if (len(line) - len(line.rstrip("\\"))) % 2:
            raise refusal(line, "a line that is complete: behind a \\ the script's next one would belong to it")
    script = "\n".join(lines) + "\n"
    if lines and (said := subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr):
        raise refusal(value, f"lines that bash can read ({' '.join(said.split())})")
    return lines


def command(value: object) -> str:
    """Words in front of python, as `apptainer exec --nv image.sif`."""
    try:
        shlex.split(text(value))
    except ValueError as error:
        raise refusal(value, f"a command in front of python, such as apptainer exec --nv image.sif ({error})") from None
    return text(value)


def sbatch_options(value: object) -> tuple[str, ...]:
    """Options of sbatch that have no key of their own here."""
    form = "a list of sbatch's options, each as --name=value or --name"
    if not isinstance(value, list):
        raise refusal(value, form)
    for option in value:
        match = re.fullmatch(r"--([a-z][a-z-]+)(=\S.*)?", text(option))
        if not match:
            raise refusal(option, form)
        if match[1] in DECIDED:
            raise refusal(option, f"another option: --{match[1]} is what the launcher decides, or a key of this file")
    return tuple(text(option) for option in value)


def time_limit(value: object) -> timedelta:
    """Slurm's --time: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. So `24:00` is 24 minutes, and 24 hours are `24:00:00`."""
    forms = "a time limit M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, such as 2:59:00 for just under three hours"
    match = re.fullmatch("(?:([0-9]{1,3})-)?([0-9]{1,6}(?::[0-9]{1,2}){0,2})", text(value))
    if not match:
        raise refusal(value, forms)
    days, rest = match[1], [int(part) for part in match[2].split(":")]
    bounds = (math.inf if days is None else 23, 59, 59)  # the first may be any number: 90 minutes, 48 hours
    if any(number > most for number, most in zip(rest, bounds, strict=False)):
        raise refusal(value, f"{forms}; hours up to 23 behind days, minutes and seconds up to 59")
    rest = [0, *rest] if days is None and len(rest) < 3 else rest
    hours, minutes, seconds = (*rest, 0, 0)[:3]
    limit = timedelta(days=int(days or 0), hours=hours, minutes=minutes, seconds=seconds)
    if not timedelta() < limit <= LONGEST:
        raise refusal(value, "a time limit from one second to 365 days")
    return limit


def format_time(limit: timedelta) -> str:
    """H:MM:SS or D-HH:MM:SS, in which nobody mistakes minutes for hours."""
    hours, seconds = divmod(limit.seconds, 3600)
    clock = f"{hours}:{seconds // 60:02}:{seconds % 60:02}"
    return f"{limit.days}-{clock.rjust(8, '0')}" if limit.days else clock


def whole_minutes(limit: timedelta) -> int:
    """Slurm counts limits in minutes and rounds up."""
    return math.ceil(limit / timedelta(minutes=1))


Reader = Callable[[object], object]
Schema = Mapping[str, "Reader | Schema"]  # nested as the file is; the key "*" stands for any name


class _TextLoader(yaml.BaseLoader):
    """Keep every value as the text that was typed; refuse a key that stands twice, where YAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep=deep)


def read_file(root: Path, file: str, schema: Schema) -> dict[str, Any]:
    """Return the checked settings of one file; a key that is null is None."""
    try:
        content = yaml.load((root / file).read_text(encoding="utf-8-sig"), _TextLoader)  # noqa: S506 it makes only text
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise LaunchError(f"{file}{f', line {mark.line + 1}' if mark else ''}: cannot be read: {reason}") from error
    return _values(content, schema, file, "")


def _values(node: object, schema: Schema, file: str, above: str) -> dict[str, Any]:
    """Return the checked values of a table, whose keys' full names begin with `above`."""
    if node is None or node in ("", *NULL):
        return {}
    if not isinstance(node, dict):
        place = f"{file}: {above.rstrip('.')}".removesuffix(": ")
        raise LaunchError(f"{place}: {refusal(node, '`key: value` lines')}")
    values: dict[str, Any] = {}
    for name, value in node.items():
        full = f"{above}{name}"
        reader = schema.get(name, schema.get("*"))
        if reader is None or not name.isprintable():
            near = nearest(full, [f"{above}{known}" for known in schema])
            raise LaunchError(f"{file}: unknown key {full!r}{near}; the keys here are {', '.join(schema)}")
        if isinstance(reader, Mapping):
            values[name] = _values(value, reader, file, f"{full}.")
        elif value != "":  # else it is as if the key were not there
            try:
                values[name] = None if value in NULL else reader(value)
            except ValueError as error:
                raise LaunchError(f"{file}: {full}: {error}") from None
    return values
