"""Add the options that a command has beside trainer, model and data."""

from jsonargparse import ActionYesNo
from jsonargparse.typing import PositiveFloat
from lightning.pytorch.cli import LightningArgumentParser

from src.engine.breaker.rules import BreakerSettings
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.run.changes import ESSENTIAL
from src.engine.watchdog.settings import WatchdogSettings

OF_ONE_START = ("run", "allow_changed", "fresh", "output")  # options that are no part of an experiment


def add_options(parser: LightningArgumentParser) -> None:
    """Add them to the parser of a subcommand."""
    parser.add_argument("--task", type=str | None, default=None, help="configs/tasks/<task>.yaml, if no model is named")
    parser.add_argument("--run", type=str | None, default=None, help="name of the run; an existing one is continued")
    parser.add_argument(
        "--allow_changed",
        "--allow-changed",
        type=str | None,
        default=None,
        help=f"continue a run although these have changed, with commas between: {', '.join(ESSENTIAL)}",
    )
    parser.add_argument(
        "--fresh", action=ActionYesNo, default=False, help="start another run, NAME-2, if --run NAME is there"
    )
    parser.add_argument(
        "--output", type=str | None, default=None, help="folder for what an evaluation writes; default: the run's"
    )
    parser.add_argument("--global_batch_size", type=int | None, help="samples per optimizer step over all devices")
    parser.add_argument("--micro_batch_size", type=int | None, help="samples per device and pass")
    parser.add_argument("--compile", type=bool, default=False, help="compile the model block by block")
    parser.add_argument("--activation_checkpointing", type=bool, default=False, help="recompute blocks' activations")
    parser.add_class_arguments(CheckpointSettings, "checkpoint")
    parser.add_class_arguments(BreakerSettings, "breaker")
    parser.add_class_arguments(WatchdogSettings, "watchdog")
    parser.add_argument(
        "--collective_timeout_minutes",
        type=PositiveFloat | None,
        default=None,
        help="how long a rank waits for the others in a collective; null: what the strategy says, 30",
    )
    parser.add_argument("--debug_collectives", type=bool, default=False, help="NCCL and PyTorch report at INFO")
