"""Modules by the names that they had before src/engine/: a project that was made before goes on."""

import importlib
import sys

import pytest

from src.cli import main
from src.engine.callbacks import ema
from src.engine.data import loader
from src.engine.moved import MOVED
from tests.commands import CPU, SMALL


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_itself(old: str) -> None:
    """Not a second copy, whose classes would be others; a warning has the new name."""
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is now {MOVED[old]}"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__spec__ is not None
    assert module.__spec__.name == MOVED[old]


@pytest.mark.filterwarnings("ignore:src.callbacks:FutureWarning")
@pytest.mark.filterwarnings("ignore:src.batching:FutureWarning")
def test_the_classes_are_the_same() -> None:
    """What was imported by its old name is an instance of what is imported by its new one."""
    assert importlib.import_module("src.batching").GlobalBatchLoader is loader.GlobalBatchLoader
    assert importlib.import_module("src.callbacks.ema").EMA is ema.EMA


@pytest.mark.filterwarnings("ignore:src.callbacks:FutureWarning")
@pytest.mark.usefixtures("run_root")
def test_a_configuration_by_an_old_name_trains() -> None:
    """A class_path of a configuration that was written before."""
    sys.modules.pop("src.callbacks.ema", None)
    assert main(["fit", *CPU, *SMALL, "--trainer.callbacks", "src.callbacks.ema.EMA"]) == 0
