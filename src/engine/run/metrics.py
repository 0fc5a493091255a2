"""Keep `metrics.csv`: one row per logged step, in one file for the whole life of a run."""

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only

from src.engine.files import put, replacing, sync

Row = dict[str, Any]


class MetricsCSV(Logger):
    """Appends rows to `path`; metrics logged at the same step share a row, a new metric adds a column.

    Lightning's CSVLogger deletes the file of an earlier start or opens a `version_1` beside it. This one continues:
    `rewind(step)` drops the rows that a resumed run will write again. A row that the disk refuses is lost, with a
    warning; training continues.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.columns: list[str] = []
        self._row: Row = {}  # the newest one, which may still grow
        self._grown = False  # since it was written
        self._start: int | None = None  # where it begins in the file, once it is there
        self._warned = False
        if path.exists():
            with path.open(newline="", errors="replace") as file:
                header = next(csv.reader(file), [])
            self.columns = header if "step" in header else []  # a power cut may leave a file of zeros

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> DummyExperiment:
        """Return what takes any call of a module that asks all its loggers, such as `add_image`, and keeps nothing."""
        return DummyExperiment()

    @property
    def save_dir(self) -> str:
        """Return the folder where Lightning puts what belongs to the run (`trainer.log_dir`)."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run directory has the whole configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add `metrics` to the row of `step`; a row is written when the next step's begins, or by `flush`."""
        step = 0 if step is None else step
        if self._row and self._row["step"] != step:
            self._write()
            self._row, self._start = {}, None
        self._row = {"step": step} | self._row | {key: float(value) for key, value in metrics.items()}
        self._grown = True

    @rank_zero_only
    def save(self) -> None:
        """Do nothing: Lightning calls it after each metric, and the row of this step may still grow."""

    @rank_zero_only
    def flush(self) -> None:
        """Write the open row to the disk: the state of a step must not outlive its row. It may grow afterwards."""
        self._write(to_disk=True)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the row that is still open."""
        self._write()

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forget what was logged after `step` optimizer steps; rows carry the index of a step, from 0."""
        self._row, self._grown, self._start = {}, False, None
        if not self.path.exists():
            return
        rows = [row for row in self._rows() if int(row["step"]) < step]
        self._rewrite(rows, self.columns)
        if not rows or int(rows[-1]["step"]) < step - 1:
            self._start = None
        else:
            # Validation after that step may be logged once more. Until then the row stays in the file: a start that is
            # killed before it has logged anything must not take it along.
            self._row = {key: value for key, value in rows[-1].items() if value} | {"step": step - 1}

    def _write(self, to_disk: bool = False) -> None:
        try:
            if self._grown:
                self._grown = False
                self._put_row()
                self._warned = False
            if to_disk and self.path.exists():
                sync(self.path)
        except OSError as error:
            if not self._warned:
                print(f"warning: {self.path} cannot be written ({error.strerror or error}); rows are lost until it can")
            self._warned = True

    def _put_row(self) -> None:
        columns = list(dict.fromkeys([*self.columns, *self._row]))
        if columns == self.columns:
            self._start = put(self.path, _text([self._row], columns), self._start)
            return
        before = self._rows() if self.path.exists() else []
        if before and int(before[-1]["step"]) == self._row["step"]:
            before.pop()
        self._rewrite([*before, self._row], columns)

    def _rows(self) -> list[Row]:
        """Return the whole rows of the file: a kill or a power cut may have torn the last one."""
        text = self.path.read_text(errors="replace")
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        return [row for row in rows if (row.get("step") or "").isdecimal()]

    def _rewrite(self, rows: list[Row], columns: list[str]) -> None:
        with replacing(self.path) as temporary:
            temporary.write_bytes(_text([dict(zip(columns, columns, strict=True)), *rows], columns))
        self.columns = columns
        self._start = self.path.stat().st_size - len(_text(rows[-1:], columns))


def _text(rows: list[Row], columns: list[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="", extrasaction="ignore").writerows(rows)
    return text.getvalue().encode()
