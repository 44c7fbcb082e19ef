"""Splitting a jaxpr in two: values passed to the second half, and values it recomputes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.pipeline.remat import FlatJaxpr, split_program


def halves_of(function: Any, *arguments: Any, first: list[int], free: list[int] | None = None):
    return split_program(
        jax.make_jaxpr(function)(*arguments), first_outputs=first, free_inputs=free or []
    )


def names_in(function: Any, *arguments: Any) -> list[str]:
    return [equation.primitive.name for equation in jax.make_jaxpr(function)(*arguments).eqns]


def test_split_saves_matmuls_and_recomputes_cheap_operations() -> None:
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x @ w
        wide = jnp.concatenate([jnp.sin(product)] * 4, axis=1)
        return wide.sum(), jnp.cos(wide)

    halves = halves_of(function, x, w, first=[0])
    assert [aval.shape for aval in halves.saved] == [(4, 8)]  # not the four times wider array
    (total,), kept = halves.first([x, w])
    (found,) = halves.second(kept, [])
    wanted_total, wanted = function(x, w)
    np.testing.assert_array_equal(total, wanted_total)
    np.testing.assert_array_equal(found, wanted)
    assert "dot_general" not in names_in(lambda kept: halves.second(kept, []), kept)


def test_split_defers_work_used_only_by_second_half() -> None:
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x), x.T @ (x @ w)

    halves = halves_of(function, x, w, first=[0])
    first = names_in(lambda x, w: halves.first([x, w]), x, w)
    assert "dot_general" not in first
    assert sorted(aval.shape for aval in halves.saved) == [(4, 8), (8, 8)]


def test_split_saves_smallest_intermediate() -> None:
    x = jnp.ones((64, 64))

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = (x @ x).sum(axis=0)  # one row instead of the whole matrix
        wide = jnp.broadcast_to(row, (64, 64)) * 2.0
        return wide.sum(), jnp.tanh(wide)

    halves = halves_of(function, x, first=[0])
    assert [aval.shape for aval in halves.saved] == [(64,)]


def test_split_does_not_save_free_inputs() -> None:
    x, ids = jnp.ones((4, 8)), jnp.arange(4.0)

    def function(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask = ids[:, None] > 1
        return jnp.where(mask, x, 0).sum(), jnp.where(mask, x @ x.T @ x, 1.0)

    halves = halves_of(function, x, ids, first=[0], free=[1])
    assert [aval.shape for aval in halves.saved] == [(4, 8)]
    (total,), kept = halves.first([x, ids])
    np.testing.assert_array_equal(halves.second(kept, [ids])[0], function(x, ids)[1])
    assert total == 16


def test_split_inlines_nested_calls() -> None:
    x = jnp.ones((4, 4))

    @jax.jit
    def inner(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x @ x
        return product.sum(), jax.checkpoint(lambda y: jnp.sin(y) @ y)(product)

    halves = halves_of(inner, x, first=[0])
    first = names_in(lambda x: halves.first([x]), x)
    assert first.count("dot_general") == 1
    _, kept = halves.first([x])
    np.testing.assert_allclose(halves.second(kept, [])[0], inner(x)[1], rtol=1e-6)


def test_split_may_save_output_of_first_half() -> None:
    x = jnp.ones((4, 4))
    halves = halves_of(lambda x: (x @ x, jnp.sin(x @ x)), x, first=[0])
    (product,), kept = halves.first([x])
    np.testing.assert_allclose(halves.second(kept, [])[0], jnp.sin(product), rtol=1e-6)
    nothing = halves_of(lambda x: (x @ x, jnp.ones(3)), x, first=[0])
    assert nothing.saved == () and nothing.second([], [])[0].tolist() == [1, 1, 1]


def test_input_dependencies_of_values() -> None:
    inner = jax.jit(lambda x, y: (2 * x, jnp.broadcast_to(jnp.float32(3), x.shape), x + y))
    flat = FlatJaxpr(jax.make_jaxpr(lambda x, y: (*inner(x, y), y))(jnp.ones(4), jnp.ones(4)))
    x, y = flat.inputs
    assert [flat.input_dependencies(value) for value in flat.outputs] == [{x}, set(), {x, y}, {y}]


def test_run_computes_values_from_given_inputs() -> None:
    flat = FlatJaxpr(
        jax.make_jaxpr(lambda x, y: (3 * x, x + y, jnp.ones(4)))(jnp.ones(4), jnp.ones(4))
    )
    triple, _, ones = flat.outputs
    values = flat.environment(flat.inputs[:1], [jnp.full(4, 2.0)])
    flat.run(sorted(flat.dependencies([triple, ones])), values)
    assert values[triple].tolist() == [6.0] * 4 and values[ones].tolist() == [1.0] * 4
