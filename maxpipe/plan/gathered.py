"""Bytes of a layer's weights as they are gathered: in compute type, or in 8 bits with scales."""

from __future__ import annotations

from collections.abc import Mapping

from maxpipe.models.spec import Param
from maxpipe.optim.kept import BYTES
from maxpipe.plan.sizes import Sizes


def gathers_any(sizes: Sizes) -> bool:
    """Whether there is a parameter whose shards are gathered for use."""
    kinds = (kind.params for kind in sizes.model.kinds.values())
    params = (param for each in (sizes.model.ends.params, *kinds) for param in each.values())
    return any(sizes.gathered_over(param.dims) for param in params)


def gathered_bytes(sizes: Sizes, layers: Mapping[str, int]) -> float:
    """Of this number of layers of each kind, gathered."""
    if sizes.config.model.matmul == "default" and not sizes.config.adapter.rank:
        elements = sum(
            count * sizes.layer_elements(kind, whole=True) for kind, count in layers.items()
        )
        return float(gathered_size(sizes) * elements)
    return float(sum(count * _of_layer(sizes, kind) for kind, count in layers.items()))


def gathered_size(sizes: Sizes, param: Param | None = None) -> int:
    """Bytes of one number of a layer's parameter as it is gathered, scales left out.

    In 8 bits it is there twice, for products forward and backward, unless the whole matrix has
    one scale.
    """
    if param is not None and param.exact:
        return BYTES[param.exact]
    if param is None or not _rounds(sizes, param):
        return BYTES[sizes.config.model.compute_dtype]
    return 1 if sizes.config.model.matmul_scales == "tensor" else 2


def _of_layer(sizes: Sizes, kind: str) -> int:
    params = filter(sizes.counts, sizes.model.kinds[kind].params.values())
    return sum(
        gathered_size(sizes, each) * sizes.elements(each.dims, whole=True)
        + 4 * _scales(sizes, each)
        for each in params
    )


def _rounds(sizes: Sizes, param: Param) -> bool:
    """Whether it is gathered in 8 bits: as `Decoder.summed`."""
    model = sizes.config.model
    rounded = model.matmul != "default" and model.matmul_scales != "block"
    rounded &= model.matmul_parts == "all" or not param.is_of_heads
    return rounded and param.summed > 0 and not sizes.config.mesh.sequence_parallel


def _scales(sizes: Sizes, param: Param) -> int:
    """Their number, of a parameter in 8 bits."""
    if not _rounds(sizes, param) or sizes.config.model.matmul_scales == "tensor":
        return int(_rounds(sizes, param))
    sides = param.dims[: param.summed], param.dims[param.summed :]
    return sum(sizes.elements(dims, whole=True) for dims in sides)
