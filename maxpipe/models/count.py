"""Parameters and floating-point operations of a model, from its description.

No jax: the same numbers serve planning, the start-up screen, the MFU and the cut into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from maxpipe.models.adapters import SCALE, factors_of
from maxpipe.models.spec import Kind, Matmul, Model, Param, Products, Scores


def size(param: Param) -> int:
    """Entries of a parameter."""
    return math.prod(param.shape)


def layer_params(kind: Kind) -> int:
    """Parameters of one layer of this kind."""
    return sum(map(size, counted(kind).values()))


def total(model: Model, of: Callable[[Param], float]) -> float:
    """The sum of a number over all parameters, heads ahead included; a tied table counts once."""
    layers = (model.layer_types[kind] for kind in model.layers)
    kinds = (param for kind in layers for param in counted(kind).values())
    return sum(map(of, (*model.ends.params.values(), *kinds)))


def counted(kind: Kind) -> Mapping[tuple[str, str], Param]:
    """Parameters of a layer with the dims that they have in products, however they are held."""
    held = {name: param for name, param in kind.declared.items() if name in kind.stored}
    scales = {(part, name + SCALE) for part, name in held}
    return {
        name: replace(held[name], trainable=False) if name in held else param
        for name, param in kind.params.items()
        if name not in scales
    }


@lru_cache(maxsize=64)
def num_params(model: Model) -> int:
    """Parameters of the whole model, heads ahead included; a tied table counts once."""
    return int(total(model, size))


@lru_cache(maxsize=64)
def active_params(model: Model) -> int:
    """Of them, those that one token uses: all but the experts that it is not sent to."""
    unused = sum(
        size(part.params[each.param]) * (1.0 - each.needed)
        for kind in model.all_layers
        for part in model.layer_types[kind].parts.values()
        for each in part.operations
        if isinstance(each, Matmul)
    )
    return num_params(model) - round(unused)


@lru_cache(maxsize=64)
def num_trained(model: Model) -> int:
    """Parameters that are trained."""
    return int(total(model, lambda param: size(param) if param.trainable else 0))


@lru_cache(maxsize=64)
def forward_flops_per_token(model: Model, sequence_length: int) -> int:
    """Matmul operations that one token's forward pass needs in training, a multiply-add counting 2.

    Of the attention matrix the half before the diagonal counts, and of that what a window leaves;
    of weights those that a token uses.
    """
    layers = sum(
        _matmul_weights(model.layer_types[kind], needed=True)
        + _products(model.layer_types[kind], needed=True)
        + _attention(model, layer, sequence_length)
        for layer, kind in enumerate(model.all_layers)
    )
    return round(2 * (layers + _projected(model) + sum(matrices_ahead(model).values())))


def train_flops_per_token(model: Model, sequence_length: int) -> int:
    """Forward and backward, nothing recomputed: what MFU counts (PaLM, arXiv:2204.02311).

    The backward's half that makes gradients of weights is not needed for frozen ones.
    """
    ends = model.ends
    frozen = sum(_frozen_weights(model.layer_types[kind], {}) for kind in model.layers)
    if (heads := ends.mtp_layers) is not None:
        is_frozen = {
            name: not ends.params["ahead", "layer", *name].trainable for name in heads.kind.params
        }
        frozen += heads.num_heads * _frozen_weights(heads.kind, is_frozen)
    own = matrices_ahead(model)
    frozen += sum(weights for name, weights in own.items() if not ends.params[name].trainable)
    head = ends.params["embedding" if ends.head is None else "head",]
    frozen += 0 if head.trainable else _projected(model)
    return 3 * forward_flops_per_token(model, sequence_length) - round(2 * frozen)


@lru_cache(maxsize=64)
def layer_costs(model: Model, sequence_length: int) -> tuple[float, ...]:
    """Operations of each layer's forward for one token, as computed, in network order.

    What the automatic cut into chunks balances. It follows from the model alone, so that the
    layout is the same on every device and mesh.
    """
    pairs = scored_pairs(sequence_length) / sequence_length
    of_kind = {
        name: 2.0
        * (
            _matmul_weights(kind, needed=False)
            + _products(kind, needed=False)
            + 2 * _heads(kind) * pairs
        )
        for name, kind in model.layer_types.items()
    }
    return tuple(of_kind[kind] for kind in model.layers)


@lru_cache(maxsize=256)
def computed_share(kind: Kind) -> dict[tuple[str, str], float]:
    """(part, name) -> share of a parameter's entries that is multiplied with each token."""
    found = dict.fromkeys(counted(kind), 1.0)
    for name, part in kind.parts.items():
        for each in part.operations:
            if isinstance(each, Matmul):
                found[name, each.param] = each.computed
    return found


def _matmul_weights(kind: Kind, *, needed: bool) -> float:
    factors = sum(map(size, factors_of(kind).values()))
    return factors + sum(
        size(part.params[each.param]) * (each.needed if needed else each.computed)
        for part in kind.parts.values()
        for each in part.operations
        if isinstance(each, Matmul)
    )


def _products(kind: Kind, *, needed: bool) -> float:
    """Multiply-adds of a token's activations with each other, scores left out."""
    return sum(
        each.heads * (each.needed if needed else each.computed)
        for part in kind.parts.values()
        for each in part.operations
        if isinstance(each, Products)
    )


def _frozen_weights(kind: Kind, is_frozen: Mapping[tuple[str, str], bool]) -> float:
    """Of those that a token uses, entries that are not trained, as the kind or `is_frozen` says."""
    return sum(
        size(part.params[each.param]) * each.needed
        for name, part in kind.parts.items()
        for each in part.operations
        if isinstance(each, Matmul)
        and is_frozen.get((name, each.param), not kind.params[name, each.param].trainable)
    )


def _heads(kind: Kind) -> float:
    """Sum of the sizes of all heads that are scored."""
    return sum(
        each.heads * each.head_dim
        for part in kind.parts.values()
        for each in part.operations
        if isinstance(each, Scores)
    )


def _attention(model: Model, layer: int, tokens: int) -> float:
    """Multiply-adds of a layer's scores and mixing that one token needs."""
    kind = model.layer_types[model.all_layers[layer]]
    return sum(
        2 * each.heads * each.head_dim * _visible(tokens, _window(model, each, layer))
        for part in kind.parts.values()
        for each in part.operations
        if isinstance(each, Scores)
    )


def _window(model: Model, scores: Scores, layer: int) -> float:
    return model.values[scores.window][layer] if scores.window else 0


def _visible(tokens: int, window: float) -> float:
    """Keys that a query sees on average."""
    if not 0 < window < tokens:
        return tokens // 2
    return window - window**2 / (2 * tokens)


def _projected(model: Model) -> int:
    """Entries of the output projection, for each head; a tied table is one as well."""
    ends = model.ends
    heads = 0 if ends.mtp is None else ends.mtp.num_heads
    return (1 + heads) * size(ends.head or ends.embedding)


def matrices_ahead(model: Model) -> dict[tuple[str, ...], int]:
    """Entries of the matrices that heads ahead have besides layers, by name."""
    return {
        name: size(param)
        for name, param in model.ends.params.items()
        if name in (("ahead", "transform"), ("ahead", "projection"))
    }


_KERNEL_LANES = 128
"""Kernels want multiples of this number of tokens."""


def tokens_before(windows: Iterable[int], run: int) -> int:
    """How many tokens in front of `run` next to each other their queries may see, of those that
    other devices have: as many as the largest window says, `run` for all.

    `windows` are those of all layers, 0 for none.
    """
    sizes = [*windows] or [0]
    if 0 in sizes:
        return run
    before = max(sizes) - 1
    before = before if run % _KERNEL_LANES else -(-before // _KERNEL_LANES) * _KERNEL_LANES
    return min(before, run)


QUERY_BLOCK, MAX_BLOCKS = 256, 8
"""Queries whose scores plain attention holds at once, and into how many blocks it cuts a
sequence at most; a block skips its future's keys."""


def query_blocks(tokens: int, block: int = 0) -> list[tuple[int, int]]:
    """(start, stop) of each block of queries; it scores the keys up to `stop`. 0 chooses."""
    block = block or max(QUERY_BLOCK, tokens // MAX_BLOCKS)
    if tokens % block:
        block = tokens
    return [(start, start + block) for start in range(0, tokens, block)]


_BLOCKS, _LANES = ((16_384, 512), (2048, 256), (0, 128)), 8
"""Queries and keys whose scores blockwise attention holds at once, at most, by the fewest
tokens of a sequence. On CPUs 128 needs the least processor time, and 256 the least by the clock,
as several cores share it (`benchmarks/attention.md`). Several blocks have a multiple of `_LANES`
tokens."""


def even_blocks(tokens: int, block: int = 0) -> int:
    """Size of the blocks into which blockwise attention cuts tokens, of about the same size.

    `block` is the largest allowed, 0 for the usual one. The last block may be partly empty.
    """
    block = block or next(size for least, size in _BLOCKS if tokens >= least)
    count = -(-tokens // block)
    size = -(-tokens // count)
    return size if count == 1 else -(-size // _LANES) * _LANES


_DOCUMENT, _MOST_DOCUMENTS, _MOST_WORKED_ON = 512, 8, 2**16


def packed_documents(tokens: int) -> int:
    """Documents of a row, on average over rows, that cuDNN's kernels are given at most; 1 for none.

    Its backward works on the gradients of a whole row for each of them: more for shorter documents
    would take much memory, and for very long rows even a few would.
    """
    return max(1, min(tokens // _DOCUMENT, _MOST_DOCUMENTS, _MOST_WORKED_ON // tokens))


_UNROLLED_BLOCK, _UNROLLED_TOKENS = 64, 512
"""Queries of a block, and tokens of a row at most, where blockwise attention has no loops: on CPUs
0.6 of the processor time with 256 tokens (`benchmarks/attention.md`)."""


def unrolled_blocks(
    tokens: int, windows: Sequence[int] = (0,), size: int = _UNROLLED_BLOCK
) -> tuple[tuple[int, int, int], ...]:
    """(first key, start, stop) of blocks of queries without loops; none for long rows.

    A block scores the keys from the first that it sees under the largest window, 0 for none, to its
    own end.
    """
    if tokens > _UNROLLED_TOKENS:
        return ()
    window = max(windows) if all(windows) else tokens
    return tuple(
        (max(0, start - window + 1) // size * size, start, min(start + size, tokens))
        for start in range(0, tokens, size)
    )


def scored_pairs(tokens: int, *, by_blocks: bool = False) -> int:
    """Pairs of query and key of a sequence that plain attention scores, or one by blocks."""
    if by_blocks and (unrolled := unrolled_blocks(tokens)):
        return sum((stop - start) * (stop - first) for first, start, stop in unrolled)
    if by_blocks:
        size = even_blocks(tokens)
        count = -(-tokens // size)
        return size**2 * count * (count + 1) // 2
    return sum((stop - start) * stop for start, stop in query_blocks(tokens))


def scored_keys(tokens: int) -> int:
    """Keys of a sequence that plain attention's blocks of queries score, of all blocks."""
    return sum(stop for _, stop in query_blocks(tokens))
