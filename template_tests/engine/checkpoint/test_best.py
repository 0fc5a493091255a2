"""The best state by a metric: which, when, under which names, and that a run can go on from it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer

from src.checkpoint.compare import differences
from src.engine.checkpoint import write
from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.files import fault, steps_inside
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.write import WholeFiles
from tests.tiny import Line, Rows, loaders, quiet_trainer

DATA = torch.linspace(-1, 1, 24)[:, None]


class Scored(Line):
    """Its score at each step is as given; momentum and dropout make a state more than its weight."""

    def __init__(self, scores: dict[int, float]) -> None:
        super().__init__()
        self.scores = scores

    def error(self, batch: torch.Tensor) -> torch.Tensor:
        return super().error(torch.nn.functional.dropout(batch, 0.5, self.training))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("score", self.scores[self.trainer.global_step])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def fit(
    folder: Path,
    scores: dict[int, float],
    resume: Path | None = None,
    seed: int = 0,
    module: type["Scored"] | None = None,
    **settings: Any,
) -> tuple[Trainer, SaveBest]:
    """Train on 24 samples in batches of 2 (an epoch is 12 steps), with a validation every 3 batches."""
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"monitor": "score", "every_n_steps": 999, "asynchronous": False}
    for name in [name for name in settings if name in CheckpointSettings.__annotations__]:
        chosen[name] = settings.pop(name)
    checkpoints = CheckpointSettings(**chosen)
    newest = SaveNewest(folder, checkpoints)
    best = SaveBest(folder, checkpoints, newest)
    settings = {
        "val_check_interval": 3,
        "max_steps": 12,
        "num_sanity_val_steps": 1,
        "plugins": [WholeFiles()],
    } | settings
    trainer = quiet_trainer(callbacks=[newest, best], **settings)
    trainer.fit((module or Scored)(scores), *loaders(trainer, DATA, 2), ckpt_path=resume, weights_only=True)
    return trainer, best


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SCORES = {0: 0.0, 3: 0.5, 6: 0.1, 9: 0.9, 12: 0.3}


@pytest.mark.parametrize("when", [{"val_check_interval": 3}, {"limit_train_batches": 3, "val_check_interval": None}])
@pytest.mark.parametrize(("mode", "best"), [("min", 6), ("max", 9)])
@pytest.mark.parametrize("behind", [False, True])
def test_the_best_by_the_metric_is_kept(
    tmp_path: Path, behind: bool, mode: str, best: int, when: dict[str, Any]
) -> None:
    """One best state stays, whether validation is inside of an epoch or at its end: that of the best value."""
    fit(tmp_path, SCORES, mode=mode, asynchronous=behind, **when)
    assert names(tmp_path) == [f"best-step={best:08d}.ckpt", "step=00000012.ckpt"]
    assert steps_inside(tmp_path / f"best-step={best:08d}.ckpt") == best


def test_the_end_can_be_the_best(tmp_path: Path) -> None:
    """A best that the last validation finds is saved with the end of training."""
    fit(tmp_path, SCORES | {12: 0.05})
    assert names(tmp_path) == ["best-step=00000012.ckpt", "step=00000012.ckpt"]


@pytest.mark.parametrize("behind", [False, True])
def test_a_best_that_is_due_anyway_is_written_once(
    tmp_path: Path, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both names are due at one step they are one file, and deleting the older name keeps the other whole."""
    written: list[str] = []
    real = write.write

    def count(state: dict[str, Any], path: Path) -> Exception | None:
        written.append(path.name)
        return real(state, path)

    monkeypatch.setattr(write, "write", count)
    fit(tmp_path, SCORES, every_n_steps=3, keep=1, asynchronous=behind)
    assert written == [f"step={step:08d}.ckpt" for step in (3, 6, 9, 12)]
    assert names(tmp_path) == ["best-step=00000006.ckpt", "step=00000012.ckpt"]
    assert fault(tmp_path / "best-step=00000006.ckpt") is None
    fit(tmp_path / "last", SCORES | {12: 0.05}, every_n_steps=3)
    newest, best = (tmp_path / "last" / f"{kind}step=00000012.ckpt" for kind in ("", "best-"))
    assert newest.samefile(best)


def test_the_best_alone_does_not_put_off_the_newest(tmp_path: Path) -> None:
    """A best state says nothing of when the newest is due, whose files a killed run goes on from."""
    seen: list[int] = []

    class Watched(Scored):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            newest = next(call for call in self.trainer.callbacks if isinstance(call, SaveNewest))  # type: ignore[attr-defined]
            seen.append(newest.schedule.step)

    fit(tmp_path, SCORES, module=Watched, every_n_steps=8)
    assert seen == [0] * 8 + [8] * 4


def test_a_name_is_given_twice_without_a_trace(tmp_path: Path) -> None:
    """The same name for the same file again, after a kill, leaves the two names and nothing else."""
    (tmp_path / "a").write_text("state")
    write.give_name(tmp_path / "a", tmp_path / "b")
    write.give_name(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == ["a", "b"]
    assert (tmp_path / "b").read_text() == "state"


def test_a_file_system_without_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no second name can be given, the best is a whole file of its own and nothing else is left behind."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    fit(tmp_path, SCORES, every_n_steps=3, keep=9)
    newest, best = tmp_path / "step=00000006.ckpt", tmp_path / "best-step=00000006.ckpt"
    assert not newest.samefile(best)
    assert newest.read_bytes() == best.read_bytes()
    assert all(path.suffix == ".ckpt" for path in tmp_path.iterdir())


def test_a_best_that_cannot_be_named_is_said_and_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk with room for a state but not for its copy costs the new best, is said, and ends no training."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    class FullAtSix(Scored):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            if self.global_step == 5:
                monkeypatch.setattr(os, "link", refuse)
                monkeypatch.setattr("shutil.copyfile", refuse)

    fit(tmp_path, SCORES, module=FullAtSix, every_n_steps=3)
    assert "best-step=00000006.ckpt (" in capsys.readouterr().out
    assert names(tmp_path) == ["best-step=00000003.ckpt", "step=00000009.ckpt", "step=00000012.ckpt"]


def test_a_run_goes_on_exactly_from_its_best(tmp_path: Path) -> None:
    """The best lies between two steps, as the newest do: the end of a run that goes on from it is that of the whole."""
    ends, rows = [], [Rows(), Rows()]
    fit(tmp_path / "whole", SCORES, logger=rows[0])
    fit(tmp_path / "resumed", SCORES, tmp_path / "whole/best-step=00000006.ckpt", seed=9, logger=rows[1])
    for folder in ("whole", "resumed"):
        state = torch.load(tmp_path / folder / "step=00000012.ckpt", weights_only=True)
        ends.append({key: state[key] for key in ("state_dict", "optimizer_states", "loops")})
    assert list(differences(ends[0], ends[1])) == []
    assert rows[1].curve("score") == {step: value for step, value in rows[0].curve("score").items() if (step or 0) > 6}


def test_a_validation_between_two_micro_batches_keeps_what_it_saw(tmp_path: Path) -> None:
    """The best holds the weights that were validated, also where the next step is half accumulated by then."""
    seen: dict[int, float] = {}

    class Watched(Scored):
        def on_validation_end(self) -> None:
            seen[self.trainer.global_step] = float(self.weight)

    scores = {0: 0.0, 1: 0.5, 3: 0.3, 4: 0.1, 6: 0.7}
    fit(tmp_path, scores, module=Watched, accumulate_grad_batches=2, max_steps=6)
    state = torch.load(tmp_path / "best-step=00000004.ckpt", weights_only=True)
    assert float(state["state_dict"]["weight"]) == seen[4]
    assert names(tmp_path) == ["best-step=00000004.ckpt", "step=00000006.ckpt"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
@pytest.mark.parametrize(("later", "expected"), [(0.3, 9), (0.05, 12)])
def test_a_resumed_run_knows_the_best_of_the_earlier_start(
    tmp_path: Path, mode: str, sign: int, later: float, expected: int
) -> None:
    """A later value wins over the best one of the start before only if it is better, and one best file stays."""
    scores = {step: value * sign for step, value in {0: 0.0, 3: 0.5, 6: 0.4, 9: 0.1, 12: later}.items()}
    fit(tmp_path, scores, mode=mode, every_n_steps=3, max_steps=9)
    # The state of step 6 does not know that step 9 is the best.
    resume = tmp_path / "step=00000006.ckpt"
    _, best = fit(tmp_path, scores | {9: 0.2 * sign}, resume, mode=mode, every_n_steps=3)
    path = tmp_path / f"best-step={expected:08d}.ckpt"
    assert list(tmp_path.glob("best-*")) == [path]
    assert best.best_model_path == str(path)
    assert float(best.best_model_score or 0) == pytest.approx(sign * min(0.1, later))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_that_was_killed_before_its_state_was_named_the_best_names_it(tmp_path: Path) -> None:
    """The state knows that it was the best, and becomes it when the run goes on from it."""
    fit(tmp_path, SCORES, every_n_steps=3, max_steps=6)
    (tmp_path / "best-step=00000006.ckpt").unlink()
    _, best = fit(tmp_path, SCORES, tmp_path / "step=00000006.ckpt", every_n_steps=3)
    assert best.best_model_path == str(tmp_path / "best-step=00000006.ckpt")
    assert steps_inside(tmp_path / "best-step=00000006.ckpt") == 6


def test_a_metric_that_is_never_logged_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Validations without the monitored metric keep no best state, and one note names what is logged instead."""
    fit(tmp_path, SCORES, monitor="val/accuracy")
    said = capsys.readouterr().out
    assert said.count("checkpoint.monitor 'val/accuracy' is never logged") == 1
    assert "(logged: score)" in said
    assert names(tmp_path) == ["step=00000012.ckpt"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_an_older_best_that_cannot_be_deleted_stops_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start, for which the other ranks wait, goes on with the better one."""
    fit(tmp_path, SCORES, max_steps=6, every_n_steps=3)
    older, unlink = tmp_path / "best-step=00000003.ckpt", Path.unlink
    write.give_name(tmp_path / "step=00000003.ckpt", older)

    def barred(path: Path, missing_ok: bool = False) -> None:
        if path == older:
            raise PermissionError("not yours")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", barred)
    _, best = fit(tmp_path, SCORES, tmp_path / "step=00000006.ckpt")
    assert best.best_model_path == str(tmp_path / "best-step=00000006.ckpt")
