"""Checks that all recurrent layers share: comparison with a token-by-token recurrence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.models.layers.recurrent import Recurrent
from tests.nn.parts import RULES, assert_close, context, packed

LENGTHS = [[13], [1, 5, 2, 5], [7, 3, 3]]
"""Document lengths of each sequence of 13 tokens, which no chunk size divides."""
SEGMENTS, _ = packed(LENGTHS)
Params = dict[str, jax.Array]


@partial(jax.jit, static_argnames=("module", "part"))
def _run(module: Any, part: Any, params: Params, x: Any, segments: Any, cache: Any) -> Any:
    built = module(part, RULES)
    for name, value in params.items():
        getattr(built, name)[...] = value
    output = built(x, context(segments, segments, cache=cache))
    return output.x, output.cache


@dataclass(frozen=True)
class Layer:
    """A recurrent layer and its recurrence."""

    module: Any
    part: Any
    recurrence: Callable[[Params, jax.Array, Any], jax.Array]
    """Function that computes one document `[tokens, D]` token by token, in plain JAX."""

    def with_part(self, **changes: Any) -> Layer:
        """Return the layer with other sizes."""
        return replace(self, part=replace(self.part, **changes))

    def draw(self) -> tuple[Params, jax.Array]:
        """Return parameters that differ from their initial values, and an input."""
        assert isinstance(self.part, Recurrent)
        keys = iter(jax.random.split(jax.random.key(1), 20))
        params = {
            name: jax.random.normal(next(keys), param.shape) * 0.7
            for name, param in self.part.params.items()
        }
        return params, jax.random.normal(next(keys), (3, 13, self.part.d_model))

    def run(self, params: Params, x: Any, segments: Any = SEGMENTS, cache: Any = None) -> Any:
        """Return the output and the updated cache."""
        return _run(self.module, self.part, params, x, segments, cache)

    def by_documents(self, params: Params, x: jax.Array) -> jax.Array:
        """Compute each document of `LENGTHS` separately, token by token."""
        ends = [np.cumsum(row) for row in LENGTHS]
        first = [
            (row, stop - size)
            for row, (stops, sizes) in enumerate(zip(ends, LENGTHS, strict=True))
            for stop, size in zip(stops, sizes, strict=True)
        ]
        ahead = jnp.pad(x, ((0, 0), (0, 13), (0, 0)))
        documents = jnp.stack([ahead[row, start : start + 13] for row, start in first])
        outputs = iter(jax.vmap(lambda x: self.recurrence(params, x, self.part))(documents))
        rows = [[next(outputs)[:size] for size in row] for row in LENGTHS]
        return jnp.stack([jnp.concatenate(row) for row in rows])

    def check_values_and_gradients(self, params: Params, x: jax.Array) -> None:
        """Compare the output and each gradient with those of the recurrence in float64."""
        towards = jax.random.normal(jax.random.key(7), x.shape)

        def loss(forward: Any) -> Any:
            def of(w: Params, x: jax.Array) -> Any:
                out = forward(w, x)
                return (out * towards).sum(), out

            return jax.jit(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))

        (_, out), gradients = loss(lambda w, x: self.run(w, x)[0])(params, x)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), (params, x))
            towards = jnp.asarray(np.asarray(towards, np.float64))
            expected = jax.tree.map(np.asarray, loss(self.by_documents)(*wide))
        (_, expected_out), expected_gradients = expected
        assert expected_out.dtype == np.float64
        named = jax.tree_util.tree_leaves_with_path((out, gradients))
        for (path, actual), target in zip(
            named, jax.tree.leaves((expected_out, expected_gradients)), strict=True
        ):
            error = np.abs(actual - target).max() / np.abs(target).max()
            assert error < 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"

    def check_documents_are_independent(self) -> None:
        """Change one document, and compare the outputs of all others."""
        params, x = self.draw()
        expected, _ = self.run(params, x)
        # The third row's second document is from token 7 to 9.
        changed, _ = self.run(params, x.at[2, 7:10].multiply(1e3))
        others = np.delete(np.arange(13), [7, 8, 9])
        np.testing.assert_array_equal(changed[2, others], expected[2, others])
        assert (np.abs(changed[2, 7:10] - expected[2, 7:10]).max(-1) > 0.1).all()

    def check_decoding(self) -> None:
        """Compare decoding from a cache, after left padding, with the recurrence."""
        params, x = self.draw()
        starts = np.array([0, 6, 11])  # first text token of each sequence
        segments = (np.arange(13) >= starts[:, None]).astype(np.int32)
        rows = [jnp.roll(row, -start, 0) for row, start in zip(x, starts, strict=True)]
        recurrence = jax.jit(jax.vmap(lambda x: self.recurrence(params, x, self.part)))
        expected = [*recurrence(jnp.stack(rows))]
        cache = self.module.empty_cache(self.part, 3, 13, jnp.dtype("float32"))
        axes = jax.tree.structure(cache).flatten_up_to(self.module.cache_axes(self.part))
        assert [len(names) for names in axes] == [leaf.ndim for leaf in jax.tree.leaves(cache)]
        for first, stop in itertools.pairwise((0, 5, 10, 11, 12, 13)):
            out, after = self.run(params, x[:, first:stop], segments[:, first:stop], cache)
            assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)
            cache = after
            for row, start in enumerate(starts):
                if stop > start:
                    text = slice(max(first, start), stop)
                    actual = out[row, text.start - first :]
                    assert_close(actual, expected[row][text.start - start : stop - start])

    def check_left_padding(self) -> None:
        """Change the padding before the text, and compare the outputs and states."""
        params, x = self.draw()
        results = []
        for noise in (1.0, 1e3):
            cache = self.module.empty_cache(self.part, 3, 13, x.dtype)
            for first in (0, 5):  # the second chunk also begins with padding
                text = np.arange(first, first + 5) >= 6
                padded = x[:, first : first + 5] * np.where(text, 1.0, noise)[:, None]
                segments = np.tile(text.astype(np.int32), (3, 1))
                read, cache = self.run(params, padded, segments, cache)
            results.append((read[:, 1:], cache.state))
        jax.tree.map(np.testing.assert_array_equal, *results)

    def check_gradients_of_strong_decay(self, name: str) -> None:
        """Check that gradients are finite if each token keeps exp(-8000) of the state, and that
        the gradient of the parameter `name` is not 0.
        """
        params, x = self.draw()
        params |= {"decay": jnp.full(params["decay"].shape, 9.0)}
        gradients = jax.jit(jax.grad(lambda w: self.run(w, x)[0].sum()))(params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        assert np.abs(gradients[name]).max() > 0

    def check_bfloat16(self) -> None:
        """Compare the bfloat16 output with the float32 output."""
        params, x = self.draw()
        rough, _ = self.run(params, x.astype(jnp.bfloat16))
        assert rough.dtype == jnp.bfloat16
        expected = np.asarray(self.run(params, x)[0])
        error = np.abs(np.asarray(rough, np.float32) - expected).max()
        assert error < 0.05 * np.abs(expected).max()
