"""Mamba-2 compared with its token-by-token recurrence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers import mamba2
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn.mamba2 import Mamba2
from tests.nn.parts import RULES, assert_close, context, packed

PART = mamba2.Mamba2(
    d_model=10,
    num_heads=6,
    head_dim=5,
    num_groups=2,
    state_size=7,
    kernel=4,
    conv_bias=True,
    norm=RMSNorm(30, 1e-4),
    out_gain=1.0,
    chunk=4,
)
ONE_GROUP = replace(PART, num_groups=1, conv_bias=False)
LENGTHS = [[13], [1, 5, 2, 5], [7, 3, 3]]
"""Document lengths of each sequence of 13 tokens, which no chunk size divides."""
SEGMENTS, _ = packed(LENGTHS)
Params = dict[str, jax.Array]


def drawn_for(part: mamba2.Mamba2 = PART) -> tuple[Params, jax.Array]:
    """Return parameters that differ from their initial values, and an input."""
    keys = iter(jax.random.split(jax.random.key(1), 20))
    drawn = {
        name: jax.random.normal(next(keys), param.shape) * 0.7
        for name, param in part.params.items()
    }
    return drawn, jax.random.normal(next(keys), (3, 13, part.d_model))


@partial(jax.jit, static_argnames="part")
def run(
    params: Params, x: jax.Array, segments: Any, cache: Any = None, part: mamba2.Mamba2 = PART
) -> Any:
    """Return the output and the updated cache."""
    built = Mamba2(part, RULES)
    for name, value in params.items():
        getattr(built, name)[...] = value
    found = built(x, context(segments, segments, cache=cache))
    return found.x, found.cache


def token_by_token(w: Params, x: jax.Array, part: mamba2.Mamba2 = PART) -> jax.Array:
    """Compute one document `[tokens, D]` in plain JAX."""
    kernel, group = part.kernel, part.group

    def convolved(name: str) -> jax.Array:
        rows = jnp.einsum("td,dhp->thp", x, w[name])
        before = jnp.concatenate([jnp.zeros((kernel - 1, *rows.shape[1:])), rows])
        taps = [before[at : at + len(rows)] * w[f"conv_{name}"][..., at] for at in range(kernel)]
        return jax.nn.silu(sum(taps, w.get(f"conv_{name}_bias", 0.0)))

    value, key, query = map(convolved, ("value", "key", "query"))
    key, query = (jnp.repeat(each, group, axis=1) for each in (key, query))
    time = jax.nn.softplus(x @ w["time_step"] + w["time_step_bias"])
    time = jnp.maximum(time, part.min_time_step)
    kept = jnp.exp(-jnp.exp(w["decay"]) * time)

    def step(state: jax.Array, each: Any) -> tuple[jax.Array, jax.Array]:
        key, query, value, time, kept = each
        new = (time[:, None] * key)[:, :, None] * value[:, None, :]
        state = state * kept[:, None, None] + new
        return state, jnp.einsum("hkv,hk->hv", state, query)

    state = jnp.zeros((part.num_heads, part.state_size, part.head_dim))
    _, found = jax.lax.scan(step, state, (key, query, value, time, kept))
    found = found + w["skip"][:, None] * value
    found = found * jax.nn.silu(jnp.einsum("td,dhp->thp", x, w["gate"]))
    groups = found.reshape(len(x), part.num_groups, -1)
    groups = groups / jnp.sqrt((groups**2).mean(-1, keepdims=True) + part.norm.epsilon)
    return jnp.einsum("thv,hvd->td", groups.reshape(found.shape) * w["norm"], w["out"])


def by_documents(w: Params, x: jax.Array, part: mamba2.Mamba2 = PART) -> jax.Array:
    """Compute each document of `LENGTHS` separately."""
    rows = []
    for row, sizes in enumerate(LENGTHS):
        stops = np.cumsum(sizes)
        documents = [x[row, stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
        rows.append(jnp.concatenate([token_by_token(w, each, part) for each in documents]))
    return jnp.stack(rows)


@pytest.mark.parametrize(
    "part", [PART, ONE_GROUP, replace(PART, chunk=64), replace(PART, min_time_step=0.7)]
)
def test_chunked_form_equals_token_recurrence(part: mamba2.Mamba2) -> None:
    drawn, x = drawn_for(part)
    towards = jax.random.normal(jax.random.key(7), x.shape)

    def loss(forward: Any) -> Any:
        def of(w: Params, x: jax.Array) -> Any:
            found = forward(w, x)
            return (found * towards).sum(), found

        return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)

    got = jax.jit(loss(lambda w, x: run(w, x, SEGMENTS, part=part)[0]))(drawn, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), (drawn, x))
        towards = jnp.asarray(np.asarray(towards, np.float64))
        wanted = jax.jit(loss(lambda w, x: by_documents(w, x, part)))(*wide)
        wanted = jax.tree.map(np.asarray, wanted)
    assert wanted[0][1].dtype == np.float64
    assert np.abs(got[0][1] - wanted[0][1]).max() < 1e-5 * np.abs(wanted[0][1]).max()
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(wanted[1]), strict=True
    ):
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


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
    wanted = [token_by_token(drawn, row) for row in x]
    segments = np.ones((3, 13), np.int32)
    cache: Any = Mamba2.empty_cache(PART, 3, 13, jnp.dtype("float32"))
    axes = jax.tree.leaves(Mamba2.cache_axes(PART), is_leaf=lambda each: type(each) is tuple)
    axes = [*axes[0], *axes[1:]]  # the first leaf is the tuple of the convolution's inputs
    assert [len(each) for each in axes] == [each.ndim for each in jax.tree.leaves(cache)]
    for first, stop in itertools.pairwise((0, 5, 10, 11, 12, 13)):
        found, after = run(drawn, x[:, first:stop], segments[:, first:stop], cache)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)
        cache = after
        for row, whole in zip(found, wanted, strict=True):
            assert_close(row, whole[first:stop])


def test_left_padding_does_not_change_result() -> None:
    drawn, x = drawn_for()
    found = []
    for noise in (1.0, 1e3):
        text = np.arange(13) >= 6
        given = x * np.where(text, 1.0, noise)[:, None]
        cache = Mamba2.empty_cache(PART, 3, 13, x.dtype)
        read, cache = run(drawn, given, np.tile(text.astype(np.int32), (3, 1)), cache)
        found.append((read[:, 6:], cache.state))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_gradients_are_finite_if_state_decays_at_once() -> None:
    drawn, x = drawn_for()
    drawn |= {"decay": jnp.full(6, 9.0)}  # each token keeps exp(-8000) of the state
    found = jax.jit(jax.grad(lambda w: run(w, x, SEGMENTS)[0].sum()))(drawn)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert np.abs(found["value"]).max() > 0


def test_bfloat16_output_is_close_to_float32() -> None:
    drawn, x = drawn_for()
    rough, _ = run(drawn, x.astype(jnp.bfloat16), SEGMENTS)
    assert rough.dtype == jnp.bfloat16
    wanted = np.asarray(run(drawn, x, SEGMENTS)[0])
    assert np.abs(np.asarray(rough, np.float32) - wanted).max() < 0.05 * np.abs(wanted).max()
