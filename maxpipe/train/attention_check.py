"""Compare an attention backend with plain attention before a run uses it on new hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxpipe.errors import Code, ConfigError
from maxpipe.models.layers.attention import AUTO, Attention
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.spec import Model
from maxpipe.nn.attention import BACKENDS
from maxpipe.nn.attention.interface import AttentionBackend, Mask
from maxpipe.train.kernel_check import KernelCheck, KernelDeviation, deviation

_TOKENS, _GROUPS, _SHARED = 256, 2, 4
"""Maximum sizes used in the check: tokens, key/value heads, and query heads per key/value head."""
_DOCUMENTS = 3
_CUDNN_TOKENS, _CUDNN_DOCUMENTS = 1024, (1, 2, 5)
"""Tokens and documents per sequence used to check the cudnn backend, which selects one of three
kernels based on the number of documents."""

AttentionPart = Attention | LatentAttention


def attention_check(model: Model, dtype: str, tokens: int) -> KernelCheck:
    """Return the check of all attention types of a model; plain attention is not checked."""
    cases = [*_cases(model, tokens)]
    return KernelCheck(
        "attention",
        [f"{part.backend} {_shape(part, rows)}" for part, rows, _ in cases],
        lambda: [each for case in cases for each in _compare_backend(*case, dtype)],
        _error,
    )


def _error(rule: str) -> ConfigError:
    key = "model.attention"
    return ConfigError.one(Code.MODEL_ATTENTION, key, None, rule, f"Set {key}=xla.")


def _cases(model: Model, tokens: int) -> Iterator[tuple[AttentionPart, int, tuple[int, ...]]]:
    """Yield (sublayer, number of tokens, window sizes) for each distinct attention type."""
    seen: set[str] = set()
    for kind in model.layer_types.values():
        for part in kind.parts.values():
            if not isinstance(part, AttentionPart) or part.backend in (AUTO, "xla"):
                continue
            rows = min(tokens, _CUDNN_TOKENS if part.backend == "cudnn" else _TOKENS)
            if (shape := _shape(part, rows)) not in seen:
                seen.add(shape)
                name = part.window if isinstance(part, Attention) else ""
                sizes = {min(int(size), rows // 3) for size in model.values[name]} if name else ()
                yield part, rows, tuple(sorted(sizes))


def _documents(part: AttentionPart) -> tuple[int, ...]:
    """Return the numbers of documents per sequence to check."""
    return _CUDNN_DOCUMENTS if part.backend == "cudnn" else (_DOCUMENTS,)


def _shape(part: AttentionPart, tokens: int) -> str:
    """Return a string with the sizes and options of an attention sublayer."""
    groups, shared, values = _heads(part)
    more = [*sorted(part.options), *(["window"] if getattr(part, "window", "") else [])]
    return " ".join(
        [f"{tokens} tokens {groups * shared}/{groups} x {part.head_dim}/{values}", *more]
    )


def _heads(part: AttentionPart) -> tuple[int, int, int]:
    """Return the numbers of key/value heads and of query heads per key/value head, and the size of
    a value head, as used in the check.
    """
    if isinstance(part, LatentAttention):
        return min(part.num_heads, _GROUPS), 1, part.value_size
    shared = min(part.num_heads // part.num_kv_heads, _SHARED)
    return min(part.num_kv_heads, _GROUPS), shared, part.head_dim


def _compare_backend(
    part: AttentionPart, tokens: int, windows: tuple[int, ...], dtype: str
) -> Iterator[KernelDeviation]:
    """Yield the deviation for each number of documents per sequence, with the largest window."""
    groups, shared, values = _heads(part)
    heads, random = groups * shared, np.random.default_rng(0)
    shared_dims = part.rope_size if isinstance(part, LatentAttention) else 0
    shapes = (heads, part.head_dim), (groups, part.head_dim), (groups, values), (heads, values)
    drawn = [random.standard_normal((1, tokens, *shape)) for shape in shapes]
    sinks = random.standard_normal(heads) if "sinks" in part.options else None
    query, key, value, cotangent = (jnp.asarray(each, dtype) for each in drawn)

    def run(
        attend: AttentionBackend, given: Any, cotangent: Array, window: Array, segments: Array
    ) -> list[Array]:
        def mixed(query: Array, key: Array, value: Array, sinks: Array | None) -> Array:
            if shared_dims:
                key = key.at[..., -shared_dims:].set(key[:, :, :1, -shared_dims:])
            mask = Mask(
                segments,
                window=window if windows else 0,
                windows=windows,
                scale=part.scale,
                soft_cap=getattr(part, "soft_cap", 0.0),
                sinks=sinks,
                shared_dims=shared_dims,
            )
            return attend(query, key, value, mask)

        result, pullback = jax.vjp(mixed, *given)
        return [result, *jax.tree.leaves(pullback(cotangent))]

    def all_of(given: Any, cotangent: Array, *rest: Array) -> list[list[Array]]:
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (given, cotangent))
        with jax.default_matmul_precision("highest"):
            exact = run(BACKENDS["xla"], *wide, *rest)
        backends = (BACKENDS["xla"], BACKENDS[part.backend])
        return [exact, *(run(each, given, cotangent, *rest) for each in backends)]

    given = (query, key, value, None if sinks is None else jnp.asarray(sinks, dtype))
    window, compare = jnp.int32(max(windows, default=0)), jax.jit(all_of)
    for documents in _documents(part):
        segments = jnp.asarray(1 + np.arange(tokens)[None] * documents // tokens, jnp.int32)
        exact, plain, own = jax.device_get(compare(given, cotangent, window, segments))
        yield deviation(part.backend, dtype, exact, plain, own)
