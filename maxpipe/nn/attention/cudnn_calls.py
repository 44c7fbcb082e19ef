"""XLA's calls of cuDNN's fused attention, as its compiler for GPUs takes them.

jax's own functions for them are private, change with its releases, and ask the GPU that is present
what it can do, which a step that is compiled ahead of time has none of.

Source: FlashAttention-2 (arXiv:2307.08691), as cuDNN has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

_STATUS_RETURNING = 2
"""Of the versions of custom calls the one that these have."""
_HEADS_FIRST = (0, 2, 1, 3)
"""[B, T, N, H] to [B, N, T, H], and back: results have these dims, which in memory lie as those of
the inputs do."""


@dataclass(frozen=True)
class Kernel:
    """What one is compiled for."""

    causal: bool
    scale: float
    window: int = 0
    """Tokens that a query sees at most, itself and those right before it; 0 for all."""
    packed: int = 1
    """Documents of a row at most, on average over the rows; with 1 each row is one."""


class Documents(NamedTuple):
    """Those of all rows of tokens `[B, T]`, one after the other; B times `packed` at most."""

    lengths: Int[Array, "B packed"]
    """In tokens; behind the last one 0."""
    starts: Int[Array, "B packed+1"]
    """The number of the first token, counted through all rows; behind the last one B times T."""


def forward(
    kernel: Kernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    beside: Array | Documents | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "D N T"]]:
    """What is mixed, and the logarithm of the sum of exponentials of each query's scores.

    `beside` is nothing, or what is added to the scores, `[B, 1, T, S]`, or, of packed documents,
    `Documents`. D is B, or the most documents, and T of the sums counts from the first token of
    each.
    """
    rows, tokens, heads, size = query.shape
    sums = jax.ShapeDtypeStruct((rows * kernel.packed, heads, tokens), jnp.float32)
    mixed = jax.ShapeDtypeStruct((rows, heads, tokens, size), query.dtype)
    bias, packed = _operands(query, key, beside)
    operands = (query, key, value, *bias, *packed)
    mixed, sums = _call("", kernel, operands, (mixed, sums), bool(bias))
    return mixed.transpose(_HEADS_FIRST), sums


def backward(
    kernel: Kernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    mixed: Float[Array, "B T N H"],
    sums: Float[Array, "D N T"],
    d_mixed: Float[Array, "B T N H"],
    beside: Array | Documents | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S G H"], Float[Array, "B S G H"]]:
    """Gradients of queries, keys and values."""
    found = tuple(
        jax.ShapeDtypeStruct(tuple(x.shape[dim] for dim in _HEADS_FIRST), x.dtype)
        for x in (query, key, value)
    )
    bias, packed = _operands(query, key, beside)
    operands = (query, key, value, sums, d_mixed, *bias, mixed, *packed)
    found = _call("Backward", kernel, operands, found, bool(bias))
    return tuple(each.transpose(_HEADS_FIRST) for each in found)


def _operands(
    query: Array, key: Array, beside: Array | Documents | None
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """(bias, lengths and places in memory of documents), each empty where there is none."""
    if beside is None:
        return (), ()
    if not isinstance(beside, Documents):
        return (beside,), ()
    places = (beside.starts * math.prod(x.shape[2:]) for x in (query, key))
    return (), (beside.lengths, beside.lengths, *places)


def _call(
    direction: str,
    kernel: Kernel,
    operands: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    biased: bool,
) -> Any:
    query, key = operands[:2]
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    call: Any = jax.ffi.ffi_call(
        f"__cudnn$fmha{'ScaleBias' if biased else ''}Softmax{direction}",
        (*results, workspace),
        vmap_method="sequential",
        # From major to minor.
        output_layouts=[_HEADS_FIRST if each.ndim == 4 else None for each in (*results, workspace)],
        custom_call_api_version=_STATUS_RETURNING,
        legacy_backend_config=json.dumps(_config(kernel, query, key, bool(direction))),
    )
    return call(*operands)[:-1]


def _config(kernel: Kernel, query: Array, key: Array, is_backward: bool) -> Mapping[str, Any]:
    """XLA's `GpuBackendConfig`."""
    rows, tokens, heads, _ = query.shape
    mask = "CAUSAL" if kernel.causal else "PADDING" if kernel.packed > 1 else "NO_MASK"
    scores = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[str(query.dtype)],
        "dimensions": [str(size) for size in (rows, heads, tokens, key.shape[1])],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    products = _BACKWARD if is_backward else _FORWARD
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": kernel.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": f"PADDING_{mask}" if kernel.causal and kernel.packed > 1 else mask,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": kernel.window,
        "max_seg_per_batch": kernel.packed,
        "is_paged_attention": False,
        **{f"{name}_dot_dimension_numbers": _dims(*dims) for name, dims in products.items()},
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}


_Dims = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
_FORWARD: Mapping[str, _Dims] = {
    "bmm1": ((3, 3), (0, 2), (0, 2)),  # BTNH, BSNH -> BNTS
    "bmm2": ((3, 1), (0, 1), (0, 2)),  # BNTS, BSNH -> BTNH
}
"""Of each product the dims that are summed over, and those of batches on the left and the right."""
_BACKWARD: Mapping[str, _Dims] = {
    "bmm1_grad_gemm1": ((2, 1), (0, 1), (0, 2)),  # BNTS, BTNH -> BSNH
    "bmm1_grad_gemm2": ((3, 1), (0, 1), (0, 2)),  # BNTS, BSNH -> BTNH
    "bmm2_grad_gemm1": ((2, 1), (0, 1), (0, 2)),  # BNTS, BTNH -> BSNH
    "bmm2_grad_gemm2": ((3, 3), (0, 2), (0, 2)),  # BTNH, BSNH -> BNTS
}


def _dims(summed: tuple[int, int], left: Sequence[int], right: Sequence[int]) -> dict[str, Any]:
    return {
        "lhs_contracting_dimensions": [str(summed[0])],
        "rhs_contracting_dimensions": [str(summed[1])],
        "lhs_batch_dimensions": [str(dim) for dim in left],
        "rhs_batch_dimensions": [str(dim) for dim in right],
    }
