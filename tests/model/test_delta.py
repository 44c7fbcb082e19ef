"""The gated delta rule compared with its token-by-token recurrence."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers import gated_delta
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn.delta_rule import inverse_of_unit_lower
from maxpipe.nn.gated_delta import GatedDelta
from tests.model.recurrent import Layer, Params
from tests.nn.parts import RULES, assert_close, with_values

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


def recurrence(w: Params, x: jax.Array, part: gated_delta.GatedDelta) -> jax.Array:
    """Compute one document `[tokens, D]`."""
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
    write = jax.nn.sigmoid(write) * (2 if part.allow_neg_eigval else 1)
    _, found = jax.lax.scan(step, state, (query, key, value, write, kept))
    found = found / jnp.sqrt((found**2).mean(-1, keepdims=True) + part.norm.epsilon)
    found = found * w["norm"] * jax.nn.silu(z)
    return jnp.einsum("thv,hvd->td", found, w["out"])


LAYER = Layer(GatedDelta, PART, recurrence)


@pytest.mark.parametrize("chunk", [4, 64])
def test_chunked_rule_equals_token_recurrence(chunk: int) -> None:
    layer = LAYER.with_part(chunk=chunk)
    layer.check_values_and_gradients(*layer.draw())


def test_doubled_write_gates_equal_token_recurrence() -> None:
    layer = LAYER.with_part(allow_neg_eigval=True)
    params, x = layer.draw()
    layer.check_values_and_gradients(params, x)
    assert np.abs(layer.run(params, x)[0] - LAYER.run(params, x)[0]).max() > 0.01


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
    layer = LAYER.with_part(fused=False)
    drawn, x = LAYER.draw()
    apart = separate(drawn)
    assert {name: each.shape for name, each in apart.items()} == {
        name: param.shape for name, param in layer.part.params.items()
    }

    def loss(params: Params, layer: Layer) -> Any:
        out = layer.run(params, x)[0]
        return (out**2).sum(), out

    grad = jax.value_and_grad(loss, has_aux=True)
    (_, found), found_grads = grad(apart, layer)
    (_, wanted), wanted_grads = grad(drawn, LAYER)
    assert_close(found, wanted)
    for name, each in separate(wanted_grads).items():
        assert_close(found_grads[name], each)


def test_document_does_not_affect_other_documents() -> None:
    LAYER.check_documents_are_independent()


def test_chunked_decoding_equals_full_forward() -> None:
    LAYER.check_decoding()


def test_left_padding_does_not_change_result() -> None:
    LAYER.check_left_padding()


def test_inverse_is_accurate_for_nearly_identical_keys() -> None:
    """Powers of such a matrix have entries of 1e17, but its inverse has entries of 1."""
    size = 64
    near = np.tri(size, k=-1) * (1 - 1e-3 * np.random.default_rng(0).random((size, size)))
    found = inverse_of_unit_lower(jnp.asarray(near, jnp.float32))
    assert_close(found, np.linalg.inv(np.eye(size) + near))
    towards = np.random.default_rng(1).normal(size=(size, size))
    got = jax.grad(lambda lower: (inverse_of_unit_lower(lower) * towards).sum())(
        jnp.asarray(near, jnp.float32)
    )
    inverse = np.linalg.inv(np.eye(size) + near)
    assert_close(got, -inverse.T @ towards @ inverse.T)


def test_gradients_are_finite_if_gates_forget_everything() -> None:
    LAYER.check_gradients_of_strong_decay("qkvz")


def test_bfloat16_output_is_close_to_float32() -> None:
    LAYER.check_bfloat16()


def test_initial_decay_rates_span_wide_range() -> None:
    """Fraction of the state that one step forgets if the input is zero."""
    built = GatedDelta(LAYER.with_part(num_value_heads=64, num_key_heads=32).part, RULES)
    w = with_values(built)
    lost = 1 - np.exp(-np.exp(w["decay"]) * np.log1p(np.exp(w["decay_bias"])))
    assert 1e-4 < lost.min() < 0.003 and 0.5 < lost.max() < 0.9
    assert len({*lost}) == 64
    steps = np.log1p(np.exp(w["decay_bias"]))
    assert steps.min() >= 0.001 and steps.max() <= 0.1
