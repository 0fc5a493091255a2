"""Prepare the command line for Lightning's parser, and turn the parser's errors into one line."""

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from src.engine.errors import FileError, UserError
from src.engine.secret import secret_option
from src.engine.text import nearest

if TYPE_CHECKING:  # the launcher reads files with this module and must start fast
    from jsonargparse import ArgumentParser

SUBCOMMANDS = ("fit", "validate", "test", "predict")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = ("trainer", "checkpoint", "breaker", "watchdog")  # settings of classes of ours, not named by class_path
PROJECT_KEYS = ("task", "cluster", "account", "partition")  # of project.yaml; the last three are slurm/cluster.py's
# Lines of jsonargparse's messages that repeat what it got or list what every optional type may also be.
NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path but|^$"
)


def with_defaults(argv: list[str], model_of_run: Callable[[str], str] | None = None) -> list[str]:
    """Return the command line with `configs/defaults.yaml` and, if no model is named, the task's file in front.

    `model_of_run` returns, as YAML, the model and the data of the run that an evaluation names.
    """
    if not argv or argv[0] in ("-h", "--help"):
        return argv or ["--help"]
    if argv[0] in ("-c", "--config"):
        raise UserError(f"{argv[0]} belongs behind the subcommand; start with one of {', '.join(SUBCOMMANDS)}")
    if argv[0] not in SUBCOMMANDS:
        near = nearest(argv[0], SUBCOMMANDS)
        raise UserError(f"{argv[0]!r} is no subcommand{near}; start with one of {', '.join(SUBCOMMANDS)}")
    if name := secret_option(argv):
        raise UserError(
            f"{name} holds a key, token or password, which would stand in the run's configuration, logs and "
            "checkpoints: put it into an environment variable that your code or the library reads (WANDB_API_KEY); "
            "a word that is no secret can stand in a --config file"
        )
    task = None
    names_model = any(
        arg in ("--model", "--model.class_path") or arg.startswith(("--model=", "--model.class_path=")) for arg in argv
    )
    for path in [str(CONFIGS / "defaults.yaml"), *config_files(argv)]:
        config = read_config(path)
        _refuse_values_for_groups(config, path)
        model = config.get("model")
        names_model = names_model or isinstance(model, str) or (isinstance(model, dict) and "class_path" in model)
        task = config.get("task", task)
    for value in _values(argv, ("--task",)):
        if not value:
            raise UserError(f"--task is empty; {_known_tasks()}")
        task = value
    if names_model and any(_values(argv, ("--task",))):
        raise UserError(f"--task {task} chooses a model and the command names another one: leave one of them out")
    first = ["--config", str(CONFIGS / "defaults.yaml")]
    evaluated = [name for name in _values(argv, ("--run",)) if argv[0] != "fit"]
    if model_of_run and not names_model and task is None and evaluated:
        first += ["--config", model_of_run(evaluated[-1])]
    elif not names_model:
        task = task or project_task()
        path = str(_task_file(task))
        _refuse_values_for_groups(read_config(path), path)
        first += ["--config", path, "--task", task]
    return [argv[0], *first, *argv[1:]]


def project_task() -> str:
    """Return the task that project.yaml names."""
    path = CONFIGS.parent / "project.yaml"
    project = read_config(str(path), "project.yaml") if path.exists() else {}
    for key in project.keys() - set(PROJECT_KEYS):
        raise UserError(f"project.yaml: unknown key {key}{nearest(str(key), PROJECT_KEYS)}")
    task = project.get("task")
    if task in (None, ""):
        raise UserError(f"no model and no task: --task NAME, or `task:` in project.yaml; {_known_tasks()}")
    if not isinstance(task, str):
        raise UserError(f"project.yaml: task: got {task!r}, expected a name in quotes; {_known_tasks()}")
    return task


def _task_file(task: object) -> Path:
    names = [file.stem for file in (CONFIGS / "tasks").glob("*.yaml")]
    if task not in names:
        near, known = nearest(str(task), names), _known_tasks()
        raise UserError(f"task {task!r} is unknown{near}; {known} (--task NAME, or `task:` in project.yaml)")
    return CONFIGS / "tasks" / f"{task}.yaml"


def _known_tasks() -> str:
    names = [file.stem for file in sorted((CONFIGS / "tasks").glob("*.yaml"))]
    return f"configs/tasks has {', '.join(names) or 'none'}"


def config_files(argv: list[str]) -> list[str]:
    """Return the arguments of --config, in order."""
    return list(_values(argv, ("--config", "-c")))


def _values(argv: list[str], options: tuple[str, ...]) -> Iterator[str]:
    for index, arg in enumerate(argv):
        if arg in options and index + 1 < len(argv):
            yield argv[index + 1]
        elif arg.split("=", 1)[0] in options and "=" in arg:
            yield arg.split("=", 1)[1]


def read_config(path: str, name: str | None = None, loader: type[Any] = yaml.SafeLoader) -> dict[str, Any]:
    """Return a YAML file as a dictionary; `name` is what messages call it, else --config and the path."""
    file, name = Path(path), name or f"--config {path}"
    if not file.is_file():
        shown = Path("configs") if Path.cwd() == CONFIGS.parent else CONFIGS
        known = [str(shown / file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.yaml"))]
        raise UserError(f"{name}: no such file{nearest(path, known)}")
    try:
        content = yaml.load(file.read_text(), loader)  # noqa: S506 one that makes no objects
    except OSError as error:
        raise FileError(error) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{name}{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{name}: expected `key: value` lines, got a {type(content).__name__}")
    return content


def _refuse_values_for_groups(config: Mapping[str, Any], path: str) -> None:
    """Refuse an empty group, as of a `trainer:` whose lines are all comments: the parser would drop earlier values."""
    for group in GROUPS:
        value = config.get(group, {})
        if not isinstance(value, dict):
            got = "empty" if value is None else repr(value)
            raise UserError(f"--config {path}: {group} is {got}: put settings below it, or leave `{group}:` out")


def explain(error: Exception, parser: "ArgumentParser", argv: list[str]) -> str:
    """Return a parser's error as one line: the full key, what is wrong, the nearest valid name, the file it is in."""
    text = str(error)
    keys = re.findall(r'Parser key "([^"]+)"', text)
    path = ".".join(keys)
    if match := re.search(r"Option '([^']+)' is not accepted", text):
        owner = re.search(r"Problem with given class_path '([^']+)'", text)
        name = f"{keys[0]}.init_args.{match[1]}" if keys else match[1]
        arguments = class_parameters(owner[1]) if owner else ()
        near = nearest(name, [f"{keys[0]}.init_args.{argument}" for argument in arguments])
        return f"unknown key {name}{near}{_origin(name, argv)}"
    if match := re.search(r"does not accept option '([^']+)'", text) or re.search(
        r"unrecognized arguments: --([^\s=]+)", text
    ):
        return f"unknown key {match[1]}{nearest(match[1], _keys(parser))}{_origin(match[1], argv)}"
    if match := re.search(r"unrecognized arguments: (.*)", text):
        return f"{match[1]!r} belongs to no option"
    if (given := re.search(r"Given value: ([\w.]+)$", text)) and _of_old_lightning(given[1]):
        return (
            f"{path}: {given[1]} is written for pytorch_lightning, whose classes are not lightning's: change its "
            "import to `import lightning.pytorch as pl`"
        )
    lines = [re.sub(r"^-\s*", "", line.strip()) for line in text.splitlines()]
    lines = [re.sub(r'Parser key "[^"]+":\s*', "", line) for line in lines if not NOISE.search(line)]
    lines = [re.sub(r"Problem with given class_path '([^']+)':", r"\1:", line) for line in lines]
    lines = [re.sub(r"Expected an? <class '([^']+)'>. Got value:", r"expected \1, got", line) for line in lines if line]
    reason = " ".join(lines)
    if "required: batch_size" in reason:
        reason += ": --data.batch_size N is the micro batch; a default in the class lets global_batch_size set it"
    return f"{path}: {reason}{_origin(path, argv)}" if path else reason


def raised_by_import(error: BaseException | None) -> BaseException | None:
    """Return what a module's own code raised when it was imported, None where the parser complains by itself."""
    while error is not None:
        if isinstance(error, SyntaxError) or any(
            frame.f_code.co_name == "<module>" for frame, _ in traceback.walk_tb(error.__traceback__)
        ):
            return error
        error = error.__cause__ or error.__context__
    return None


def _keys(parser: "ArgumentParser") -> list[str]:
    return [action.dest for action in parser._actions if action.dest not in ("help", "print_config")]


def class_parameters(class_path: str) -> Mapping[str, inspect.Parameter]:
    """Return a class's parameters, with those it passes to its parents as **kwargs; {} if it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    parameters: dict[str, inspect.Parameter] = {}
    try:
        owner = getattr(importlib.import_module(module), name)
        for base in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
            own = inspect.signature(base).parameters
            parameters = {**own, **parameters}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
                break
    except (ImportError, AttributeError, ValueError, TypeError):
        pass
    return parameters


def _of_old_lightning(class_path: str) -> bool:
    """Return whether a class derives from the package pytorch_lightning, which lightning installs beside itself."""
    module, _, name = class_path.rpartition(".")
    try:
        parents = getattr(importlib.import_module(module), name).__mro__
    except (ImportError, AttributeError, ValueError):
        return False
    return any(parent.__module__.startswith("pytorch_lightning") for parent in parents)


def _origin(key: str, argv: list[str]) -> str:
    """Return `, in <file>` for the last config file that has the key; "" if it comes from the command line."""
    for path in reversed(config_files(argv)):
        node: Any = read_config(path)
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                break
            node = node[part]
        else:
            return f", in {path}"
    return ""
