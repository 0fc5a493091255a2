from types import SimpleNamespace
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import LightningEnvironment

from src.engine.checkpoint.write import WholeFiles
from src.engine.resolve.hardware import Shape
from src.engine.resolve.precision import BF16Mixed
from src.engine.trainer import trainer_settings
from src.strategies import is_ours

UNSET = ("callbacks", "plugins", "logger", "enable_checkpointing", "enable_model_summary", "max_epochs", "max_time")


def test_what_the_trainer_is_given_leaves_the_configuration_as_it_is() -> None:
    """The user's objects come first, ours where they bring none of their own, and no list of theirs is changed."""
    theirs = WholeFiles()
    given = dict.fromkeys(UNSET) | {"strategy": "auto", "max_steps": -1, "val_check_interval": 5}
    config = Namespace(**given | {"plugins": [theirs]})
    resolved: Any = SimpleNamespace(
        plan=SimpleNamespace(accumulation=4),
        shape=Shape("cpu", 1, 2),
        strategy="ddp",
        precision=SimpleNamespace(value="bf16-mixed"),
        environment=LightningEnvironment(),
    )
    settings = trainer_settings(resolved, config, is_ours)
    own_files, precision, environment = settings["plugins"]
    assert own_files is theirs
    assert isinstance(precision, BF16Mixed)
    assert environment is resolved.environment
    assert config == Namespace(**given | {"plugins": [theirs]})
    chosen = {name: settings[name] for name in ("strategy", "devices", "precision", "max_epochs", "val_check_interval")}
    assert chosen == {"strategy": "ddp", "devices": 2, "precision": None, "max_epochs": 1, "val_check_interval": 20}
    assert not settings["logger"]
    assert not settings["enable_progress_bar"]
    (ours, _) = trainer_settings(resolved, Namespace(**given | {"strategy": object()}), is_ours)["plugins"][:2]
    assert isinstance(ours, WholeFiles)
