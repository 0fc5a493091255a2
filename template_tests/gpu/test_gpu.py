"""What only a GPU can show. Run with `python -m pytest -m gpu` on a machine with one or two NVIDIA GPUs."""

import signal
import time
from pathlib import Path

import pytest
import torch

from src.checkpoint.compare import differences, outcome
from src.engine import exit_codes
from src.engine.callbacks.throughput import peak_flops
from src.engine.checkpoint.rank_state import RandomNumbers
from src.strategies import NAMES
from template_tests.launchers import TORCHRUN, srun
from tests.commands import SMALL, TASK, cut_back, losses, only_run, read_json, rows, train, weights
from tests.small_task import SmallModule

pytestmark = pytest.mark.gpu
ONE, TWO = (["--config", f"configs/h100_n1_gpu{count}.yaml"] for count in (1, 2))
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OFFLOAD = ["--trainer.strategy", "src.strategies.FSDP", "--trainer.strategy.cpu_offload", "true"]
# How a strategy may be varied -> its options.
VARIED = {
    **{name: ["--trainer.strategy", name] for name in NAMES[1:]},
    "fsdp_full_shard compiled": ["--trainer.strategy", "fsdp_full_shard", "--compile", "true"],
    "fsdp_full_shard recomputed": ["--trainer.strategy", "fsdp_full_shard", "--activation_checkpointing", "true"],
    "fsdp_full_shard accumulated": ["--trainer.strategy", "fsdp_full_shard", "--micro_batch_size", "2"],
    "ddp compiled": ["--trainer.strategy", "ddp", "--compile", "true"],
    "ddp accumulated": ["--trainer.strategy", "ddp", "--micro_batch_size", "2"],
    "offloaded": OFFLOAD,
}
# TF32 products round to 10 bits, and bf16 has 8: of losses about 2.
CURVE = {"32-true": 2e-3, "bf16-mixed": 2e-2, "16-mixed": 2e-2}
TWENTY = ["--trainer.max_steps", "20", "--trainer.val_check_interval", "20"]


def test_one_gpu_trains_in_bf16_without_a_process_group(tmp_path: Path) -> None:
    """`devices: 1` is one plain device in bf16-mixed, by compute capability, without a scaler and with an MFU."""
    done = train(tmp_path, "fit", *ONE, *SMALL)
    manifest = read_json(only_run(tmp_path) / "manifest.json")
    assert manifest["precision"] == "bf16-mixed"
    assert "compute capability" in manifest["precision_reason"]
    assert manifest["strategy"] == "one device, no process group"
    assert "bf16-mixed (" in done.stdout
    state = torch.load(next(only_run(tmp_path).glob("checkpoints/step=*.ckpt")), weights_only=True)
    assert "MixedPrecision" not in state
    row = rows(only_run(tmp_path))[-1]
    assert float(row["perf/peak_memory_gib"]) > 0
    if peak := peak_flops(torch.cuda.get_device_name()):
        work = float(row["perf/samples_per_sec"]) * SmallModule().flops_per_sample
        assert float(row["perf/mfu"]) == pytest.approx(work / peak)


def test_random_numbers_are_restored_from_a_file_that_was_loaded_onto_the_gpu(tmp_path: Path) -> None:
    """`map_location="cuda"` moves the generators' states too, which PyTorch takes from the host's memory alone."""
    numbers = RandomNumbers(torch.device("cuda", 0))
    torch.save(numbers.rank_state(), tmp_path / "state")
    drawn = torch.rand(4), torch.rand(4, device="cuda")
    numbers.load_rank_state(torch.load(tmp_path / "state", map_location="cuda", weights_only=True))
    assert torch.equal(torch.rand(4), drawn[0])
    assert torch.equal(torch.rand(4, device="cuda"), drawn[1])


def test_fp16_has_a_scaler_whose_state_and_skips_are_kept(tmp_path: Path) -> None:
    """16-mixed scales the loss, logs scale and skipped steps, and saves the scaler's state."""
    train(tmp_path, "fit", *ONE, *SMALL, "--trainer.precision", "16-mixed")
    run = only_run(tmp_path)
    row = rows(run)[-1]
    assert float(row["fp16/scale"]) > 0
    assert float(row["fp16/skipped_steps"]) >= 0
    state = torch.load(next(run.glob("checkpoints/step=*.ckpt")), weights_only=True)
    assert state["MixedPrecision"]["scale"] > 0


def test_the_cards_name_is_only_a_label(tmp_path: Path) -> None:
    """A V100 shape runs on any card of that number, with a note and that card's precision."""
    done = train(tmp_path, "fit", "--config", "configs/v100_n1_gpu2.yaml", "--trainer.devices", "1", *SMALL)
    assert "named for V100, runs on" in done.stdout


def test_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    """Eight of four nodes: one line, exit code 2."""
    done = train(tmp_path, "fit", "--config", "configs/h100_n4_gpu8.yaml", *SMALL, check=False)
    assert done.returncode == 2
    assert "asks for 4 nodes × 8 GPUs" in done.stderr


def test_deterministic_training_repeats_itself(tmp_path: Path) -> None:
    """One seed and trainer.deterministic give bit-identical weights twice on a GPU."""
    for name in ("a", "b"):
        train(tmp_path, "fit", *ONE, *SMALL, "--trainer.deterministic", "true", "--run", name)
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_recomputed_activations_take_less_memory(tmp_path: Path) -> None:
    """activation_checkpointing gives the same losses at a lower peak."""
    model = [*TASK, "--model.width", "512", "--model.depth", "8", "--model.lr", "1e-4", "--global_batch_size", "256"]
    steps = ["--trainer.max_steps", "4", "--trainer.log_every_n_steps", "1", "--trainer.limit_val_batches", "0"]
    for name in ("false", "true"):
        train(tmp_path, "fit", *ONE, *model, *steps, "--activation_checkpointing", name, "--run", name)
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), abs=0.02)
    peaks = [float(rows(tmp_path / name)[-1]["perf/peak_memory_gib"]) for name in ("true", "false")]
    assert peaks[0] < peaks[1]


def test_compiled_blocks_give_the_same_curve(tmp_path: Path) -> None:
    """--compile changes speed, not the losses (bf16 rounding aside), and checkpoint names stay plain."""
    for name in ("false", "true"):
        train(tmp_path, "fit", *ONE, *SMALL, "--compile", name, "--run", name)
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), abs=0.02)
    assert weights(tmp_path / "true").keys() == weights(tmp_path / "false").keys()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param([*ONE, "--trainer.precision", "bf16-mixed"], id="one"),
        pytest.param([*ONE, "--trainer.precision", "16-mixed"], id="one-fp16"),
        pytest.param([*TWO, "--trainer.precision", "bf16-mixed"], id="two", marks=two_gpus),
        pytest.param([*TWO, "--trainer.strategy", "fsdp_full_shard"], id="two-sharded", marks=two_gpus),
    ],
)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(shape: list[str], tmp_path: Path) -> None:
    """Dropout on every GPU, the loss scale and the rows go on bit for bit, given deterministic kernels."""
    keep = ["--checkpoint.every_n_steps", "1", "--checkpoint.keep", "99", "--model.dropout", "0.3", "--data.size", "40"]
    steps = ["--trainer.max_steps", "12", "--trainer.log_every_n_steps", "3", "--trainer.deterministic", "true"]
    command = ["fit", *shape, *SMALL, *keep, *steps, "--run", "killed"]
    train(tmp_path / "whole", *command)
    copy = cut_back(tmp_path / "whole/killed", 7, tmp_path / "again")
    assert "continues from step 7" in train(tmp_path / "again", *command).stdout
    assert list(differences(outcome(copy), outcome(tmp_path / "whole/killed"))) == []


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of twenty steps on one GPU without a strategy, in fp32."""
    folder = tmp_path_factory.mktemp("expected")
    train(folder, "fit", *ONE, *SMALL, *TWENTY, "--trainer.precision", "32-true")
    return losses(only_run(folder))


@pytest.mark.parametrize("shape", [pytest.param(ONE, id="one"), pytest.param(TWO, id="two", marks=two_gpus)])
@pytest.mark.parametrize("precision", CURVE)
@pytest.mark.parametrize("name", VARIED)
def test_every_strategy_has_the_curve_of_one_gpu_in_fp32(
    name: str, precision: str, shape: list[str], expected: list[float], tmp_path: Path
) -> None:
    """Over NCCL too each strategy and precision is the same mathematics, to the precision's own rounding."""
    train(tmp_path, "fit", *shape, *SMALL, *TWENTY, *VARIED[name], "--trainer.precision", precision)
    assert len(expected) == 20
    assert losses(only_run(tmp_path)) == pytest.approx(expected, abs=CURVE[precision])


@pytest.mark.parametrize("shape", [pytest.param(ONE, id="one"), pytest.param(TWO, id="two", marks=two_gpus)])
def test_clipping_by_norm_is_the_same_mathematics(shape: list[str], tmp_path: Path) -> None:
    """Of whole gradients, of their parts over NCCL, and of parts in the host's memory.

    To 1e-6, where AdamW, which divides by a gradient's size, feels it (losses differ by 0.3).
    """
    clipped = [*SMALL, *TWENTY, "--trainer.precision", "32-true", "--trainer.gradient_clip_val", "1e-6"]
    train(tmp_path, "fit", *ONE, *clipped, "--run", "alone")
    train(tmp_path, "fit", *ONE, *clipped, "--trainer.gradient_clip_val", "0", "--run", "unclipped")
    expected = losses(tmp_path / "alone")
    assert losses(tmp_path / "unclipped") != pytest.approx(expected, abs=0.1)
    for name in ("ddp", "fsdp_full_shard", "fsdp_hybrid_shard", "offloaded"):
        train(tmp_path, "fit", *shape, *clipped, *VARIED[name], "--run", name)
        assert losses(tmp_path / name) == pytest.approx(expected, abs=CURVE["32-true"])


@two_gpus
def test_two_gpus_give_the_curve_of_one_under_both_launchers(tmp_path: Path) -> None:
    """Plain python and torchrun start two NCCL ranks that train as one GPU does and leave one set of files."""
    exact = ["--trainer.precision", "32-true"]
    train(tmp_path / "one", "fit", *ONE, *SMALL, *exact)
    train(tmp_path / "plain", "fit", *TWO, *SMALL, *exact)
    train(tmp_path / "torchrun", "fit", *TWO, *SMALL, *exact, launcher=TORCHRUN)
    curves = [losses(only_run(tmp_path / name)) for name in ("one", "plain", "torchrun")]
    # TF32 products round to 10 bits.
    assert curves[1] == pytest.approx(curves[0], abs=2e-3)
    assert curves[2] == pytest.approx(curves[1], abs=1e-5)
    run = only_run(tmp_path / "plain")
    assert len(list(run.rglob("events.out.tfevents*"))) == 1
    assert read_json(run / "manifest.json")["world_size"] == 2


@two_gpus
def test_a_rank_that_lost_another_over_nccl_ends_with_a_code_of_ours(tmp_path: Path) -> None:
    """SIGKILL to one of two: NCCL does not say so, and the watchdog ends the other as one that waits for the dead."""
    endless = ["--trainer.max_steps", "1000000", "--watchdog.minutes", "0.25", "--run", "lost"]
    processes = srun(tmp_path, 1, 2, "fit", *TWO, *SMALL, *endless)
    try:
        until = time.monotonic() + 180
        while not (tmp_path / "lost/metrics.csv").exists() or len(rows(tmp_path / "lost")) < 3:
            assert time.monotonic() < until
            time.sleep(0.1)
        processes[1].kill()
        processes[0].wait(timeout=120)
    finally:
        for process in processes:
            process.kill()
        output, _ = (process.communicate()[0] for process in processes)
        print(output)
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode in (exit_codes.HUNG, exit_codes.LOST_A_RANK)
    assert "rank 1" in output or "another rank has ended" in output
