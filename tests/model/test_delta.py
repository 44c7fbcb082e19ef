"""The gated delta rule compared with its token-by-token recurrence."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers import gated_delta
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn import gated_delta as module
from maxpipe.nn.gated_delta import GatedDelta
from tests.nn.parts import RULES, assert_close, context, packed, with_values

PART = gated_delta.GatedDelta(
    d_model=10,
    num_key_heads=2,
    num_value_heads=6,
    key_size=5,
    value_size=7,
    kernel=4,
    norm=RMSNorm(7, 1e-4),
    out_gain=1.0,
    chunk=4,
)
LENGTHS = [[13], [1, 5, 2, 5], [7, 3, 3]]
"""Document lengths of each sequence of 13 tokens, which no chunk size divides."""
SEGMENTS, _ = packed(LENGTHS)
Params = dict[str, jax.Array]


def drawn_for(part: gated_delta.GatedDelta = PART) -> tuple[Params, jax.Array]:
    """Return parameters that differ from their initial values, and an input."""
    keys = iter(jax.random.split(jax.random.key(1), 20))
    drawn = {
        name: jax.random.normal(next(keys), param.shape) * 0.7
        for name, param in part.params.items()
    }
    return drawn, jax.random.normal(next(keys), (3, 13, part.d_model))


@partial(jax.jit, static_argnames="part")
def run(
    params: Params,
    x: jax.Array,
    segments: Any,
    cache: Any = None,
    part: gated_delta.GatedDelta = PART,
) -> Any:
    """Return the output and the updated cache."""
    built = GatedDelta(part, RULES)
    for name, value in params.items():
        getattr(built, name)[...] = value
    found = built(x, context(segments, segments, cache=cache))
    return found.x, found.cache


def token_by_token(w: Params, x: jax.Array, part: gated_delta.GatedDelta = PART) -> jax.Array:
    """Compute one document `[tokens, D]` in plain JAX."""
    group, dk, dv, kernel = part.group, part.key_size, part.value_size, part.kernel
    inner = jnp.einsum("td,dke->tke", x, w["qkvz"])
    gates = jnp.einsum("td,dke->tke", x, w["ba"])
    sizes = (dk, dk, group * dv, group * dv)
    query, key, value, z = jnp.split(inner, np.cumsum(sizes)[:-1], axis=-1)
    value, z = (each.reshape(len(x), -1, dv) for each in (value, z))
    write, forget = (each.reshape(len(x), -1) for each in jnp.split(gates, 2, axis=-1))

    def convolved(name: str, rows: jax.Array) -> jax.Array:
        before = jnp.concatenate([jnp.zeros((kernel - 1, *rows.shape[1:])), rows])
        taps = [before[at : at + len(rows)] * w[f"conv_{name}"][..., at] for at in range(kernel)]
        return jax.nn.silu(sum(taps[1:], taps[0]))

    query, key = convolved("query", query), convolved("key", key)
    query, key = (each / jnp.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (query, key))
    query, key = (jnp.repeat(each, group, axis=1) for each in (query / math.sqrt(dk), key))
    value = convolved("value", value)
    kept = jnp.exp(-jnp.exp(w["decay"]) * jax.nn.softplus(forget + w["decay_bias"]))

    def step(state: jax.Array, each: Any) -> tuple[jax.Array, jax.Array]:
        query, key, value, write, kept = each
        state = state * kept[:, None, None]
        wrong = write[:, None] * (value - jnp.einsum("hkv,hk->hv", state, key))
        state = state + key[:, :, None] * wrong[:, None, :]
        return state, jnp.einsum("hkv,hk->hv", state, query)

    state = jnp.zeros((value.shape[1], dk, dv))
    _, found = jax.lax.scan(step, state, (query, key, value, jax.nn.sigmoid(write), kept))
    found = found / jnp.sqrt((found**2).mean(-1, keepdims=True) + part.norm.epsilon)
    found = found * w["norm"] * jax.nn.silu(z)
    return jnp.einsum("thv,hvd->td", found, w["out"])


def by_documents(w: Params, x: jax.Array, part: gated_delta.GatedDelta = PART) -> jax.Array:
    """Compute each document of `LENGTHS` separately."""
    ends = [np.cumsum(row) for row in LENGTHS]
    first = [
        (row, stop - size)
        for row, (stops, sizes) in enumerate(zip(ends, LENGTHS, strict=True))
        for stop, size in zip(stops, sizes, strict=True)
    ]
    ahead = jnp.pad(x, ((0, 0), (0, 13), (0, 0)))
    each = jnp.stack([ahead[row, start : start + 13] for row, start in first])
    found = iter(jax.vmap(partial(token_by_token, w, part=part))(each))
    rows = [[next(found)[:size] for size in row] for row in LENGTHS]
    return jnp.stack([jnp.concatenate(row) for row in rows])


@pytest.mark.parametrize("chunk", [4, 64])
def test_chunked_rule_equals_token_recurrence(chunk: int) -> None:
    part = replace(PART, chunk=chunk)
    drawn, x = drawn_for(part)
    towards = jax.random.normal(jax.random.key(7), x.shape)

    def of_chunks(w: Params, x: jax.Array) -> Any:
        found, _ = run(w, x, SEGMENTS, part=part)
        return (found * towards).sum(), found

    def of_tokens(w: Params, x: jax.Array) -> Any:
        found = by_documents(w, x, part)
        return (found * towards).sum(), found

    got, wanted = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(drawn, x)
        for f in (of_chunks, of_tokens)
    )
    assert_close(got[0][1], wanted[0][1])
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(wanted[1]), strict=True
    ):
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def separate(params: Params, part: gated_delta.GatedDelta = PART) -> Params:
    """Split the fused projections into the matrices of Qwen3.5."""
    found = {name: each for name, each in params.items() if name not in ("qkvz", "ba")}
    sizes = (part.key_size, part.key_size, part.group * part.value_size)
    query, key, value, gate = jnp.split(params["qkvz"], np.cumsum(sizes), axis=-1)
    write, forget = jnp.split(params["ba"], 2, axis=-1)
    by_value = (part.d_model, part.num_value_heads)
    found |= {"query": query, "key": key, "write": write.reshape(by_value)}
    found |= {
        name: each.reshape(*by_value, -1) for name, each in (("value", value), ("gate", gate))
    }
    return found | {"forget": forget.reshape(by_value)}


def test_separate_projections_equal_fused_projections() -> None:
    part = replace(PART, fused=False)
    drawn, x = drawn_for()
    apart = separate(drawn)
    assert {name: each.shape for name, each in apart.items()} == {
        name: param.shape for name, param in part.params.items()
    }

    def loss(params: Params, part: gated_delta.GatedDelta) -> Any:
        out = run(params, x, SEGMENTS, part=part)[0]
        return (out**2).sum(), out

    grad = jax.value_and_grad(loss, has_aux=True)
    (_, found), found_grads = grad(apart, part)
    (_, wanted), wanted_grads = grad(drawn, PART)
    assert_close(found, wanted)
    for name, each in separate(wanted_grads).items():
        assert_close(found_grads[name], each)


def test_document_does_not_affect_other_documents() -> None:
    drawn, x = drawn_for()
    wanted, _ = run(drawn, x, SEGMENTS)
    # The third row's second document is from token 7 to 9.
    changed, _ = run(drawn, x.at[2, 7:10].multiply(1e3), SEGMENTS)
    others = np.delete(np.arange(13), [7, 8, 9])
    np.testing.assert_array_equal(changed[2, others], wanted[2, others])
    assert (np.abs(changed[2, 7:10] - wanted[2, 7:10]).max(-1) > 0.1).all()


def test_chunked_decoding_equals_full_forward() -> None:
    drawn, x = drawn_for()
    starts = np.array([0, 6, 11])  # first text token of each sequence
    segments = (np.arange(13) >= starts[:, None]).astype(np.int32)
    rows = [jnp.roll(row, -start, 0) for row, start in zip(x, starts, strict=True)]
    wanted = [*jax.jit(jax.vmap(partial(token_by_token, drawn)))(jnp.stack(rows))]
    cache = GatedDelta.empty_cache(PART, 3, 13, jnp.dtype("float32"))
    assert [len(each) for each in GatedDelta.cache_axes(PART)] == [each.ndim for each in cache]
    cuts = (0, 5, 10, 11, 12, 13)
    for first, stop in itertools.pairwise(cuts):
        found, after = run(drawn, x[:, first:stop], segments[:, first:stop], cache)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)
        cache = after
        for row, start in enumerate(starts):
            if stop > start:
                text = slice(max(first, start), stop)
                assert_close(
                    found[row, text.start - first :], wanted[row][text.start - start : stop - start]
                )


def test_left_padding_does_not_change_result() -> None:
    drawn, x = drawn_for()
    found = []
    for noise in (1.0, 1e3):
        cache = GatedDelta.empty_cache(PART, 3, 13, x.dtype)
        for first in (0, 5):  # the second chunk also begins with padding
            text = np.arange(first, first + 5) >= 6
            given = x[:, first : first + 5] * np.where(text, 1.0, noise)[:, None]
            segments = np.tile(text.astype(np.int32), (3, 1))
            read, cache = run(drawn, given, segments, cache)
        found.append((read[:, 1:], cache.state))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_inverse_is_accurate_for_nearly_identical_keys() -> None:
    """Powers of such a matrix have entries of 1e17, but its inverse has entries of 1."""
    size = 64
    near = np.tri(size, k=-1) * (1 - 1e-3 * np.random.default_rng(0).random((size, size)))
    found = module._inverse(jnp.asarray(near, jnp.float32))
    assert_close(found, np.linalg.inv(np.eye(size) + near))
    towards = np.random.default_rng(1).normal(size=(size, size))
    got = jax.grad(lambda lower: (module._inverse(lower) * towards).sum())(
        jnp.asarray(near, jnp.float32)
    )
    inverse = np.linalg.inv(np.eye(size) + near)
    assert_close(got, -inverse.T @ towards @ inverse.T)


def test_gradients_are_finite_if_gates_forget_everything() -> None:
    drawn, x = drawn_for()
    drawn |= {"decay": jnp.full(6, 9.0)}  # each token keeps exp(-8000) of the state
    found = jax.jit(jax.grad(lambda w: run(w, x, SEGMENTS)[0].sum()))(drawn)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert np.abs(found["qkvz"]).max() > 0


def test_bfloat16_output_is_close_to_float32() -> None:
    drawn, x = drawn_for()
    rough, _ = run(drawn, x.astype(jnp.bfloat16), SEGMENTS)
    assert rough.dtype == jnp.bfloat16
    wanted = np.asarray(run(drawn, x, SEGMENTS)[0])
    assert np.abs(np.asarray(rough, np.float32) - wanted).max() < 0.05 * np.abs(wanted).max()


def test_initial_decay_rates_span_wide_range() -> None:
    """Fraction of the state that one step forgets if the input is zero."""
    built = GatedDelta(replace(PART, num_value_heads=64, num_key_heads=32), RULES)
    w = with_values(built)
    lost = 1 - np.exp(-np.exp(w["decay"]) * np.log1p(np.exp(w["decay_bias"])))
    assert 1e-4 < lost.min() < 0.003 and 0.5 < lost.max() < 0.9
    assert len({*lost}) == 64
    steps = np.log1p(np.exp(w["decay_bias"]))
    assert steps.min() >= 0.001 and steps.max() <= 0.1
