import os
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from src.engine.errors import UserError
from src.engine.resolve.hardware import (
    Shape,
    check_shape,
    local_cards,
    other_card_note,
    process_environment,
    read_shape,
    runnable_shapes,
    shape_label,
)
from src.engine.resolve.precision import Card
from tests.commands import ROOT


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine with some number of one kind of GPU."""

    def pretend(gpus: int, name: str = "NVIDIA A100-SXM4-80GB", capability: tuple[int, int] = (8, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    return pretend


@pytest.fixture
def configs(tmp_path) -> Path:
    """A folder of shapes: one CPU, one, two and four GPUs, and two nodes."""
    shapes = {
        "cpu.yaml": "{accelerator: cpu, num_nodes: 1, devices: 1}",
        "a100_n1_gpu1.yaml": "{accelerator: gpu, num_nodes: 1, devices: 1}",
        "h100_n1_gpu2.yaml": "{accelerator: gpu, num_nodes: 1, devices: 2}",
        "a100_n1_gpu4.yaml": "{accelerator: gpu, num_nodes: 1, devices: 4}",
        "a100_n2_gpu1.yaml": "{accelerator: gpu, num_nodes: 2, devices: 1}",
    }
    for name, trainer in shapes.items():
        (tmp_path / name).write_text(f"trainer: {trainer}\n")
    (tmp_path / "empty.yaml").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (0, ("auto", 1, "auto"), Shape("cpu", 1, 1)),
        (0, ("auto", 1, 1), Shape("cpu", 1, 1)),
        (0, ("cpu", 2, 3), Shape("cpu", 2, 3)),
        (4, ("cpu", 1, "auto"), Shape("cpu", 1, 1)),
        (4, ("auto", 1, "auto"), Shape("gpu", 1, 4)),
        (4, ("gpu", 2, -1), Shape("gpu", 2, 4)),
        (4, ("cuda", 1, "2"), Shape("gpu", 1, 2)),
        (4, ("gpu", 1, [2, 3]), Shape("gpu", 1, 2, (2, 3))),
        (4, ("gpu", 1, [0]), Shape("gpu", 1, 1, (0,))),
        (4, ("gpu", 1, "1, 3"), Shape("gpu", 1, 2, (1, 3))),
        (4, ("gpu", 1, "[2]"), Shape("gpu", 1, 1, (2,))),
    ],
)
def test_the_trainers_settings_become_numbers(machine, gpus, given, expected):
    """Accelerator, nodes and devices are read as Lightning would, `auto` and -1 as all GPUs or one CPU process."""
    machine(gpus)
    assert read_shape(*given) == expected


def test_the_world_is_nodes_times_devices():
    """The world size counts the processes of all nodes, and the text says both factors."""
    assert Shape("gpu", 2, 4).world_size == 8
    assert str(Shape("gpu", 2, 4)) == "2 nodes × 4 GPUs"
    assert str(Shape("cpu", 1, 2)) == "1 node × 2 CPU processes"


@pytest.mark.parametrize("accelerator", ["tpu", "mps", "GPU"])
def test_other_accelerators_are_refused(accelerator):
    """An accelerator that nothing here was made for is refused with those that work."""
    with pytest.raises(UserError, match="use auto, cpu or gpu"):
        read_shape(accelerator, 1, 1)


@pytest.mark.parametrize(
    ("num_nodes", "devices"),
    [
        *((1, 0), (1, -2), (1, "many"), (1, ""), (1, []), (0, 1)),
        *((0, "auto"), (-1, -1), (1, [0, 0]), (1, [-2, 0]), (1, "1, 1")),
    ],
)
def test_counts_that_mean_nothing_are_refused(num_nodes, devices):
    """Devices and nodes are counts from 1 up, and a list names different GPUs."""
    with pytest.raises(UserError, match="counts from 1 up"):
        read_shape("cpu", num_nodes, devices)


@pytest.mark.parametrize(("gpus", "shape"), [(4, Shape("gpu", 1, 4)), (4, Shape("gpu", 2, 2)), (0, Shape("cpu", 1, 2))])
def test_a_shape_that_is_here_passes(machine, configs, gpus, shape):
    """Up to as many GPUs as there are, and any number of CPU processes, are accepted."""
    machine(gpus)
    check_shape(shape, [], configs)


def test_a_slice_of_a_card_is_one_device(machine, configs):
    """One MIG slice is listed as one device: one device passes and two are refused."""
    machine(1, "NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    check_shape(read_shape("gpu", 1, 1), [], configs)
    assert local_cards(read_shape("gpu", 1, "auto")) == [Card("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0))]
    with pytest.raises(UserError, match="this machine has 1 GPU and"):
        check_shape(Shape("gpu", 1, 2), [], configs)


def test_too_few_gpus_are_refused_with_what_runs(machine, configs):
    """The refusal names the asking file, what is here, exactly the shapes that run here, and how to start elsewhere."""
    machine(2)
    with pytest.raises(UserError) as refused:
        check_shape(Shape("gpu", 1, 4), ["configs/a100_n1_gpu4.yaml", "mine.yaml"], configs)
    text = str(refused.value)
    assert text.startswith("configs/a100_n1_gpu4.yaml asks for 1 node × 4 GPUs; this machine has 2 GPUs and")
    assert "Runs here: configs/a100_n1_gpu1.yaml, configs/cpu.yaml, configs/h100_n1_gpu2.yaml. " in text
    assert "--ntasks-per-node=4 --gpus-per-node=4" in text
    assert text.endswith("--config configs/a100_n1_gpu4.yaml")


def test_a_gpu_index_that_is_not_here_is_refused(machine, configs):
    """Particular GPUs must exist, also where there are enough of others."""
    machine(2)
    check_shape(Shape("gpu", 1, 1, (1,)), [], configs)
    with pytest.raises(UserError, match="asks for GPU 2; this machine has 2 GPUs"):
        check_shape(Shape("gpu", 1, 1, (2,)), [], configs)


def test_only_shapes_of_one_node_are_offered(configs):
    """A machine without GPUs is offered CPU shapes only, and no machine alone is offered two nodes."""
    assert runnable_shapes(configs, 0) == ["configs/cpu.yaml"]
    assert not any("n2" in name for name in runnable_shapes(configs, 8))


def test_only_shapes_are_offered(configs):
    """Files that are no shape, or one without a number of devices, are neither offered nor in the way."""
    before = runnable_shapes(configs, 8)
    shape = "{accelerator: gpu, num_nodes: 1, devices: 1}"
    others = {"defaults.yaml": shape, "mine.yaml": shape, "a100_n1_gpu.yaml": "{devices: auto}", "h100_gpus.yaml": ""}
    for name, trainer in others.items():
        (configs / name).write_text(f"trainer: {trainer}\n")
    assert runnable_shapes(configs, 8) == before
    assert runnable_shapes(configs, 0) == ["configs/cpu.yaml"]


def test_every_shape_of_the_project_says_its_numbers():
    """The nodes and devices in a shape's file name are those in the file."""
    folder = ROOT / "configs"
    for path in folder.glob("*_n*_*.yaml"):
        nodes, count = (int("".join(filter(str.isdigit, part))) for part in path.stem.split("_")[1:])
        text = path.read_text()
        assert f"num_nodes: {nodes}\n" in text, path.name
        assert f"devices: {count}\n" in text, path.name


def test_another_card_than_the_files_name_is_noted():
    """The name is a label: another card is said and not refused, the same card and a CPU are not worth a word."""
    h100 = [Card("NVIDIA H100 80GB HBM3", (9, 0))]
    assert other_card_note(["configs/a100_n1_gpu1.yaml"], h100) == "named for A100, runs on NVIDIA H100 80GB HBM3"
    assert other_card_note(["configs/h100_n1_gpu1.yaml"], h100) is None
    assert other_card_note(["configs/presets/prod.yaml"], h100) is None
    assert other_card_note(["configs/a100_n1_gpu1.yaml", "configs/cpu.yaml"], []) is None
    assert shape_label("configs/tasks/mine.yaml") is None


def test_the_cards_are_those_that_the_run_uses(machine, monkeypatch):
    """Only the GPUs that the run takes are looked at, and none on a CPU."""
    machine(4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    assert [card.name for card in local_cards(Shape("gpu", 1, 2))] == ["card 0", "card 1"]
    assert local_cards(Shape("gpu", 1, 1, (3,))) == [Card("card 3", (8, 0))]
    assert local_cards(Shape("cpu", 1, 2)) == []


def torchrun(tasks: int, nodes: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }


def sbatch(tasks: int, nodes: int) -> dict[str, str]:
    """What the script of a job sees, outside of srun."""
    return {"SLURM_JOB_ID": "1", "SLURM_NTASKS": str(tasks), "SLURM_NNODES": str(nodes), "SLURM_PROCID": "0"}


def srun(tasks: int, nodes: int) -> dict[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes)}
    return sbatch(tasks, nodes) | step | {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": str(tasks // nodes)}


@pytest.mark.parametrize(
    ("variables", "shape", "expected"),
    [
        ({}, Shape("gpu", 1, 4), LightningEnvironment),
        ({}, Shape("cpu", 1, 1), LightningEnvironment),
        ({"MASTER_ADDR": "node1", "NODE_RANK": "1", "MASTER_PORT": "29500"}, Shape("gpu", 2, 4), LightningEnvironment),
        (torchrun(8, 2), Shape("gpu", 2, 4), TorchElasticEnvironment),
        (torchrun(1, 1), Shape("cpu", 1, 1), TorchElasticEnvironment),
        (srun(8, 2), Shape("gpu", 2, 4), SLURMEnvironment),
        (srun(4, 1), Shape("gpu", 1, 4), SLURMEnvironment),
        (srun(1, 1), Shape("gpu", 1, 1), SLURMEnvironment),
        (srun(1, 1), Shape("gpu", 1, 4), LightningEnvironment),
        (sbatch(4, 1), Shape("gpu", 1, 4), LightningEnvironment),
        (srun(4, 1) | torchrun(8, 2), Shape("gpu", 2, 4), TorchElasticEnvironment),
    ],
)
def test_who_started_the_processes_is_found_out(monkeypatch, variables, shape, expected):
    """torchrun, srun and Lightning's own start are told apart; in a job's script without srun it is Lightning's."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert type(process_environment(shape)) is expected


def test_srun_need_not_say_the_tasks_per_node(monkeypatch):
    """`srun -n 4` sets no count per node, which Lightning asks for: it is accepted and the shape's count is set."""
    for name, value in srun(4, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    environment = process_environment(Shape("gpu", 1, 4))
    assert isinstance(environment, SLURMEnvironment)
    environment.validate_settings(num_devices=4, num_nodes=1)
    assert os.environ["SLURM_NTASKS_PER_NODE"] == "4"


def test_a_job_is_not_requeued_behind_the_users_back(monkeypatch):
    """Lightning's own requeueing on a signal stays off."""
    for name, value in srun(4, 1).items():
        monkeypatch.setenv(name, value)
    environment = process_environment(Shape("gpu", 1, 4))
    assert isinstance(environment, SLURMEnvironment)
    assert environment.auto_requeue is False


@pytest.mark.parametrize(
    ("variables", "shape", "says"),
    [
        (srun(4, 1), Shape("gpu", 1, 2), "srun started 4 processes on 1 node.*--trainer.num_nodes 1 --trainer.devi"),
        (srun(2, 2), Shape("gpu", 2, 4), "--trainer.num_nodes 2 --trainer.devices 1, or start 4 per node on 2 nodes"),
        (srun(4, 2), Shape("gpu", 1, 4), "--trainer.num_nodes 2 --trainer.devices 2"),
        (srun(2, 1), Shape("gpu", 1, 1), "srun started 2 processes"),
        (
            srun(3, 2),
            Shape("gpu", 3, 1),
            "3 processes on 2 nodes.* asks for 3 nodes × 1 GPU: start 1 per node on 3 nodes",
        ),
        (torchrun(4, 2), Shape("gpu", 1, 4), "torchrun started 4 processes on 2 nodes"),
        (torchrun(1, 1), Shape("gpu", 1, 2), "torchrun started 1 process on 1 node"),
        (srun(1, 1), Shape("gpu", 2, 1), "this is one srun task on one node"),
        (sbatch(8, 2), Shape("gpu", 2, 4), "this is one process on one node: start it on every node, srun --nodes=2"),
        ({}, Shape("gpu", 2, 4), "torchrun --nnodes=2 --nproc-per-node=4"),
    ],
)
def test_another_number_of_processes_than_asked_is_refused(monkeypatch, variables, shape, says):
    """A launcher that started more, fewer or otherwise placed processes is refused with the settings that would fit."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        process_environment(shape)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("2(x2)", Shape("gpu", 2, 2)),
        ("4", Shape("gpu", 1, 4)),
        ("8(x16)", Shape("gpu", 16, 8)),
        ("1(x3)", Shape("cpu", 3, 1)),
    ],
)
def test_slurms_own_account_of_the_tasks_is_read(monkeypatch, layout, shape):
    """A step whose tasks lie on the nodes as asked is accepted, also where Slurm's other variables speak of the job."""
    job = srun(2 * shape.world_size, shape.num_nodes) | {"SLURM_STEP_TASKS_PER_NODE": layout}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert isinstance(process_environment(shape), SLURMEnvironment)
    assert os.environ["SLURM_NTASKS"] == str(shape.world_size)
    assert os.environ["SLURM_NTASKS_PER_NODE"] == str(shape.devices)


def test_tasks_that_lie_unevenly_are_refused(monkeypatch):
    """Three tasks on one node and one on the other are not 2 × 2, though there are four on two nodes."""
    for name, value in (srun(4, 2) | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"4 processes on 2 nodes \(3, 1 per node\).*--ntasks-per-node=2"):
        process_environment(Shape("gpu", 2, 2))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"NODE_RANK": "1"}, "NODE_RANK=1 is set, and 1 node × 2 CPU processes has node 0: unset NODE_RANK"),
        ({"GROUP_RANK": "3"}, "GROUP_RANK=3 is set"),
        ({"NODE_RANK": "abc"}, "NODE_RANK=abc is set"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set and WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT not"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "unset LOCAL_RANK"),
    ],
)
def test_what_another_launcher_has_left_is_refused(left, said, monkeypatch):
    """Else this process would wait in silence for others that nobody starts."""
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(said)):
        process_environment(Shape("cpu", 1, 2))


def test_another_machine_s_address_is_not_waited_for(monkeypatch, capsys):
    """On one node the ranks meet on this machine, and a note says that the variable has no effect."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    assert process_environment(Shape("cpu", 1, 2)).main_address == "127.0.0.1"
    assert "note: MASTER_ADDR=10.0.0.7 is not used" in capsys.readouterr().out


def test_nodes_without_a_common_port_are_refused(monkeypatch):
    """Without MASTER_PORT each node would choose one of its own and wait there."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(UserError, match="start it on every node"):
        process_environment(Shape("cpu", 2, 2))
