"""`metrics.csv`: one row per logged step, in one place for the whole life of a run."""

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only

from src.files import replacing, sync


class MetricsCSV(Logger):
    """Appends rows to `path`; metrics logged at the same step share a row, a new metric adds a column.

    Lightning's CSVLogger deletes the file of an earlier start or opens a `version_1` beside it. This one continues:
    `rewind(step)` drops the rows that a resumed run will write again. A disk that refuses a row ends no training: the
    row is kept and written with the next one.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.columns: list[str] = []
        self._row: dict[str, Any] = {}  # the newest one, which may still grow
        self._grown = False  # since it was written
        self._waiting: list[dict[str, Any]] = []  # what the disk has refused so far, and the newest
        self._refused = False  # and it was said
        self._written: int | None = None  # the step of the last row in the file
        if path.exists():
            with path.open(newline="", errors="replace") as file:
                header = next(csv.reader(file), [])
            self.columns = header if "step" in header else []  # a power cut may leave a file of zeros

    @property
    def name(self) -> str:  # noqa: D102
        return ""

    @property
    def version(self) -> str:  # noqa: D102
        return ""

    @property
    def experiment(self) -> DummyExperiment:
        """Return what takes any call of a module that asks all its loggers, such as `add_image`, and keeps nothing."""
        return DummyExperiment()

    @property
    def save_dir(self) -> str:
        """Where Lightning puts what belongs to the run (`trainer.log_dir`)."""
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
            self._row = {}
        self._row = {"step": step} | self._row | {key: float(value) for key, value in metrics.items()}
        self._grown = True

    @rank_zero_only
    def save(self) -> None:
        """Do nothing: Lightning calls it after each metric, and the row of this step may still grow."""

    @rank_zero_only
    def flush(self) -> None:
        """Write the row that is still open, to the disk: the state of a step must not outlive its row. It may grow."""
        self._write()
        try:
            if self.path.exists():
                sync(self.path)
        except OSError as error:
            self._say(error)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the row that is still open."""
        self._write()

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forget what was logged after `step` optimizer steps; rows carry the index of a step, from 0."""
        self._row, self._grown, self._written, self._waiting = {}, False, None, []
        if not self.path.exists():
            return
        rows = [row for row in self._rows() if int(row["step"]) < step]
        self._rewrite(rows, self.columns)
        if rows and int(rows[-1]["step"]) == step - 1:
            # Validation after that step may be logged once more. Until then the row stays in the file: a start that is
            # killed before it has logged anything must not take it along.
            self._row = {key: value for key, value in rows[-1].items() if value} | {"step": step - 1}
            self._written = step - 1

    def _write(self) -> None:
        if self._grown:
            if self._waiting and self._waiting[-1]["step"] == self._row["step"]:
                self._waiting.pop()
            self._waiting.append(self._row)
            self._grown = False
        if not self._waiting:
            return
        try:
            self._put(self._waiting)
        except OSError as error:
            self._say(error)
            return
        self._written, self._waiting, self._refused = self._waiting[-1]["step"], [], False

    def _say(self, error: OSError) -> None:
        if not self._refused:
            print(f"warning: {self.path} cannot be written ({error.strerror or error}); its rows are kept", flush=True)
        self._refused = True

    def _put(self, rows: list[dict[str, Any]]) -> None:
        columns = list(dict.fromkeys([*self.columns, *(key for row in rows for key in row)]))
        again = rows[0]["step"] == self._written
        if columns != self.columns or again:
            before = self._rows() if self.path.exists() else []
            self._rewrite([*(before[:-1] if again else before), *rows], columns)
            self.columns = columns
        else:
            self._append(_text(rows, columns))

    def _append(self, content: bytes) -> None:
        """All of it or nothing, as far as the disk lets a torn row be cut off again."""
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(content) != len(content):
                    raise OSError("no space left on the disk")
            except OSError:
                file.truncate(end)
                raise

    def _rows(self) -> list[dict[str, Any]]:
        """The whole ones: a kill or a power cut may have torn one."""
        text = self.path.read_text(errors="replace")
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        return [row for row in rows if (row.get("step") or "").isdecimal()]

    def _rewrite(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        with replacing(self.path) as temporary:
            temporary.write_bytes(_text(rows, columns, header=True))


def _text(rows: list[dict[str, Any]], columns: list[str], *, header: bool = False) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
