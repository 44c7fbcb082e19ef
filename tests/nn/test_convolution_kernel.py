"""Convolution kernels in interpret mode, compared with plain JAX and automatic differentiation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn import convolution_kernel, recurrent_kernels
from maxpipe.nn.chunked_scan import EMPTY_SEGMENT
from maxpipe.nn.convolution_kernel import Columns, Convolution
from maxpipe.nn.delta_rule import l2_normalize

HEADS, TOKENS, WIDTH, PADDED = 3, 37, 48, 40
COLUMNS = (Columns(16, norm=0.25), Columns(24), Columns(8, convolved=False))
SEGMENTS = np.stack([np.repeat([4, 7, 5], [1, 20, 16]), np.repeat([2, 0], [30, 7])])
"""The first sequence continues a document, and the second starts one and ends with padding."""
BEFORE = np.array([[EMPTY_SEGMENT, 4, 4], [EMPTY_SEGMENT] * 3])


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use five blocks of tokens, two steps within a block, and registers of eight columns."""
    monkeypatch.setattr(convolution_kernel, "HALO", 4)
    monkeypatch.setattr(convolution_kernel, "_BLOCK", 8)
    monkeypatch.setattr(convolution_kernel, "_ROWS", 4)
    monkeypatch.setattr(convolution_kernel, "_WIDTH", WIDTH)
    monkeypatch.setattr(recurrent_kernels, "LANES", 8)


def draw() -> tuple[jax.Array, ...]:
    """Return tokens, earlier tokens, the kernel and the bias."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, TOKENS, HEADS, WIDTH), (2, 3, HEADS, 40), (HEADS, 40, 4), (HEADS, 40)]
    return tuple(map(jax.random.normal, keys, shapes))


def plain(x: jax.Array, tail: jax.Array, kernel: jax.Array, bias: Any) -> jax.Array:
    """Return the columns in the dtype of the arguments."""
    row = jnp.concatenate([tail, x[..., :40]], axis=1)
    of = np.concatenate([BEFORE, SEGMENTS], axis=1)
    total = jnp.zeros(()) if bias is None else bias
    for at in range(4):
        seen = (of[:, at : at + TOKENS] == SEGMENTS)[..., None, None]
        total = total + jnp.where(seen, row[:, at : at + TOKENS], 0.0) * kernel[..., at]
    total = jax.nn.silu(total)
    parts = [l2_normalize(total[..., :16]) * 0.25, total[..., 16:], x[..., 40:]]
    return jnp.concatenate(parts, axis=-1)


def arguments(x: jax.Array, tail: Any, kernel: Any, bias: Any) -> convolution_kernel.Arguments:
    heads_first = jnp.pad(x, [(0, 0), (0, PADDED - TOKENS), (0, 0), (0, 0)]).swapaxes(1, 2)
    masks = convolution_kernel.token_masks(jnp.asarray(BEFORE), jnp.asarray(SEGMENTS), PADDED)
    return convolution_kernel.make_arguments(heads_first, tail, kernel, bias, masks)


@partial(jax.jit, static_argnames="has_bias")
def gradients(inputs: Any, d_out: jax.Array, has_bias: bool) -> tuple[jax.Array, Any]:
    """Return the output of the kernels, and the gradients of `inputs`."""

    def packed(inputs: Any) -> convolution_kernel.Arguments:
        return arguments(*inputs, *[None] * (not has_bias))

    static = Convolution(COLUMNS, 4, has_bias)
    packed_inputs, pull = jax.vjp(packed, inputs)
    out = convolution_kernel.forward(static, packed_inputs, interpret=True)
    d_out = jnp.pad(d_out, [(0, 0), (0, PADDED - TOKENS), (0, 0), (0, 0)]).swapaxes(1, 2)
    found = convolution_kernel.backward(static, packed_inputs, d_out, interpret=True)
    return out.swapaxes(1, 2)[:, :TOKENS], pull(found)[0]


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_values_and_gradients_equal_those_of_plain_jax(has_bias: bool) -> None:
    inputs = draw()[: 3 + has_bias]
    d_out = jax.random.normal(jax.random.key(5), inputs[0].shape)
    out, found = gradients(inputs, d_out, has_bias)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*inputs, d_out)]
        run = lambda *inputs: plain(*inputs, *[None] * (not has_bias))  # noqa: E731
        expected_out, pull = jax.vjp(run, *wide[:-1])
        expected = jax.tree.map(np.asarray, (expected_out, *pull(wide[-1])))
    for actual, target in zip((out, *found), expected, strict=True):
        assert target.dtype == np.float64
        assert np.abs(actual - target).max() < 1e-5 * np.abs(target).max()


def test_numbers_that_are_not_finite_only_affect_tokens_of_their_document() -> None:
    """The last seven tokens of the second sequence are padding, and so are its earlier tokens."""
    x, tail, kernel, _ = draw()
    d_out = jax.random.normal(jax.random.key(5), x.shape)
    out, (d_x, *_) = gradients((x, tail, kernel), d_out, False)
    changed = (x.at[1, 30:].set(jnp.nan), tail.at[1].set(jnp.inf), kernel)
    changed_out, (changed_d_x, *_) = gradients(changed, d_out.at[1, 30:].set(jnp.nan), False)
    np.testing.assert_array_equal(changed_out[0], out[0])
    np.testing.assert_array_equal(changed_out[1, :30], out[1, :30])
    np.testing.assert_array_equal(changed_d_x[0], d_x[0])
    np.testing.assert_array_equal(changed_d_x[1, :30], d_x[1, :30])
    assert np.isnan(changed_out[1, 30:, :, :16]).all()


def test_silu_of_large_numbers_has_finite_gradients() -> None:
    x, tail, kernel, _ = draw()
    inputs = (1e3 * x, tail, kernel)
    out, found = gradients(inputs, jnp.ones_like(x), False)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((out, found)))
