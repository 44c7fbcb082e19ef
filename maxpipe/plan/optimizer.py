"""What the optimizer keeps on one device. No jax."""

from __future__ import annotations

from collections.abc import Mapping

from maxpipe.model.spec import Param
from maxpipe.optim.kept import BYTES, kept
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


def _bytes(sizes: Sizes, param: Param) -> float:
    config = sizes.config
    found = kept(config.optim, param, config.model.param_dtype).values()
    return sum(sizes.elements(sizes.padded(one.dims)) * BYTES[one.dtype] for one in found)
