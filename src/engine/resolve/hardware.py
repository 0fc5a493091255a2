"""Check the devices that a configuration asks for against those of this machine, and find who started the processes."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from src.engine.cpus import usable_cpus
from src.engine.errors import UserError
from src.engine.resolve.precision import Card


@dataclass(frozen=True)
class Shape:
    """Processes of one run: `devices` on each of `num_nodes` nodes."""

    accelerator: str  # cpu | gpu
    num_nodes: int
    devices: int
    indices: tuple[int, ...] | None = None  # particular GPUs, as in `devices: [2, 3]`

    @property
    def world_size(self) -> int:
        """Return the number of processes over all nodes."""
        return self.num_nodes * self.devices

    def __str__(self) -> str:
        kind = "GPU" if self.accelerator == "gpu" else "CPU process"
        plural = "" if self.devices == 1 else "es" if kind.endswith("s") else "s"
        return f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''} × {self.devices} {kind}{plural}"


def read_shape(accelerator: str, num_nodes: int, devices: int | str | list[int]) -> Shape:
    """Turn the Trainer's three settings into numbers (`auto` and -1 mean all GPUs of this machine, one CPU process)."""
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise UserError(f"trainer.accelerator {accelerator!r} is not supported; use auto, cpu or gpu")
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    accelerator = "gpu" if accelerator == "cuda" else accelerator
    counts = f"trainer.devices {devices!r} on trainer.num_nodes {num_nodes}"
    allowed = "both are counts from 1 up (devices may also be auto or a list of GPU indices)"
    if num_nodes < 1:
        raise UserError(f"{counts}: {allowed}")
    text = str(devices).strip().strip("[]").replace(" ", "")
    if text in ("auto", "-1"):
        return Shape(accelerator, num_nodes, max(torch.cuda.device_count(), 1) if accelerator == "gpu" else 1)
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = []
    listed = isinstance(devices, list) or "," in text or "[" in str(devices)
    least = 0 if listed else 1
    if not numbers or min(numbers) < least or len(set(numbers)) < len(numbers):
        raise UserError(f"{counts}: {allowed}")
    if listed and accelerator == "cpu":
        raise UserError(f"trainer.devices {devices!r} are GPU indices; on a CPU give the number of processes")
    if listed:
        return Shape(accelerator, num_nodes, len(numbers), tuple(numbers))
    return Shape(accelerator, num_nodes, numbers[0])


def check_shape(shape: Shape, configs: list[str], config_folder: Path) -> None:
    """Refuse a shape that this machine does not have."""
    gpus = torch.cuda.device_count()
    if shape.accelerator == "cpu":
        return
    beyond = [index for index in shape.indices or () if index >= gpus]
    if gpus >= shape.devices and not beyond:
        return
    asker = next((name for name in reversed(configs) if shape_label(name) not in (None, "cpu")), None)
    wanted = f"GPU {beyond[0]}" if beyond else str(shape)
    options = f" --config {asker}" if asker else ""
    source = asker or "the configuration"
    raise UserError(
        f"{source} asks for {wanted}; this machine has {gpus} GPU{'' if gpus == 1 else 's'} and {usable_cpus()} CPUs. "
        f"Runs here: {', '.join(runnable_shapes(config_folder, gpus))}. On a cluster: srun --nodes={shape.num_nodes} "
        f"--ntasks-per-node={shape.devices} --gpus-per-node={shape.devices} python -m src.cli fit{options}"
    )


def runnable_shapes(config_folder: Path, gpus: int) -> list[str]:
    """Return the shapes in `config_folder` that one machine with this many GPUs can run."""
    names = []
    for path in sorted(config_folder.glob("*.yaml")):
        trainer = (yaml.safe_load(path.read_text()) or {}).get("trainer") or {}
        devices = trainer.get("devices")
        if shape_label(path.name) is None or not isinstance(devices, int) or trainer.get("num_nodes", 1) > 1:
            continue
        if trainer.get("accelerator") == "cpu" or devices <= gpus:
            names.append(f"configs/{path.name}")
    return names


def shape_label(config: str) -> str | None:
    """Return the card type in a shape's file name: `a100` for configs/a100_n1_gpu4.yaml, None for other files."""
    stem = Path(config).stem
    return stem.split("_")[0] if "_gpu" in stem or stem.startswith("cpu") else None


def other_card_note(configs: list[str], cards: list[Card]) -> str | None:
    """Return a note if the file's name has another card than the machine: the name is only a label."""
    labels = [label for label in map(shape_label, configs) if label and label != "cpu"]
    if not labels or not cards or labels[-1] in cards[0].name.lower():
        return None
    return f"named for {labels[-1].upper()}, runs on {cards[0].name}"


def local_cards(shape: Shape) -> list[Card]:
    """Return the GPUs that this node gives to the run; empty on a CPU."""
    if shape.accelerator == "cpu":
        return []
    indices = shape.indices or range(min(shape.devices, torch.cuda.device_count()))
    return [Card(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in indices]


HERE = "127.0.0.1"
CHILD = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")  # what Lightning gives its processes


def process_environment(shape: Shape) -> ClusterEnvironment:
    """Return the environment of whoever started the processes: torchrun, srun or Lightning; checked against the shape.

    A smaller world than asked for would train without an error (seen with Slurm variables but no `srun`), so the count
    that the launcher announces must be the shape's.
    """
    if TorchElasticEnvironment.detect():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        _check_layout("torchrun", [local] * (world // local), shape)
        return TorchElasticEnvironment()
    layout = srun_layout()
    if sum(layout) > 1 or (layout and shape.world_size == 1):
        _check_layout("srun", layout, shape)
        # Lightning compares these; Slurm leaves them out (`srun -n 4`) or lets them speak of the job, not of the step.
        os.environ["SLURM_NTASKS"], os.environ["SLURM_NNODES"] = str(shape.world_size), str(shape.num_nodes)
        os.environ["SLURM_NTASKS_PER_NODE"] = str(shape.devices)
        return SLURMEnvironment(auto_requeue=False)
    if shape.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
        started = "one srun task" if layout else "one process"
        raise UserError(
            f"{shape} asked for, but this is {started} on one node: start it on every node, "
            f"srun --nodes={shape.num_nodes} --ntasks-per-node={shape.devices} python -m src.cli … "
            f"or torchrun --nnodes={shape.num_nodes} --nproc-per-node={shape.devices} -m src.cli …"
        )
    _refuse_left_over(shape)
    return LightningEnvironment()


def _refuse_left_over(shape: Shape) -> None:
    """Refuse what a launcher's variables in the environment would make this process wait for in silence."""
    there = {name: os.environ[name] for name in CHILD if name in os.environ}
    if shape.world_size > 1 and "LOCAL_RANK" in there and len(there) < len(CHILD):
        missing = ", ".join(name for name in CHILD if name not in there)
        raise UserError(f"LOCAL_RANK is set and {missing} not: unset LOCAL_RANK, or start this with torchrun or srun")
    for name in ("NODE_RANK", "GROUP_RANK"):  # Lightning takes either for the number of this node
        node = os.environ.get(name, "0")
        if not node.isdecimal() or int(node) >= shape.num_nodes:
            raise UserError(
                f"{name}={node} is set, and {shape} has node{'s 0 to' if shape.num_nodes > 1 else ''} "
                f"{shape.num_nodes - 1}: unset {name}, or set it to the number of this node"
            )
    if shape.num_nodes == 1 and "LOCAL_RANK" not in there and there.get("MASTER_ADDR", HERE) != HERE:
        print(f"note: MASTER_ADDR={there['MASTER_ADDR']} is not used: the processes of one node meet on {HERE}")
        os.environ["MASTER_ADDR"] = HERE


def srun_layout() -> list[int]:
    """Return the tasks on each node of the srun step of this process; [] outside of one, as in a batch script.

    Slurm writes them as `2(x3),1`; without `--ntasks-per-node` it may well put 3 and 1 tasks on two nodes.
    """
    if not {"SLURM_STEP_ID", "SLURM_STEPID"} & os.environ.keys():
        return []
    if text := os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        parts = [part.removesuffix(")").split("(x") for part in text.split(",")]
        return [int(count) for count, *times in parts for _ in range(int(times[0]) if times else 1)]
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", 0)))
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", 1)))
    return [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]


def _check_layout(launcher: str, layout: list[int], shape: Shape) -> None:
    if layout == [shape.devices] * shape.num_nodes:
        return
    tasks, nodes = sum(layout), len(layout)
    found = f"{tasks} process{'es' if tasks > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    even = len(set(layout)) == 1
    if not even:
        found += f" ({', '.join(map(str, layout))} per node)"
    fits = f"set --trainer.num_nodes {nodes} --trainer.devices {layout[0]}, or " if even else ""
    raise UserError(
        f"{launcher} started {found}, the configuration asks for {shape}: {fits}start {shape.devices} per node on "
        f"{shape.num_nodes} node{'s' if shape.num_nodes > 1 else ''} (--nodes={shape.num_nodes} "
        f"{'--ntasks-per-node' if launcher == 'srun' else '--nproc-per-node'}={shape.devices})"
    )
