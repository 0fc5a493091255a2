"""Where a run's metrics go: one CSV file, one TensorBoard folder, one Weights & Biases run, over all its starts."""

import os
import secrets
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only

from src.files import write_text
from src.metrics_csv import MetricsCSV
from src.run import Run


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard's files in a run directory. A disk that takes no more costs events, and never the run."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # noqa: D102
        self._attempt(super().log_metrics, metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        self._attempt(super().log_hyperparams, *args, **kwargs)

    def save(self) -> None:  # noqa: D102
        self._attempt(super().save)

    def finalize(self, status: str) -> None:  # noqa: D102
        self._attempt(super().finalize, status)

    def flush(self) -> None:
        """Write what TensorBoard keeps to itself for two minutes."""
        self._attempt(lambda: self.experiment.flush())

    def _attempt(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            act(*args, **kwargs)
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
                raise  # else Lightning has turned what the disk said into "you tried to log …"
            self._experiment: Any = DummyExperiment()  # its thread has ended, and each new one would say so again
            said = error.__cause__ or error
            print(
                f"warning: {self.log_dir} cannot be written ({said}): TensorBoard goes without the rest of this start"
            )


def run_loggers(run: Run) -> list[Logger]:
    """Return the two that every run has. What was logged behind the state that training resumes from is logged again.

    TensorBoard's comes first: it is the module's `self.logger`, as in Lightning by itself. Its name and version are
    empty, so that callbacks that save beside the logger's files save in the run directory.
    """
    rows = MetricsCSV(run.path / "metrics.csv")
    rows.rewind(run.rows)
    purge = run.rows if run.state == "continued" else None
    return [RunTensorBoard(run.path, name="", version="", sub_dir="tensorboard", purge_step=purge), rows]


@rank_zero_only
def keep_wandb_run(run: Run, loggers: list[Logger]) -> None:
    """Let a WandbLogger go on in the W&B run of the earlier starts.

    By W&B's own variables, so that a wandb.init in the user's code does the same. An id that the user gave, in the
    configuration or the environment, comes first. Only rank 0 logs; the others would race for the id.
    """
    if not any(part.__name__ == "WandbLogger" for logger in loggers for part in type(logger).__mro__):
        return
    path = run.path / "wandb_id"
    if not path.exists():
        write_text(path, os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    os.environ["WANDB_RUN_ID"] = path.read_text().strip()
    os.environ.setdefault("WANDB_RESUME", "allow")
