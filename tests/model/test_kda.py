"""Kimi delta attention compared with its token-by-token recurrence."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers import kda
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Products
from maxpipe.nn.kda import KimiDelta, decay_since_start, decay_until_end, decayed_scores
from tests.model.recurrent import Layer, Params
from tests.nn.parts import RULES, with_values


def recurrence(w: Params, x: jax.Array, part: kda.KimiDelta) -> jax.Array:
    """Compute one document `[tokens, D]`."""

    def convolved(name: str) -> jax.Array:
        rows = jnp.einsum("td,dhk->thk", x, w[name])
        before = jnp.concatenate([jnp.zeros((part.kernel - 1, *rows.shape[1:])), rows])
        taps = [
            before[at : at + len(rows)] * w[f"conv_{name}"][..., at] for at in range(part.kernel)
        ]
        return jax.nn.silu(sum(taps[1:], taps[0]))

    query, key, value = map(convolved, ("query", "key", "value"))
    query, key = (y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (query, key))
    query = query / math.sqrt(part.head_dim)
    forget = jnp.einsum("tr,rhk->thk", x @ w["forget_down"], w["forget_up"])
    gate = jnp.einsum("tr,rhk->thk", x @ w["gate_down"], w["gate_up"])
    rate = jnp.exp(w["decay"])[:, None]
    decay = jnp.exp(-rate * jax.nn.softplus(forget + w["decay_bias"]))
    write = jax.nn.sigmoid(x @ w["write"])

    def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        query, key, value, write, decay = token
        state = state * decay[:, :, None]
        wrong = write[:, None] * (value - jnp.einsum("hkv,hk->hv", state, key))
        state = state + key[:, :, None] * wrong[:, None, :]
        return state, jnp.einsum("hkv,hk->hv", state, query)

    state = jnp.zeros((part.num_heads, part.head_dim, part.head_dim))
    _, out = jax.lax.scan(step, state, (query, key, value, write, decay))
    out = out / jnp.sqrt((out**2).mean(-1, keepdims=True) + part.norm.epsilon)
    return jnp.einsum("thv,hvd->td", out * w["norm"] * jax.nn.sigmoid(gate), w["out"])


LAYER = Layer(
    KimiDelta,
    kda.KimiDelta(
        d_model=10,
        num_heads=3,
        head_dim=5,
        kernel=4,
        norm=RMSNorm(5, 1e-4, scales_in_float32=True),
        out_gain=1.0,
        chunk=4,
    ),
    recurrence,
)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_form_equals_token_recurrence(chunk: int) -> None:
    layer = LAYER.with_part(chunk=chunk)
    layer.check_values_and_gradients(*layer.draw())


def test_chunk_of_64_tokens_equals_token_recurrence() -> None:
    """Blocks have 32 tokens, more than `kda.BLOCK`."""
    layer = LAYER.with_part(chunk=64)
    params, _ = layer.draw()
    x, towards = (jax.random.normal(jax.random.key(seed), (1, 40, 10)) for seed in (2, 3))

    def gradients(forward: Any, *arrays: Any) -> Any:
        def loss(w: Params, x: jax.Array) -> Any:
            out = forward(w, x)
            return (out * arrays[2]).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*arrays[:2])

    segments = jnp.zeros((1, 40), jnp.int32)
    found = gradients(lambda w, x: layer.run(w, x, segments)[0], params, x, towards)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, x, towards))
        wanted = gradients(lambda w, x: recurrence(w, x[0], layer.part)[None], *wide)
        wanted = jax.tree.map(np.asarray, wanted)
    for (path, target), actual in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        error = np.abs(actual - target).max() / np.abs(target).max()
        assert error < 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


@pytest.mark.parametrize(
    ("rate", "bias"),
    [
        (0.0, 80.0),  # each token keeps exp(-80) of the state
        (4.0, 0.0),
        (-20.0, 0.0),  # each token keeps the state, except for 2e-9 of it
    ],
)
def test_strong_and_weak_decay_equal_token_recurrence(rate: float, bias: float) -> None:
    params, x = LAYER.draw()
    params |= {"decay": params["decay"] + rate, "decay_bias": params["decay_bias"] + bias}
    LAYER.with_part(chunk=16).check_values_and_gradients(params, x)


def test_strong_decay_in_some_dims_does_not_affect_others() -> None:
    """In each head, two dims keep exp(-80) of the state per token, and the others almost all."""
    params, x = LAYER.draw()
    params["decay_bias"] = jnp.tile(jnp.array([80.0, -8.0, 80.0, -8.0, -8.0]), (3, 1))
    params["decay"] = jnp.zeros(3)
    LAYER.with_part(chunk=16).check_values_and_gradients(params, x)


def scores_token_by_token(left: jax.Array, right: jax.Array, decay: jax.Array) -> Any:
    """Return the scores of each token with all earlier tokens, and the decay within the chunk."""
    size = len(right)

    def step(until: jax.Array, token: Any) -> Any:
        number, left, decay = token
        until = jnp.where(jnp.arange(size)[:, None] < number, until * jnp.exp(decay), until)
        earlier = jnp.where(jnp.arange(size)[:, None] < number, right * until, 0.0)
        return until, jnp.einsum("pd,ed->pe", left, earlier)

    tokens = (jnp.arange(size), left.swapaxes(0, 1), decay)
    until, scores = jax.lax.scan(step, jnp.ones_like(right), tokens)
    return scores.swapaxes(0, 1), jnp.cumprod(jnp.exp(decay), 0), until


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_scores_of_alternating_decay_are_precise(size: int) -> None:
    """Differences of cumulative sums would lose six digits here: they are about 1e3, but scores
    depend on differences of about 1e-3.
    """
    draw = np.random.default_rng(0)
    left, right = draw.normal(size=(2, size, 8)), draw.normal(size=(size, 8))
    decay = -np.where(np.arange(size)[:, None] % 13 == 3, 300.0, draw.uniform(0, 1e-3, (size, 8)))
    decay[5:7] = -1e30
    towards = draw.normal(size=(2, size, size))

    def graded(forward: Any, dtype: str) -> Any:
        arguments = [jnp.asarray(y, dtype) for y in (left, right, decay)]

        def loss(*arguments: jax.Array) -> Any:
            scores, *within = forward(*arguments)
            return (scores * towards.astype(dtype)).sum(), (scores, *within)

        both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arguments)
        return both[0][1], both[1]

    def chunked(*arguments: jax.Array) -> Any:
        left, right, decay = arguments
        scores = [decayed_scores(each, right, decay) for each in left]
        return jnp.stack(scores), decay_since_start(decay), decay_until_end(decay)

    actual = graded(chunked, "float32")
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, graded(scores_token_by_token, "float64"))
    for array, target in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert target.dtype == np.float64
        assert np.abs(array - target).max() <= 1e-6 * np.abs(target).max()


def test_chunk_size_changes_only_rounding() -> None:
    params, x = LAYER.draw()
    outputs = [LAYER.with_part(chunk=chunk).run(params, x)[0] for chunk in (1, 2, 16)]
    for output in outputs[1:]:
        assert np.abs(output - outputs[0]).max() < 1e-6 * np.abs(outputs[0]).max()


def test_document_does_not_affect_other_documents() -> None:
    LAYER.check_documents_are_independent()


def test_chunked_decoding_equals_full_forward() -> None:
    LAYER.check_decoding()


def test_left_padding_does_not_change_result() -> None:
    LAYER.check_left_padding()


def test_gradients_are_finite_if_gates_forget_everything() -> None:
    LAYER.check_gradients_of_strong_decay("query")


def test_bfloat16_output_is_close_to_float32() -> None:
    LAYER.check_bfloat16()


def test_initial_decay_rates_span_wide_range() -> None:
    """Fraction of the state that one step forgets if the input is zero."""
    layer = LAYER.with_part(num_heads=8, head_dim=16, norm=RMSNorm(16, 1e-4))
    w = with_values(KimiDelta(layer.part, RULES))
    lost = 1 - np.exp(-np.exp(w["decay"])[:, None] * np.log1p(np.exp(w["decay_bias"])))
    assert lost.min() < 0.01 and lost.max() > 0.5
    assert all(len({*row}) == 16 for row in lost)


def num_products(jaxpr: Any) -> int:
    """Return the number of multiply-adds in matmuls."""
    count = 0
    for equation in jaxpr.eqns:
        for inner in equation.params.values():
            count += num_products(inner.jaxpr) if hasattr(inner, "jaxpr") else 0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[dim] for dim in contracted]
            count += math.prod(equation.outvars[0].aval.shape) * math.prod(sizes)
    return count


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_declared_operations_equal_traced_matmuls(chunk: int) -> None:
    layer = LAYER.with_part(chunk=chunk)
    part, (params, _) = layer.part, layer.draw()
    x = jnp.zeros((1, chunk, part.d_model))
    traced = jax.make_jaxpr(lambda: layer.run(params, x, jnp.zeros((1, chunk), jnp.int32))[0])()
    (products,) = (each for each in part.operations if isinstance(each, Products))
    projections = sum(math.prod(part.params[name].shape) for name in part.projections)
    # Both scores sum the decay of each block, which XLA computes once.
    repeated = (chunk - 1) * part.head_dim
    expected = part.num_heads * (products.computed + repeated) + projections
    assert num_products(traced.jaxpr) == chunk * expected
