"""What is said when memory is out: who held what, and settings that are valid and keep the global batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src import exit_codes
from src.callbacks.out_of_memory import OutOfMemory
from src.cli import ProjectCLI, main
from src.errors import UserError
from src.memory import (
    AS_CLASS,
    EACH,
    GIB,
    Setup,
    Usage,
    advice,
    asked_for,
    is_on_host,
    is_out_of_memory,
    report,
    unusable,
)
from src.out_of_memory import in_front, setup_of
from src.stopped import READ_BY_SCRIPT
from src.strategies import FSDP
from tests.commands import CPU, SMALL, TASK, TWO, fit, only_run, read_json, train
from tests.crash import Cramped
from tests.small_task import SmallData, SmallModule
from tests.tiny import quiet_trainer

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 70.00 GiB "
    "is allocated by PyTorch, and 512.50 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CRAMPED = [*SMALL, "--model", "tests.crash.Cramped"]  # a global batch of 8, and room for 4 samples

FULL = Usage(
    "NVIDIA H100 80GB HBM3",
    total=80 * GIB,
    parameters=5 * GIB,
    gradients=5 * GIB,
    optimizer=10 * GIB,
    buffers=GIB,
    peak=70 * GIB,
    fragmented=GIB,
    others=2 * GIB,
    asked="2.50 GiB",
)
SETUP = Setup(
    on_gpu=True,
    training=True,
    world_size=2,
    parameters=GIB,
    trainable=GIB,
    precision="bf16-mixed",
    auto_precision="bf16-mixed",
    micro_batch_size=8,
    smaller_batch=("--micro_batch_size", "4"),
    global_batch_size=16,
    has_blocks=True,
    compiled=False,
    recomputes=False,
    sharding="none",
    sharded_over=2,
    in_front=None,
    reduced=4,
    accumulates=False,
    reduces_each=False,
    allocator=(),
    takes_workers=True,
)
OFFLOAD = f"{AS_CLASS} --trainer.strategy.cpu_offload true {EACH}"
SHARDED: dict[str, Any] = {"sharding": "full", "in_front": AS_CLASS}
ALL = [
    "--compile true",
    "--micro_batch_size 4",
    "--trainer.strategy fsdp_shard_grad_op",
    "--trainer.strategy fsdp_full_shard",
    "--activation_checkpointing true",
    OFFLOAD,
]


def pasted(setup: Setup = SETUP, usage: Usage | None = FULL, **changed: Any) -> list[str]:
    return [lever.paste for lever in advice(replace(setup, **changed), usage) if lever.paste]


def without(*names: str) -> list[str]:
    return [paste for paste in ALL if not any(name in paste for name in names)]


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
    """What PyTorch really raises when the host has no memory, and how much it was asked for."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58)
    assert is_out_of_memory(raised.value)
    assert is_on_host(raised.value)
    assert asked_for(str(raised.value)) == f"{2**60} bytes"


@pytest.mark.parametrize("error", [RuntimeError("shapes"), UserError("CUDA error: out of memory"), KeyError("memory")])
def test_other_errors_are_not(error: Exception) -> None:
    """Neither other failures nor a text that only speaks of it."""
    assert not is_out_of_memory(error)


def test_the_message_tells_the_fragmentation() -> None:
    """It is from the moment of the failure, in whatever unit; a message without it tells nothing."""
    assert unusable(CUDA_SAYS) == round(512.5 * 2**20)
    assert unusable("CUDA out of memory.") is None
    assert asked_for(CUDA_SAYS) == "2.50 GiB"


# --- who held what ---


def test_the_table_accounts_for_the_peak() -> None:
    """What is no parameter, gradient, optimizer state or buffer at the peak is put down to the activations."""
    said = "\n".join(report(SETUP, FULL, 1, "COMMAND"))
    assert "out of memory on rank 1 of 2: NVIDIA H100 80GB HBM3 has 80.00 GiB, 2.50 GiB more were asked for" in said
    amounts = [line.rsplit(maxsplit=2)[1] for line in FULL.lines()]
    assert amounts == ["5.00", "5.00", "10.00", "1.00", "49.00", "1.00", "2.00"]
    assert replace(FULL, peak=0).rest == 0


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
    assert usage.peak > usage.parameters


# --- what to turn ---


def test_advice_comes_in_order_of_its_cost() -> None:
    """What makes nothing slower first, larger cards last."""
    assert pasted() == ALL
    assert advice(SETUP, FULL)[-1].paste == ""
    assert "cards with more memory" in advice(SETUP, FULL)[-1].effect
    assert pasted(usage=None) == ALL


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"compiled": True}, ("compile",)),
        ({"smaller_batch": ()}, ("--micro",)),
        ({"recomputes": True}, ("checkpointing",)),
        ({"has_blocks": False}, ("compile", "checkpointing")),
        ({"world_size": 1, "sharded_over": 1}, ("strategy",)),
        ({"sharding": "grad_op"}, ("grad_op",)),
        ({"sharding": "full"}, ("grad_op", "full_shard")),
        ({"sharding": "offload"}, ("strategy",)),
        ({"sharding": "other"}, ("strategy",)),
        ({"training": False}, ("checkpointing", "offload", "grad_op")),
        ({"on_gpu": False}, ("offload",)),
    ],
)
def test_what_cannot_help_is_left_out(changed: dict[str, Any], missing: tuple[str, ...]) -> None:
    """What is on already, what the model or the strategy does not allow, what one device cannot divide."""
    assert pasted(**changed) == without(*missing)


def test_sharding_over_a_node_can_be_over_all() -> None:
    """A hybrid that holds a half may hold a quarter."""
    assert "--trainer.strategy fsdp_full_shard" in pasted(sharding="full", sharded_over=2, world_size=4)


def test_sharding_says_what_it_saves() -> None:
    """16 bytes a parameter divided by the ranks; grad-op keeps the gathered parameters, of 16 bits when mixed."""
    saved = {lever.paste.split()[-1]: lever.effect for lever in advice(SETUP, FULL) if "fsdp_" in lever.paste}
    assert saved["fsdp_full_shard"].startswith("saves 8.00 GiB of 16.00 GiB")
    assert saved["fsdp_shard_grad_op"].startswith("saves 6.00 GiB of 16.00 GiB")


def test_fsdp_may_reduce_each_micro_batch_where_whole_gradients_take_the_memory() -> None:
    """12 GiB where a part is 6, of a card of 80; not for less than a twentieth of it, nor where it is done already."""
    large = replace(SETUP, parameters=3 * GIB, trainable=3 * GIB, **SHARDED, accumulates=True)
    (lever,) = [lever for lever in advice(large, FULL) if lever.paste == f"{AS_CLASS} {EACH}"]
    assert lever.effect.startswith("saves 6.00 GiB")
    assert f"{AS_CLASS} {EACH}" not in pasted(large, reduces_each=True)
    assert f"{AS_CLASS} {EACH}" not in pasted(large, training=False)
    assert f"{AS_CLASS} {EACH}" not in pasted(large, trainable=GIB)


def test_a_smaller_micro_batch_does_not_bring_whole_gradients_with_it() -> None:
    """A step of one pass reduces at once: with two passes fsdp would hold more of the gradients than before."""
    large = replace(SETUP, parameters=3 * GIB, trainable=3 * GIB, **SHARDED)
    assert f"--micro_batch_size 4 {AS_CLASS} {EACH}" in pasted(large)
    assert "--micro_batch_size 4" in pasted(large, accumulates=True)
    assert "--micro_batch_size 4" in pasted(large, reduces_each=True)
    assert "--micro_batch_size 4" in pasted(large, in_front=None, sharding="none")


def test_what_sharding_saves_is_less_while_a_step_accumulates() -> None:
    """Of 16 bytes a parameter two ranks halve 12, as whole gradients stay; an offloaded one has them on the card."""
    saved = [lever.effect for lever in advice(replace(SETUP, accumulates=True), FULL) if "fsdp_full" in lever.paste]
    assert saved[0].startswith("saves 6.00 GiB of 16.00 GiB")
    assert replace(SETUP, accumulates=True).held("offload", 2) == 4 * GIB
    assert replace(SETUP, accumulates=True, reduces_each=True).held("full", 2) == SETUP.held("full", 2) == 8 * GIB
    assert SETUP.held("offload", 2) == 0


def test_gradients_that_are_summed_in_16_bits_take_half() -> None:
    """What two ranks would keep whole is then no more than a part in 32 bits; in 64 bits it is twice as much."""
    whole = replace(SETUP, accumulates=True, reduced=2)
    assert whole.whole_gradients("full", 2) == 0
    assert replace(whole, precision="64-true").whole_gradients("full", 2) == 4 * GIB


def test_a_strategy_given_by_class_keeps_its_settings() -> None:
    """Each lever adds to it; a name, or the class anew, would undo what it saves already."""
    hybrid = replace(SETUP, **SHARDED | {"in_front": ""}, sharded_over=2, world_size=4, accumulates=True)
    large = replace(hybrid, parameters=3 * GIB, trainable=3 * GIB)
    assert EACH in pasted(large)
    assert f"--trainer.strategy.cpu_offload true {EACH}" in pasted(large)
    over_all = "--trainer.strategy.reshard_after_forward true --trainer.strategy.ranks_per_shard null"
    (effect,) = [lever.effect for lever in advice(replace(large, reduces_each=True), FULL) if lever.paste == over_all]
    assert effect.startswith("saves 12.00 GiB of 24.00 GiB")
    assert not any(AS_CLASS in paste for paste in pasted(large))


def test_an_evaluation_holds_parameters_alone() -> None:
    """Neither gradients nor Adam are there to be divided, and nothing accumulates."""
    levers = advice(replace(SETUP, training=False), FULL)
    said = {lever.paste: lever.effect for lever in levers}
    assert said["--trainer.strategy fsdp_full_shard"].startswith("saves 2.00 GiB of 4.00 GiB for parameters on each")
    assert not any("accumulation" in effect or "Adam" in effect for effect in said.values())


@pytest.mark.parametrize(
    "given",
    [
        "--trainer.strategy fsdp_full_shard",
        "--trainer.strategy fsdp_shard_grad_op",
        "--trainer.strategy fsdp_hybrid_shard",
        f"{AS_CLASS} --trainer.strategy.reduce_dtype bfloat16 --trainer.strategy.static_graph true",
        f"{AS_CLASS} --trainer.strategy.ranks_per_shard 2 --trainer.strategy.timeout 0:05:00",
    ],
)
@pytest.mark.usefixtures("run_root")
def test_a_strategy_can_be_given_more_settings(given: str) -> None:
    """With what has to stand in front it is the same strategy, and one more setting is one more."""
    command = ["fit", *TWO, *TASK, *given.split()]
    cli = ProjectCLI(command)
    before: Any = cli.trainer.strategy
    after: Any = ProjectCLI(
        [*command, *in_front(before, cli.settings.trainer.strategy).split(), *EACH.split()]
    ).trainer.strategy
    for name in ("reshard_after_forward", "ranks_per_shard", "reduce_dtype", "cpu_offload", "_timeout"):
        assert getattr(after, name) == getattr(before, name)
    assert [made._ddp_kwargs.get("static_graph", False) for made in (before, after)] == ["static_graph" in given] * 2
    assert (before.sync_every_micro_batch, after.sync_every_micro_batch) == (False, True)


class Registered(FSDP):
    """A strategy of the user's, as it comes by a name of theirs."""


class ByItself(SmallModule):
    """Optimizes by itself, so that nothing can be accumulated for it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def setup_for(*options: str) -> Setup:
    """What the command finds out about a configuration; a global batch of 8 on two ranks."""
    cli = ProjectCLI(["fit", *TWO, *TASK, "--global_batch_size", "8", *options])
    return setup_of(cli.trainer, cli.model, cli.resolved, cli.settings)


@pytest.mark.usefixtures("run_root")
def test_the_configuration_says_what_accumulation_keeps() -> None:
    """How gradients are summed, whether they are kept, and whether there can be more micro batches at all."""
    named = setup_for("--trainer.strategy", "fsdp_full_shard", "--micro_batch_size", "2")
    assert (named.in_front, named.reduced, named.accumulates, named.reduces_each) == (AS_CLASS, 4, True, False)
    halves = ["--trainer.strategy.reduce_dtype", "bfloat16"]
    given = setup_for(*AS_CLASS.split(), *halves, *EACH.split())
    assert (given.in_front, given.reduced, given.accumulates, given.reduces_each) == ("", 2, False, True)
    assert setup_for().in_front is None
    assert setup_for().smaller_batch
    assert setup_for("--model", f"{__name__}.ByItself").smaller_batch == ()


def test_a_registered_strategy_stays_what_it_is() -> None:
    """Its class is named, and not the one it is made from."""
    assert in_front(Registered(), "theirs") == f"--trainer.strategy {__name__}.Registered"


def test_fragmentation_is_turned_only_where_there_is_some() -> None:
    """With what the environment sets already, and not where the allocator does it already."""
    ragged = replace(FULL, fragmented=8 * GIB)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in pasted(usage=ragged)
    kept = pasted(usage=ragged, allocator=("max_split_size_mb:64",))
    assert "PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True" in kept
    assert pasted(usage=ragged, allocator=("expandable_segments:True",)) == ALL
    assert pasted() == ALL


def test_half_precision_is_offered_where_the_card_has_it() -> None:
    """What `auto` would choose, unless that is fp32 too."""
    assert "--trainer.precision bf16-mixed" in pasted(precision="32-true")
    assert "--trainer.precision 16-mixed" in pasted(precision="32-true", auto_precision="16-mixed")
    assert pasted(precision="32-true", auto_precision="32-true") == ALL


def test_a_model_that_does_not_fit_at_any_batch_is_divided() -> None:
    """Where parameters, gradients and Adam alone are more than the card, no smaller batch is offered."""
    setup = replace(SETUP, parameters=6 * GIB, trainable=6 * GIB)
    assert pasted(setup) == without("compile", "--micro", "checkpointing")
    assert "parameters, gradients and Adam take 96.00 GiB alone, whatever the batch" in report(setup, FULL, 0, "")


def test_loaders_that_bring_their_own_batches() -> None:
    """No option of ours makes them smaller; the text says who can."""
    (text,) = [
        lever.effect
        for lever in advice(replace(SETUP, micro_batch_size=None, smaller_batch=()), FULL)
        if "brings its own batches" in lever.effect
    ]
    assert "--trainer.accumulate_grad_batches" in text


def test_the_host_of_a_gpu_has_levers_of_its_own() -> None:
    """The batch on the card does not fill the host: loader processes do."""
    host = replace(FULL, device="this machine", fragmented=None, others=None)
    assert pasted(usage=host) == ["--data.num_workers 1"]
    assert pasted(usage=host, takes_workers=False) == []
    assert "Slurm: --mem" in advice(SETUP, host)[-1].effect


@pytest.mark.parametrize(
    "paste", [*ALL, f"{AS_CLASS} {EACH}", "--trainer.precision bf16-mixed", "--data.num_workers 1"]
)
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
    assert "2.00 GiB more were asked for" in said
    assert "all with the global batch of 8" in said
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
    assert "to be added to\n  python slurm/jobs.py resume mine --\nby\n" in said.err
    assert "continue      python slurm/jobs.py resume mine\n" in said.out


def test_an_evaluation_without_memory(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same code, and nothing that only helps a backward pass."""
    fit(run_root, "mine", *SMALL)
    cramped = ["--model", "tests.crash.Cramped", "--model.command", "test", "--run", "mine"]
    assert main(["test", *CPU, *SMALL, *cramped]) == exit_codes.OUT_OF_MEMORY
    said = capsys.readouterr().err
    assert "  --micro_batch_size 4\n" in said
    assert "--activation_checkpointing" not in said


def test_one_rank_without_memory_is_the_reason_for_all(tmp_path: Path) -> None:
    """Rank 1 explains itself once; the command ends with its code, and rank 0's summary says whose fault it was."""
    sharded = ["--trainer.strategy", "fsdp_full_shard", "--global_batch_size", "16", "--model.rank", "1"]
    done = train(tmp_path, "fit", *TWO, *CRAMPED, *sharded, check=False)
    assert done.returncode == exit_codes.OUT_OF_MEMORY, done.stderr
    assert done.stderr.count("what to turn") == 1
    assert "out of memory on rank 1 of 2: this machine has" in done.stderr
    assert "rank 1 is out of memory; rank 0 ends with it" in done.stderr
    summary = read_json(only_run(tmp_path) / "summary.json")
    assert (summary["exit_reason"], summary["error"]) == ("out of memory", "rank 1 is out of memory")
