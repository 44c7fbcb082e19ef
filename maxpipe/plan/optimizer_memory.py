"""Predict the optimizer state and gathered weights on one device in bytes, without jax.

Weights are gathered in the compute dtype, or in an 8-bit dtype with scales.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from maxpipe.models.spec import Param
from maxpipe.optim.state_spec import BYTES, is_orthogonalised, state_arrays
from maxpipe.parallel.axes import axis_table, find_zero1_dim
from maxpipe.plan.sizes import Sizes


def optimizer_bytes(sizes: Sizes) -> float:
    """Return the size of the optimizer state on one device in bytes."""
    ends = (_bytes(sizes, param) for param in sizes.model.ends.params.values())
    layers = optimizer_layer_bytes(sizes, sizes.layer_slots)
    return layers + optimizer_layer_bytes(sizes, sizes.prologue_layers) + sum(ends)


def optimizer_layer_bytes(sizes: Sizes, layers: Mapping[str, int]) -> float:
    """Return the size in bytes of optimizer state for the given numbers of layers by type."""
    return sum(
        count * _bytes(sizes, param)
        for kind, count in layers.items()
        for param in sizes.model.layer_types[kind].params.values()
    )


CPU_COPIES = {"adafactor": 1.0, "lion": 0.6}
"""Number of gradient copies that XLA for CPU keeps during an update. This constant and the next two
are fitted."""
MUON_WHOLE_COPIES, MUON_SHARDED_COPIES = 1.0, 1.6
"""Number of gradient copies in a Muon update, for unsharded and for sharded matrices."""


def gradient_copy_bytes(sizes: Sizes) -> float:
    """Return the size in bytes of float32 gradient copies, during the reduction or the update."""
    optim, is_cpu = sizes.config.optim, sizes.platform == "cpu"

    def in_update(param: Param) -> float:
        if not is_orthogonalised(optim, param):
            return CPU_COPIES.get(optim.name, 0.0) * is_cpu
        return (
            MUON_SHARDED_COPIES
            if sizes.elements(param.dims) < math.prod(param.shape)
            else MUON_WHOLE_COPIES
        )

    sums = _copies(sizes, lambda param: is_cpu and bool(sizes.reduced_over(param.dims)))
    return max(sums, _copies(sizes, in_update))


def _copies(sizes: Sizes, number: Callable[[Param], float]) -> float:
    """Return the total bytes of `number(param)` float32 copies of each gradient."""
    kinds, layers = (
        sizes.model.layer_types,
        Counter(sizes.layer_slots) + Counter(sizes.prologue_layers),
    )
    counted = [(n, param) for kind, n in layers.items() for param in kinds[kind].params.values()]
    counted += [(1, param) for param in sizes.model.ends.params.values()]
    return 4.0 * sum(
        count * number(param) * sizes.elements(sizes.padded(param.dims))
        for count, param in counted
        if param.trainable
    )


def zero1_dim(sizes: Sizes, param: Param) -> int | None:
    """Return the dimension along which ZeRO-1 shards a parameter's optimizer state, if any."""
    if not sizes.config.optim.zero1:
        return None
    table = axis_table(sizes.config.mesh)
    return find_zero1_dim(param.dims, [table.get(axis, ()) for axis in param.axes], sizes.axes)


def _bytes(sizes: Sizes, param: Param) -> float:
    config, total = sizes.config, 0.0
    dim, data = zero1_dim(sizes, param), sizes.axes["data"]
    for one in state_arrays(config.optim, param, config.model.param_dtype).values():
        size = sizes.elements(sizes.padded(one.dims)) * BYTES[one.dtype]
        is_shared = dim is not None and dim not in one.dropped_dims
        total += size / data if is_shared else size
    return total


def gathers_weights(sizes: Sizes) -> bool:
    """Return whether any parameter is gathered for use."""
    kinds = (kind.params for kind in sizes.model.layer_types.values())
    params = (param for each in (sizes.model.ends.params, *kinds) for param in each.values())
    return any(sizes.gathered_over(param.dims) for param in params)


def gathered_bytes(sizes: Sizes, layers: Mapping[str, int]) -> float:
    """Return the size in bytes of gathered weights for the given numbers of layers by type."""
    if sizes.config.model.matmul == "default" and not sizes.config.adapter.rank:
        elements = sum(
            count * sizes.layer_elements(kind, whole=True) for kind, count in layers.items()
        )
        return float(gathered_itemsize(sizes) * elements)
    return float(sum(count * _gathered_layer_bytes(sizes, kind) for kind, count in layers.items()))


def gathered_itemsize(sizes: Sizes, param: Param | None = None) -> int:
    """Return the number of bytes per element of a gathered parameter, excluding scales.

    8-bit parameters are stored twice, for forward and backward matmuls, unless the complete matrix
    has one scale.
    """
    if param is not None and param.own_dtype:
        return BYTES[param.own_dtype]
    if param is None or not _is_quantized(sizes, param):
        return BYTES[sizes.config.model.compute_dtype]
    return 1 if sizes.config.model.matmul_scales == "tensor" else 2


def _gathered_layer_bytes(sizes: Sizes, kind: str) -> int:
    params = filter(sizes.includes, sizes.model.layer_types[kind].params.values())
    return sum(
        gathered_itemsize(sizes, each) * sizes.elements(each.dims, whole=True)
        + 4 * _scales(sizes, each)
        for each in params
    )


def _is_quantized(sizes: Sizes, param: Param) -> bool:
    """Return whether a parameter is gathered in 8 bits: see `Decoder.summed`."""
    model = sizes.config.model
    rounded = model.matmul != "default" and model.matmul_scales != "block"
    rounded &= model.matmul_parts == "all" or not param.is_of_heads
    return rounded and param.num_contracted_dims > 0 and not sizes.config.mesh.sequence_parallel


def _scales(sizes: Sizes, param: Param) -> int:
    """Return the number of scales of an 8-bit parameter."""
    if not _is_quantized(sizes, param) or sizes.config.model.matmul_scales == "tensor":
        return int(_is_quantized(sizes, param))
    sides = param.dims[: param.num_contracted_dims], param.dims[param.num_contracted_dims :]
    return sum(sizes.elements(dims, whole=True) for dims in sides)
