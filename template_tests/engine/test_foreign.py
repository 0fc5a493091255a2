"""What users bring: modules, data modules, strategies and bars that know nothing of this project."""

import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.demos import LightningTransformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from src.cli import main
from template_tests.launchers import PROBE
from tests.commands import BORING, CPU, ROOT, SMALL, fit, losses, only_run, read_json, rows

pytestmark = pytest.mark.usefixtures("run_root")
GAN = [
    "--model",
    "template_tests.engine.test_foreign.Gan",
    "--trainer.max_epochs",
    "2",
    "--trainer.log_every_n_steps",
    "1",
]


def test_lightnings_boring_model_trains_unchanged(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that brings its own loaders works by its path; the batch that they give is said in one line."""
    assert main(["fit", *CPU, *BORING, "--trainer.max_steps", "10"]) == 0
    run = only_run(run_root)
    assert run.name.startswith("BoringModel-")
    assert losses(run)
    output = capsys.readouterr().out
    assert "the global batch is 1 = 1 over 1 device(s)" in output
    assert main(["predict", *CPU, *BORING]) == 0
    assert (run / "predictions.pt").exists()


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_command_without_data_is_refused_before_there_is_a_run(
    command: str, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that names the missing loader."""
    assert main([command, *CPU, "--model", "tests.tiny.Line"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{command} needs data, and Line has no " in line
    assert not run_root.exists()


def test_a_module_of_the_old_package_names_the_import_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """lightning installs pytorch_lightning beside itself, whose classes are others."""
    (tmp_path / "old.py").write_text("import pytorch_lightning as pl\nclass Old(pl.LightningModule):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = ModuleType("pytorch_lightning")
    package.LightningModule = type("LightningModule", (), {"__module__": "pytorch_lightning"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    assert main(["fit", *CPU, "--model", "old.Old"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "change its import to `import lightning.pytorch as pl`" in line


def test_lightnings_transformer_trains_on_a_plain_data_module(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign model with a foreign data module: the global batch is kept through its `batch_size`."""
    # The demo downloads a text for loaders of its own, which the data module replaces.
    monkeypatch.setattr(LightningTransformer, "prepare_data", lambda self: None)
    model = ["--model", "lightning.pytorch.demos.LightningTransformer", "--model.vocab_size", "50"]
    data = ["--data", "template_tests.tokens.RandomTokens", "--data.vocab", "50"]
    batch = ["--global_batch_size", "8", "--micro_batch_size", "2", "--trainer.log_every_n_steps", "1"]
    run = fit(run_root, "foreign", *model, *data, *batch)
    assert len(losses(run)) == 4
    assert read_json(run / "manifest.json")["accumulation"] == 4


class Gan(LightningModule):
    """Two networks in turns, by manual optimization, whose pictures go to the logger, as Lightning's example does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh())
        self.discriminator = torch.nn.Linear(64, 1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def judge(self, images: torch.Tensor, real: float) -> torch.Tensor:
        found = self.discriminator(images)
        return torch.nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, real))

    def training_step(self, batch: torch.Tensor) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        noise = torch.randn(len(batch), 4)
        self.toggle_optimizer(first)
        made = self(noise)
        self.logger.experiment.add_image("made", made[0].view(1, 8, 8), 0)  # type: ignore[union-attr]
        loss = self.judge(made, 1.0)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = (self.judge(batch, 1.0) + self.judge(self(noise).detach(), 0.0)) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        for logger in self.loggers:  # all of them
            picture = self(torch.zeros(1, 4)).view(1, 8, 8)
            logger.experiment.add_image("seen", picture, self.current_epoch)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), 1e-3) for net in (self.generator, self.discriminator)], []

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.rand(12, 64), 4)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def test_a_gan_logs_pictures_by_its_logger(run_root: Path) -> None:
    """`self.logger.experiment` is TensorBoard's writer, and what another logger cannot keep is no error."""
    run = fit(run_root, "gan", *GAN)
    pictures = EventAccumulator(str(run / "tensorboard")).Reload().Tags()["images"]
    assert sorted(pictures) == ["made", "seen"]
    assert {"g_loss", "d_loss"} <= rows(run)[-1].keys()


def test_modes_survive_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each validation the module trains again and its frozen part stays in evaluation mode."""
    monkeypatch.setenv("PROBE_FOLDER", str(tmp_path))
    warnings.filterwarnings("ignore", "Found .* in eval mode")  # the claim is about just such a part
    assert main(["fit", *CPU, *PROBE, "--trainer.max_epochs", "2", "--trainer.val_check_interval", "2"]) == 0
    modes = read_json(tmp_path / "probe-0.json")["modes"]
    assert len(modes) == 12
    assert all(mode == [True, True, False] for mode in modes)


def test_what_users_bring_in_yaml_is_kept(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy object, a progress bar and `logger: false` take effect; a setting that cannot is named."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "trainer:\n  logger: false\n  default_root_dir: elsewhere\n"
        "  strategy:\n    class_path: lightning.pytorch.strategies.SingleDeviceStrategy\n"
        "    init_args:\n      device: cpu\n"
        "  callbacks:\n  - class_path: lightning.pytorch.callbacks.TQDMProgressBar\n"
    )
    run = fit(run_root, "own", *SMALL, "--config", str(path))
    said = capsys.readouterr().out
    assert "default_root_dir has no effect" in said
    assert not (run / "metrics.csv").exists()
    assert (run / "DONE").exists()


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_checkpoint_that_needs_pickle_needs_trust(
    command: str, run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One from elsewhere that holds an object is refused in one line with its name, until --weights_only false."""
    path = tmp_path / "foreign.ckpt"
    run = fit(run_root, "theirs", *SMALL, "--trainer.max_steps", "2")
    state = torch.load(run / "checkpoints/step=00000002.ckpt", weights_only=True)
    torch.save(state | {"hyper_parameters": {"folder": tmp_path}}, path)
    start = [command, *CPU, *SMALL, "--ckpt_path", str(path)]
    named = ["--run", "ours"] if command == "fit" else []
    assert main([*start, *named]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pathlib" in line
    assert "--weights_only false" in line
    assert main([*start, *named, "--weights_only", "false"]) == 0


@pytest.mark.parametrize("found", ["hpc", "exception"])
def test_a_new_run_starts_from_no_file_that_lies_about(
    found: str, run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning loads a job's hpc_ckpt_1.ckpt in the working directory and an OnExceptionCheckpoint's: not here."""
    steps = ["--trainer.log_every_n_steps", "1", "--trainer.max_steps"]
    other = fit(run_root, "other", *SMALL, *steps, "2")
    monkeypatch.chdir(tmp_path)
    left = "hpc_ckpt_1.ckpt" if found == "hpc" else "on_exception.ckpt"
    shutil.copy(other / "checkpoints/step=00000002.ckpt", left)
    own = ["--trainer.callbacks+", "OnExceptionCheckpoint", "--trainer.callbacks.dirpath", str(tmp_path)]
    if found == "hpc":
        own = []
        for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS"):
            monkeypatch.setenv(name, "1")
        for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("SLURM_JOB_ID", "5")
        monkeypatch.setenv("SLURM_JOB_NAME", "train")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    assert main(["fit", "--config", str(ROOT / CPU[1]), *SMALL, *own, *steps, "4", "--run", "new"]) == 0
    assert [row["step"] for row in rows(run_root / "new") if row["train/loss"]] == ["0", "1", "2", "3"]
