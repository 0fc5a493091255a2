"""Lightning's Trainer as the command line sees it."""

from collections.abc import Callable
from typing import Any

from jsonargparse import Namespace
from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.plugins.io import CheckpointIO

from src.engine.checkpoint.restore import Restore
from src.engine.checkpoint.write import WholeFiles
from src.engine.data.loader import in_micro_batches
from src.engine.resolve.precision import BF16Mixed
from src.engine.resolve.resolution import Resolution


class ProjectTrainer(Trainer):
    """Lightning's Trainer with two corrections of its command line, which loads no checkpoint that it is not given.

    `precision` may also be `auto`. And a limit of 1 stays the number 1: under the types that Lightning declares, the
    parser reads it as 1.0, which means all batches.
    """

    def __init__(
        self,
        *args: Any,
        precision: str | int = "auto",
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        **kwargs: Any,
    ) -> None:
        limits = {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
            "overfit_batches": overfit_batches,
        }
        super().__init__(*args, precision=precision, **limits, **kwargs)  # type: ignore[arg-type]  # resolved by then
        self._checkpoint_connector = Restore(self)
        self.model_settings: object = None  # of the configuration; a checkpoint keeps them


def trainer_settings(resolved: Resolution, config: Namespace, is_ours: Callable[[object], bool]) -> dict[str, Any]:
    """Return what the Trainer is given in place of the same settings of `config`, its group with objects built.

    Loggers, the progress line, saving and the time limit are the run's callbacks (src/cli.py), so Lightning's own
    defaults for them are off.
    """
    plan, shape = resolved.plan, resolved.shape
    callbacks, plugins = as_list(config.callbacks), as_list(config.plugins)
    strategy = resolved.strategy if isinstance(resolved.strategy, str) else config.strategy
    precision: str | None = resolved.precision.value
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(WholeFiles())
    if precision == "bf16-mixed" and is_ours(strategy):
        plugins.append(BF16Mixed("bf16-mixed", "cuda" if shape.accelerator == "gpu" else "cpu"))
        precision = None
    settings = {
        "accelerator": shape.accelerator,
        "devices": list(shape.indices) if shape.indices else shape.devices,
        "precision": precision,
        "strategy": strategy,
        "plugins": [*plugins, resolved.environment],
        "logger": False if config.logger in (None, True) else config.logger,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "enable_model_summary": config.enable_model_summary is True,
        # Lightning's Timer asks the other ranks in every step, and stops with an extra validation.
        "max_time": config.max_time if config.enable_checkpointing is False else None,
    }
    if config.max_epochs is None:  # one epoch where neither steps nor time are given; Lightning would train 1000
        settings["max_epochs"] = -1 if config.max_steps > 0 or config.max_time is not None else 1
    if plan:
        settings |= in_micro_batches(config.as_dict(), plan.accumulation)
        settings["accumulate_grad_batches"] = plan.accumulation
    return settings


def as_list(setting: Any) -> list[Any]:
    """Return a setting that is one object, a list of them or None as a list."""
    return [item for item in (setting if isinstance(setting, list) else [setting]) if item]
