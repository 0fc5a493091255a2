"""Keep the names that modules had before `src/engine/` importable, for one release, with a warning."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import warnings
from collections.abc import Sequence
from types import ModuleType

# What a project's own code and configurations have imported or named by class_path.
MOVED = {
    "src.batching": "src.engine.data.loader",
    "src.seeding": "src.engine.data.seeding",
    "src.errors": "src.engine.errors",
    "src.callbacks": "src.engine.callbacks",
}


class Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a module by its old name as the one that it is now, not as a second copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an old name, and None for every other."""
        return importlib.util.spec_from_loader(fullname, self) if new_name(fullname) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module by its new name."""
        new = str(new_name(spec.name))
        warnings.warn(f"{spec.name} is now {new}; the old name goes with the next release", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced."""
        module.__spec__ = self._spec


def new_name(name: str) -> str | None:
    """Return what a moved module, or one in a moved folder, is called now; None for all else."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None
