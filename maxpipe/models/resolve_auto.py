"""Resolve size-dependent defaults: `model.attention=auto` and the size of loss blocks.

The module does not import jax. Forecasts and training programs call the same functions once the
platform is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.attention import AUTO, CANNOT, Attention
from maxpipe.models.layers.compressed_attention import CompressedAttention
from maxpipe.models.layers.indexer import INDEX_TOPK
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.registry import describe
from maxpipe.parallel.axes import ContextAttention

_LONG = {"cpu": 256, "tpu": 4096, "gpu": 4096}
"""Minimum sequence length for which `auto` selects `blockwise`. On CPUs, `blockwise` is faster for
64 tokens or more (`benchmarks/attention.md`), but compilation is slower with several blocks. On
other platforms, `blockwise` is used if the scores of plain attention would need too much memory."""

_ORDER = {"tpu": ("splash", "blockwise"), "gpu": ("cudnn", "blockwise"), "cpu": ("blockwise",)}
"""Backends in order of preference, keyed by platform. `xla` is the fallback: it supports every
option and platform."""

_SPLASH_TOKENS = 128
_CUDNN_HEAD, _CUDNN_LARGEST = 8, 128


BLOCK_TOKENS = 2048
"""Number of tokens in a block of the loss computation. Each block reads the output projection and
its gradient sums, so smaller blocks make matmuls memory-bound on chips with low memory
bandwidth."""
_LARGE_LOGITS = 2**29
"""Size in bytes of a microbatch's float32 logits on one device, above which the loss is computed in
blocks."""


ALONE = ContextAttention()
"""Sharding in which every device holds full sequences."""


class Choice(NamedTuple):
    """The selected backend, and the reasons why preferred backends were not selected."""

    backend: str
    rejected: tuple[str, ...] = ()


def choose(
    model: ModelConfig, platform: str, tokens: int, over_context: ContextAttention = ALONE
) -> Choice:
    """Return the backend for sequences of `tokens` tokens; `platform` is the platform name used by
    jax.
    """
    if model.attention != AUTO:
        return Choice(model.attention)
    sparse = any(INDEX_TOPK in part.options for part in _attention_parts(model))
    if has_ring(model, over_context) or (sparse and over_context.context > 1):
        return Choice("blockwise")
    device = platform if platform in _ORDER else "gpu"
    refused: list[str] = []
    for backend in _ORDER[device]:
        why = next(_refuses(backend, device, model, tokens, over_context), "")
        if not why:
            return Choice(backend, tuple(refused))
        refused.append(f"{backend} {why}")
    return Choice("xla", tuple(refused))


def resolved(
    model: ModelConfig, platform: str, tokens: int, over_context: ContextAttention = ALONE
) -> ModelConfig:
    """Return the model config with `auto` replaced by the selected backend."""
    return replace(model, attention=choose(model, platform, tokens, over_context).backend)


def words(
    model: ModelConfig, platform: str, tokens: int, over_context: ContextAttention = ALONE
) -> str:
    """Describe which backend was selected and why; return "" unless `model.attention=auto`."""
    if model.attention != AUTO:
        return ""
    backend, refused = choose(model, platform, tokens, over_context)
    if has_ring(model, over_context):
        method = over_context.method
        return f"{backend}, because mesh.context_attention={method} computes attention in blocks"
    chosen = f"{backend}, selected by model.attention=auto on {platform} for {tokens:,} tokens"
    return f"{chosen}: {', '.join(refused)}" if refused else chosen


def loss_block(setting: int, tokens: int, vocabulary: int) -> int:
    """Return the number of tokens per loss block, whose logits are in memory at the same time; 0
    means the full microbatch.

    `setting` is `pipeline.loss_block_tokens`. `tokens` is the number of tokens of the microbatch on
    one device, and `vocabulary` is the number of logits per token on one device.
    """
    if setting < 0:
        setting = BLOCK_TOKENS if 4 * tokens * vocabulary > _LARGE_LOGITS else 0
    return setting if setting < tokens else 0


def _refuses(
    backend: str, device: str, model: ModelConfig, tokens: int, over_context: ContextAttention
) -> Iterator[str]:
    if backend not in CANNOT:
        yield "is not available"
        return
    mixing = _attention_parts(model)
    lacks = {option for part in mixing for option in part.options & CANNOT[backend]}
    for option in sorted(lacks):
        yield f"does not support {option.replace('_', ' ')}"
    if backend == "blockwise" and tokens < _LONG[device]:
        yield f"requires {_LONG[device]:,} tokens or more"
    context = over_context.context
    whole = context == 1 or all(
        over_context.exchange_size(part.num_heads, _key_heads(part)) == context for part in mixing
    )
    run = tokens if whole else tokens // (2 * context)  # each device holds two chunks
    if backend == "splash" and run % _SPLASH_TOKENS:
        yield f"requires a multiple of {_SPLASH_TOKENS} tokens"
    if backend == "cudnn":
        if model.compute_dtype == "float32":
            yield "does not support float32"
        for size in {part.head_dim for part in mixing}:
            if size % _CUDNN_HEAD or size > _CUDNN_LARGEST:
                yield (
                    f"requires head sizes that are multiples of {_CUDNN_HEAD}, up to "
                    f"{_CUDNN_LARGEST}"
                )
        if tokens % 2:
            yield "requires an even number of tokens"


def has_ring(model: ModelConfig, over_context: ContextAttention) -> bool:
    """Return True if keys are passed around a ring of devices. Scores are then computed block by
    block.
    """
    parts = _attention_parts(model)
    return any(over_context.ring_size(part.num_heads, _key_heads(part)) > 1 for part in parts)


_AttentionPart = Attention | LatentAttention | CompressedAttention


def _attention_parts(model: ModelConfig) -> list[_AttentionPart]:
    return [
        part
        for layer_type in describe(model).layer_types.values()
        for part in layer_type.parts.values()
        if isinstance(part, _AttentionPart)
    ]


def _key_heads(part: _AttentionPart) -> int:
    if not isinstance(part, LatentAttention):
        return part.num_kv_heads
    return 1 if part.is_sparse else part.num_heads
