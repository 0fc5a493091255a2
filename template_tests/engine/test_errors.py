import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from src.cli import main
from src.engine import exit_codes
from src.engine.errors import UserError, hint, of_a_file
from src.engine.outcome import is_refused_setting
from src.strategies import NAMES
from tests.commands import BORING, CPU, SMALL
from tests.tiny import Line, loaders, quiet_trainer


class Skipping(torch.nn.Module):
    """Has a layer that its forward pass never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.skipped = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used(batch)


@pytest.fixture
def alone():
    """A process group of this process only."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_unused_parameters_say_which_strategy_allows_them():
    """What DDP itself raises where a layer got no gradient is explained with a strategy that exists."""
    model = DistributedDataParallel(Skipping())
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(1, 1)).sum().backward()
    text = hint(raised.value)
    assert text is not None
    assert "--trainer.strategy ddp_find_unused" in text
    assert "ddp_find_unused" in NAMES


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_a_fused_optimizer_in_fp16_says_with_what_clipping_works():
    """What Lightning raises where fp16, clipping and a fused optimizer meet is explained with what does go together."""

    class Fused(Line):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), self.lr, fused=True)

    trainer = quiet_trainer(max_steps=1, plugins=[MixedPrecision("16-mixed", "cpu")], gradient_clip_val=0.5)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Fused(), *loaders(trainer, torch.ones(4, 1), 2))
    text = hint(raised.value)
    assert text is not None
    assert "--trainer.precision bf16-mixed" in text


def test_ranks_that_gloo_cannot_connect_name_the_setting():
    """Where gloo took an address that other nodes do not reach, the hint is its variable."""
    text = hint(RuntimeError("Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc] timed out connecting"))
    assert text is not None
    assert "GLOO_SOCKET_IFNAME=" in text


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), MemoryError(), UserError("memory is 0"), KeyboardInterrupt()]
)
def test_other_errors_have_no_hint(error):
    """Where nothing can be turned the traceback stands alone."""
    assert hint(error) is None


def raised_by(function: Callable[[], Any]) -> Exception:
    """The exception of a call with the traceback that begins inside of it, as it does below main()."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        function()
    error = raised.value
    trace: Any = error.__traceback__
    return error.with_traceback(trace.tb_next.tb_next)


def test_a_setting_that_lightning_refuses_is_no_crash():
    """Lightning's own complaint about an argument counts as bad input; a user's ValueError does not."""
    assert is_refused_setting(raised_by(lambda: Trainer(accelerator="cpu", limit_val_batches=1.5, logger=False)))
    assert not is_refused_setting(raised_by(lambda: int(raised_in_user_code())))
    assert not is_refused_setting(KeyError("lost"))


def raised_in_user_code() -> int:
    raise ValueError("a module's own")


def test_weights_that_fsdp_has_not_gathered_are_explained():
    """What PyTorch says where a unit's weights are used from outside of it leads nowhere by itself."""
    text = hint(RuntimeError("aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor"))
    assert text is not None
    assert "BLOCKS" in text
    assert "--trainer.strategy ddp" in text


@pytest.mark.usefixtures("run_root")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--trainer.val_check_interval", "1000"], "val_check_interval"),
        (["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val/nothing"], "val/nothing"),
        (
            ["--trainer.callbacks+", "src.engine.callbacks.ema.EMA", "--trainer.callbacks.decay", "1.5"],
            "the decay of EMA is 1.5",
        ),
        (
            ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "a"] * 2,
            "Found more than one stateful",
        ),
    ],
)
def test_a_setting_that_is_refused_late_is_one_line(given, said, capfd):
    """By Lightning once training is being set up, or by the __init__ of a class in the configuration."""
    assert main(["fit", *CPU, *SMALL, "--trainer.val_check_interval", "4", "--trainer.max_epochs", "1", *given]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("warning")]
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert said in lines[-1]
    assert "Traceback" not in "".join(lines)
    assert "Union" not in lines[-1]


def test_a_new_run_that_is_refused_before_its_first_step_leaves_no_folder(run_root):
    """The name is free for the next try; the folder of a run that was there before is kept."""
    refused = [
        "fit",
        *CPU,
        *SMALL,
        "--trainer.val_check_interval",
        "1000",
        "--trainer.max_epochs",
        "1",
        "--run",
        "mine",
    ]
    assert main(refused) == 2
    assert not list(run_root.iterdir())
    (run_root / "mine").mkdir()
    assert main(refused) == 2
    assert (run_root / "mine").exists()


THEIRS = """
import lightning
if {imported}: {raising}
class Data(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        if {built}: {raising}
    def setup(self, stage):
        if {set_up}: {raising}
    def train_dataloader(self):
        {raising}
class Net(lightning.pytorch.demos.boring_classes.BoringModel):
    def __init__(self):
        super().__init__()
        {raising}
"""


@pytest.mark.usefixtures("run_root")
@pytest.mark.parametrize("moment", ["imported", "built", "set up", "loaded", "the model is built"])
@pytest.mark.parametrize(
    "raising", ["raise ValueError('width')", "{}['width']", "None.width", "assert not 'width'", "int([])", "1 / 0"]
)
def test_an_error_of_the_users_code_shows_where_it_is(moment, raising, monkeypatch, tmp_path, capsys):
    """Whatever it is and whenever it comes: the traceback into their file, exit code 1."""
    moments = {"imported": moment == "imported", "built": moment == "built", "set_up": moment == "set up"}
    code = THEIRS.format(**moments, raising=raising)
    (tmp_path / "theirs.py").write_text(
        code.replace("import lightning", "import lightning.pytorch.demos.boring_classes")
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    model = "theirs.Net" if moment == "the model is built" else BORING[1]
    data = [] if moment == "the model is built" else ["--data", "theirs.Data"]
    assert main(["fit", *CPU, "--model", model, *data]) == 1
    told = capsys.readouterr().err
    assert f'File "{tmp_path / "theirs.py"}", line ' in told
    assert told.count("Traceback") == 1


@pytest.mark.usefixtures("run_root")
def test_a_setting_that_a_class_of_lightning_refuses_is_one_line(capsys):
    """Its constructor is nobody's code of the user's."""
    stop = [
        "--trainer.callbacks",
        "EarlyStopping",
        "--trainer.callbacks.monitor",
        "x",
        "--trainer.callbacks.mode",
        "up",
    ]
    assert main(["fit", *CPU, *BORING, *stop]) == 2
    assert capsys.readouterr().err == "error: `mode` can be min, max, got up\n"


@pytest.mark.parametrize(
    ("number", "ours", "code"),
    [
        (errno.ENOSPC, True, exit_codes.BUSY),
        (errno.EDQUOT, False, exit_codes.BUSY),
        (errno.ESTALE, True, exit_codes.BUSY),
        (errno.EACCES, True, exit_codes.BAD_INPUT),
        (errno.EISDIR, True, exit_codes.BAD_INPUT),
        (errno.EROFS, True, exit_codes.BAD_INPUT),
        (errno.ENOENT, False, None),
    ],
)
def test_what_the_system_says_of_a_file_of_ours_is_one_line(number, ours, code, run_root, tmp_path):
    """75 where a restart may find it well; a file that the user's code opens elsewhere keeps its traceback."""
    path = (run_root if ours else tmp_path / "theirs") / "file"
    said = of_a_file(OSError(number, os.strerror(number), str(path)))
    if code is None:
        assert said is None
        return
    assert said is not None
    assert said.exit_code == code
    assert str(said).startswith(f"{path}: {os.strerror(number)}; ")


@pytest.mark.parametrize("name", ["summary.json", "manifest.json", "metrics.csv", "heartbeat", "config.yaml", ".lock"])
def test_a_folder_in_the_place_of_a_file_of_a_run_is_no_traceback(name, run_root, capsys):
    """Training begins all the same or one line names the path; nothing else of the run is lost."""
    (run_root / "mine" / name).mkdir(parents=True)
    code = main(["fit", *CPU, *SMALL, "--run", "mine"])
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert code == 0 or (code in (2, 75) and f"{run_root / 'mine'}" in told.err)
