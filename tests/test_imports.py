"""Who may import whom: the arrows of the layout, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
FILES = sorted(SRC.rglob("*.py"))
# Nothing else may import these.
ENTRY = (
    "cli",
    "lightning_cli",
    "command_line",
    "agreement",
    "resolution",
    "start",
    "trainer",
    "out_of_memory",
    "endings",
    "batch_size",
)
MACHINERY = (
    "strategies",
    "checkpoint",
    "callbacks",
    "batch_plan",
    "batching",
    "precision",
    "hardware",
    "run",
    "storage",
    "manifest",
    "memory",
    "metrics_csv",
)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def refused(path: Path) -> list[str]:
    """The imports of `path` that go against an arrow."""
    parts = path.relative_to(SRC).with_suffix("").parts
    bad = []
    for name in imports(path):
        target = name.split(".")
        if target[0] != "src":
            if parts[0] == "models" and target[0] in ("lightning", "torchmetrics", "jsonargparse"):
                bad.append(name)
            continue
        inside = target[1] if len(target) > 1 else ""
        if inside in ENTRY and parts[0] not in ENTRY:
            bad.append(name)
        if parts[0] == "models" and inside != "models":
            bad.append(name)
        if parts[0] in MACHINERY and inside in ("tasks", "models"):
            bad.append(name)
        # A task slices its data into global batches and tells users what is wrong: batching and errors, no more.
        own = parts[0] == "tasks" and len(parts) > 1 and target[1:3] == ["tasks", parts[1]]
        if parts[0] == "tasks" and not own and inside not in ("models", "batching", "errors"):
            bad.append(name)
    return bad


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_follow_the_arrows(path: Path) -> None:
    """Models know only torch, machinery knows no task, a task knows no other task, nothing imports the CLI."""
    assert refused(path) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/net.py", "import lightning"),
        ("models/net.py", "from src.batch_plan import BatchPlan"),
        ("callbacks/x.py", "from src.models.net import Net"),
        ("tasks/a/data.py", "from src.tasks.b import B"),
        ("tasks/a/data.py", "from src.run import Run"),
        ("run.py", "from src.cli import main"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule above does refuse each kind of wrong arrow."""
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert len(refused(SRC / path)) == 1


def test_no_module_is_named_for_nothing() -> None:
    """Names say the noun that a module is about."""
    assert not {"utils", "util", "helpers", "common", "misc", "base"} & {path.stem for path in FILES}


@pytest.mark.parametrize("path", sorted((SRC.parent / "slurm").rglob("*.py")), ids=lambda path: path.name)
def test_the_launcher_loads_nothing_heavy(path: Path) -> None:
    """slurm/ imports neither PyTorch nor Lightning, and of src/ only inside of functions what does not either."""
    tree = ast.parse(path.read_text())
    assert not [name for name in imports(path) if name.split(".")[0] in ("torch", "lightning", "torchmetrics")]
    top = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top]
    assert not [name for name in names if (name or "").split(".")[0] == "src"]
