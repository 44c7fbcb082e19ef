"""MLP, with optional 8-bit matmuls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from maxpipe.models.layers import mlp
from maxpipe.nn.activation_statistics import ActivationRecorder
from maxpipe.nn.module import LayerContext, Output, SpecModule
from maxpipe.parallel import quantized_matmul
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer, Weight
from maxpipe.parallel.quantized_array import compute_max_abs
from maxpipe.parallel.quantized_matmul import weight_residual
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def apply_activation(
    inputs: Sequence[Float[Array, "*rows F"]],
    function: mlp.Activation,
    weights: Float[Array, "*rows"] | None = None,
    *,
    in_8_bits: bool = False,
) -> Float[Array, "*rows F"]:
    """Apply an activation to the outputs of the input projections, optionally weighted, and store
    the result once for all matmuls.

    Without barriers, XLA for TPU fuses the function and its derivative into every matmul of the
    backward pass and recomputes them, which costs a tenth of a layer's cycles. If `in_8_bits` is
    set, no barriers are needed: XLA quantizes the result and computes its scales in the same pass.
    """
    return _activation(function, in_8_bits, tuple(inputs), weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activation(
    function: mlp.Activation, in_8_bits: bool, inputs: tuple[Array, ...], weights: Array | None
) -> Array:
    del in_8_bits
    return _compute_activation(function, inputs, weights)


def _compute_activation(
    function: mlp.Activation, inputs: tuple[Array, ...], weights: Array | None = None
) -> Array:
    if isinstance(function, mlp.Ungated):
        hidden = _FUNCTIONS[function.function](*inputs)
        return hidden if weights is None else hidden * weights[..., None]
    gate, up = inputs
    if isinstance(function, mlp.ScaledInput):
        assert weights is not None, "only experts have routing weights"
        gate, up = gate * weights[..., None], up * weights[..., None]
        return _FUNCTIONS[function.function](gate) * up
    if isinstance(function, mlp.ScaledGate):
        hidden = jax.nn.silu(gate * function.scale) * up
    elif isinstance(function, mlp.ClampedSilu):
        gate = jnp.minimum(gate, function.limit)
        up = jnp.clip(up, -function.limit, function.limit)
        up = up + function.offset if function.offset else up
        hidden = gate * jax.nn.sigmoid(function.slope * gate) * up
    else:
        hidden = _FUNCTIONS[function](gate) * up
    return hidden if weights is None else hidden * weights[..., None]


def _activation_forward(
    function: mlp.Activation, in_8_bits: bool, inputs: tuple[Array, ...], weights: Array | None
) -> tuple[Array, Any]:
    hidden = _compute_activation(function, inputs, weights)
    return _barrier(hidden, in_8_bits), (inputs, weights)


def _activation_backward(
    function: mlp.Activation, in_8_bits: bool, saved: Any, cotangent: Array
) -> Any:
    _, vjp = jax.vjp(partial(_compute_activation, function), *saved)
    return _barrier(vjp(_barrier(cotangent, in_8_bits)), in_8_bits)


def _barrier(tree: Any, in_8_bits: bool) -> Any:
    return tree if in_8_bits else jax.lax.optimization_barrier(tree)


_activation.defvjp(_activation_forward, _activation_backward)


def apply_mlp(
    x: Float[Array, "B T D"],
    module: SpecModule,
    function: mlp.Activation,
    split: SequenceParallel,
    prefix: str = "",
    largest: Float[Array, "B T 1"] | None = None,
    recorder: ActivationRecorder | None = None,
) -> Float[Array, "B T D"]:
    """Compute an MLP with the parameters of `module` whose names start with the prefix."""
    names = mlp.input_projections(function)
    *into, down = (
        getattr(module, f"{prefix}{name}")[...].astype(x.dtype) for name in (*names, "down")
    )
    if split.quantizer is not None and split.can_prequantize((*into, down)):
        return quantized_mlp(
            x, largest, (*into, down), function, split.quantizer, split.rules, prefix
        )
    inputs = split.column_parallel(x, tuple(into), (_UP_AXES,) * len(into), largest)
    inputs = _named(inputs, function, prefix)
    hidden = apply_activation(inputs, function, in_8_bits=split.quantizer is not None)
    hidden = constrain(hidden, (None, None, "mlp"), split.rules)
    if recorder is not None:
        recorder.record_hidden(f"{prefix}hidden", hidden)
    return split.row_parallel(hidden, down, _UP_AXES[::-1])


def _named(
    inputs: Sequence[Float[Array, "B T F"]], function: mlp.Activation, prefix: str
) -> tuple[Float[Array, "B T F"], ...]:
    """Name the inputs of the activation, for `pipeline.saved_names`."""
    names = mlp.input_projections(function)
    return tuple(
        checkpoint_name(each, f"{prefix}{name}") for name, each in zip(names, inputs, strict=True)
    )


_UP_AXES = ("embed", "mlp")
"""Logical axes of the input projections. The output projection has the same axes in reverse
order."""


# Fully quantized MLP. The differentiation rules below determine which arrays are quantized, and in
# which pass.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def quantized_mlp(
    x: Float[Array, "B T D"],
    largest: Float[Array, "B T 1"] | None,
    weights: tuple[Weight, ...],
    function: mlp.Activation,
    low: MatmulQuantizer,
    rules: AxisRules,
    prefix: str,
) -> Float[Array, "B T D"]:
    """Compute an MLP; `largest` is the largest magnitude in each token, if known."""
    return _quantized_mlp_forward(x, largest, weights, function, low, rules, prefix)[0]


def _quantized_mlp_forward(
    x: Array,
    largest: Array | None,
    weights: tuple[Weight, ...],
    function: mlp.Activation,
    low: MatmulQuantizer,
    rules: AxisRules,
    prefix: str,
) -> Any:
    *into, down = weights
    inputs = quantized_matmul.matmuls(x, largest, tuple(into), 1, low, True)
    inputs = _named(inputs, function, prefix)
    hidden = constrain(_compute_activation(function, inputs), (None, None, "mlp"), rules)
    (out,) = quantized_matmul.matmuls(hidden, None, (down,), 1, low, False)
    return out, (x, largest, inputs, tuple(map(weight_residual, weights)))


def _quantized_mlp_backward(
    function: mlp.Activation,
    low: MatmulQuantizer,
    rules: AxisRules,
    prefix: str,
    saved: Any,
    cotangent: Float[Array, "B T D"],
) -> Any:
    """Compute the gradients of the MLP; the arrays between the projections are computed twice.

    The first computation, which determines the scales, is fused into the matmul that computes the
    arrays' cotangents. The second computation quantizes the arrays. If the arrays were computed
    only once, XLA for TPU would materialize some of them and need a third more cycles.
    """
    del prefix
    x, largest, inputs, weights = saved
    *of_inputs, of_down = (residual.weight for residual in weights)
    barrier = jax.lax.optimization_barrier

    def inside(d_hidden: Array, *inputs: Array) -> tuple[Array, ...]:
        hidden, vjp = jax.vjp(partial(_compute_activation, function), inputs)
        return hidden, *vjp(d_hidden)[0]

    d_output = barrier(low.quantize_tokens(cotangent, gradient=True))
    d_hidden = low.input_grad(d_output, of_down, 1).compute().astype(x.dtype)
    d_hidden = constrain(d_hidden, (None, None, "mlp"), rules)
    made = d_hidden, *inputs
    made, most = barrier((made, [compute_max_abs(array, (2,)) for array in inside(*made)]))
    again = inside(*made)
    hidden, *d_inputs = barrier(
        [
            low.quantize_tokens(*pair, gradient=n > 0)
            for n, pair in enumerate(zip(again, most, strict=True))
        ]
    )
    d_x = [
        barrier(low.input_grad(d_activation, weight, 1).compute().astype(x.dtype))
        for d_activation, weight in zip(d_inputs, of_inputs, strict=True)
    ]
    if not low.weight_gradients:
        hidden, *d_inputs = again
    makes = [
        partial(quantized_matmul.weight_grad, x, d_input, low, into=True, most=largest)
        for d_input in d_inputs
    ]
    makes.append(partial(quantized_matmul.weight_grad, hidden, cotangent, low, into=False))
    d_weights = (
        residual.gradient(make, x.dtype) for residual, make in zip(weights, makes, strict=True)
    )
    return reduce(operator.add, d_x), None, tuple(d_weights)


quantized_mlp.defvjp(_quantized_mlp_forward, _quantized_mlp_backward)


class MLP(SpecModule):
    """MLP with a gate (SwiGLU or GEGLU of arXiv:2002.05202) or without."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, part: mlp.MLP, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the MLP, `[B, T, D] -> [B, T, D]`."""
        split = context.split(self.rules)
        function, largest, recorder = self.part.function, context.max_abs, context.recorder
        return Output(apply_mlp(x, self, function, split, largest=largest, recorder=recorder))
