import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from src.engine.checkpoint.best import SaveBest
from src.engine.checkpoint.choose import newest
from src.engine.checkpoint.save import SaveNewest
from src.engine.checkpoint.schedule import CheckpointSettings
from src.engine.checkpoint.shards import IN_PARTS, load, part_path
from src.engine.checkpoint.write import WholeFiles, back_up, write_parts
from src.engine.errors import AgreedError, UserError
from tests.tiny import Line, loaders, quiet_trainer

DATA = torch.linspace(-1, 1, 24)[:, None]


@pytest.fixture
def fit():
    """Trains on 24 samples in batches of 2 (an epoch is 12 steps); returns trainer and module."""

    def run(callbacks, module=None, resume=None, **settings):
        module = Line() if module is None else module
        trainer = quiet_trainer(callbacks=callbacks, **settings)
        trainer.fit(module, *loaders(trainer, DATA, 2), ckpt_path=resume, weights_only=True)
        return trainer, module

    return run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("keep", "expected"), [(1, ["00000010"]), (2, ["00000009", "00000010"]), (3, ["00000006", "00000009", "00000010"])]
)
def test_the_newest_are_kept_and_the_end_is_one(tmp_path, fit, keep, expected):
    """Every N steps and at the end a state is saved, and exactly the last K stay."""
    fit([SaveNewest(tmp_path, CheckpointSettings(every_n_steps=3, keep=keep))], max_steps=10)
    assert names(tmp_path) == [f"step={number}.ckpt" for number in expected]


def test_an_end_inside_an_epoch_is_of_that_epoch(tmp_path, fit):
    """What `list` shows: Lightning counts the epoch as done where the steps end."""
    fit([SaveNewest(tmp_path, CheckpointSettings())], max_steps=22)
    assert torch.load(tmp_path / "step=00000022.ckpt", weights_only=True)["epoch"] == 1


def test_the_old_one_stays_until_the_new_one_was_read_back(tmp_path, fit, monkeypatch, capsys):
    """A disk that says it has written and has not costs that save alone."""
    save = torch.save

    def losing(state, path):
        save(state, path)
        if state.get("global_step") == 4:
            with path.open("rb+") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"\xff" * 512)

    monkeypatch.setattr(torch, "save", losing)
    present = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 6:
                present.extend(names(tmp_path))

    settings = CheckpointSettings(every_n_steps=2, keep=1, asynchronous=False)
    fit([Watch(), SaveNewest(tmp_path, settings)], max_steps=8, plugins=[WholeFiles()])
    assert present == ["step=00000002.ckpt", "step=00000004.ckpt"]
    assert "warning: step 4 could not be saved" in capsys.readouterr().out


def test_the_old_one_goes_when_the_new_one_is_there(tmp_path, fit):
    """While a state is being written, an older complete one is always on disk."""
    present = []

    class Watch(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            present.append(names(tmp_path))

    fit([Watch(), SaveNewest(tmp_path, CheckpointSettings(every_n_steps=2, keep=1))], max_steps=6)
    assert present == [[], [], ["step=00000002.ckpt"], ["step=00000004.ckpt"]]


def test_steps_are_optimizer_steps(tmp_path, fit):
    """With accumulation the interval and the file's number count optimizer steps, not batches."""
    settings = CheckpointSettings(every_n_steps=2, keep=9)
    fit([SaveNewest(tmp_path, settings)], max_epochs=1, accumulate_grad_batches=2)
    assert names(tmp_path) == [f"step={number:08d}.ckpt" for number in (2, 4, 6)]
    assert newest(tmp_path) == (tmp_path / "step=00000006.ckpt", 6)


def test_a_resumed_run_ends_like_one_that_was_never_stopped(tmp_path, fit):
    """Going on from the state of step 12 gives exactly the weight of 20 steps in a row, and saves in its rhythm."""
    _, whole = fit([], max_steps=20)
    fit([SaveNewest(tmp_path, CheckpointSettings(every_n_steps=12))], max_steps=13)
    (tmp_path / "step=00000013.ckpt").unlink()
    found = newest(tmp_path)
    assert found is not None
    newer = SaveNewest(tmp_path, CheckpointSettings(every_n_steps=5))
    trainer, resumed = fit([newer], resume=found[0], max_steps=20)
    assert (found[1], trainer.global_step) == (12, 20)
    assert torch.equal(whole.weight, resumed.weight)
    assert names(tmp_path) == ["step=00000015.ckpt", "step=00000020.ckpt"]


@pytest.mark.parametrize(
    ("strategy", "files", "said"),
    [
        (FSDPStrategy, WholeFiles, "FSDPStrategy writes checkpoints of its own.*--trainer.strategy fsdp_full_shard"),
        (ModelParallelStrategy, WholeFiles, "ModelParallelStrategy writes checkpoints of its own"),
        (SingleDeviceStrategy, AsyncCheckpointIO, "AsyncCheckpointIO, which is not needed"),
    ],
)
def test_writers_whose_files_nobody_checks_are_refused_at_setup(tmp_path, strategy, files, said):
    """A strategy or plugin whose first save would fail says so before training."""
    trainer = quiet_trainer()
    trainer._accelerator_connector.strategy = strategy()
    trainer.strategy.checkpoint_io = files()
    with pytest.raises(AgreedError, match=said):
        SaveNewest(tmp_path, CheckpointSettings()).setup(trainer, Line(), "fit")


@pytest.mark.parametrize("name", ["keep", "every_n_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_nothing_kept_or_no_interval_is_refused(name, value):
    """Keeping no state, or saving one every 0 steps, is refused by name."""
    with pytest.raises(UserError, match=f"checkpoint.{name} is {value}; it must be at least 1"):
        CheckpointSettings(**{name: value})


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("name", ["{step}", "best-{epoch}-{step}", "step={step:03d}"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_the_files_of_a_users_own_checkpoints_are_theirs(tmp_path, fit, name, weights_only):
    """A ModelCheckpoint of the user's in the same folder loses no file to ours and takes none of ours away."""
    settings, resume = CheckpointSettings(every_n_steps=3, monitor="val/loss"), None
    for steps in (8, 12):
        user = ModelCheckpoint(tmp_path, name, save_top_k=-1, every_n_train_steps=5, save_weights_only=weights_only)
        saver = SaveNewest(tmp_path, settings)
        fit([user, saver, SaveBest(tmp_path, settings, saver)], max_steps=steps, val_check_interval=4, resume=resume)
        resume = tmp_path / "step=00000008.ckpt"
    kept = {"step=00000009.ckpt", "step=00000012.ckpt", "best-step=00000012.ckpt"}
    assert kept <= set(names(tmp_path))
    assert len(set(names(tmp_path)) - kept) == 2


def test_a_copy_of_the_newest_healthy_state_is_kept_elsewhere(tmp_path, fit):
    """The backup has one whole state, the newest from before a bad streak; no pruning in the run reaches it."""
    bad: list[int] = []

    class Streak(Callback):
        def on_train_batch_end(self, trainer, *args):
            bad.extend([7] if trainer.global_step == 7 else [])

    folder, settings = tmp_path / "mine/checkpoints", CheckpointSettings(every_n_steps=3, backup=str(tmp_path / "copy"))
    since = lambda: min(bad, default=None)  # noqa: E731
    fit([Streak(), SaveNewest(folder, settings, bad_since=since)], max_steps=10, plugins=[WholeFiles()])
    assert names(tmp_path / "copy/mine") == ["step=00000006.ckpt"]
    assert newest(tmp_path / "copy/mine") == (tmp_path / "copy/mine/step=00000006.ckpt", 6)


def test_a_backup_that_fails_is_a_warning(tmp_path, fit, capsys):
    """A second folder that is no folder costs the copies alone."""
    (tmp_path / "copy").write_text("")
    settings = CheckpointSettings(every_n_steps=5, backup=str(tmp_path / "copy"))
    fit([SaveNewest(tmp_path / "mine/checkpoints", settings)], max_steps=10, plugins=[WholeFiles()])
    assert names(tmp_path / "mine/checkpoints") == ["step=00000005.ckpt", "step=00000010.ckpt"]
    assert "warning: step 5 is saved, but not copied to checkpoint.backup" in capsys.readouterr().out


def test_the_copy_of_a_state_in_parts_has_its_parts_and_no_older_ones(tmp_path):
    """What is copied is whole by itself, and takes the place of the copy before it with all its files."""
    folder, copy = tmp_path / "checkpoints", tmp_path / "copy"
    for step in (3, 6):
        path = folder / f"step={step:08d}.ckpt"
        part = part_path(path, "abcd", 0, 1)
        content = {"global_step": step, "state_dict": {"w": IN_PARTS}}
        assert write_parts(content, {"state_dict.w": torch.full((4,), float(step))}, path, [part], 0) is None
        back_up(path, copy)
    assert names(copy / "shards") == [part.name]
    assert torch.equal(load(copy / path.name)["state_dict"]["w"], torch.full((4,), 6.0))
    assert len(names(copy)) == 2
