"""YAML files laid over each other: every value is checked where it stands and known by the file it came from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurm import syntax
from slurm.errors import LaunchError

Key = tuple[str, ...]  # ("nccl", "nvlink", "NCCL_DEBUG")


@dataclass(frozen=True)
class Layer:
    """What one file sets; a key that is null is None here, and takes away what a lower layer has set."""

    file: str
    values: Mapping[Key, Any]


def dotted(key: Key) -> str:
    """A key as it is said to the user: nccl.nvlink.NCCL_DEBUG."""
    return ".".join(key)


def read_layer(root: Path, file: str, schema: syntax.Schema) -> Layer:
    """The settings of `file`, a path below `root`.

    Raises:
        LaunchError: the file cannot be read, is not YAML, or holds a key or a value that is not allowed.

    """
    try:
        content = yaml.load((root / file).read_text(encoding="utf-8-sig"), _TextLoader)  # noqa: S506 it makes only text
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise LaunchError(f"{file}{f', line {mark.line + 1}' if mark else ''}: cannot be read: {reason}") from error
    return Layer(file, dict(_walk(content, schema, (), file)))


class _TextLoader(yaml.BaseLoader):
    """Every value stays the text that was typed; a key that stands twice is an error, where YAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep=deep)


def _walk(node: object, schema: syntax.Schema, key: Key, file: str) -> Iterator[tuple[Key, Any]]:
    if node is None or node in ("", *syntax.NULL):
        return
    if not isinstance(node, dict):
        raise LaunchError(
            f"{': '.join([file, *([dotted(key)] if key else [])])}: {syntax.refusal(node, '`key: value` lines')}"
        )
    for name, value in node.items():
        full = (*key, name)
        reader = schema.get(name, schema.get("*"))
        if reader is None or not name.isprintable():
            near = syntax.nearest(dotted(full), [dotted((*key, known)) for known in schema])
            raise LaunchError(f"{file}: unknown key {dotted(full)!r}{near}; the keys here are {', '.join(schema)}")
        if isinstance(reader, Mapping):
            yield from _walk(value, reader, full, file)
            continue
        if value == "":  # as if the key were not there
            continue
        try:
            yield full, None if value in syntax.NULL else reader(value)
        except ValueError as error:
            raise LaunchError(f"{file}: {dotted(full)}: {error}") from None
