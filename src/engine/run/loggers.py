"""Log a run's metrics, over all its starts, to one CSV file, one TensorBoard folder, one Weights & Biases run."""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.event_file_writer import EventFileWriter, _AsyncWriter
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

from src.engine.files import put, write_text
from src.engine.run.directory import Run
from src.engine.run.metrics import MetricsCSV


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard's files in a run directory. A disk that takes no more costs events, and never the run."""

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """Return the writer, which takes `add_scalar`, `add_image` and so on."""
        if self._experiment is None:
            self._experiment: SummaryWriter | None = _Summaries(self.log_dir, **self._kwargs)
        return self._experiment

    def save(self) -> None:
        """Flush, and write hparams.yaml, which the run directory can do without."""
        with suppress(OSError):
            super().save()

    def flush(self) -> None:
        """Write what TensorBoard keeps to itself for two minutes."""
        self.experiment.flush()


class _Summaries(SummaryWriter):
    """PyTorch's writer with `_EventFile` below it."""

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is not None:
            return self.file_writer
        writer = FileWriter.__new__(FileWriter)
        writer.event_writer = _EventFile(str(self.log_dir), self.max_queue, self.flush_secs)
        self.file_writer, self.all_writers = writer, {self.log_dir: writer}  # type: ignore[assignment]
        if self.purge_step is not None:  # what was logged from there on comes again
            writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), self.purge_step)
            self.purge_step = None
        return writer


class _EventFile(EventFileWriter):
    """TensorBoard's own ends its thread at the first error of the disk, and raises it at each call from then on."""

    def __init__(self, folder: str, max_queue: int, flush_seconds: float) -> None:
        self._logdir = folder
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._async_writer = _AsyncWriter(RecordWriter(_Records(Path(folder) / name)), max_queue, flush_seconds)
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))


class _Records:
    """A file that takes whole records, and drops them with one warning while the disk refuses them."""

    def __init__(self, path: Path) -> None:
        self.path, self.closed, self._warned = path, False, False

    def write(self, record: bytes) -> None:
        try:
            self.path.parent.mkdir(exist_ok=True)
            put(self.path, record)
            self._warned = False
        except OSError as error:
            if not self._warned:
                print(f"warning: {self.path} cannot be written ({error.strerror}); events are lost until it can")
            self._warned = True

    def flush(self) -> None:
        """Do nothing: each record is written at once."""

    def close(self) -> None:
        self.closed = True


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
    """Let a WandbLogger continue the W&B run of the earlier starts.

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
