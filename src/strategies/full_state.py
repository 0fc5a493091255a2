"""From the parts that ranks have to whole tensors, which every strategy can load, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from src.checkpoint.contents import rebuild
from src.checkpoint.shards import IN_PARTS, Rows


def full(state: Any, keep: bool) -> Any:
    """The same nested state with every sharded tensor whole, in the host's memory.

    One tensor after the other, so that a device never holds more than one of them whole. Collective.

    Args:
        state: dictionaries, lists and tuples of tensors and of plain values
        keep: whether this rank wants the result; where not, sharded tensors are left out

    """

    def whole(_: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        tensor = value.full_tensor()
        return tensor.cpu() if keep else None

    return rebuild(state, whole)


def in_parts(state: Any, keep: bool) -> tuple[Any, dict[str, Tensor]]:
    """The same nested state with IN_PARTS for every tensor that is cut into rows, and this rank's rows of these.

    A tensor that a module has sharded otherwise by itself is put together. Collective where there is one.

    Args:
        state: as for `full`
        keep: as for `full`

    Returns:
        the state, and the rows by the tensor's place in it; {} on a rank whose rows another one has, too

    """
    parts: dict[str, Tensor] = {}

    def leaf(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        cut = [placement for placement in value.placements if not placement.is_replicate()]
        if len(cut) != 1 or type(cut[0]) is not Shard or cut[0].dim != 0:
            return full(value, keep)
        place = value.device_mesh.get_coordinate()
        assert place is not None
        if all(at == 0 for at, placement in zip(place, value.placements, strict=True) if placement.is_replicate()):
            rows = value.to_local()
            whole = rows.untyped_storage().nbytes() == rows.nbytes  # else the rest of its storage would be saved, too
            parts[name] = rows.detach() if whole else rows.detach().clone()
        return IN_PARTS

    return rebuild(state, leaf), parts


def like(whole: Any, part: Any) -> Any:
    """The part of `whole` that this rank has of `part`; `whole` itself where `part` is not sharded."""
    whole = whole.whole() if isinstance(whole, Rows) else whole
    if not isinstance(part, DTensor) or not isinstance(whole, Tensor) or isinstance(whole, DTensor):
        return whole
    whole = whole.to(part.to_local().device, part.dtype)
    # Every rank has the file: nothing to send.
    return distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)


def optimizer_like(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's whole state in the parts of `optimizer`'s parameters: momenta and the like, by their shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parts = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"]:
            parts[number] = {
                name: like(value, parameter if getattr(value, "shape", None) == parameter.shape else None)
                for name, value in state["state"][number].items()
            }
    return {**state, "state": parts}
