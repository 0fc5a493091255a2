"""Set up the process before a command does anything: memory on GPUs, YAML, warnings."""

import enum
import logging
import os
import warnings

import yaml


def prepare_environment() -> None:
    """Set what PyTorch reads from the environment when the GPU is first used; the user's own settings stay."""
    # A save copies the state into page-locked memory, whose first 15 GB took 9.4 s to get, and so 3.0 s (H100).
    pinned = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    value = given if "pinned_" in given else f"{given},{pinned}".strip(",")
    os.environ |= {"PYTORCH_ALLOC_CONF": value, "PYTORCH_CUDA_ALLOC_CONF": value}  # PyTorch reads the first that is set


def prepare_yaml() -> None:
    """Let YAML write enums, such as the default of Timer's `interval`."""
    yaml.SafeDumper.add_multi_representer(enum.Enum, lambda dumper, value: dumper.represent_data(value.value))


def quieten() -> None:
    """Hide Lightning's advertising and warnings that a user can do nothing about."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # a report that was asked for
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of calls that Lightning makes
    for message in (
        ".*LeafSpec.*",  # Lightning 2.6.6 on torch 2.13
        ".*does not have many workers.*",  # the number of workers is chosen by what this rank may use
        ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run's
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*AccumulateGrad node's stream.*",  # Lightning builds DDP on a stream of its own, torch 2.11 remarks on it
        ".*`srun` command is available.*",  # on a login node too; who started the processes is checked
        ".*distributed.nn.functional.all_gather is deprecated.*",  # Lightning's, on torch 2.13
        ".*infer the batch indices fetched.*",  # predictions are kept in the loader's order
        ".*callbacks used to create the checkpoint need to be provided.*",  # evaluation needs none of them
    ):
        warnings.filterwarnings("ignore", message=message)
