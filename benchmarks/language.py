"""The command against a bare PyTorch loop on the same GPT, one after the other, as a ratio.

    python benchmarks/language.py --gpus 2

124 M-class shape with a byte vocabulary (85 M parameters), bf16, blocks and loss compiled, 32 × 1024 per GPU.
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

import torch

ROOT = Path(__file__).resolve().parent.parent
WIDTH, DEPTH, HEADS, CONTEXT, MICRO, STEPS, WARM = 768, 12, 12, 1024, 32, 100, 30


def bare() -> None:
    """One rank of the bare loop; prints tokens/s per GPU."""
    sys.path.insert(0, str(ROOT))
    from src.models.gpt import GPT

    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.manual_seed(0)
    model = GPT(256, WIDTH, DEPTH, HEADS, CONTEXT).cuda()
    for block in model.blocks:
        block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)
    step = Step(model)
    if world > 1:
        torch.distributed.init_process_group("nccl")
        step = torch.nn.parallel.DistributedDataParallel(step, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = torch.randint(0, 256, (MICRO, CONTEXT + 1), dtype=torch.uint8).pin_memory()
    for index in range(WARM + STEPS):
        if index == WARM:
            torch.cuda.synchronize()
            start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(data.cuda(non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    speed = MICRO * CONTEXT * STEPS / (time.perf_counter() - start)
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            json.dumps({"tokens_per_sec_per_gpu": speed, "mfu": speed * model.flops_per_token() / 989e12}), flush=True
        )
    if world > 1:
        torch.distributed.destroy_process_group()


class Step(torch.nn.Module):
    """From bytes to the loss, in one forward pass that can be distributed."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """(B, T + 1) bytes -> the mean loss, in nats."""
        tokens = batch.long()
        return self.model.loss(self.model.features(tokens[:, :-1]), tokens[:, 1:])


def command(gpus: int) -> dict[str, float]:
    """The same through `python -m src.cli fit`: medians of the logged intervals after the warm-up."""
    settings = {
        "--config": f"configs/h100_n1_gpu{gpus}.yaml",
        "--compile": "true",
        "--global_batch_size": MICRO * gpus,
        "--model.width": WIDTH,
        "--model.depth": DEPTH,
        "--model.heads": HEADS,
        "--model.context": CONTEXT,
        "--model.sample_bytes": 0,
        "--trainer.max_steps": WARM + STEPS,
        "--trainer.limit_val_batches": 0,
        "--run": "speed",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(part) for pair in settings.items() for part in pair]
        environment = os.environ | {"RUN_ROOT": folder}
        done = subprocess.run(
            [sys.executable, "-m", "src.cli", "fit", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        with (Path(folder) / "speed" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) >= WARM]
    keys = {"tokens_per_sec_per_gpu": "perf/tokens_per_sec", "mfu": "perf/mfu", "data_wait": "perf/data_wait"}
    values = {name: median(float(row[key]) for row in rows) for name, key in keys.items()}
    return values | {"tokens_per_sec_per_gpu": values["tokens_per_sec_per_gpu"] / gpus}


def main() -> None:
    """Run both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        return bare()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.gpus}"]
    loop = [sys.executable, *(launcher if arguments.gpus > 1 else []), __file__, "--bare"]
    output = subprocess.run(loop, check=True, capture_output=True, text=True).stdout
    reference = json.loads(output.strip().splitlines()[-1])
    ours = command(arguments.gpus)
    ratio = ours["tokens_per_sec_per_gpu"] / reference["tokens_per_sec_per_gpu"]
    versions = {"torch": torch.__version__, "card": torch.cuda.get_device_name(), "gpus": arguments.gpus}
    print(json.dumps({"bare": reference, "command": ours, "ratio": round(ratio, 4)} | versions))
    return None


if __name__ == "__main__":
    main()
