"""Attention with cuDNN's fused kernels for NVIDIA GPUs.

A kernel with a dense bias is twice as slow as a kernel with document offsets. The kernel is
therefore selected at run time, depending on the data. If every sequence contains a single document,
the kernel uses only the causal mask. If documents are contiguous, the kernels for Hopper and newer
GPUs skip pairs of tokens from different documents. In all other cases, the kernel reads a dense
bias.

All mesh axes are manual in the program that runs the kernels, so each device calls the kernels
separately. This module emits XLA's custom calls directly. The corresponding functions in jax are
private and change between releases. Those functions also query the local GPU, which is absent in
ahead-of-time compilation.

Source: FlashAttention-2 (arXiv:2307.08691) as implemented in cuDNN.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from maxpipe.models.count import packed_documents
from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn.attention import interface, xla
from maxpipe.nn.attention.interface import Mask, switch_window
from maxpipe.parallel import scopes
from maxpipe.parallel.collectives import map_shards, mark_varying
from maxpipe.parallel.mesh import mesh_device_kind

_STATUS_RETURNING = 2
"""XLA's API version for custom calls that return a status."""
_HEADS_FIRST = (0, 2, 1, 3)
"""Permutation between [B, T, N, H] and [B, N, T, H]. Results have dims [B, N, T, H], but their
memory layout follows the order of the inputs."""


@dataclass(frozen=True)
class Kernel:
    """Static options of a kernel."""

    causal: bool
    scale: float
    window: int = 0
    """Number of tokens that a query token attends to, including itself. 0 means all tokens."""
    packed: int = 1
    """Upper limit on the average number of documents per sequence in a batch. 1 means one document
    per sequence."""


class DocumentOffsets(NamedTuple):
    """Lengths and start indices of up to B times `packed` documents in a batch `[B, T]`."""

    lengths: Int[Array, "B packed"]
    """Document lengths in tokens, padded with 0."""
    starts: Int[Array, "B packed+1"]
    """Index of each document's first token in the flattened batch, padded with B times T."""


def forward(
    kernel: Kernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    beside: Array | DocumentOffsets | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "D N T"]]:
    """Run the forward kernel. Return the output and the log-sum-exp of each query token's scores.

    `beside` is None, a bias `[B, 1, T, S]` added to the scores, or the offsets of packed documents.
    D is B if documents are not packed; otherwise, D is the maximum number of documents. If
    documents are packed, index 0 along dim T of the log-sum-exp is each document's first token.
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
    beside: Array | DocumentOffsets | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S G H"], Float[Array, "B S G H"]]:
    """Return the gradients of queries, keys and values."""
    gradients = tuple(
        jax.ShapeDtypeStruct(tuple(x.shape[dim] for dim in _HEADS_FIRST), x.dtype)
        for x in (query, key, value)
    )
    bias, packed = _operands(query, key, beside)
    operands = (query, key, value, sums, d_mixed, *bias, mixed, *packed)
    gradients = _call("Backward", kernel, operands, gradients, bool(bias))
    return tuple(array.transpose(_HEADS_FIRST) for array in gradients)


def _operands(
    query: Array, key: Array, beside: Array | DocumentOffsets | None
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the bias operands and the document operands; unused operands are empty tuples."""
    if beside is None:
        return (), ()
    if not isinstance(beside, DocumentOffsets):
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
        # Layouts list dims from major to minor.
        output_layouts=[
            _HEADS_FIRST if result.ndim == 4 else None for result in (*results, workspace)
        ],
        custom_call_api_version=_STATUS_RETURNING,
        legacy_backend_config=json.dumps(_config(kernel, query, key, bool(direction))),
    )
    return call(*operands)[:-1]


def _config(kernel: Kernel, query: Array, key: Array, is_backward: bool) -> Mapping[str, Any]:
    """Return the `GpuBackendConfig` that XLA expects for the kernel."""
    rows, tokens, heads, _ = query.shape
    mask = "CAUSAL" if kernel.causal else "PADDING" if kernel.packed > 1 else "NO_MASK"
    scores = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[str(query.dtype)],
        "dimensions": [str(size) for size in (rows, heads, tokens, key.shape[1])],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    products = _BACKWARD_CALL if is_backward else _FORWARD
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
"""Contracting dims of each matmul, and batch dims of its left and right operands."""
_BACKWARD_CALL: Mapping[str, _Dims] = {
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


_BACKWARD = 2.5
"""Ratio of backward to forward FLOPs. The backward pass recomputes the scores and computes four
gradients."""
_PACKING_GPUS = re.compile(r"\bG?[HB]\d{3}\b")
"""Name pattern of GPUs that support packed documents (compute capability 9.0 or 10.0)."""
_MAX_ELEMENTS = 2**31
"""Maximum number of elements that the kernels can index."""
_MASK_VALUE = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""Bias added to masked scores. cuDNN subtracts two such biases, and the result must not
overflow."""


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    mask: Mask,
) -> Float[Array, "B T N H"]:
    """Compute attention in a single kernel; `models.layers.attention.CANNOT` lists unsupported
    options.

    If there is a cache or the sequence length is odd, attention in plain JAX is used. During
    training, config rules exclude caches and odd sequence lengths.
    """
    assert not mask.soft_cap and mask.sinks is None, "rejected by a config rule"
    tokens, keys = query.shape[1], key.shape[1]
    if not mask.has_places or tokens % 2 or keys % 2:
        return xla.attend(query, key, value, mask)
    ordered = mask.is_self_ordered and mask.key_segments is None
    call = CudnnOptions(
        windows=(mask.window,) if isinstance(mask.window, int) else mask.windows,
        causal=mask.causal and ordered,
        scale=key.shape[-1] ** -0.5 if mask.scale is None else mask.scale,
    )
    seen = None if ordered else mask.seen(0, tokens, keys, causal=mask.causal)
    window = None if isinstance(mask.window, int) or not ordered else mask.window
    beside = _CudnnMask(mask.segments, window, seen)
    key, value = (interface.repeat_kv_heads(array, query.shape[2]) for array in (key, value))
    # The transpose of `mark_varying` sums the gradients of inputs that are replicated across
    # devices.
    return _attention(*mark_varying((query, key, value, beside)), call)


@dataclass(frozen=True)
class CudnnOptions:
    """Static options of a compiled attention program."""

    windows: tuple[int, ...]
    """Window sizes used by the layers. If there are several, the program selects the layer's window
    at run time."""
    causal: bool
    """Whether the causal mask compares token indices. If true, queries and keys belong to the same
    tokens.
    """
    scale: float


class _CudnnMask(NamedTuple):
    """Arrays that determine which keys are visible, as in `Mask`."""

    segments: Int[Array, "B T"]
    window: Int[Array, ""] | None
    visible: Bool[Array, "B 1 T S"] | None
    """Full mask for queries and keys that are not in sequence order."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    beside: _CudnnMask,
    call: CudnnOptions,
) -> Float[Array, "B T N H"]:
    """Compute attention. The differentiation rules run the kernels on each device, within
    `on_shards`.
    """
    return _forward(query, key, value, beside, call)[0]


def _forward(
    query: Array, key: Array, value: Array, beside: _CudnnMask, call: CudnnOptions
) -> tuple[Array, tuple[Any, ...]]:
    arrays, sums, others = _specs(query)
    packs = _supports_packing()
    run = map_shards(
        partial(local_forward, call=call, packs=packs),
        (arrays, arrays, arrays, others),
        (arrays, sums),
    )
    mixed, log_sums = mark_varying(run(query, key, value, beside))
    # Both arrays get checkpoint names, so that the kernel is not rerun if the output is saved.
    mixed, log_sums = checkpoint_name(mixed, "context"), checkpoint_name(log_sums, LOG_SUM)
    return mixed, (query, key, value, beside, mixed, log_sums)


def _backward(call: CudnnOptions, saved: tuple[Any, ...], d_mixed: Array) -> tuple[Any, ...]:
    arrays, sums, others = _specs(d_mixed)
    run = map_shards(
        partial(local_backward, call=call, packs=_supports_packing()),
        (arrays, arrays, arrays, others, arrays, sums, arrays),
        (arrays, arrays, arrays),
    )
    return *mark_varying(run(*saved, d_mixed)), None


_attention.defvjp(_forward, _backward)


def _specs(query: Array) -> tuple[PartitionSpec, PartitionSpec, _CudnnMask]:
    """Return the partition specs for arrays with heads, log-sum-exps, and arrays without heads."""
    rows, heads = interface.query_axes(query)
    batch: Any = PartitionSpec(rows)
    whole: Any = PartitionSpec()
    return (
        PartitionSpec(rows, None, heads),
        PartitionSpec(rows, heads),
        _CudnnMask(batch, whole, batch),
    )


def _supports_packing() -> bool:
    """Return whether the kernels of the mesh's devices support packed documents."""
    return _PACKING_GPUS.search(mesh_device_kind()) is not None


# Computation on one device.


def local_forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    beside: _CudnnMask,
    *,
    call: CudnnOptions,
    packs: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute the output and the float32 log-sum-exp on one device."""

    def run(kernel: Kernel, known: _KernelMask, query: Array, key: Array, value: Array) -> Any:
        with jax.named_scope(scopes.flops(_matmul_flops(query, key, call.causal))):
            mixed, sums = forward(kernel, query, key, value, _argument(known))
        return mixed, known.to_rows(sums) if isinstance(known, _PackedDocuments) else sums

    return _run_fastest_kernel(run, beside, call, packs, (query, key, value))


def local_backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    beside: _CudnnMask,
    mixed: Float[Array, "B T N H"],
    sums: Float[Array, "B N T"],
    d_mixed: Float[Array, "B T N H"],
    *,
    call: CudnnOptions,
    packs: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S G H"], Float[Array, "B S G H"]]:
    """Compute the gradients of queries, keys and values on one device."""

    def run(kernel: Kernel, known: _KernelMask, *arrays: Array) -> Any:
        query, key, value, mixed, sums, d_mixed = arrays
        sums = known.to_documents(sums) if isinstance(known, _PackedDocuments) else sums
        with jax.named_scope(scopes.flops(_BACKWARD * _matmul_flops(query, key, call.causal))):
            return backward(kernel, query, key, value, mixed, sums, d_mixed, _argument(known))

    return _run_fastest_kernel(run, beside, call, packs, (query, key, value, mixed, sums, d_mixed))


def _matmul_flops(query: Array, key: Array, causal: bool) -> float:
    rows, tokens, heads, size = query.shape
    return 4 * size * rows * heads * tokens * key.shape[1] / (2 if causal else 1)


# Kernel selection.


class _PackedDocuments(NamedTuple):
    """The packed documents in a batch of sequences, and the document index of each token."""

    documents: DocumentOffsets
    number: Int[Array, " BT"]
    """Document index of each token; documents are numbered across the batch."""

    @classmethod
    def from_segments(cls, segments: Int[Array, "B T"], packed: int) -> _PackedDocuments:
        """Return the documents of sequences that contain at most `packed` documents on average."""
        rows, tokens = segments.shape
        first = _document_starts(segments).reshape(-1)
        size, end = rows * packed, rows * tokens
        starts = jnp.nonzero(first, size=rows * (packed + 1), fill_value=end)[0].astype(jnp.int32)
        lengths = starts[1 : size + 1] - starts[:size]
        documents = DocumentOffsets(lengths.reshape(rows, -1), starts.reshape(rows, -1))
        return cls(documents, jnp.cumsum(first, dtype=jnp.int32) - 1)

    def to_rows(self, sums: Float[Array, "D N T"]) -> Float[Array, "B N T"]:
        """Convert the log-sum-exp from per-document to per-sequence token indices."""
        rows, tokens = self.documents.starts.shape[0], sums.shape[2]
        places = jnp.arange(len(self.number)) - self.documents.starts.reshape(-1)[self.number]
        return jnp.swapaxes(sums[self.number, :, places].reshape(rows, tokens, -1), 1, 2)

    def to_documents(self, sums: Float[Array, "B N T"]) -> Float[Array, "D N T"]:
        """Convert the log-sum-exp from per-sequence to per-document token indices.

        Entries beyond the end of a document are arbitrary and are never read.
        """
        _, heads, tokens = sums.shape
        twice = jnp.pad(sums, ((0, 0), (0, 0), (0, tokens)))
        starts = self.documents.starts.reshape(-1)[: self.documents.lengths.size]

        def one(start: Array) -> Array:
            place = start // tokens, 0, start % tokens
            return lax.dynamic_slice(twice, place, (1, heads, tokens))[0]

        return jax.vmap(one)(starts)


_KernelMask = _PackedDocuments | Array | None
"""Additional mask passed to a kernel: packed documents, a bias `[B, 1, T, S]`, or None."""


def _argument(known: _KernelMask) -> DocumentOffsets | Array | None:
    return known.documents if isinstance(known, _PackedDocuments) else known


def _document_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return a mask that is true for the first token of each document."""
    return jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0


def _run_fastest_kernel(
    run: Callable[..., Any],
    beside: _CudnnMask,
    call: CudnnOptions,
    packs: bool,
    arrays: tuple[Array, ...],
) -> Any:
    """Call `run(kernel, known, *arrays)` with the fastest kernel that supports the mask."""
    query, key = arrays[:2]
    masked = Kernel(call.causal, call.scale)
    hidden = _MASK_VALUE[str(query.dtype)]

    def with_numbers(seen: Bool[Array, "B 1 T S"], *arrays: Array) -> Any:
        return mark_varying(run(masked, jnp.where(seen, 0.0, hidden).astype(query.dtype), *arrays))

    if beside.visible is not None:
        return with_numbers(beside.visible, *arrays)

    def of_window(window: int, beside: _CudnnMask, *arrays: Array) -> Any:
        def by_numbers(beside: _CudnnMask, *arrays: Array) -> Any:
            # The kernel applies the causal mask itself.
            mask = Mask(beside.segments, window=window)
            seen = mask.seen(0, query.shape[1], key.shape[1], causal=False)
            return with_numbers(seen, *arrays)

        def by(packed: int) -> Callable[..., Any]:
            kernel = Kernel(call.causal, call.scale, window, packed)

            def branch(beside: _CudnnMask, *arrays: Array) -> Any:
                known = (
                    _PackedDocuments.from_segments(beside.segments, packed) if packed > 1 else None
                )
                return mark_varying(run(kernel, known, *arrays))

            return branch

        if window and not call.causal:
            return by_numbers(beside, *arrays)
        rows, tokens = beside.segments.shape
        packs_here = packs and query.size < _MAX_ELEMENTS
        counts = (1, packed) if packs_here and (packed := packed_documents(tokens)) > 1 else (1,)
        most = jnp.asarray([rows * count for count in counts])
        number = jnp.sum(jnp.sum(_document_starts(beside.segments)) > most)
        number = jnp.where(_documents_are_contiguous(beside.segments), number, len(counts))
        return lax.switch(number, [*map(by, counts), by_numbers], beside, *arrays)

    return switch_window(of_window, beside.window, call.windows, (beside, *arrays))


def _documents_are_contiguous(segments: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Return whether documents are contiguous: segment IDs increase, and padding (ID 0) comes
    last.
    """
    last = jnp.where(segments == 0, jnp.iinfo(segments.dtype).max, segments)
    return jnp.all(jnp.diff(last, axis=1) >= 0)
