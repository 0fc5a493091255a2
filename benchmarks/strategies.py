"""Speed and memory of each strategy through the command, and of bare PyTorch loops of the same model beside them.

    python benchmarks/strategies.py --gpus 2 --shape 1.2B
    python benchmarks/strategies.py --gpus 1 --shape 85M --only ddp
    python benchmarks/strategies.py --gpus 1 --only fsdp_full_shard    # over one rank: what the command adds to FSDP2
    python benchmarks/strategies.py --gpus 2 --shape 85M --recipe      # two GPUs against one, 0.5 M tokens a step
    python benchmarks/strategies.py --shape 1.2B --pretend 2 4 8       # memory on more GPUs than there are

The language task's GPT over bytes, bf16, blocks and head with loss compiled, fused AdamW, clipping by norm; all on
the same cards, one after the other, as medians over intervals of ten steps. Peak memory is what PyTorch had allocated
at most on a rank. The loop's lag is for how long its GPU still works when Python has given it the last step of an
interval: where that is a few milliseconds, the GPU waits for Python. `--pretend` runs rank 0 of so many on one GPU
with torch's "fake" process group, whose collectives move nothing: the shards have their true sizes, the numbers in
them and the time mean nothing.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
CONTEXT, STEPS, WARM, INTERVAL = 1024, 60, 10, 10
# width, depth, heads, samples per GPU and pass
SHAPES = {"85M": (768, 12, 12, 32), "1.2B": (2048, 24, 16, 8), "1.2B-16": (2048, 24, 16, 16)}
# name -> options of the command
OURS = {
    "ddp": ["--trainer.strategy", "ddp"],
    "fsdp_shard_grad_op": ["--trainer.strategy", "fsdp_shard_grad_op"],
    "fsdp_full_shard": ["--trainer.strategy", "fsdp_full_shard"],
    "fsdp_full_shard + recomputed activations": [
        *("--trainer.strategy", "fsdp_full_shard", "--activation_checkpointing", "true"),
    ],
    "fsdp_full_shard + CPU offload": [
        *("--trainer.strategy", "src.strategies.FSDP", "--trainer.strategy.cpu_offload", "true"),
        *("--trainer.max_steps", "24", "--trainer.log_every_n_steps", "4"),  # a step takes seconds
    ],
}
BARE = {"ddp": "ddp", "fsdp_shard_grad_op": "grad_op", "fsdp_full_shard": "full"}


class Step(torch.nn.Module):
    """From bytes to the loss, in one forward pass that can be distributed."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """(B, T + 1) bytes -> the mean loss, in nats."""
        tokens = batch.long()
        return self.model.loss(self.model.features(tokens[:, :-1]), tokens[:, 1:])


def bare(shape: str, mode: str, pretended: int | None) -> None:
    """Run one rank of the bare loop; print what it measured."""
    sys.path.insert(0, str(ROOT))
    from src.models.gpt import GPT

    width, depth, heads, micro = SHAPES[shape]
    world = pretended or int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.manual_seed(0)
    model = GPT(256, width, depth, heads, CONTEXT).cuda()
    flops = model.flops_per_token()
    for block in model.blocks:
        block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)
    step: torch.nn.Module = Step(model)
    if grouped := world > 1 or mode != "ddp":
        torch.distributed.init_process_group(**_group(pretended))
        step = _distribute(step, model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = torch.randint(0, 256, (micro, CONTEXT + 1), dtype=torch.uint8).pin_memory()
    speeds, lags, start = [], [], 0.0
    for index in range(WARM + STEPS + 1):
        if index >= WARM and index % INTERVAL == 0:
            given = time.perf_counter()
            torch.cuda.synchronize()
            now = time.perf_counter()
            speeds.append(micro * CONTEXT * INTERVAL / (now - start))
            lags.append(1000 * (now - given))
            start = now
        with torch.autocast("cuda", torch.bfloat16, enabled=mode == "ddp"):
            loss = step(data.cuda(non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    speed = median(speeds[1:])  # as the command's, over intervals: a GPU's neighbours disturb some
    if int(os.environ.get("RANK", 0)) == 0:
        gib = torch.cuda.max_memory_allocated() / 2**30
        found = {"tokens": speed, "mfu": speed * flops / 989e12, "gib": gib, "lag": median(lags[1:])}
        print(json.dumps(found), flush=True)
    if grouped:
        torch.distributed.destroy_process_group()


def _group(pretended: int | None) -> dict[str, Any]:
    if not pretended:
        return {"backend": "nccl"}
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return {"backend": "fake", "rank": 0, "world_size": pretended, "store": FakeStore()}


def _distribute(step: torch.nn.Module, model: torch.nn.Module, mode: str) -> torch.nn.Module:
    if mode == "ddp":
        return torch.nn.parallel.DistributedDataParallel(step, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=mode == "full")
    return fully_shard(step, mp_policy=policy, reshard_after_forward=False)


def command(shape: str, gpus: int, options: list[str], samples: int | None = None) -> dict[str, Any]:
    """Measure the same through `python -m src.cli fit`, as a user runs it: medians of logged intervals after warm-up.

    `samples` is the global batch, where it is not one pass of every GPU.
    """
    width, depth, heads, micro = SHAPES[shape]
    settings: dict[str, Any] = {
        "--task": "language",
        "--config": f"configs/h100_n1_gpu{gpus}.yaml",
        "--compile": "true",
        "--global_batch_size": samples or micro * gpus,
        "--micro_batch_size": micro,
        "--model.width": width,
        "--model.depth": depth,
        "--model.heads": heads,
        "--model.context": CONTEXT,
        "--model.sample_bytes": 0,
        "--trainer.max_steps": WARM + STEPS,
        "--trainer.limit_val_batches": 0,
        "--trainer.log_every_n_steps": INTERVAL,
        "--run": "speed",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(part) for pair in settings.items() for part in pair]
        done = subprocess.run(
            [sys.executable, "-m", "src.cli", "fit", *arguments, *options],
            cwd=ROOT,
            env=os.environ | {"RUN_ROOT": folder},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return {"error": (done.stdout + done.stderr)[-1500:]}
        with (Path(folder) / "speed" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) >= WARM]
    keys = {"tokens": "perf/tokens_per_sec", "mfu": "perf/mfu", "gib": "perf/peak_memory_gib"}
    values = {name: median(float(row[key]) for row in rows if row[key]) for name, key in keys.items()}
    return values | {"tokens": values["tokens"] / gpus}


def run_bare(shape: str, gpus: int, mode: str, pretended: int | None = None) -> dict[str, Any]:
    """Run the bare loop in processes of its own."""
    alone = gpus == 1 and mode == "ddp"  # without a process group, as the command
    launcher = [] if alone else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    loop = [sys.executable, *launcher, __file__, "--shape", shape, "--bare", mode]
    loop += ["--pretend", str(pretended)] if pretended else []
    done = subprocess.run(loop, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}


def compare(shape: str, gpus: int, names: list[str], rounds: int) -> None:
    """Print a row for each strategy and round: the command, the bare loop, their ratio."""
    print("strategy | tokens/s per GPU | MFU | peak GiB | bare loop | its GiB | its lag, ms | ratio", flush=True)
    for name in names * rounds:  # so that a machine's slow minutes do not all meet one strategy
        ours = command(shape, gpus, OURS[name])
        loop = run_bare(shape, gpus, BARE[name]) if name in BARE else {}
        if error := ours.get("error") or loop.get("error"):
            print(f"{name} | {error}", flush=True)
            continue
        row = f"{name} | {ours['tokens']:,.0f} | {ours['mfu']:.1%} | {ours['gib']:.1f}"
        if loop:
            row += f" | {loop['tokens']:,.0f} | {loop['gib']:.1f} | {loop['lag']:.0f}"
            row += f" | {ours['tokens'] / loop['tokens']:.3f}"
        print(row, flush=True)


def recipe(shape: str, gpus: int) -> None:
    """Train the usual GPT-2 recipe, half a million tokens a step by accumulation: all GPUs against one."""
    samples = 2**19 // CONTEXT
    one, many = (command(shape, count, OURS["ddp"], samples) for count in (1, gpus))
    if error := one.get("error") or many.get("error"):
        sys.exit(error)
    speedup = gpus * many["tokens"] / one["tokens"]
    print("1 GPU, tokens/s | per GPU of all | speed-up")
    print(f"{one['tokens']:,.0f} | {many['tokens']:,.0f} | {speedup:.3f}", flush=True)


def pretend(shape: str, worlds: list[int], names: list[str]) -> None:
    """Peak memory of rank 0 of each world size in the bare loop, which takes what the command takes."""
    print("strategy | " + " | ".join(f"{world} GPUs, peak GiB" for world in worlds), flush=True)
    for name, mode in BARE.items():
        if mode == "ddp" or name not in names:  # ddp holds the same on any number; this group cannot reduce for it
            continue
        found = [run_bare(shape, 1, mode, world) for world in worlds]
        print(f"{name} | " + " | ".join(row.get("error") or f"{row['gib']:.1f}" for row in found), flush=True)


def main() -> None:
    """Print the table that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="1.2B")
    parser.add_argument("--only", nargs="*", choices=OURS, default=list(OURS))
    parser.add_argument("--rounds", type=int, default=1, help="how often each pair is measured: ratios vary by a tenth")
    parser.add_argument("--recipe", action="store_true")
    parser.add_argument("--pretend", nargs="*", type=int)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        return bare(arguments.shape, arguments.bare, (arguments.pretend or [None])[0])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.gpus} GPUs, {arguments.shape}")
    if arguments.pretend:
        return pretend(arguments.shape, arguments.pretend, arguments.only)
    if arguments.recipe:
        return recipe(arguments.shape, arguments.gpus)
    return compare(arguments.shape, arguments.gpus, arguments.only, arguments.rounds)


if __name__ == "__main__":
    main()
