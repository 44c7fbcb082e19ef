"""Selection and sharding of the TPU kernels of recurrent layers.

Layers use plain JAX on other devices, and for sizes that the kernels do not support.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float

from maxpipe.nn import convolution_kernel, recurrent_kernels
from maxpipe.nn.attention.interface import shard_axes
from maxpipe.nn.convolution_kernel import Arguments, Convolution
from maxpipe.nn.recurrent_kernels import Layout, Operands
from maxpipe.parallel.collectives import map_shards, mark_varying
from maxpipe.parallel.tpu_kernels import has_tpu_devices


class KernelShards(NamedTuple):
    """Mesh axes over which the kernels of a layer are sharded."""

    rows: tuple[str, ...]
    """Axes that shard sequences."""
    heads: str | None
    """Axis that shards heads."""
    number: int
    """Number of shards of the heads."""


def kernel_shards(rows: int, heads: int) -> KernelShards:
    """Return the mesh axes that shard sequences and heads."""
    batch, axis = shard_axes(rows, heads)
    mesh = jax.sharding.get_abstract_mesh()
    return KernelShards(batch, axis, mesh.shape[axis] if axis else 1)


def run_forward(
    layout: Layout, operands: Operands, state: Float[Array, "B V k v"], *, save_states: bool
) -> tuple[Array, Array, Array | None]:
    """Run `recurrent_kernels.forward` on the shards of each device. Other devices than
    TPUs interpret the kernels as JAX operations.
    """
    shards = kernel_shards(*state.shape[:2])
    arrays, of_operands = PartitionSpec(shards.rows, shards.heads), _specs(shards, operands)
    states = PartitionSpec(shards.rows, None, shards.heads) if save_states else None
    options = {"save_states": save_states, "interpret": not has_tpu_devices()}
    run = partial(recurrent_kernels.forward, layout, **options)
    run = map_shards(run, (of_operands, arrays), (arrays, arrays, states))
    return run(*mark_varying((operands, state)))


def run_backward(
    layout: Layout,
    operands: Operands,
    states: Float[Array, "B N V k v"],
    d_out: Float[Array, "B V T w"],
    d_state: Float[Array, "B V k v"],
) -> tuple[Operands, Array]:
    """Run `recurrent_kernels.backward` on the shards of each device. Other devices than
    TPUs interpret the kernels as JAX operations.
    """
    shards = kernel_shards(*d_state.shape[:2])
    arrays, of_operands = PartitionSpec(shards.rows, shards.heads), _specs(shards, operands)
    interpret = not has_tpu_devices()

    def run(operands: Operands, *arrays: Array) -> tuple[Operands, Array]:
        gradients, d_start = recurrent_kernels.backward(
            layout, operands, *arrays, interpret=interpret
        )

        def total(gradient: Array, spec: PartitionSpec) -> Array:
            heads = (shards.heads,) if shards.heads and not any(spec) else ()
            axes = (*shards.rows, *heads)
            return lax.psum(gradient, axes) if axes else gradient

        shared = tuple(map(total, gradients.shared, of_operands.shared))
        return gradients._replace(shared=shared), d_start

    states_spec = PartitionSpec(shards.rows, None, shards.heads)
    in_specs = (of_operands, states_spec, arrays, arrays)
    mapped: Any = map_shards(run, in_specs, (of_operands, arrays))
    return mapped(*mark_varying((operands, states, d_out, d_state)))


def _specs(shards: KernelShards, operands: Operands) -> Any:
    """Return the partition specs of operands."""
    arrays: Any = PartitionSpec(shards.rows, shards.heads)
    shared: Any = tuple(
        PartitionSpec() if len(weight) == 1 else PartitionSpec(shards.heads)
        for weight in operands.shared
    )
    return Operands(shared, tuple(arrays for _ in operands.tokens), arrays)


def run_convolution(options: Convolution, arguments: Arguments) -> Float[Array, "B H T E"]:
    """Run the kernels of `convolution_kernel` on the shards of each device."""
    # The transpose of `mark_varying` sums the gradients of weights that are replicated across
    # devices.
    return _convolution(options, mark_varying(arguments))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolution(options: Convolution, arguments: Arguments) -> Array:
    specs = _convolution_specs(arguments)
    run = partial(convolution_kernel.forward, options, interpret=not has_tpu_devices())
    return map_shards(run, (specs,), specs.x)(arguments)


def _convolution_backward(
    options: Convolution, arguments: Arguments, d_out: Array
) -> tuple[Arguments]:
    specs, interpret = _convolution_specs(arguments), not has_tpu_devices()
    axes = kernel_shards(len(arguments.x), arguments.x.shape[1]).rows

    def run(arguments: Arguments, d_out: Array) -> Arguments:
        gradients = convolution_kernel.backward(options, arguments, d_out, interpret=interpret)
        weights = gradients.weights
        return gradients._replace(weights=lax.psum(weights, axes) if axes else weights)

    return (map_shards(run, (specs, specs.x), specs)(arguments, d_out),)


_convolution.defvjp(
    lambda options, arguments: (_convolution(options, arguments), arguments),  # type: ignore
    _convolution_backward,
)


def _convolution_specs(arguments: Arguments) -> Any:
    shards = kernel_shards(len(arguments.x), arguments.x.shape[1])
    arrays, heads = PartitionSpec(shards.rows, shards.heads), PartitionSpec(shards.heads)
    return Arguments(heads, arrays, arrays, PartitionSpec(shards.rows))  # type: ignore[arg-type]
