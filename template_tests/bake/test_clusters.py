"""What the cluster files say as the template ships them; in a project they are its owner's to change."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from slurm.cluster import load_cluster
from template_tests.bake.baking import ROOT


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("local", {"accelerator": "cpu", "gpu_type": "a100", "gpus_per_node": 4, "mem": "0", "needs": ()}),
        ("generic", {"gpu_request": "gpus-per-node", "time": timedelta(hours=2, minutes=59), "partition": None}),
        ("gilbreth", {"gpus_per_node": 4, "cpus_per_gpu": 16, "partition": "a100-80gb", "time": timedelta(days=2)}),
        ("rivanna", {"gpu_request": "gres", "gpu_type": "a100", "time": timedelta(hours=2, minutes=59)}),
        ("supercloud", {"gpu_request": "gres", "gpu_type": "volta", "gpus_per_node": 2, "time": timedelta(hours=12)}),
    ],
)
def test_a_cluster_file_says_what_is_known_and_no_more(name: str, values: dict[str, object], tmp_path: Path) -> None:
    """No warning, nobody's account, no NCCL variable but NCCL_DEBUG=WARN; request, partition and time of the site."""
    shutil.copytree(
        ROOT / "configs/clusters", tmp_path / "configs/clusters", ignore=shutil.ignore_patterns("mine.yaml")
    )
    cluster = load_cluster(name, tmp_path)
    assert {key: getattr(cluster, key) for key in values} == values
    assert (cluster.warnings, cluster.account) == ([], None)
    assert all(set(variables.items()) <= {("NCCL_DEBUG", "WARN")} for variables in cluster.nccl.values())
