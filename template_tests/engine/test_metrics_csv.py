import csv
import os
import resource
from pathlib import Path

import pytest
import torch

from src.engine.files import write_text
from src.engine.run.metrics import MetricsCSV
from tests.tiny import Line, loaders, quiet_trainer


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def logged(path: Path, steps: range) -> None:
    """Steps of a run that ends well."""
    rows = MetricsCSV(path)
    for step in steps:
        rows.log_metrics({"train/loss": 1.0 / (step + 1)}, step)
    rows.finalize("success")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.csv"


def test_metrics_of_a_step_share_a_row(path):
    """What is logged at one step, by whomever and when, is one row."""
    rows = MetricsCSV(path)
    for step in (0, 1):
        rows.log_metrics({"a": 1 + step}, step)
        rows.log_metrics({"b": torch.tensor(2.5)}, step)  # type: ignore[dict-item]  # Lightning does that
    rows.finalize("success")
    assert table(path) == [{"step": "0", "a": "1.0", "b": "2.5"}, {"step": "1", "a": "2.0", "b": "2.5"}]


def test_a_later_value_of_the_same_step_wins(path):
    """A metric that is logged twice at a step keeps its last value."""
    rows = MetricsCSV(path)
    rows.log_metrics({"a": 1}, 0)
    rows.log_metrics({"a": 2}, 0)
    rows.finalize("success")
    assert table(path) == [{"step": "0", "a": "2.0"}]


def test_a_new_metric_adds_a_column_and_keeps_the_rows(path):
    """A metric that comes later leaves earlier rows as they were, empty in its column."""
    rows = MetricsCSV(path)
    rows.log_metrics({"a": 1}, 0)
    rows.log_metrics({"val/b": 2}, 1)
    rows.log_metrics({"a": 3}, 2)
    rows.finalize("success")
    assert table(path) == [
        {"step": "0", "a": "1.0", "val/b": ""},
        {"step": "1", "a": "", "val/b": "2.0"},
        {"step": "2", "a": "3.0", "val/b": ""},
    ]


def test_a_killed_run_keeps_all_but_the_open_row(path):
    """Rows are on disk as soon as the next step begins, without any call at the end."""
    rows = MetricsCSV(path)
    for step in range(3):
        rows.log_metrics({"a": step}, step)
        rows.save()
    assert [row["step"] for row in table(path)] == ["0", "1"]


def test_a_flushed_row_is_on_disk_and_may_still_grow(path):
    """`flush` writes the open row, for the state of its step must not outlive it; a later metric joins that row."""
    rows = MetricsCSV(path)
    for step in range(2):
        rows.log_metrics({"a": step}, step)
        rows.flush()
        rows.flush()
        assert [row["step"] for row in table(path)] == [str(number) for number in range(step + 1)]
    rows.log_metrics({"val/b": 2}, 1)
    rows.log_metrics({"a": 2}, 2)
    rows.finalize("success")
    assert [(row["step"], row["a"], row["val/b"]) for row in table(path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", "2.0"),
        ("2", "2.0", ""),
    ]


def test_a_second_start_appends(path):
    """A new logger on an old file continues it, in its columns."""
    logged(path, range(2))
    logged(path, range(2, 4))
    assert [row["step"] for row in table(path)] == ["0", "1", "2", "3"]
    assert path.read_text().count("step") == 1


def test_a_resumed_run_has_each_step_once(path):
    """After rewinding to the checkpoint, steps that are trained again are in the file once."""
    logged(path, range(8))
    rows = MetricsCSV(path)
    rows.rewind(5)
    for step in range(5, 10):
        rows.log_metrics({"train/loss": -1}, step)
    rows.finalize("success")
    assert [row["step"] for row in table(path)] == [str(step) for step in range(10)]
    assert [row["train/loss"] for row in table(path)[4:6]] == ["0.2", "-1.0"]


def test_rewinding_to_the_end_changes_nothing(path):
    """A checkpoint of the last logged step drops no row and no column."""
    logged(path, range(4))
    before = path.read_text()
    rows = MetricsCSV(path)
    rows.rewind(4)
    rows.finalize("success")
    assert path.read_text() == before


def test_rewinding_to_the_start_keeps_no_row(path):
    """A run without a checkpoint starts its file anew."""
    logged(path, range(4))
    rows = MetricsCSV(path)
    rows.rewind(0)
    rows.finalize("success")
    assert table(path) == []


def test_validation_after_the_checkpoint_joins_the_newest_row(path):
    """Validation that a resumed run repeats for the last kept step goes into that step's row."""
    logged(path, range(3))
    rows = MetricsCSV(path)
    rows.rewind(3)
    rows.log_metrics({"val/loss": 7}, 2)
    rows.finalize("success")
    assert [(row["step"], row["val/loss"]) for row in table(path)] == [("0", ""), ("1", ""), ("2", "7.0")]


def test_rewinding_without_a_file_does_nothing(path):
    """A new run has nothing to rewind."""
    MetricsCSV(path).rewind(3)
    assert not path.exists()


def test_nothing_but_the_file_is_left_behind(path):
    """Rewriting goes through a temporary file that does not stay."""
    logged(path, range(3))
    MetricsCSV(path).rewind(2)
    assert [file.name for file in path.parent.iterdir()] == ["metrics.csv"]


def test_a_real_training_is_one_row_per_step(path):
    """Under Lightning, training and validation of a step are in its row and the last row is there."""
    logger = MetricsCSV(path)
    trainer = quiet_trainer(logger=[logger], max_steps=4, val_check_interval=2, num_sanity_val_steps=1)

    class Logging(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss)
            return loss

    trainer.fit(Logging(), *loaders(trainer, torch.ones(8, 1), 2))
    found = table(path)
    assert [row["step"] for row in found] == ["0", "1", "2", "3"]
    assert all(row["mine"] for row in found)
    assert [bool(row["val/loss"]) for row in found] == [False, True, False, True]


def test_lightnings_log_dir_is_the_run_directory(path):
    """As the first logger, it makes `trainer.log_dir` the folder of its file, whatever other loggers say."""
    assert quiet_trainer(logger=[MetricsCSV(path)]).log_dir == str(path.parent)


@pytest.mark.parametrize("grown", [False, True])
def test_a_start_that_is_killed_before_it_logs_takes_no_row_along(path, grown):
    """The row of the step that a start goes on from stays in the file, also while more of it is being logged."""
    first = MetricsCSV(path)
    first.log_metrics({"train/loss": 1.0}, step=3)
    first.flush()
    second = MetricsCSV(path)
    second.rewind(4)
    if grown:
        second.log_metrics({"val/loss": 2.0}, step=3)  # and is killed here
    third = MetricsCSV(path)
    third.rewind(4)
    third.log_metrics({"val/loss": 2.0}, step=3)
    third.finalize("success")
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"step": "3", "train/loss": "1.0", "val/loss": "2.0"}]


@pytest.mark.parametrize("new", [False, True])
def test_a_disk_that_refuses_rows_ends_nothing_and_tears_none(path, capsys, new):
    """While it is full rows are lost, with one warning; those before and after are whole."""
    rows, limits = MetricsCSV(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for step in range(8):
            rows.log_metrics({"train/loss": float(step)} | ({"val/loss": 1.0} if new and step == 3 else {}), step)
            if step in (2, 6):
                rows.flush()
                assert [row["step"] for row in table(path)] == ["0", "1", "2"]
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (path.stat().st_size + 3 if step == 2 else limits[0], limits[1])
                )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    rows.finalize("success")
    assert [(row["step"], row["train/loss"]) for row in table(path)] == [(str(n), f"{n}.0") for n in (0, 1, 2, 7)]
    assert capsys.readouterr().out.count("metrics.csv cannot be written") == 1


@pytest.mark.parametrize("tail", [b"3,0.", b"3", b"\0\0\0\0\r\n", b"\0" * 9, b"x,1\r\n", b"\xff\xff"])
def test_a_torn_row_stops_no_start(path, tail):
    """What a kill or a power cut has left behind the last whole row is dropped."""
    logged(path, range(3))
    path.write_bytes(path.read_bytes() + tail)
    rows = MetricsCSV(path)
    rows.rewind(30)
    rows.finalize("success")
    assert [row["step"] for row in table(path)] == ["0", "1", "2"]


@pytest.mark.parametrize("content", [b"", b"\0" * 50, b"st"])
def test_a_file_without_its_columns_is_begun_anew(path, content):
    """A file that a power cut has left without content takes rows again."""
    path.write_bytes(content)
    rows = MetricsCSV(path)
    rows.rewind(3)
    logged(path, range(3, 5))
    assert [row["step"] for row in table(path)] == ["3", "4"]


def test_rows_are_on_the_disk_before_their_state(path, monkeypatch):
    """`flush`, which comes before a save, and each replacement of the file wait for the disk."""
    synced, real = [], os.fsync

    def watched(file):
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        real(file)

    monkeypatch.setattr(os, "fsync", watched)
    rows, folder = MetricsCSV(path), path.parent.name
    rows.log_metrics({"a": 1}, 0)
    rows.flush()
    write_text(path.with_name("summary.json"), "{}")
    assert synced == [".metrics.csv.tmp", folder, "metrics.csv", ".summary.json.tmp", folder]
