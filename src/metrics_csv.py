"""`metrics.csv`: one row per logged step, in one place for the whole life of a run."""

import csv
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class MetricsCSV(Logger):
    """Appends rows to `path`; metrics logged at the same step share a row, a new metric adds a column.

    Lightning's CSVLogger deletes the file of an earlier start or opens a `version_1` beside it. This one continues:
    `rewind(step)` drops the rows that a resumed run will write again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.columns: list[str] = []
        self._row: dict[str, Any] = {}  # the newest one, which may still grow
        self._grown = False  # since it was written
        self._written: int | None = None  # the step of the last row in the file
        if path.exists():
            with path.open(newline="") as file:
                self.columns = next(csv.reader(file), [])

    @property
    def name(self) -> str:  # noqa: D102
        return ""

    @property
    def version(self) -> str:  # noqa: D102
        return ""

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
        """Write the row that is still open: the state of a step must not outlive the step's row. It may grow later."""
        self._write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the row that is still open."""
        self._write()

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forget what was logged after `step` optimizer steps; rows carry the index of a step, from 0."""
        self._row, self._grown, self._written = {}, False, None
        if not self.path.exists():
            return
        rows = [row for row in self._rows() if int(row["step"]) < step]
        self._rewrite(rows)
        if rows and int(rows[-1]["step"]) == step - 1:
            # Validation after that step may be logged once more. Until then the row stays in the file: a start that is
            # killed before it has logged anything must not take it along.
            self._row = {key: value for key, value in rows[-1].items() if value} | {"step": step - 1}
            self._written = step - 1

    def _write(self) -> None:
        if not self._grown:
            return
        new = [key for key in self._row if key not in self.columns]
        again = self._row["step"] == self._written
        if new or again:
            rows = self._rows() if self.path.exists() else []
            self.columns += new
            self._rewrite([*(rows[:-1] if again else rows), self._row])
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns, restval="").writerow(self._row)
        self._grown, self._written = False, self._row["step"]

    def _rows(self) -> list[dict[str, Any]]:
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)
