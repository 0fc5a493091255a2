"""What took the memory when an allocation failed, and what to turn: facts in, lines out."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

GIB = 2**30
WORTH_A_SETTING = 0.05  # share of the device, from which on fragmentation and whole gradients are
AS_CLASS = "--trainer.strategy src.strategies.FSDP"  # a name takes no settings
EACH = "--trainer.strategy.sync_every_micro_batch true"
HOST = "DefaultCPUAllocator: can't allocate memory"
# What CUDA's libraries say, who get their memory beside PyTorch's allocator.
CARD = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# What each rank holds a part of: nothing, gradients and optimizer, parameters as well, and that in the host's memory.
# "other" is a strategy that is not the project's.
Sharding = Literal["none", "grad_op", "full", "offload", "other"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the card or on the host; also where the compiler has wrapped that."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause) if isinstance(cause, RuntimeError) else ""
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or any(part in text for part in (HOST, *CARD)):
            return True
        cause = cause.__cause__
    return False


def is_on_host(error: BaseException) -> bool:
    """Of an out-of-memory error: whether it was the host's memory."""
    return isinstance(error, MemoryError) or HOST in str(error)


def asked_for(text: str) -> str | None:
    """How much an allocator's message says it could not give."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    return found[1] if found else None


def unusable(text: str) -> int | None:
    """Bytes that PyTorch's message says are reserved and not allocated, at the moment of the failure."""
    found = re.search(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated", text)
    return round(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else None


@dataclass(frozen=True)
class Usage:
    """Who held what when an allocation failed, in bytes."""

    device: str  # the card's name, or "this machine"
    total: int  # of the device
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    peak: int  # of this process
    fragmented: int | None = None  # reserved by PyTorch and not usable; None on a host
    others: int | None = None  # other processes, CUDA and NCCL; None on a host
    asked: str | None = None  # what could not be given

    @property
    def rest(self) -> int:
        """Activations and whatever else is needed for a while: what is not accounted for at the peak."""
        return max(0, self.peak - self.parameters - self.gradients - self.optimizer - self.buffers)

    def lines(self) -> list[str]:
        """A table, one amount per line."""
        host = self.fragmented is None
        rest = "the rest: data, activations, libraries" if host else "activations and the like, estimated"
        amounts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "buffers": self.buffers,
            f"{rest} (peak {gib(self.peak)} − these)": self.rest,
            "fragmentation: reserved by PyTorch, not allocated": self.fragmented,
            "other processes, CUDA and NCCL": self.others,
        }
        known = {name: amount for name, amount in amounts.items() if amount is not None}
        width = max(map(len, known))
        return [f"  {name:<{width}}  {gib(amount):>12}" for name, amount in known.items()]


@dataclass(frozen=True)
class Setup:
    """What of a configuration decides about memory."""

    on_gpu: bool
    training: bool
    world_size: int
    parameters: int  # numbers in the whole model
    trainable: int  # of them
    precision: str
    auto_precision: str  # what `auto` would choose here
    micro_batch_size: int | None
    smaller_batch: tuple[str, ...]  # options for about half of it in the same global batch
    global_batch_size: int | None
    has_blocks: bool
    compiled: bool
    recomputes: bool  # activations
    sharding: Sharding
    sharded_over: int  # ranks
    in_front: str | None  # under fsdp: of a setting of it, "" where it is given by class; None: not under fsdp
    reduced: int  # bytes in which fsdp sums a gradient
    accumulates: bool  # several micro batches to a step
    reduces_each: bool  # under fsdp: the gradients of each of them, and not of the step (sync_every_micro_batch)
    allocator: tuple[str, ...]  # settings in PYTORCH_ALLOC_CONF
    takes_workers: bool  # the data has a setting num_workers

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return {"bf16-true": 2, "16-true": 2, "64-true": 8}.get(self.precision, 4)

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and Adam's two moments, undivided: 16 for each parameter that is trained."""
        return self.width * (self.parameters + (3 * self.trainable if self.training else 0))

    def held(self, sharding: Sharding, ranks: int) -> int:
        """Bytes of that on one device under a kind of sharding."""
        if sharding in ("none", "other"):
            return self.state
        gathered = (2 if "mixed" in self.precision else self.width) * self.parameters
        held = 0 if sharding == "offload" else self.state // ranks + (gathered if sharding == "grad_op" else 0)
        return held + (self.whole_gradients(sharding, ranks) if self.accumulates and not self.reduces_each else 0)

    def whole_gradients(self, sharding: Sharding, ranks: int) -> int:
        """Bytes that fsdp holds more on each device while a step accumulates: all gradients instead of a part.

        They are in the type in which they are summed (FSDPParam.unsharded_accumulated_grad).
        """
        part = 0 if sharding == "offload" else self.width * self.trainable // ranks
        return max(0, (8 if self.precision == "64-true" else self.reduced) * self.trainable - part)


@dataclass(frozen=True)
class Lever:
    """A setting to turn: what to paste, which may be nothing, and what it does."""

    paste: str
    effect: str


def advice(setup: Setup, usage: Usage | None) -> list[Lever]:
    """What to turn, the cheapest in speed first, larger machines last. Each keeps the global batch."""
    if setup.on_gpu and usage is not None and usage.fragmented is None:
        return list(_on_the_host(setup))
    now = setup.held(setup.sharding, setup.sharded_over)
    hopeless = setup.training and usage is not None and now > usage.total
    return [
        *([] if hopeless else _no_slower(setup, usage)),
        *([] if hopeless else _smaller_batch(setup, usage)),
        *_reduced(setup, usage),
        *_sharded(setup, now),
        *([] if hopeless else _recomputed(setup)),
        *_offloaded(setup),
        *_larger(setup),
    ]


def _no_slower(setup: Setup, usage: Usage | None) -> Iterable[Lever]:
    if setup.has_blocks and not setup.compiled:
        yield Lever("--compile true", "compiled blocks and loss keep less for the backward pass, and are faster")
    expandable = any("expandable_segments" in part for part in setup.allocator)
    if usage and usage.fragmented and usage.fragmented > WORTH_A_SETTING * usage.total and not expandable:
        value = ",".join([*setup.allocator, "expandable_segments:True"])
        yield Lever(
            f"PYTORCH_ALLOC_CONF={value}",
            f"in front of the command: of the {gib(usage.fragmented)} of fragmentation most becomes usable",
        )
    if setup.on_gpu and setup.precision in ("32-true", "64-true") and "mixed" in setup.auto_precision:
        yield Lever(
            f"--trainer.precision {setup.auto_precision}",
            f"activations of 16 bits, and faster; it rounds otherwise than {setup.precision}",
        )


def _smaller_batch(setup: Setup, usage: Usage | None) -> Iterable[Lever]:
    if setup.smaller_batch:
        paste = " ".join(setup.smaller_batch)
        sizes = f"fewer than {setup.micro_batch_size} samples at once, so fewer activations"
        sizes += "; accumulation follows" if setup.training else ""
        if not setup.accumulates and (kept := _kept(setup, usage)):
            paste += f" {_of_fsdp(setup, EACH)}"
            sizes += f", with gradients reduced each time: fsdp would keep whole ones, {gib(kept)} more"
        yield Lever(paste, sizes)
    elif setup.micro_batch_size is None:
        accumulate = ", and as much more --trainer.accumulate_grad_batches" if setup.training else ""
        yield Lever("", f"the data brings its own batches: make them smaller there{accumulate}")


def _reduced(setup: Setup, usage: Usage | None) -> Iterable[Lever]:
    if setup.accumulates and (kept := _kept(setup, usage)):
        yield Lever(
            _of_fsdp(setup, EACH),
            f"saves {gib(kept)} of gradients that fsdp keeps whole between micro batches; communicates after each",
        )


def _of_fsdp(setup: Setup, options: str) -> str:
    """The class in front of its settings, unless it is given: named once more it would lose those that it has."""
    front = AS_CLASS if setup.in_front is None else setup.in_front
    return f"{front} {options}".lstrip()


def _kept(setup: Setup, usage: Usage | None) -> int:
    """Bytes of whole gradients that a setting of fsdp can save, where it is worth it."""
    if not setup.training or setup.in_front is None or setup.reduces_each:
        return 0
    kept = setup.whole_gradients(setup.sharding, setup.sharded_over)
    return kept if usage is None or kept > WORTH_A_SETTING * usage.total else 0


def _sharded(setup: Setup, now: int) -> Iterable[Lever]:
    if setup.world_size == 1 or setup.sharding in ("other", "offload"):
        return
    kinds: dict[str, Sharding] = {"fsdp_shard_grad_op": "grad_op", "fsdp_full_shard": "full"}
    for name, sharding in kinds.items():
        saved = now - setup.held(sharding, setup.world_size)
        if saved > 0:
            what = "parameters, gradients and Adam" if setup.training else "parameters"
            over_all = " --trainer.strategy.ranks_per_shard null" if setup.sharded_over < setup.world_size else ""
            reshard = f"--trainer.strategy.reshard_after_forward {str(sharding == 'full').lower()}"
            # A name would undo the settings of a strategy that is given by class.
            paste = f"{reshard}{over_all}" if setup.in_front == "" else f"--trainer.strategy {name}"
            yield Lever(paste, f"saves {gib(saved)} of {gib(now)} for {what} on each device; costs communication")


def _recomputed(setup: Setup) -> Iterable[Lever]:
    if setup.training and setup.has_blocks and not setup.recomputes:
        yield Lever(
            "--activation_checkpointing true",
            "keeps the input of each block and computes the rest once more in the backward pass: about a fifth slower",
        )


def _offloaded(setup: Setup) -> Iterable[Lever]:
    if setup.on_gpu and setup.training and setup.world_size > 1 and setup.sharding not in ("other", "offload"):
        yield Lever(
            _of_fsdp(setup, f"--trainer.strategy.cpu_offload true {EACH}"),
            "parameters, gradients and optimizer in the host's memory: many times slower",
        )


def _larger(setup: Setup) -> Iterable[Lever]:
    if not setup.on_gpu:
        yield Lever("", "more memory for the job (Slurm: --mem)")
    elif setup.sharding in ("grad_op", "full"):
        yield Lever("", "cards with more memory, or more of them: each then holds a smaller part")
    else:
        yield Lever("", "cards with more memory; more cards help where fsdp divides the model over them")


def _on_the_host(setup: Setup) -> Iterable[Lever]:
    if setup.takes_workers:
        yield Lever("--data.num_workers 1", "each loader process may come to hold what the data set keeps in memory")
    yield Lever("", "more memory of the host for the job (Slurm: --mem)")


def report(setup: Setup, usage: Usage | None, rank: int, again: str) -> list[str]:
    """All that is said when memory is out.

    Args:
        setup: the configuration
        usage: who held what; None where it could not be found out
        rank: who ran out first
        again: the command that goes on

    """
    where = f" on rank {rank} of {setup.world_size}" if setup.world_size > 1 else ""
    lines = [f"out of memory{where}"]
    if usage is not None:
        asked = f", {usage.asked} more were asked for" if usage.asked else ""
        lines = [f"out of memory{where}: {usage.device} has {gib(usage.total)}{asked}", *usage.lines()]
        now = setup.held(setup.sharding, setup.sharded_over)
        if setup.training and setup.on_gpu and usage.fragmented is not None and now > usage.total:
            lines.append(f"parameters, gradients and Adam take {gib(now)} alone, whatever the batch")
    kept = f", all with the global batch of {setup.global_batch_size}" if setup.global_batch_size else ""
    lines += [f"what to turn, the cheapest in speed first{kept}, to be added to", f"  {again}", "by"]
    for lever in advice(setup, usage):
        lines += [f"  {lever.paste}", f"      {lever.effect}"] if lever.paste else [f"  {lever.effect}"]
    return lines


def gib(amount: int) -> str:
    """As people read it."""
    return f"{amount / GIB:.2f} GiB"
