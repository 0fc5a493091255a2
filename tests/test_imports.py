"""Who may import whom: the arrows of the layout, read from the source. docs/engine.md draws them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "src").rglob("*.py"))
# Yours; what may be imported into each from src/ beside its own folder.
YOURS = {"models": (), "tasks": ("models", "engine.data", "engine.errors"), "strategies": ("engine",)}
# Nothing but another command imports these.
COMMANDS = (
    "cli",
    "check",
    "checkpoint",
    "doctor",
    "selftest",
    "batch_size",
)
# The rooms and files of src/engine/, each of which imports only what stands before it, and nothing of the above.
ENGINE = (
    *("moved", "exit_codes", "errors", "secret", "text", "nested", "cpus", "files", "streams"),
    *("preparation", "signals", "stopped", "poll", "distributed", "config", "data", "checkpoint", "sharding"),
    *("watchdog", "rank_zero", "resolve", "run", "memory", "callbacks", "breaker"),
    *("agreement", "trainer", "options", "lightning_cli", "outcome"),
)
HEAVY = ("torch", "lightning", "torchmetrics", "jsonargparse")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from src.engine import signals` means the module, `from src.engine.errors import UserError` a name in one
            whole = node.module in ("src", "src.engine")
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if whole else (node.module,)


def refused(path: Path) -> list[str]:
    """The imports of `path` that go against an arrow."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return [name for name in imports(path) if not allowed(parts, name.split("."))]


def allowed(parts: tuple[str, ...], target: list[str]) -> bool:
    """Whether the file `parts` below src/ may import the module `target`."""
    room = parts[0]
    if target[0] != "src":
        return room != "models" or target[0] not in HEAVY[1:]
    inside = target[1:]
    if room == "__init__" or room in COMMANDS:
        return inside[0] not in YOURS or inside[0] == "strategies"
    if room in YOURS:
        own = inside[:2] == [room, parts[1]] if room == "tasks" and len(parts) > 2 else inside[0] == room
        name = ".".join(inside)
        return own or any(name == may or name.startswith(f"{may}.") for may in YOURS[room])
    if inside[0] != "engine":
        return False
    return ENGINE.index(inside[1]) <= ENGINE.index(parts[1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_imports_follow_the_arrows(path: Path) -> None:
    """Models know only torch, a task no other task, the engine nothing of yours, and nothing imports a command."""
    if path != ROOT / "src/engine/__init__.py":
        assert refused(path) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/net.py", "import lightning"),
        ("models/net.py", "from src.engine.resolve.batch import BatchPlan"),
        ("engine/callbacks/x.py", "from src.models.net import Net"),
        ("engine/trainer.py", "from src.strategies import DDP"),
        ("engine/checkpoint/save.py", "from src.engine.run.directory import Run"),
        ("engine/signals.py", "from src.engine import poll"),
        ("tasks/a/data.py", "from src.tasks.b import B"),
        ("tasks/a/data.py", "from src.engine.run.directory import Run"),
        ("strategies/fsdp.py", "from src.cli import main"),
        ("engine/run/directory.py", "from src.cli import main"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule above does refuse each kind of wrong arrow."""
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert len(refused(ROOT / "src" / path)) == 1


def test_the_root_of_src_has_commands_and_what_is_yours() -> None:
    """Every name there is a command that one types, yours, or the engine; at most five are files."""
    names = {path.name for path in (ROOT / "src").iterdir() if path.name != "__pycache__"}
    assert {name.removesuffix(".py") for name in names} <= {*COMMANDS, *YOURS, "engine", "__init__"}
    assert sum(name.endswith(".py") for name in names) <= 5


def test_no_module_is_named_for_nothing() -> None:
    """Names say the noun that a module is about."""
    assert not {"utils", "util", "helpers", "common", "misc", "base"} & {path.stem for path in FILES}


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").rglob("*.py")), ids=lambda path: path.name)
def test_the_launcher_loads_nothing_heavy(path: Path) -> None:
    """slurm/ imports neither PyTorch nor Lightning, and of src/ only what does not either.

    What runs inside a job looks first whether `src` is that of the job, and imports it inside of functions.
    """
    assert not [name for name in imports(path) if name.split(".")[0] in HEAVY]
    top = ast.Module([node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)], [])
    of_src = [node.module for node in top.body if isinstance(node, ast.ImportFrom) and str(node.module)[:3] == "src"]
    assert not of_src or (path.parent.name != "node" and path.name != "race.py")


def test_the_launcher_has_no_circle() -> None:
    """The modules of slurm/ can be read one after the other, each after those that it imports."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "slurm").rglob("*.py")}
    known = {name: {other for other in of_slurm(path) if other in files} for name, path in files.items()}
    assert list(TopologicalSorter(known).static_order())  # a CycleError names the circle


def of_slurm(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_what_the_launcher_imports_of_src_is_light() -> None:
    """None of it, nor what it imports in turn, brings PyTorch along."""
    names = {name for path in (ROOT / "slurm").rglob("*.py") for name in imports(path) if name.startswith("src.")}
    code = f"import importlib, sys; [importlib.import_module(name) for name in {sorted(names)}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "lightning", "jsonargparse"} & set(done.stdout.split())
