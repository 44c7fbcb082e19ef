"""What the optimizer keeps on one device. No jax."""

from __future__ import annotations

from collections.abc import Mapping

from maxpipe.model.spec import Param
from maxpipe.optim.kept import BYTES, kept
from maxpipe.parallel.axes import axis_table, owned_dim
from maxpipe.plan.sizes import Sizes


def optimizer_bytes(sizes: Sizes) -> float:
    """Bytes of all of it."""
    ends = (_bytes(sizes, param) for param in sizes.model.ends.params.values())
    layers = optimizer_bytes_of(sizes, sizes.layer_slots)
    return layers + optimizer_bytes_of(sizes, sizes.outside) + sum(ends)


def optimizer_bytes_of(sizes: Sizes, layers: Mapping[str, int]) -> float:
    """Of layers of these kinds, as many of each."""
    return sum(
        count * _bytes(sizes, param)
        for kind, count in layers.items()
        for param in sizes.model.kinds[kind].params.values()
    )


def shared_over_data(sizes: Sizes, param: Param) -> int | None:
    """The dim of what is kept of a parameter that devices along `data` divide, if they do."""
    if not sizes.config.optim.shard_over_data:
        return None
    table = axis_table(sizes.config.mesh)
    return owned_dim(param.dims, [table.get(axis, ()) for axis in param.axes], sizes.axes)


def _bytes(sizes: Sizes, param: Param) -> float:
    config, total = sizes.config, 0.0
    dim, data = shared_over_data(sizes, param), sizes.axes["data"]
    for one in kept(config.optim, param, config.model.param_dtype).values():
        size = sizes.elements(sizes.padded(one.dims)) * BYTES[one.dtype]
        is_shared = dim is not None and dim not in one.left_out
        total += size / data if is_shared else size
    return total
