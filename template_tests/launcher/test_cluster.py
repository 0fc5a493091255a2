"""Cluster files: which one is chosen, what lies over what, and what a user reads when something is wrong."""

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from slurm import nccl, times
from slurm.cluster import ROOT, load_cluster
from slurm.cluster_file import KEYS, PROJECT, Gpu
from slurm.errors import LaunchError

SHIPPED = sorted(file.stem for file in (ROOT / "configs/clusters").glob("*.yaml") if file.stem != "mine")
MINE = "configs/clusters/mine.yaml"
ALPHA = "configs/clusters/alpha.yaml"
# Two sites and the one that is taken where nothing else is named.
SITES = {
    "local": "accelerator: cpu\ngpus_per_node: 4\ncpus_per_gpu: 4\nmem: 0\ntime: 2:59:00\n",
    "alpha": """\
accelerator: gpu
gpu_request: gpus-per-node
gpu: a100
gpus_per_node: 4
cpus_per_gpu: 16
mem: 50G
time: 2:59:00
needs: [account, partition]
partition: big
constraint: fast&wide
gpus:
  a100: {memory_gib: 80, capability: 8.0}
nccl:
  nvlink:
    NCCL_DEBUG: WARN
  infiniband:
    NCCL_DEBUG: WARN
    NCCL_SOCKET_IFNAME: =ib0
""",
    "beta": "accelerator: gpu\ngpu_request: gres\ngpu_type: volta\ngpus_per_node: 2\ncpus_per_gpu: 20\n"
    "mem_per_gpu: 32G\ntime: 12:00:00\nneeds: [account]\n",
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a project of three sites; arguments are a mine.yaml, a project.yaml, and sites that replace the three's."""

    def project(mine: str | None = None, project: str | None = None, **sites: str) -> Path:
        folder = tmp_path / "project" / "configs/clusters"
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**SITES, **sites}.items():
            (folder / f"{name}.yaml").write_text(content)
        if mine is not None:
            (folder / "mine.yaml").write_text(mine)
        if project is not None:
            (tmp_path / "project" / PROJECT).write_text(project)
        return tmp_path / "project"

    return project


def refused(root: Path, name: str | None = None) -> str:
    """The one line that loading ends with."""
    with pytest.raises(LaunchError) as caught:
        load_cluster(name, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is shipped


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """The cluster files of this repository without anybody's mine.yaml or project.yaml."""
    shutil.copytree(
        ROOT / "configs/clusters", tmp_path / "configs/clusters", ignore=shutil.ignore_patterns("mine.yaml")
    )
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED)
def test_every_file_in_configs_clusters_loads(name: str, shipped: Path) -> None:
    """Whatever a project makes of the files, a typing error shows up here and not at the first job."""
    assert load_cluster(name, shipped).name == name


def test_a_file_becomes_typed_fields(write: Write) -> None:
    """Numbers, times, the GPU table and NCCL's sections arrive as what they are."""
    cluster = load_cluster("alpha", write())
    assert dataclasses.is_dataclass(cluster)
    assert cluster.time == timedelta(hours=2, minutes=59)
    assert (cluster.gpus_per_node, cluster.cpus_per_gpu, cluster.mem) == (4, 16, "50G")
    assert cluster.needs == ("account", "partition")
    assert cluster.gpus == {"a100": Gpu(memory_gib=80, capability="8.0")}
    assert cluster.nccl["infiniband"] == {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert (cluster.qos, cluster.setup, cluster.cost_per_gpu_hour) == (None, (), None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.mem = "1G"  # type: ignore[misc]


def test_every_key_reaches_its_field(write: Write) -> None:
    """All keys that a file may have, set at once."""
    extra = {
        "account": "lab",
        "qos": "standby",
        "reservation": "class",
        "exclude": "n[01-03],n07",
        "mail": "me@example.org",
        "scratch": "/scratch/me",
        "cost_per_gpu_hour": "1.5",
        "gpu_type": "a100",
    }
    lines = "".join(f"{key}: {value}\n" for key, value in extra.items())
    cluster = load_cluster(
        "alpha",
        write(
            alpha=SITES["alpha"]
            + lines
            + "container: apptainer exec '/images/torch 2.sif'\nsetup:\n  - module load cuda\n  - set -x\n"
        ),
    )
    assert {key: str(getattr(cluster, key)) for key in extra} == extra
    assert cluster.container == ["apptainer", "exec", "/images/torch 2.sif"]
    assert cluster.setup == ("module load cuda", "set -x")
    unset = {key for key in KEYS if "." not in key and getattr(cluster, key) is None}
    assert unset == {"mem_per_cpu", "mem_per_gpu"}


# Which file


@pytest.mark.parametrize(
    ("name", "mine", "project", "expected"),
    [
        (None, None, None, "local"),
        (None, None, "cluster: alpha\n", "alpha"),
        (None, None, 'cluster: ""\naccount: ""\n', "local"),
        (None, None, "task: language\n", "local"),
        (None, "base: beta\n", "cluster: alpha\n", "beta"),
        ("alpha", "base: beta\n", "cluster: local\n", "alpha"),
        ("mine", "base: beta\n", "cluster: alpha\n", "beta"),
        (None, SITES["beta"], "cluster: alpha\n", "mine"),
        ("local", None, "cluster: alpha\n", "local"),
    ],
)
def test_the_name_then_mine_then_the_project_then_local(
    name: str | None, mine: str | None, project: str | None, expected: str, write: Write
) -> None:
    """The first of these that is there chooses; mine.yaml goes by the name of its base."""
    assert load_cluster(name, write(mine, project)).name == expected


@pytest.mark.parametrize("name", ["alhpa", "", "../alpha", "alpha.yaml", "/etc/passwd", "ALPHA", "mine"])
def test_an_unknown_name_lists_what_is_there(name: str, write: Write) -> None:
    """No name leads out of configs/clusters; the line has the names and the nearest one."""
    line = refused(write(), name)
    assert line.startswith(f"cluster: got {name!r}")
    assert "alpha, beta, local" in line
    assert ("did you mean alpha?" in line) == (name in ("alhpa", "../alpha", "alpha.yaml"))


def test_without_local_and_without_a_name_the_line_says_what_is_there(write: Write) -> None:
    """A project that dropped local.yaml is told which names remain."""
    root = write()
    (root / "configs/clusters/local.yaml").unlink()
    assert "got 'local'" in refused(root)
    shutil.rmtree(root / "configs")
    assert "it has none" in refused(root)


# What lies over what


@pytest.mark.parametrize(
    ("name", "mine", "project", "account", "partition"),
    [
        # over the cluster named beside them, whichever way it was chosen
        (None, None, "cluster: alpha\naccount: lab\npartition: small\n", "lab", "small"),
        ("alpha", None, "cluster: alpha\naccount: lab\npartition: small\n", "lab", "small"),
        (None, "base: alpha\n", "cluster: alpha\naccount: lab\npartition: small\n", "lab", "small"),
        ("mine", SITES["alpha"], "cluster: mine\naccount: lab\n", "lab", "big"),
        (None, "base: alpha\n", "cluster: mine\naccount: lab\n", "lab", "big"),
        # what is empty leaves the file's value
        (None, None, 'cluster: alpha\naccount: lab\npartition: ""\n', "lab", "big"),
        (None, None, "cluster: alpha\naccount:\npartition: null\n", None, "big"),
        # over no other cluster
        ("alpha", None, "cluster: beta\naccount: lab\npartition: small\n", None, "big"),
        (None, "base: alpha\n", "cluster: beta\naccount: lab\npartition: small\n", None, "big"),
        ("alpha", None, "account: lab\npartition: small\n", None, "big"),
        # mine.yaml lies over both
        (None, "base: alpha\naccount: own\n", "cluster: alpha\naccount: lab\npartition: small\n", "own", "small"),
        (None, 'base: alpha\naccount: ""\n', "cluster: alpha\naccount: lab\n", "lab", "big"),
        (None, "base: alpha\npartition: null\n", "cluster: alpha\naccount: lab\npartition: small\n", "lab", None),
    ],
)
def test_account_and_partition(
    name: str | None,
    mine: str | None,
    project: str,
    account: str | None,
    partition: str | None,
    write: Write,
) -> None:
    """project.yaml's account goes to project.yaml's cluster and to no other; mine.yaml has the last word."""
    cluster = load_cluster(name, write(mine, project))
    assert (cluster.account, cluster.partition) == (account, partition)


def test_mine_overrides_its_base_key_by_key(write: Write) -> None:
    """What mine.yaml does not name stays; NCCL's variables and cards are keys of their own; null takes away."""
    mine = """\
base: alpha
time: 1-0
constraint: null
gpus:
  h100: {memory_gib: 80, capability: 9.0}
  a100: {memory_gib: 40}
nccl:
  infiniband:
    NCCL_SOCKET_IFNAME: ~
    NCCL_IB_HCA: =mlx5_0,mlx5_1
"""
    cluster = load_cluster(None, write(mine))
    assert cluster.time == timedelta(days=1)
    assert cluster.constraint is None
    assert cluster.cpus_per_gpu == 16
    assert cluster.gpus == {"a100": Gpu(40, "8.0"), "h100": Gpu(80, "9.0")}
    assert cluster.nccl["nvlink"] == {"NCCL_DEBUG": "WARN"}
    assert cluster.nccl["infiniband"] == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "=mlx5_0,mlx5_1"}


@pytest.mark.parametrize("form", ["mem: 0", "mem_per_cpu: 4G", "mem_per_gpu: 64G"])
def test_another_form_of_memory_replaces_the_base_s(form: str, write: Write) -> None:
    """Slurm takes one form, so mine.yaml need not take the base's away."""
    cluster = load_cluster(None, write(f"base: alpha\n{form}\n"))
    key, value = form.split(": ")
    assert {name: getattr(cluster, name) for name in ("mem", "mem_per_cpu", "mem_per_gpu")} == {
        "mem": None,
        "mem_per_cpu": None,
        "mem_per_gpu": None,
        key: value,
    }


def test_mine_without_a_base_stands_alone(write: Write) -> None:
    """Nothing is inherited from anywhere, and what is lacking is listed at once, with the way round."""
    line = refused(write("accelerator: gpu\naccount: own\n"))
    assert line.startswith(f"{MINE}: not set: gpus_per_node, cpus_per_gpu, time")
    assert "base: NAME" in line


@pytest.mark.parametrize("base", ["mine", "gamma", "alpah"])
def test_the_base_is_another_file_that_is_there(base: str, write: Write) -> None:
    """mine.yaml cannot stand on itself or on nothing."""
    line = refused(write(f"base: {base}\n"))
    assert line.startswith(f"{MINE}: base: got {base!r}")
    assert "(alpha, beta, local)" in line


def test_only_mine_has_a_base(write: Write) -> None:
    """A site's file is whole."""
    assert "unknown key 'base'" in refused(write(beta="base: alpha\n"), "beta")


# What is missing


@pytest.mark.parametrize(
    ("name", "mine", "project", "file"),
    [
        (None, None, "cluster: alpha\n", ALPHA),
        ("alpha", None, None, ALPHA),
        (None, "base: alpha\n", None, MINE),
        (None, "base: alpha\n", "cluster: alpha\n", MINE),
    ],
)
def test_a_missing_account_names_file_and_key(
    name: str | None, mine: str | None, project: str | None, file: str, write: Write
) -> None:
    """Loading goes well; the line names places that count for the way the cluster was chosen, and the way to look."""
    cluster = load_cluster(name, write(mine, project))
    assert cluster.missing() == (
        "cluster alpha needs account: set account: in project.yaml (with cluster: alpha) or in "
        f"{file} (sacctmgr show assoc user=$USER lists yours)"
    )


@pytest.mark.parametrize("place", ["project", "mine"])
def test_the_places_that_the_line_names_work(place: str, write: Write) -> None:
    """Doing what the line says makes it go away."""
    account = (
        {"mine": "base: alpha\naccount: lab\n"} if place == "mine" else {"project": "cluster: alpha\naccount: lab\n"}
    )
    assert load_cluster(None, write(**account)).missing() is None


def test_account_and_partition_are_missed_in_one_line(write: Write) -> None:
    """One line for both; a site that needs neither misses neither."""
    cluster = load_cluster("alpha", write(alpha=SITES["alpha"].replace("partition: big\n", "")))
    line = cluster.missing() or ""
    assert line.startswith("cluster alpha needs account and partition: set account: and partition: in ")
    assert line.endswith("(sacctmgr show assoc user=$USER lists yours; sinfo -s lists them)")
    assert load_cluster("local", write()).missing() is None
    assert "partition" not in (load_cluster("beta", write()).missing() or "")


# Strictness


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        # unknown keys, at each depth
        (("mem:", "memm:"), ["unknown key 'memm'", "did you mean mem", "cpus_per_gpu"]),
        (("gpus_per_node", "gpus_per_nod"), ["'gpus_per_nod'", "did you mean gpus_per_node?"]),
        (("nvlink:", "nvlnk:"), ["'nccl.nvlnk.NCCL_DEBUG'", "did you mean nccl.nvlink.*?"]),
        (("memory_gib", "memory_gb"), ["'gpus.a100.memory_gb'", "did you mean gpus.*.memory_gib?"]),
        (("partition: big", "*: big"), ["not YAML"]),
        (("partition: big", "'*': big"), ["unknown key '*'"]),
        (("partition: big", "7: big"), ["unknown key '7'"]),
        # values
        (("accelerator: gpu", "accelerator: gup"), ["accelerator: got 'gup'", "gpu or cpu"]),
        (("accelerator: gpu", "accelerator: tpu"), ["accelerator: got 'tpu'", "gpu or cpu"]),
        (("gpus-per-node", "gpus-per-task"), ["gpu_request: got 'gpus-per-task'", "gpus-per-node or gres"]),
        (("gpus_per_node: 4", "gpus_per_node: four"), ["gpus_per_node: got 'four'", "whole number from 1 up"]),
        (("gpus_per_node: 4", "gpus_per_node: 0"), ["gpus_per_node: got '0'"]),
        (("gpus_per_node: 4", "gpus_per_node: -4"), ["gpus_per_node: got '-4'"]),
        (("gpus_per_node: 4", "gpus_per_node: 4.0"), ["gpus_per_node: got '4.0'"]),
        (("gpus_per_node: 4", "gpus_per_node: true"), ["gpus_per_node: got 'true'"]),
        (("gpus_per_node: 4", "gpus_per_node: ٤"), ["gpus_per_node: got '٤'"]),
        (("gpus_per_node: 4", "gpus_per_node: [4]"), ["gpus_per_node: got ['4']"]),
        (("gpus_per_node: 4\n", ""), ["not set: gpus_per_node"]),
        (("gpu_request: gpus-per-node\n", ""), ["accelerator gpu needs gpu_request: gpus-per-node or gres"]),
        (("mem: 50G", "mem: 50"), ["mem: got '50'", "64G", "0 for the whole node"]),
        (("mem: 50G", "mem: 50GB"), ["mem: got '50GB'"]),
        (("mem: 50G", "mem: 0G"), ["mem: got '0G'"]),
        (("mem: 50G\n", ""), ["exactly one of mem, mem_per_cpu, mem_per_gpu; got none"]),
        (("mem: 50G", "mem: 50G\nmem_per_cpu: 4G"), ["exactly one of", "got mem and mem_per_cpu"]),
        (("time: 2:59:00", "time: soon"), ["time: got 'soon'", "2:59:00"]),
        (("[account, partition]", "account"), ["needs: got 'account'", "a list"]),
        (("[account, partition]", "[account, qos]"), ["needs: got 'qos'", "account or partition"]),
        (("partition: big", "partition: big small"), ["partition: got 'big small'", "one word"]),
        (("partition: big", "partition: [big]"), ["partition: got ['big']", "one word"]),
        (("partition: big", "partition: {big: 1}"), ["unknown key 'partition.big'", "did you mean partition?"]),
        (("partition: big", 'partition: "big\\n#SBATCH -q x"'), ["partition: got", "one word"]),
        (("partition: big", 'partition: "\\e[31mbig"'), ["partition: got '\\x1b[31mbig'"]),
        (("partition: big", "scratch: runs"), ["scratch: got 'runs'", "absolute path"]),
        (("partition: big", "setup: module load cuda"), ["setup: got 'module load cuda'", "a list"]),
        (("partition: big", "setup: [{module: cuda}]"), ["setup: got {'module': 'cuda'}"]),
        (("partition: big", 'container: "it\'s"'), ["container: ", "No closing quotation"]),
        (("partition: big", "sbatch: --wckey=x"), ["sbatch: ", "a list"]),
        (("partition: big", "sbatch: [wckey=x]"), ["sbatch: ", "--name=value"]),
        (("partition: big", "cost_per_gpu_hour: nan"), ["cost_per_gpu_hour: got 'nan'", "from 0 up"]),
        (("partition: big", "cost_per_gpu_hour: cheap"), ["cost_per_gpu_hour: got 'cheap'"]),
        (("partition: big", "cost_per_gpu_hour: -1"), ["cost_per_gpu_hour: got '-1'"]),
        (("capability: 8.0", "capability: 8"), ["gpus.a100.capability: got '8'", "8.0"]),
        ((", capability: 8.0", ""), ["gpus.a100: set both memory_gib and capability"]),
        (("gpu: a100", "gpu: a10"), ["gpu: got 'a10'", "(a100)", "did you mean a100?"]),
        (("  a100: {memory_gib: 80, capability: 8.0}", "  a100: 80"), ["unknown key 'gpus.a100'", "gpus.*.memory_gib"]),
        (
            ("nccl:\n  nvlink:\n    NCCL_DEBUG: WARN", "nccl:\n  nvlink: WARN"),
            ["unknown key 'nccl.nvlink'", "did you mean nccl.nvlink.*?"],
        ),
    ],
    ids=lambda value: value[1].strip()[:30] if isinstance(value, tuple) else "",
)
def test_a_bad_file_is_one_line_that_names_file_and_key(
    change: tuple[str, str], parts: list[str], write: Write
) -> None:
    """The file, the full key, what was got, what is allowed, the nearest name."""
    assert change[0] in SITES["alpha"]
    line = refused(write(alpha=SITES["alpha"].replace(*change)), "alpha")
    assert line.startswith(ALPHA)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"accelerator: gpu\n\tmem: 1G\n", ["line 2", "not YAML"]),
        (b"accelerator: [gpu\n", ["line 2", "not YAML"]),
        (b"- accelerator\n", ["expected `key: value` lines, got a list"]),
        (b"gpu\n", ["expected `key: value` lines, got a str"]),
        (b"mem: 1G\n---\nmem: 2G\n", ["line 2", "not YAML"]),
        (b"mem: \xff\n", ["not YAML"]),
        (b"? [a, b]\n: 1\n", ["not YAML"]),
        (b"a: &a [*a]\n", ["not YAML"]),
        (b"mem: *nothing\n", ["not YAML"]),
        (b"mem: !!python/object/apply:os.system [ls]\n", ["mem: got ['ls']"]),
        (b"<<: {mem: 1G}\n", ["unknown key '<<.mem'"]),
        (b"", ["not set: accelerator"]),
        (b"# nothing\n", ["not set: accelerator"]),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_a_file_that_is_no_yaml_mapping_is_one_line(content: bytes, parts: list[str], write: Write) -> None:
    """Tabs, lists, broken text, aliases, tags: never a traceback, never code that runs."""
    root = write()
    (root / ALPHA).write_bytes(content)
    line = refused(root, "alpha")
    assert line.startswith(ALPHA)
    for part in parts:
        assert part in line


def test_a_folder_in_place_of_a_file_is_one_line(write: Write) -> None:
    """It is no file."""
    root = write()
    (root / MINE).mkdir()
    assert refused(root).startswith(f"{MINE}: no such file")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("007", "007"),
        ("1e3", "1e3"),
        ("12_34", "12_34"),
        ("12:30:45", "12:30:45"),
        ("0x1F", "0x1F"),
        ("grüße", "grüße"),
    ],
)
def test_an_account_is_what_was_typed(written: str, value: str, write: Write) -> None:
    """YAML would make numbers of some of these: 7, 1000.0, 1234, 45045, 31."""
    assert load_cluster(None, write(project=f"cluster: alpha\naccount: {written}\n")).account == value


@pytest.mark.parametrize(
    ("project", "parts"),
    [
        ("cluster: alpha\nacount: lab\n", ["unknown key 'acount'", "did you mean account?", "task, cluster, account"]),
        ("cluster: alhpa\n", ["cluster: got 'alhpa'", "did you mean alpha?", "(alpha, beta, local)"]),
        ("cluster: [alpha]\n", ["cluster: got ['alpha']"]),
        ("cluster: alpha\naccount: [lab]\n", ["account: got ['lab']"]),
        ("- cluster\n", ["got a list"]),
        ("cluster:\talpha\n\tx", ["not YAML"]),
    ],
)
def test_project_yaml_is_as_strict(project: str, parts: list[str], write: Write) -> None:
    """A mistake in project.yaml is one line too, also when another cluster is named."""
    root = write(project=project)
    for name in (None, "beta"):
        line = refused(root, name)
        assert line.startswith("project.yaml")
        for part in parts:
            assert part in line


# Time


@pytest.mark.parametrize(
    ("written", "shown", "minutes"),
    [
        ("90", "1:30:00", 90),
        ("24:00", "0:24:00", 24),
        ("2:59", "0:02:59", 2 + 59 / 60),
        ("0:01", "0:00:01", 1 / 60),
        ("2:59:00", "2:59:00", 179),
        ("02:59:00", "2:59:00", 179),
        ("48:00:00", "2-00:00:00", 2880),
        ("1440", "1-00:00:00", 1440),
        ("1-0", "1-00:00:00", 1440),
        ("1-12", "1-12:00:00", 2160),
        ("1-12:30", "1-12:30:00", 2190),
        ("1-12:30:01", "1-12:30:01", 2190 + 1 / 60),
        ("0-1", "1:00:00", 60),
        ("365-0", "365-00:00:00", 525600),
    ],
)
def test_time_is_read_as_slurm_reads_it(written: str, shown: str, minutes: float, write: Write) -> None:
    """M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, also in a file without quotes; shown so that hours look like hours."""
    limit = times.time_limit(written)
    assert times.format_time(limit) == shown
    assert limit == timedelta(minutes=minutes)
    assert times.time_limit(shown) == limit
    assert load_cluster(None, write(f"base: alpha\ntime: {written}\n")).time == limit


@pytest.mark.parametrize(
    "written",
    [
        *["", " ", "0", "0:00", "0-0", "-1", "-1:00", "1-", "-", ":30", "1:", "1::2", "1:2:3:4", "1-2:3:4:5", "1-1-1"],
        *[
            "9999999999",
            "3h",
            "2.5",
            "1,5",
            "٣:00:00",
        ],
        *["2:59:00 x", "2 :59", "UNLIMITED", "infinite"],
    ],
)
def test_other_times_are_refused_in_one_line(written: str) -> None:
    """What Slurm would refuse, round or read as no limit; the line shows the forms or the bounds."""
    with pytest.raises(ValueError, match="time limit") as caught:
        times.time_limit(written)
    assert "\n" not in str(caught.value)


# NCCL


@pytest.mark.parametrize(
    ("section", "setting", "advice"),
    [
        ("infiniband", "NCCL_TIMEOUT=1800", "the strategy's `timeout`"),
        ("nvlink", "NCCL_TIMEOUT=1800", "the strategy's `timeout`"),
        ("infiniband", "NCCL_IB_DISABLE=1", "TCP"),
        ("infiniband", "NCCL_NET_GDR_LEVEL=5", "LOC, PIX, PXB, PHB or SYS"),
        ("infiniband", "NCCL_NET_GDR_LEVEL=phb", "in capitals"),
        ("infiniband", "NCCL_NET_GDR_LEVEL=HIGH", "in capitals"),
        ("infiniband", "NCCL_NET_GDR_LEVEL=SYS", None),
        ("infiniband", "NCCL_NET_GDR_LEVEL=PHB", None),
        ("nvlink", "NCCL_P2P_LEVEL=5", "old form"),
        ("nvlink", "NCCL_P2P_LEVEL=nvl", "in capitals"),
        ("nvlink", "NCCL_P2P_LEVEL=SYS", None),
        ("nvlink", "NCCL_P2P_DISABLE=1", "finding a fault"),
        ("nvlink", "NCCL_SHM_DISABLE=1", "finding a fault"),
        ("nvlink", "NCCL_NVLS_ENABLE=1", "stops the job"),
        ("nvlink", "NCCL_NVLS_ENABLE=0", None),
        ("infiniband", "NCCL_SOCKET_IFNAME=ib0", "begins so"),
        ("infiniband", "NCCL_SOCKET_IFNAME==ib0", None),
        ("infiniband", "NCCL_SOCKET_IFNAME=^docker,lo", None),
        ("infiniband", "NCCL_IB_HCA=mlx5_0", "one adapter"),
        ("infiniband", "NCCL_IB_HCA==mlx5_0:1", "one adapter"),
        ("infiniband", "NCCL_IB_HCA=mlx5", None),
        ("infiniband", "NCCL_IB_HCA==mlx5_0,mlx5_1", None),
        ("infiniband", "NCCL_IB_HCA=^mlx5_bond", None),
        ("infiniband", "NCCL_IB_TIMEOUT=22", None),
        ("infiniband", "NCCL_IB_CUDA_SUPPORT=1", "no longer"),
        ("infiniband", "NCCL_IB_GDR_LEVEL=3", "no longer"),
        ("nvlink", "NCCL_TREE_THRESHOLD=0", "no longer"),
        ("nvlink", "NCCL_DEBUG=INFO", "WARN"),
        ("infiniband", "NCCL_DEBUG=trace", "WARN"),
        ("infiniband", "NCCL_DEBUG=WARN", None),
        ("infiniband", "NCCL_DEBUG_FILE=/scratch/nccl.log", "%h"),
        ("infiniband", "NCCL_DEBUG_FILE=/scratch/nccl.%h", "%p"),
        ("infiniband", "NCCL_DEBUG_FILE=/scratch/nccl.%h.%p", None),
        ("nvlink", "NCCL_ASYNC_ERROR_HANDLING=1", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("nvlink", "NCCL_BLOCKING_WAIT=1", "TORCH_NCCL_BLOCKING_WAIT"),
        ("nvlink", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "3, the default"),
        ("nvlink", "TORCH_NCCL_ASYNC_ERROR_HANDLING=3", None),
        ("nvlink", "TORCH_NCCL_DUMP_ON_TIMEOUT=1", None),
        ("infiniband", "GLOO_SOCKET_IFNAME=ib0", None),
        ("infiniband", "FI_PROVIDER=efa", None),
        ("infiniband", "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1", None),
    ],
)
def test_what_does_nothing_or_harms_is_warned_about(
    section: str, setting: str, advice: str | None, write: Write
) -> None:
    """One warning, with file, full key, value and what to do instead; none for what describes the system."""
    name, _, value = setting.partition("=")
    mine = f"base: beta\nnccl:\n  {section}:\n    {name}: '{value}'\n"
    cluster = load_cluster(None, write(mine))
    assert dict(cluster.nccl) == {section: {name: value}}
    if advice is None:
        assert cluster.warnings == []
    else:
        (warning,) = cluster.warnings
        assert warning.startswith(f"{MINE}: nccl.{section}.{name}: {value}: ")
        assert advice in warning


def test_every_rule_has_a_case_above() -> None:
    """A rule that no case reaches would never be seen to work."""
    (mark,) = test_what_does_nothing_or_harms_is_warned_about.pytestmark  # type: ignore[attr-defined]
    cases = [setting.partition("=")[::2] for _, setting, _ in mark.args[1]]
    said = {(name, advice) for name, value in cases for advice in nccl.warnings(name, value)}
    unseen = [
        rule
        for rule in nccl.RULES
        if not any(re.fullmatch(rule.names, name) and advice == rule.advice.format(name=name) for name, advice in said)
    ]
    assert unseen == []


@pytest.mark.parametrize(
    ("section", "name", "reason"),
    [
        ("nvlink", "NCCL_IB_HCA", "move it to nccl.infiniband"),
        ("nvlink", "NCCL_IB_DISABLE", "move it to nccl.infiniband"),
        ("nvlink", "NCCL_NET_GDR_LEVEL", "move it to nccl.infiniband"),
        ("nvlink", "NCCL_NET", "move it to nccl.infiniband"),
        ("nvlink", "NCCL_CROSS_NIC", "move it to nccl.infiniband"),
        ("nvlink", "FI_PROVIDER", "move it to nccl.infiniband"),
        ("nvlink", "UCX_TLS", "move it to nccl.infiniband"),
        ("nvlink", "WANDB_API_KEY", "only NCCL_"),
        ("infiniband", "LD_PRELOAD", "only NCCL_"),
        ("infiniband", "nccl_debug", "only NCCL_"),
        ("infiniband", "NCCL_DEBUG; rm", "only NCCL_"),
        ("infiniband", "NCCL_", "only NCCL_"),
        ("infiniband", "UCX_ANYTHING", "only NCCL_"),
    ],
)
def test_what_does_not_belong_into_a_section_is_refused(section: str, name: str, reason: str, write: Write) -> None:
    """A job on one node carries nothing of InfiniBand, and no other variable (or its value) gets in."""
    line = refused(write(f"base: beta\nnccl:\n  {section}:\n    '{name}': hidden\n"))
    assert line.startswith(f"{MINE}: nccl.{section}.{name}: ")
    assert reason in line
    assert "hidden" not in line


@pytest.mark.parametrize(
    ("line", "fine"),
    [
        ("export WANDB_API_KEY=abc123", False),
        ("export hf_token='abc123'", False),
        ("PASSWORD=abc123 ./login", False),
        ("pip install --index-url https://me:abc123@host/simple x", False),
        ("export HF_TOKEN=$(cat ~/.hf_token)", True),
        ('export HF_TOKEN="$HF_TOKEN"', True),
        ("export TOKENIZERS_PARALLELISM=false", True),
        ("export MONKEY=1", True),
        ("source /opt/conda/bin/activate ml", True),
        ("export http_proxy=http://proxy:3128", True),
    ],
)
def test_a_secret_is_refused_and_not_repeated(line: str, fine: bool, write: Write) -> None:
    """`setup` ends up in scripts and logs; reading a secret from a file there is fine."""
    root = write(f"base: beta\nsetup:\n  - |-\n    {line}\n")
    if fine:
        assert load_cluster(None, root).setup == (line,)
    else:
        message = refused(root)
        assert message.startswith(f"{MINE}: setup: ")
        assert "abc123" not in message


# Scratch


def test_scratch_is_filled_in_for_the_user_who_submits(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ and variables are kept in the file and expanded on demand; one that is not set is an error then."""
    monkeypatch.setenv("FAST", "/fast")
    monkeypatch.setenv("HOME", "/home/me")
    assert load_cluster(None, write("base: beta\nscratch: $FAST/runs\n")).scratch_folder() == Path("/fast/runs")
    assert load_cluster(None, write("base: beta\nscratch: ~/runs\n")).scratch_folder() == Path("/home/me/runs")
    assert load_cluster("beta", write()).scratch_folder() is None
    monkeypatch.delenv("FAST")
    for folder in ("$FAST/runs", "/scratch/$FAST", "~nobody-here/runs"):
        cluster = load_cluster(None, write(f"base: beta\nscratch: {folder}\n"))
        with pytest.raises(LaunchError, match=re.escape(f"scratch: {folder!r} names something not set here")):
            cluster.scratch_folder()


# The command


def run(root: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python slurm/cluster.py …` in a copy of the package beside `root`'s files."""
    if not (root / "slurm").exists():
        shutil.copytree(ROOT / "slurm", root / "slurm", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(root / "slurm/cluster.py"), *arguments]
    return subprocess.run(command, cwd=cwd or root, capture_output=True, text=True, check=False)


def test_the_command_shows_each_value(write: Write, tmp_path: Path) -> None:
    """From any folder: aligned columns of key and value, then warnings; exit code 0 and nothing on stderr."""
    mine = "base: alpha\ntime: 36:00:00\nsetup: [module load cuda]\nnccl:\n  nvlink:\n    NCCL_TIMEOUT: 1800\n"
    done = run(write(mine, "cluster: alpha\naccount: lab\n"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    rows = {tuple(line.split()) for line in lines}
    assert ("cluster", "alpha") in rows
    assert ("read", "from", f"{ALPHA},", "then", MINE) in rows
    assert ("account", "lab") in rows
    assert ("partition", "big") in rows
    assert ("time", "1-12:00:00") in rows
    assert ("setup", "module", "load", "cuda") in rows
    assert ("nccl.infiniband.NCCL_SOCKET_IFNAME", "=ib0") in rows
    assert ("gpus.a100.capability", "8.0") in rows
    assert lines[-1].startswith(f"warning: {MINE}: nccl.nvlink.NCCL_TIMEOUT: 1800: ")
    assert not any(key in done.stdout for key in ("qos", "None"))


def test_the_command_says_what_is_missing(write: Write) -> None:
    """The site is shown all the same; one line on stderr, exit code 2."""
    done = run(write(project="cluster: alpha\n"))
    assert done.returncode == 2
    assert done.stdout.splitlines()[0].split() == ["cluster", "alpha"]
    assert done.stderr.splitlines() == [
        f"error: cluster alpha needs account: set account: in project.yaml (with cluster: alpha) or in {ALPHA} "
        "(sacctmgr show assoc user=$USER lists yours)"
    ]


@pytest.mark.parametrize(
    ("arguments", "part"), [(["alhpa"], "did you mean alpha?"), (["beta", "second"], "second"), (["--nam"], "--nam")]
)
def test_bad_input_to_the_command_is_one_line(arguments: list[str], part: str, write: Write) -> None:
    """No usage text, no traceback, exit code 2."""
    done = run(write(), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert part in line


def test_the_module_runs_too(write: Write) -> None:
    """`python -m slurm.cluster` in the project's folder is the same command."""
    root = write()
    script = run(root, "beta")
    module = subprocess.run(
        [sys.executable, "-m", "slurm.cluster", "beta"], cwd=root, capture_output=True, text=True, check=False
    )
    assert (module.returncode, module.stdout, module.stderr) == (script.returncode, script.stdout, script.stderr)
    assert "cluster" in script.stdout


def test_importing_is_light(write: Write) -> None:
    """Neither torch nor lightning: those take seconds on a network file system; of src only what reads YAML."""
    code = f"import pathlib, sys, slurm.cluster as c; c.load_cluster(root=pathlib.Path({str(write())!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code + "; print(*sys.modules)"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    top = {module.split(".")[0] for module in done.stdout.split()}
    assert "slurm" in top
    assert not top & {"torch", "lightning", "jsonargparse", "submitit", "numpy"}


def test_as_a_script_it_hides_no_one_else_s_module(write: Write) -> None:
    """slurm/ itself is off the path: another library's `import nccl` must not find ours."""
    root = write()
    run(root, "local")
    code = (
        "import importlib.util, runpy, sys\n"
        "sys.argv, sys.path[0] = ['cluster.py', 'local'], 'slurm'\n"
        "assert importlib.util.find_spec('nccl')\n"
        "try:\n    runpy.run_path('slurm/cluster.py', run_name='__main__')\n"
        "except SystemExit:\n    print(importlib.util.find_spec('nccl'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "None"
