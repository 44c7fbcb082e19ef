"""Count the parameters and FLOPs of a model from its spec.

The module does not import jax. `plan`, the start-up screen, the MFU metric and the automatic layer
partition use these counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from maxpipe.models.adapters import SCALE, SCALE_MEAN, SCALE_SCALE, factors_of
from maxpipe.models.spec import LayerType, Matmul, Model, Param, Products, Scores


def size(param: Param) -> int:
    """Return the number of elements in a parameter."""
    return math.prod(param.shape)


def layer_params(layer_type: LayerType) -> int:
    """Return the number of parameters in one layer of this type."""
    return sum(map(size, counted(layer_type).values()))


def total(model: Model, of: Callable[[Param], float]) -> float:
    """Sum `of(param)` over all parameters, including those of multi-token prediction heads.

    A tied embedding table is counted once.
    """
    layers = (model.layer_types[layer_type] for layer_type in model.layers)
    layer_types = (param for layer_type in layers for param in counted(layer_type).values())
    return sum(map(of, (*model.ends.params.values(), *layer_types)))


def counted(layer_type: LayerType) -> Mapping[tuple[str, str], Param]:
    """Return a layer's parameters, with quantized matrices in their original unquantized shapes."""
    held = {name: param for name, param in layer_type.declared.items() if name in layer_type.stored}
    ends = (SCALE, SCALE_SCALE, SCALE_MEAN)
    scales = {(part, name + end) for part, name in held for end in ends}
    return {
        name: replace(held[name], trainable=False) if name in held else param
        for name, param in layer_type.params.items()
        if name not in scales
    }


@lru_cache(maxsize=64)
def num_params(model: Model) -> int:
    """Return the number of parameters, including those of multi-token prediction heads.

    A tied embedding table is counted once.
    """
    return int(total(model, size))


@lru_cache(maxsize=64)
def active_params(model: Model) -> int:
    """Return the number of active parameters: those that one token uses, excluding unselected
    experts.
    """
    unused = sum(
        size(layer_type.declared.get(key) or layer_type.params[key]) * (1.0 - share)
        for layer_type in map(model.layer_types.__getitem__, model.all_layers)
        for key, share in _matmul_shares(layer_type, needed=True).items()
    )
    return num_params(model) - round(unused)


@lru_cache(maxsize=64)
def num_trained(model: Model) -> int:
    """Return the number of trained parameters."""
    return int(total(model, lambda param: size(param) if param.trainable else 0))


@lru_cache(maxsize=64)
def forward_flops_per_token(model: Model, sequence_length: int) -> int:
    """Return the matmul FLOPs per token of a training forward pass; a multiply-add counts as 2
    FLOPs.

    Attention scores are counted for the causal half only, limited to the window. Weights are
    counted only if the token uses them.
    """
    layers = sum(
        _matmul_weights(model.layer_types[layer_type], needed=True)
        + _products(model.layer_types[layer_type], needed=True)
        + _attention(model, layer, sequence_length)
        for layer, layer_type in enumerate(model.all_layers)
    )
    return round(2 * (layers + _projected(model) + sum(matrices_ahead(model).values())))


def train_flops_per_token(model: Model, sequence_length: int) -> int:
    """Return the FLOPs per token of the forward and backward passes, without recomputation, as used
    to compute MFU.

    Weight gradients of frozen parameters are not counted. Source: PaLM, arXiv:2204.02311.
    """
    ends = model.ends
    frozen = sum(_frozen_weights(model.layer_types[layer_type], {}) for layer_type in model.layers)
    if (heads := ends.mtp_layers) is not None:
        is_frozen = {
            name: not ends.params["ahead", "layer", *name].trainable
            for name in heads.layer_type.params
        }
        frozen += heads.num_heads * _frozen_weights(heads.layer_type, is_frozen)
    own = matrices_ahead(model)
    frozen += sum(weights for name, weights in own.items() if not ends.params[name].trainable)
    head = ends.params["embedding" if ends.head is None else "head",]
    frozen += 0 if head.trainable else _projected(model)
    return 3 * forward_flops_per_token(model, sequence_length) - round(2 * frozen)


@lru_cache(maxsize=64)
def layer_costs(model: Model, sequence_length: int) -> tuple[float, ...]:
    """Return the FLOPs per token computed in the forward pass of each layer, from first to last
    layer.

    The automatic layer partition balances these costs. The costs depend only on the model, so the
    partition is the same on every device and mesh.
    """
    pairs = scored_pairs(sequence_length) / sequence_length
    of_type = {
        name: 2.0
        * (
            _matmul_weights(layer_type, needed=False)
            + _products(layer_type, needed=False)
            + 2 * _heads(layer_type) * pairs
        )
        for name, layer_type in model.layer_types.items()
    }
    return tuple(of_type[layer_type] for layer_type in model.layers)


@lru_cache(maxsize=256)
def computed_share(layer_type: LayerType) -> dict[tuple[str, str], float]:
    """Return the fraction of each parameter's elements that the parameter's matmul multiplies per
    token, keyed by (sublayer, name).
    """
    return dict.fromkeys(counted(layer_type), 1.0) | _matmul_shares(layer_type, needed=False)


def _matmul_shares(layer_type: LayerType, *, needed: bool) -> dict[tuple[str, str], float]:
    """Return the fraction of the elements that one token needs, or that the matmul multiplies, of
    each parameter that is used in a matmul. Adapter factors have the fraction of their matrix.
    """
    shares = {
        (name, matmul.param): matmul.needed if needed else matmul.computed
        for name, part in layer_type.parts.items()
        for matmul in part.operations
        if isinstance(matmul, Matmul)
    }
    return shares | {factor: shares[matrix] for factor, matrix in factors_of(layer_type).items()}


def _matmul_weights(layer_type: LayerType, *, needed: bool) -> float:
    return sum(
        size(layer_type.declared.get(key) or layer_type.params[key]) * share
        for key, share in _matmul_shares(layer_type, needed=needed).items()
    )


def _products(layer_type: LayerType, *, needed: bool) -> float:
    """Return the multiply-adds per token in matmuls between two activations, excluding attention
    scores.
    """
    return sum(
        product.heads * (product.needed if needed else product.computed)
        for part in layer_type.parts.values()
        for product in part.operations
        if isinstance(product, Products)
    )


def _frozen_weights(layer_type: LayerType, is_frozen: Mapping[tuple[str, str], bool]) -> float:
    """Return the number of frozen weights that one token uses.

    `is_frozen` overrides the frozen parameters declared by the layer type.
    """
    return sum(
        size(part.params[matmul.param]) * matmul.needed
        for name, part in layer_type.parts.items()
        for matmul in part.operations
        if isinstance(matmul, Matmul)
        and is_frozen.get((name, matmul.param), not layer_type.params[name, matmul.param].trainable)
    )


def _heads(layer_type: LayerType) -> float:
    return sum(
        scores.heads * scores.head_dim
        for part in layer_type.parts.values()
        for scores in part.operations
        if isinstance(scores, Scores)
    )


def _attention(model: Model, layer: int, tokens: int) -> float:
    """Return the multiply-adds per token in the attention matmuls of a layer."""
    layer_type = model.layer_types[model.all_layers[layer]]
    return sum(
        2
        * scores.heads
        * scores.head_dim
        * _visible(tokens, _window(model, scores, layer), scores.chunked)
        for part in layer_type.parts.values()
        for scores in part.operations
        if isinstance(scores, Scores)
    )


def _window(model: Model, scores: Scores, layer: int) -> float:
    return model.values[scores.window][layer] if scores.window else 0


def _visible(tokens: int, window: float, chunked: bool) -> float:
    """Return the mean number of keys that a query token attends to."""
    if not 0 < window < tokens:
        return tokens // 2
    if chunked:
        chunks, last = divmod(tokens, window)
        return (chunks * window**2 + last**2) / (2 * tokens)
    return window - window**2 / (2 * tokens)


def _projected(model: Model) -> int:
    """Return the number of weights in the output projection (or the tied table), counted once for
    each output head.
    """
    ends = model.ends
    heads = 0 if ends.mtp is None else ends.mtp.num_heads
    return (1 + heads) * size(ends.head or ends.embedding)


def matrices_ahead(model: Model) -> dict[tuple[str, ...], int]:
    """Return the number of weights in each multi-token prediction matrix outside the layers, keyed
    by name.
    """
    return {
        name: size(param)
        for name, param in model.ends.params.items()
        if name in (("ahead", "transform"), ("ahead", "projection"))
    }


_KERNEL_LANES = 128
"""Kernels require token counts that are multiples of this number."""


def tokens_before(windows: Iterable[int], run: int) -> int:
    """Return the number of preceding tokens that a device with `run` consecutive tokens needs from
    other devices.

    The largest window determines the result. If a layer has no window, the result is `run`.
    `windows` has one entry per layer; an entry of 0 means no window.
    """
    sizes = [*windows] or [0]
    if 0 in sizes:
        return run
    before = max(sizes) - 1
    before = before if run % _KERNEL_LANES else -(-before // _KERNEL_LANES) * _KERNEL_LANES
    return min(before, run)


QUERY_BLOCK, MAX_BLOCKS = 256, 8
"""Default number of query tokens per block in plain attention, and the maximum number of blocks per
sequence. Each block skips the keys after its last query token."""


def query_blocks(tokens: int, block: int = 0) -> list[tuple[int, int]]:
    """Return the (start, stop) token indices of each query block. A block computes the scores of
    the keys before `stop`.

    If `block` is 0, the block size is selected automatically.
    """
    block = block or max(QUERY_BLOCK, tokens // MAX_BLOCKS)
    if tokens % block:
        block = tokens
    return [(start, start + block) for start in range(0, tokens, block)]


_BLOCKS, _LANES = ((16_384, 512), (2048, 256), (0, 128)), 8
"""Block sizes of blockwise attention, keyed by minimum sequence length. On CPUs, a block size of
128 needs the least CPU time, and 256 the least wall-clock time, because the blocks are spread over
several cores (`benchmarks/attention.md`). If a sequence has several blocks, the block size is a
multiple of `_LANES`."""


def even_blocks(tokens: int, block: int = 0) -> int:
    """Return the block size that splits a sequence evenly for blockwise attention.

    `block` is the maximum size; if 0, the default is used. The last block may be padded.
    """
    block = block or next(size for least, size in _BLOCKS if tokens >= least)
    count = -(-tokens // block)
    size = -(-tokens // count)
    return size if count == 1 else -(-size // _LANES) * _LANES


_DOCUMENT, _MOST_DOCUMENTS, _MOST_WORKED_ON = 512, 8, 2**16


def packed_documents(tokens: int) -> int:
    """Return the largest average number of documents per sequence for which cuDNN's packed kernels
    are used; if 1, they are never used.

    The backward pass allocates full-sequence gradient arrays for each document. With more
    documents, these arrays would need too much memory; in very long sequences, even the arrays of a
    few documents would.
    """
    return max(1, min(tokens // _DOCUMENT, _MOST_DOCUMENTS, _MOST_WORKED_ON // tokens))


_UNROLLED_BLOCK, _UNROLLED_TOKENS = 64, 512
"""Block size and maximum sequence length of unrolled blockwise attention. With 256 tokens on CPUs,
unrolled attention needs 0.60 to 0.85 times the CPU time of plain attention
(`benchmarks/attention.md`)."""


def unrolled_blocks(
    tokens: int, windows: Sequence[int] = (0,), size: int = _UNROLLED_BLOCK
) -> tuple[tuple[int, int, int], ...]:
    """Return the (first key, start, stop) token indices of each query block in unrolled attention;
    empty for long sequences.

    A block computes the scores of the keys from the first key in the largest window to `stop`. A
    window of 0 means no window.
    """
    if tokens > _UNROLLED_TOKENS:
        return ()
    window = max(windows) if all(windows) else tokens
    return tuple(
        (max(0, start - window + 1) // size * size, start, min(start + size, tokens))
        for start in range(0, tokens, size)
    )


SELECTION_BLOCK = 32
"""Maximum number of query tokens per block of sparse attention. A key has one bit for each of
them."""


def selection_words(tokens: int, context: int = 1) -> int:
    """Return the number of four-byte words in which a device stores which keys the query tokens of
    a sequence select. Each of `context` devices holds two runs of query tokens, and all keys.
    """
    runs = 1 if context == 1 else 2
    return runs * -(-tokens // (context * runs) // SELECTION_BLOCK) * tokens


def scored_pairs(tokens: int, *, by_blocks: bool = False) -> int:
    """Return the number of (query, key) pairs per sequence for which plain or blockwise
    attention computes scores.
    """
    if by_blocks and (unrolled := unrolled_blocks(tokens)):
        return sum((stop - start) * (stop - first) for first, start, stop in unrolled)
    if by_blocks:
        size = even_blocks(tokens)
        count = -(-tokens // size)
        return size**2 * count * (count + 1) // 2
    return sum((stop - start) * stop for start, stop in query_blocks(tokens))


def scored_keys(tokens: int) -> int:
    """Return the number of keys for which plain attention computes scores, summed over its
    query blocks.
    """
    return sum(stop for _, stop in query_blocks(tokens))
