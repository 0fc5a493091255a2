"""How a cluster file is written: YAML in, values of the declared kinds out, or one line that says what is allowed.

A kind is what a field is annotated with: a Form (a pattern, and what makes a value of the text), a choice of words, a
list of one of these, or a table.
"""

import dataclasses
import difflib
import re
import reprlib
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from slurm import times
from slurm.errors import LaunchError

NULL = ("null", "~")  # how YAML spells "no value"
SHORT = reprlib.Repr()
SHORT.maxstring = 60


@dataclass(frozen=True)
class Form:
    """How a value is written: a pattern for all of it, the same in words, and what makes a value of the text."""

    pattern: str
    words: str
    read: Callable[[str], Any] = str


def _command(text: str) -> str:
    shlex.split(text)  # a ValueError where a quote is not closed
    return text


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


Line = Annotated[str, Form(".+", "one line of text")]
Word = Annotated[str, Form(r"\S+", "one word without spaces")]
Command = Annotated[str, Form(".+", "a command in front of python, such as apptainer exec --nv image.sif", _command)]
# Slurm takes a bare number for megabytes, and nobody who writes `64` means those.
Memory = Annotated[str, Form("[1-9][0-9]*[KMGT]", "a size with its unit, such as 64G (K, M, G or T)")]
NodeMemory = Annotated[str, Form("0|[1-9][0-9]*[KMGT]", "a size with its unit, such as 64G, or 0 for the whole node")]
# A relative path would mean another folder in a job.
Absolute = Annotated[str, Form("[/~$].*", "an absolute path (~ and $VARIABLES may be in it)")]
Option = Annotated[str, Form(r"--[a-z][a-z-]+(=\S.*)?", "an option of sbatch, --name=value or --name")]
Count = Annotated[int, Form("[1-9][0-9]{0,5}", "a whole number from 1 up", int)]
Price = Annotated[float, Form("[0-9]+([.][0-9]+)?", "a number from 0 up", float)]
Capability = Annotated[tuple[int, ...], Form("[0-9]{1,2}[.][0-9]", "a compute capability such as 8.0", _capability)]
Limit = Annotated[timedelta, Form(".+", times.FORMS, times.time_limit)]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean …?)` for a likely misspelling, else nothing."""
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class _TextLoader(yaml.BaseLoader):
    """Keep every value as it was typed, as YAML 1.1 takes `2:59:00` for 10740; refuse a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [name for index, name in enumerate(names) if name in names[:index]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def read_file(root: Path, file: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one file, whose keys are those of `kinds`; a key that is null is None."""
    try:
        content = yaml.load((root / file).read_text(encoding="utf-8-sig"), _TextLoader)  # noqa: S506 it makes only text
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise LaunchError(f"{file}{f', line {mark.line + 1}' if mark else ''}: cannot be read: {reason}") from error
    return _read_table(content, kinds, file)


def _read_table(node: object, kinds: Mapping[str, Any], file: str, above: str = "") -> dict[str, Any]:
    """Return the values of a table, whose keys' full names begin with `above`."""
    if node in (None, "", *NULL):
        return {}
    if not isinstance(node, dict):
        place = f"{file}: {above.rstrip('.')}".removesuffix(": ")
        raise LaunchError(f"{place}: got {SHORT.repr(node)}; expected `key: value` lines")
    values: dict[str, Any] = {}
    for name, value in node.items():
        full = f"{above}{name}"
        kind = kinds.get(name, kinds.get("*"))
        if kind is None or not name.isprintable():
            near = nearest(full, [f"{above}{known}" for known in kinds])
            raise LaunchError(f"{file}: unknown key {full!r}{near}; the keys here are {', '.join(kinds)}")
        if value in NULL:
            values[name] = None
        elif inner := inner_kinds(kind):
            values[name] = _read_table(value, inner, file, f"{full}.")
        elif value != "":  # else it is as if the key were not there
            try:
                values[name] = read_value(value, kind)
            except ValueError as error:
                raise LaunchError(f"{file}: {full}: {error}") from None
    return values


def inner_kinds(kind: Any) -> dict[str, Any]:
    """Return the keys that a table of this kind may have, "*" for any name; none where the kind is no table."""
    if dataclasses.is_dataclass(kind):
        return typing.get_type_hints(kind, include_extras=True)
    if typing.get_origin(kind) is Mapping:
        names, inner = typing.get_args(kind)
        return dict.fromkeys(typing.get_args(names) or ["*"], inner)
    return {}


def read_value(value: object, kind: Any) -> Any:
    """Return the value that a text has as this kind; a ValueError says what it got and what is allowed."""
    from src.engine.secret import SECRET

    if type(None) in typing.get_args(kind):  # X | None
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"got {SHORT.repr(value)}; expected a list")
        return tuple(read_value(item, typing.get_args(kind)[0]) for item in value)
    if isinstance(value, str) and SECRET.search(value):  # it would stand in scripts and logs; nor is it repeated here
        raise ValueError(
            "a key, token or password in clear; keep it in a file that only you can read, and let a line of `setup` "
            "read that: export MY_TOKEN=$(cat ~/.my_token)"
        )
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    form = Form("|".join(choices), " or ".join(choices)) if choices else typing.get_args(kind)[1]
    if not isinstance(value, str) or not value.isprintable() or not re.fullmatch(form.pattern, value.strip()):
        raise ValueError(f"got {SHORT.repr(value)}; expected {form.words}")
    return form.read(value.strip())
