"""What is said when memory is out: who held what, and settings that are valid and keep the global batch."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from slurm.node import failed_rank
from src.cli import ProjectCLI, main
from src.engine import exit_codes
from src.engine.errors import UserError
from src.engine.memory.callback import OutOfMemory
from src.engine.memory.report import AS_CLASS, EACH, advice
from src.engine.memory.usage import GIB, Usage, is_on_host, is_out_of_memory, unusable
from src.engine.outcome import _of_the_lost
from src.engine.stopped import READ_BY_SCRIPT
from template_tests.crash import Cramped
from template_tests.launchers import TORCHRUN, srun
from tests.commands import CPU, SMALL, TASK, TWO, fit, only_run, read_json, train
from tests.small_task import SmallData, SmallModule
from tests.tiny import quiet_trainer

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 70.00 GiB "
    "is allocated by PyTorch, and 512.50 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CRAMPED = [*SMALL, "--model", "template_tests.crash.Cramped"]  # a global batch of 8, and room for 4 samples

FULL = Usage(
    "NVIDIA H100 80GB HBM3",
    total=80 * GIB,
    parameters=5 * GIB,
    gradients=5 * GIB,
    optimizer=10 * GIB,
    buffers=GIB,
    peak=70 * GIB,
    state=20 * GIB,
    fragmented=GIB,
    others=2 * GIB,
)
OFFLOAD = "--trainer.strategy.cpu_offload true"
FULL_SHARD = "--trainer.strategy fsdp_full_shard"
FOREIGN = ["--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy"]


def caused_by(error: Exception) -> Exception:
    wrapped = ValueError("the compiler failed")
    wrapped.__cause__ = error
    return wrapped


# --- what is an error of this kind ---


@pytest.mark.parametrize(
    ("error", "host"),
    [
        (torch.OutOfMemoryError(CUDA_SAYS), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("ncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'"), False),
        (MemoryError(), True),
        (caused_by(torch.OutOfMemoryError("")), False),
    ],
)
def test_memory_that_is_out_is_recognized(error: Exception, host: bool) -> None:
    """PyTorch's error, those of CUDA's libraries and Python's own, also below another error."""
    assert is_out_of_memory(error)
    assert is_on_host(error) is host


def test_the_hosts_allocator_is_recognized() -> None:
    """What PyTorch really raises when the host has no memory."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58)
    assert is_out_of_memory(raised.value)
    assert is_on_host(raised.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes"), UserError("CUDA error: out of memory"), KeyError("memory")])
def test_other_errors_are_not(error: Exception) -> None:
    """Neither other failures nor a text that only speaks of it."""
    assert not is_out_of_memory(error)


def test_the_message_tells_the_fragmentation() -> None:
    """It is from the moment of the failure; a message without it tells nothing."""
    assert unusable(CUDA_SAYS) == round(512.5 * 2**20)
    assert unusable("CUDA out of memory.") is None


# --- who held what ---


def test_the_table_accounts_for_the_peak() -> None:
    """What is no parameter, gradient, optimizer state or buffer at the peak is put down to the activations."""
    assert [line.rsplit(maxsplit=2)[1] for line in FULL.lines()] == [
        "5.00",
        "5.00",
        "10.00",
        "1.00",
        "49.00",
        "1.00",
        "2.00",
    ]
    assert replace(FULL, peak=0).rest == 0
    large = replace(FULL, state=96 * GIB).lines()
    assert large[-1] == "parameters, gradients and Adam alone take 96.00 GiB, whatever the batch"


def test_what_is_there_is_measured() -> None:
    """After two steps of AdamW: weights, as many gradients, two moments and a count for each."""

    class Full(SmallModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise MemoryError
            return super().training_step(batch, batch_idx)

    memory, model = OutOfMemory(), Full()
    with pytest.raises(MemoryError):
        quiet_trainer(callbacks=[memory], max_steps=4, limit_val_batches=0).fit(model, SmallData())
    usage, tensors = memory.usage, list(model.parameters())
    assert usage is not None
    size = sum(parameter.numel() for parameter in tensors) * 4
    assert (usage.parameters, usage.gradients, usage.optimizer) == (size, size, 2 * size + 4 * len(tensors))
    assert usage.state == 4 * size
    assert usage.peak > usage.parameters


# --- what to turn ---


def pasted(
    *options: str, on_gpu: bool = True, usage: Usage | None = FULL, evaluates: bool = False, devices: list[str] = TWO
) -> list[str]:
    """What is offered for a configuration of two ranks with a global batch of 16."""
    cli = ProjectCLI(["fit", *devices, *TASK, "--global_batch_size", "16", *options])
    if evaluates:
        cli.trainer.state.fn = TrainerFn.TESTING
    shape = replace(cli.resolved.shape, accelerator="gpu" if on_gpu else "cpu")
    resolved = replace(cli.resolved, shape=shape)
    return [paste for paste, _ in advice(cli.trainer, cli.model, resolved, cli.settings, usage) if paste]


ALL = [
    "--compile true",
    "--trainer.precision auto",
    "--micro_batch_size 4",
    FULL_SHARD,
    "--activation_checkpointing true",
    f"{AS_CLASS} {OFFLOAD} {EACH}",
]


class ByItself(SmallModule):
    """Optimizes by itself, so that nothing can be accumulated for it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("options", "more", "missing"),
    [
        ([], {}, ()),
        ([], {"usage": None}, ()),
        (["--compile", "true"], {}, ("compile",)),
        (["--micro_batch_size", "1"], {}, ("--micro",)),
        (["--model", f"{__name__}.ByItself"], {}, ("--micro",)),
        (["--activation_checkpointing", "true"], {}, ("checkpointing",)),
        (["--trainer.precision", "bf16-mixed"], {}, ("precision",)),
        ([*FOREIGN, "--trainer.strategy.find_unused_parameters", "false"], {}, ("strategy",)),
        ([], {"devices": CPU}, ("strategy",)),
        ([], {"evaluates": True}, ("checkpointing", "offload")),
        ([], {"on_gpu": False}, ("offload", "precision")),
        ([], {"usage": replace(FULL, state=96 * GIB)}, ("compile", "--micro", "checkpointing")),
    ],
)
@pytest.mark.usefixtures("run_root")
def test_advice_comes_in_order_of_its_cost_without_what_cannot_help(
    options: list[str], more: dict[str, Any], missing: tuple[str, ...]
) -> None:
    """What is on already, what model or strategy do not allow, what one device cannot divide, is left out."""
    wanted = [paste for paste in ALL if not any(name in paste for name in missing)]
    batch = "--micro_batch_size 8" if more.get("devices") == CPU else "--micro_batch_size 4"
    assert pasted(*options, **more) == [paste.replace("--micro_batch_size 4", batch) for paste in wanted]


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ("--trainer.strategy fsdp_full_shard", []),
        ("--trainer.strategy fsdp_shard_grad_op", [FULL_SHARD]),
        ("--trainer.strategy fsdp_hybrid_shard", [FULL_SHARD]),
        (
            f"{AS_CLASS} --trainer.strategy.ranks_per_shard 1",
            ["--trainer.strategy.reshard_after_forward true --trainer.strategy.ranks_per_shard null"],
        ),
        (f"{AS_CLASS} --trainer.strategy.cpu_offload true", []),
    ],
)
@pytest.mark.usefixtures("run_root")
def test_a_strategy_that_divides_a_part_can_divide_more(given: str, offered: list[str]) -> None:
    """One that has a setting by class is not undone by a name."""
    strategies = [paste for paste in pasted(*given.split()) if "strategy" in paste and EACH not in paste]
    assert strategies == offered


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        (["--trainer.strategy", "fsdp_full_shard", "--micro_batch_size", "2"], True),
        (["--trainer.strategy", "fsdp_full_shard"], True),  # as the smaller batch accumulates
        (["--trainer.strategy", "fsdp_full_shard", "--global_batch_size", "2"], False),
        ([*AS_CLASS.split(), *EACH.split(), "--micro_batch_size", "2"], False),
        (["--micro_batch_size", "2"], False),
    ],
)
@pytest.mark.usefixtures("run_root")
def test_gradients_are_divided_where_fsdp_would_keep_whole_ones(options: list[str], offered: bool) -> None:
    """Where a step accumulates under fsdp, or would with the smaller batch, and it is not on already."""
    assert any(EACH in paste and OFFLOAD not in paste for paste in pasted(*options)) == offered


@pytest.mark.parametrize(
    "given",
    [
        f"{AS_CLASS} --trainer.strategy.reduce_dtype bfloat16 --trainer.strategy.static_graph true",
        f"{AS_CLASS} --trainer.strategy.ranks_per_shard 2 --trainer.strategy.timeout 0:05:00",
    ],
)
@pytest.mark.usefixtures("run_root")
def test_a_strategy_that_is_given_by_class_keeps_its_settings(given: str) -> None:
    """It is the same strategy, and one more setting is one more; a name stands for no settings to be kept."""
    command = ["fit", *TWO, *TASK, *given.split()]
    before: Any = ProjectCLI(command).trainer.strategy
    assert EACH in pasted(*given.split())
    after: Any = ProjectCLI([*command, *EACH.split()]).trainer.strategy
    for name in ("reshard_after_forward", "ranks_per_shard", "reduce_dtype", "cpu_offload", "_timeout"):
        assert getattr(after, name) == getattr(before, name)
    assert [made._ddp_kwargs.get("static_graph", False) for made in (before, after)] == ["static_graph" in given] * 2
    assert (before.sync_every_micro_batch, after.sync_every_micro_batch) == (False, True)


@pytest.mark.usefixtures("run_root")
def test_fragmentation_is_turned_only_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than a twentieth of the card, and not where the allocator does it already."""
    ragged, setting = replace(FULL, fragmented=8 * GIB), "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert setting in pasted(usage=ragged)
    assert setting not in pasted()
    monkeypatch.setenv(*setting.split("=", 1))
    assert setting not in pasted(usage=ragged)


@pytest.mark.usefixtures("run_root")
def test_the_host_of_a_gpu_has_advice_of_its_own() -> None:
    """The batch on the card does not fill the host: loader processes do."""
    assert pasted(usage=replace(FULL, device="this machine", fragmented=None, others=None)) == []


@pytest.mark.parametrize("paste", [*ALL, f"{AS_CLASS} {EACH}"])
@pytest.mark.usefixtures("run_root")
def test_every_advice_is_a_valid_option(paste: str) -> None:
    """The command takes it, and makes of it what the advice says, with the global batch kept."""
    cli = ProjectCLI(["fit", *TWO, *TASK, "--global_batch_size", "16", *paste.split()])
    assert cli.resolved.plan is not None
    assert cli.resolved.plan.global_batch_size == 16
    strategy: Any = cli.trainer.strategy
    assert getattr(strategy, "cpu_offload", False) == (OFFLOAD in paste)
    assert getattr(strategy, "sync_every_micro_batch", False) == (EACH in paste)
    assert hasattr(strategy, "reshard_after_forward") == ("--trainer.strategy" in paste)


# --- the command ---


def test_a_run_without_memory_goes_on_with_the_advice(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exit code of its own, the reason in the summary, the levers, and one of them lets the same run finish."""
    assert main(["fit", *CPU, *CRAMPED, "--run", "mine"]) == exit_codes.OUT_OF_MEMORY
    said = capsys.readouterr().err
    assert "OutOfMemoryError: CUDA out of memory" in said
    assert "each keeps the global batch of 8" in said
    assert "  --micro_batch_size 4\n" in said
    assert "--run mine\n" in said
    assert read_json(run_root / "mine/summary.json")["exit_reason"] == "out of memory"
    assert fit(run_root, "mine", *CRAMPED, "--micro_batch_size", "4").is_dir()


@pytest.mark.usefixtures("run_root")
def test_blocks_that_cannot_be_read_do_not_hide_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice leaves out what works on blocks; who runs without them learns of lacking memory only."""
    monkeypatch.setattr(Cramped, "BLOCKS", "Block", raising=False)
    assert main(["fit", *CPU, *CRAMPED]) == exit_codes.OUT_OF_MEMORY
    said = capsys.readouterr().err
    assert "  --micro_batch_size 4\n" in said
    assert "--activation_checkpointing" not in said


@pytest.mark.usefixtures("run_root")
def test_a_job_without_memory_is_submitted_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed into a job's log is for a login node, where nobody trains."""
    monkeypatch.setenv(READ_BY_SCRIPT, "1")
    assert main(["fit", *CPU, *CRAMPED, "--run", "mine"]) == exit_codes.OUT_OF_MEMORY
    said = capsys.readouterr()
    assert "Add it to\n  python slurm/jobs.py resume mine --\n" in said.err
    assert "continue      python slurm/jobs.py resume mine\n" in said.out


def test_an_evaluation_without_memory(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same code, and nothing that only helps a backward pass."""
    fit(run_root, "mine", *SMALL)
    cramped = ["--model", "template_tests.crash.Cramped", "--model.command", "test", "--run", "mine"]
    assert main(["test", *CPU, *SMALL, *cramped]) == exit_codes.OUT_OF_MEMORY
    said = capsys.readouterr().err
    assert "  --micro_batch_size 4\n" in said
    assert "--activation_checkpointing" not in said


ONE_RANK = [*CRAMPED, "--trainer.strategy", "fsdp_full_shard", "--global_batch_size", "16", "--model.rank", "1"]


def test_one_rank_without_memory_is_the_reason_for_all(tmp_path: Path) -> None:
    """Rank 1 explains itself once; the command ends with its code, and the summary says whose fault it was."""
    done = train(tmp_path, "fit", *TWO, *ONE_RANK, check=False)
    assert done.returncode == exit_codes.OUT_OF_MEMORY, done.stderr
    assert done.stderr.count("Try one of these") == done.stderr.count("Traceback") == 1
    assert "out of memory on rank 1 of 2: this machine has" in done.stderr
    summary = read_json(only_run(tmp_path) / "summary.json")
    assert summary["exit_reason"] == "out of memory"
    assert summary["error"].startswith("rank 1: OutOfMemoryError: CUDA out of memory")


def test_a_job_ends_as_the_rank_without_memory(tmp_path: Path) -> None:
    """Under srun the other rank ends with a code of its own, and the job with the one of the first rank."""
    processes = srun(tmp_path, 1, 2, "fit", *TWO, *ONE_RANK)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [exit_codes.LOST_A_RANK, exit_codes.OUT_OF_MEMORY], outputs
    batch = "".join(f"srun: error: n1: task {rank}: Exited with exit code {codes[rank]}\n" for rank in (0, 1))
    assert failed_rank.job_exit_code(batch, max(codes)) == exit_codes.OUT_OF_MEMORY


def test_torchrun_names_the_rank_without_memory(tmp_path: Path) -> None:
    """It has an exit code of its own, and shows that of the first rank that failed."""
    done = train(tmp_path, "fit", *TWO, *ONE_RANK, launcher=(*TORCHRUN, "--"), check=False)
    assert done.returncode == 1, done.stderr
    assert re.search(r"Root Cause.*rank +: 1 .*exitcode +: 71 ", done.stderr, re.DOTALL)


def test_a_rank_without_memory_outranks_what_others_end_with() -> None:
    """The command ends with 71 though another rank crashed, and one lost its peers."""
    codes = (exit_codes.CRASHED, exit_codes.OUT_OF_MEMORY, exit_codes.LOST_A_RANK)
    children = [subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"]) for code in codes]
    assert _of_the_lost(SimpleNamespace(procs=children)) == exit_codes.OUT_OF_MEMORY


def test_ranks_without_memory_explain_it_once(tmp_path: Path) -> None:
    """Where all of them run out of it in the same step."""
    done = train(tmp_path, "fit", *TWO, *CRAMPED, "--global_batch_size", "16", check=False)
    assert done.returncode == exit_codes.OUT_OF_MEMORY, done.stderr
    assert done.stderr.count("Try one of these") == done.stderr.count("Traceback") == 1
    assert done.stderr.count(" is out of memory too") == 1
