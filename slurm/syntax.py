"""How one value of a cluster file is written: text in, checked value out.

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

NULL = ("null", "~")  # how YAML spells "no value"
SWITCHES = ("true", "false", "yes", "no", "on", "off")
# Options of sbatch that follow from the command line or have a key.
DECIDED = (
    *("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task", "array"),
    *("mem", "mem-per-cpu", "mem-per-gpu", "account", "partition", "qos", "constraint", "reservation", "exclude"),
    *("time", "job-name", "output", "error", "open-mode", "comment", "signal", "requeue", "no-requeue", "export"),
    *("mail-user", "mail-type", "parsable", "wrap", "test-only", "wait", "chdir", "cpu-bind", "gpu-bind"),
)
# A key, token or password in clear or in a URL; `export MY_TOKEN=$(cat ~/.my_token)` is fine.
SECRET = re.compile(r"""(\b|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD)=(?!["']?\$|["']?$)|://[^/\s:@]+:[^/\s@$]+@""", re.I)
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


def count(value: object) -> int:
    """A whole number from 1 up."""
    if not re.fullmatch("[1-9][0-9]{0,5}", text(value)):
        raise refusal(value, "a whole number from 1 up")
    return int(text(value))


def price(value: object) -> float:
    """Money, or whatever the site bills in."""
    try:
        number = float(text(value))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise refusal(value, "a number from 0 up")
    return number


def memory(value: object) -> str:
    """A size with its unit. Slurm takes a bare number for megabytes, and nobody who writes `64` means those."""
    if not re.fullmatch("[1-9][0-9]{0,8}[KMGT]", text(value)):
        raise refusal(value, "a size with its unit, such as 64G (K, M, G or T)")
    return text(value)


def node_memory(value: object) -> str:
    """As `memory`; 0 is all that the node has."""
    if text(value) == "0":
        return "0"
    try:
        return memory(value)
    except ValueError:
        raise refusal(value, "a size with its unit, such as 64G (K, M, G or T), or 0 for the whole node") from None


def capability(value: object) -> tuple[int, int]:
    """A GPU's compute capability; precision is chosen by it."""
    if not re.fullmatch("[0-9]{1,2}[.][0-9]", text(value)):
        raise refusal(value, "a compute capability such as 8.0")
    major, minor = text(value).split(".")
    return int(major), int(minor)


def path(value: object) -> str:
    """An absolute path, also through `~` or a variable: a relative one would mean another folder in a job."""
    if not text(value).startswith(("/", "~", "$")):
        raise refusal(value, "an absolute path (~ and $VARIABLES may be in it)")
    return text(value)


def choice(*allowed: str) -> Callable[[object], str]:
    """A reader of one of these words."""

    def read(value: object) -> str:
        if value not in allowed:
            raise refusal(value, f"{' or '.join(allowed)}{nearest(str(value), allowed)}")
        return str(value)

    return read


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
    if days is not None:
        units = ("hours", "minutes", "seconds")[: len(rest)]
    else:
        units = (("minutes",), ("minutes", "seconds"), ("hours", "minutes", "seconds"))[len(rest) - 1]
    most = {"hours": 23, "minutes": 59, "seconds": 59}
    leading = None if days is not None else units[0]  # may be any number: 90 minutes, 48 hours
    if any(number > most[unit] for unit, number in zip(units, rest, strict=True) if unit != leading):
        raise refusal(value, f"{forms}; hours up to 23 behind days, minutes and seconds up to 59")
    limit = timedelta(days=int(days or 0), **dict(zip(units, rest, strict=True)))
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
