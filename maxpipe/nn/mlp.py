"""Gated MLP, with optional 8-bit matmuls."""

from __future__ import annotations

from functools import partial
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

_FUNCTIONS = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=True)}


def gated_activation(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"],
    function: mlp.Gate,
    weights: Float[Array, "*rows"] | None = None,
    *,
    in_8_bits: bool = False,
) -> Float[Array, "*rows F"]:
    """Compute `function(gate) * up`, optionally weighted, and store the result once for all
    matmuls.

    Without barriers, XLA for TPU fuses the function and its derivative into every matmul of the
    backward pass and recomputes them, which costs a tenth of a layer's cycles. If `in_8_bits` is
    set, no barriers are needed: XLA quantizes the result and computes its scales in the same pass.
    """
    return _gated_activation(
        function, in_8_bits, gate, up, *(() if weights is None else (weights,))
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_activation(function: mlp.Gate, in_8_bits: bool, *arrays: Array) -> Array:
    del in_8_bits
    return _compute_gate(function, *arrays)


def _compute_gate(
    function: mlp.Gate, gate: Array, up: Array, weights: Array | None = None
) -> Array:
    if isinstance(function, mlp.ScaledInput):
        assert weights is not None, "only experts have routing weights"
        gate, up = gate * weights[..., None], up * weights[..., None]
        return _FUNCTIONS[function.function](gate) * up
    if isinstance(function, mlp.ClampedSilu):
        gate = jnp.minimum(gate, function.limit)
        up = jnp.clip(up, -function.limit, function.limit)
        hidden = gate * jax.nn.sigmoid(function.slope * gate) * (up + 1)
    else:
        hidden = _FUNCTIONS[function](gate) * up
    return hidden if weights is None else hidden * weights[..., None]


def _gated_activation_forward(
    function: mlp.Gate, in_8_bits: bool, *arrays: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _barrier(_compute_gate(function, *arrays), in_8_bits), arrays


def _gated_activation_backward(
    function: mlp.Gate, in_8_bits: bool, saved: tuple[Array, ...], cotangent: Array
) -> tuple[Array, ...]:
    _, vjp = jax.vjp(partial(_compute_gate, function), *saved)
    return _barrier(vjp(_barrier(cotangent, in_8_bits)), in_8_bits)


def _barrier(tree: Any, in_8_bits: bool) -> Any:
    return tree if in_8_bits else jax.lax.optimization_barrier(tree)


_gated_activation.defvjp(_gated_activation_forward, _gated_activation_backward)


def gated_mlp(
    x: Float[Array, "B T D"],
    module: SpecModule,
    function: mlp.Gate,
    split: SequenceParallel,
    prefix: str = "",
    largest: Float[Array, "B T 1"] | None = None,
    recorder: ActivationRecorder | None = None,
) -> Float[Array, "B T D"]:
    """Compute a gated MLP with the parameters of `module` whose names start with the prefix."""
    gate, up, down = (
        getattr(module, f"{prefix}{name}")[...].astype(x.dtype) for name in ("gate", "up", "down")
    )
    if split.quantizer is not None and split.can_prequantize((gate, up, down)):
        return quantized_gated_mlp(
            x, largest, (gate, up, down), function, split.quantizer, split.rules, prefix
        )
    gate, up = split.column_parallel(x, (gate, up), (_UP_AXES, _UP_AXES), largest)
    gate, up = checkpoint_name(gate, f"{prefix}gate"), checkpoint_name(up, f"{prefix}up")
    hidden = gated_activation(gate, up, function, in_8_bits=split.quantizer is not None)
    hidden = constrain(hidden, (None, None, "mlp"), split.rules)
    if recorder is not None:
        recorder.record_hidden(f"{prefix}hidden", hidden)
    return split.row_parallel(hidden, down, _UP_AXES[::-1])


_UP_AXES = ("embed", "mlp")
"""Logical axes of the input projections. The output projection has the same axes in reverse
order."""


# Fully quantized MLP. The differentiation rules below determine which arrays are quantized, and in
# which pass.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def quantized_gated_mlp(
    x: Float[Array, "B T D"],
    largest: Float[Array, "B T 1"] | None,
    weights: tuple[Weight, ...],
    function: mlp.Gate,
    low: MatmulQuantizer,
    rules: AxisRules,
    prefix: str,
) -> Float[Array, "B T D"]:
    """Compute a gated MLP; `largest` is the largest magnitude in each token, if known."""
    return _quantized_gated_mlp_forward(x, largest, weights, function, low, rules, prefix)[0]


def _quantized_gated_mlp_forward(
    x: Array,
    largest: Array | None,
    weights: tuple[Weight, ...],
    function: mlp.Gate,
    low: MatmulQuantizer,
    rules: AxisRules,
    prefix: str,
) -> Any:
    (gate, up), down = quantized_matmul.matmuls(x, largest, weights[:2], 1, low, True), weights[2]
    gate, up = checkpoint_name(gate, f"{prefix}gate"), checkpoint_name(up, f"{prefix}up")
    hidden = constrain(_compute_gate(function, gate, up), (None, None, "mlp"), rules)
    (out,) = quantized_matmul.matmuls(hidden, None, (down,), 1, low, False)
    return out, (x, largest, gate, up, tuple(map(weight_residual, weights)))


def _quantized_gated_mlp_backward(
    function: mlp.Gate,
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
    x, largest, gate, up, weights = saved
    of_gate, of_up, of_down = (residual.weight for residual in weights)
    barrier = jax.lax.optimization_barrier

    def inside(d_hidden: Array, gate: Array, up: Array) -> tuple[Array, ...]:
        hidden, vjp = jax.vjp(partial(_compute_gate, function), gate, up)
        return hidden, *vjp(d_hidden)

    d_output = barrier(low.quantize_tokens(cotangent, gradient=True))
    d_hidden = low.input_grad(d_output, of_down, 1).compute().astype(x.dtype)
    d_hidden = constrain(d_hidden, (None, None, "mlp"), rules)
    made = d_hidden, gate, up
    made, most = barrier((made, [compute_max_abs(array, (2,)) for array in inside(*made)]))
    again = inside(*made)
    hidden, d_gate, d_up = barrier(
        [
            low.quantize_tokens(*pair, gradient=n > 0)
            for n, pair in enumerate(zip(again, most, strict=True))
        ]
    )
    d_x = [
        barrier(low.input_grad(d_activation, weight, 1).compute().astype(x.dtype))
        for d_activation, weight in ((d_gate, of_gate), (d_up, of_up))
    ]
    if not low.weight_gradients:
        hidden, d_gate, d_up = again
    makes = [
        partial(quantized_matmul.weight_grad, x, d_gate, low, into=True, most=largest),
        partial(quantized_matmul.weight_grad, x, d_up, low, into=True, most=largest),
        partial(quantized_matmul.weight_grad, hidden, cotangent, low, into=False),
    ]
    d_weights = (
        residual.gradient(make, x.dtype) for residual, make in zip(weights, makes, strict=True)
    )
    return d_x[0] + d_x[1], None, tuple(d_weights)


quantized_gated_mlp.defvjp(_quantized_gated_mlp_forward, _quantized_gated_mlp_backward)


class GatedMLP(SpecModule):
    """SwiGLU or GEGLU MLP (arXiv:2002.05202)."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, part: mlp.GatedMLP, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the MLP, `[B, T, D] -> [B, T, D]`."""
        split = context.split(self.rules)
        function, largest, recorder = self.part.function, context.max_abs, context.recorder
        return Output(gated_mlp(x, self, function, split, largest=largest, recorder=recorder))
