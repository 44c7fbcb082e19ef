"""Check of an update's result before the update is applied; see `optim.guard`."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from maxpipe.optim.update import Optimizer, OptState
from maxpipe.optim.update_bound import MOMENTUM

Tree = Any


def check_update(
    optimizer: Optimizer,
    gradients: Tree,
    norm: Float[jax.Array, ""],
    rate: Float[jax.Array, ""],
    params: Tree,
    state: OptState,
    before: Float[jax.Array, " 2"],
) -> tuple[Bool[jax.Array, ""], Float[jax.Array, " 2"]]:
    """Return whether the update keeps parameters and moments finite, and their new bounds.

    The cheap bound is nearly always sufficient. Otherwise, the update is computed once more to
    check its values, which requires a pass over all parameters and state.

    Args:
        optimizer: the optimizer.
        gradients: a device's shards of the gradients. `params` and `state` are also shards.
        norm: norm of the full gradient.
        rate: learning rate.
        params: parameters before the update.
        state: optimizer state before the update.
        before: bounds before the update.
    """
    bound = optimizer.bound_update(before, norm, rate)

    def by_looking() -> tuple[jax.Array, jax.Array]:
        largest = optimizer.max_abs if optimizer.config.offload_state else _largest
        sizes = jnp.stack([_largest(params), largest(state.trees.get(MOMENTUM, {}))])
        after = optimizer.bound_update(sizes, norm, rate)
        if not optimizer.is_elementwise:
            return jnp.isfinite(after).all(), after
        return _is_finite_after_update(optimizer, gradients, norm, params, state), after

    known = jnp.isfinite(bound).all()
    return jax.lax.cond(known, lambda: (known, bound), by_looking)


def _largest(tree: Tree) -> Float[jax.Array, ""]:
    """Return the largest absolute value across all arrays, or 0 if there are no arrays."""
    found = [jnp.abs(leaf).max().astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(found).max() if found else jnp.zeros(())


def _is_finite_after_update(
    optimizer: Optimizer,
    gradients: Tree,
    norm: Float[jax.Array, ""],
    params: Tree,
    state: OptState,
) -> Bool[jax.Array, ""]:
    """Compute the update without storing it, and return whether all results are finite.

    The barrier separates this computation from the update itself and keeps it in its branch, where
    it is fused into a reduction. If XLA shared or hoisted parts of the computation, their results
    would be stored in memory.
    """
    if optimizer.config.offload_state:
        return optimizer.is_finite_after_update(gradients, norm, params, state)
    given = jax.lax.optimization_barrier((gradients, norm, params, state))
    gradients, norm, params, state = given
    params, state = optimizer.update(gradients, state, params, norm=norm, draw=False)
    # Use one expression for all trees; with separate reductions, XLA would store shared values.
    finite = jax.tree.map(
        lambda *entries: reduce(operator.and_, map(jnp.isfinite, entries)).all(),
        params,
        *state.trees.values(),
    )
    return jnp.stack(jax.tree.leaves(finite)).all()
