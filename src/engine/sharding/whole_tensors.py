"""Turn sharded states into whole tensors, which every strategy can load, or into each rank's rows, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from src.engine.checkpoint.shards import IN_PARTS, Rows
from src.engine.nested import rebuild


def to_full(state: Any, keep: bool) -> Any:
    """Return the same nested state with every sharded tensor whole, in the host's memory. Collective.

    One tensor after the other, so that a device never holds more than one of them whole. On a rank that does not
    `keep` the result, None stands for each sharded tensor.
    """

    def whole(_: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        tensor = value.full_tensor()
        return tensor.cpu() if keep else None

    return rebuild(state, whole)


def local_rows(state: Any, keep: bool) -> tuple[Any, dict[str, Tensor]]:
    """Return the same nested state with IN_PARTS for every tensor that is cut into rows, and this rank's rows of these.

    The rows are by the tensor's place in the state; of replicas, only the first returns them. A tensor that a
    module has sharded otherwise by itself is put together as by `to_full`. Collective where there is one.
    """
    rows: dict[str, Tensor] = {}

    def leaf(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        cut = [placement for placement in value.placements if not placement.is_replicate()]
        if len(cut) != 1 or type(cut[0]) is not Shard or cut[0].dim != 0:
            return to_full(value, keep)
        position = value.device_mesh.get_coordinate()
        assert position is not None
        if all(at == 0 for at, placement in zip(position, value.placements, strict=True) if placement.is_replicate()):
            local = value.to_local()
            alone = local.untyped_storage().nbytes() == local.nbytes  # else the rest of its storage would be saved, too
            rows[name] = local.detach() if alone else local.detach().clone()
        return IN_PARTS

    return rebuild(state, leaf), rows


def shard_like(whole: Any, sharded: Any) -> Any:
    """Return this rank's rows of `whole`, divided as `sharded` is; `whole` itself where that is no sharded tensor."""
    whole = whole.whole() if isinstance(whole, Rows) else whole
    if not isinstance(sharded, DTensor) or not isinstance(whole, Tensor) or isinstance(whole, DTensor):
        return whole
    whole = whole.to(sharded.to_local().device, sharded.dtype)
    # Every rank has the file: nothing to send.
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)


def optimizer_like(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a whole optimizer state divided as `optimizer`'s parameters are: momenta and the like, by their shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    sharded = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"]:
            sharded[number] = {
                name: shard_like(value, parameter if getattr(value, "shape", None) == parameter.shape else None)
                for name, value in state["state"][number].items()
            }
    return {**state, "state": sharded}
