"""What an update would leave, before it is taken: see `train.guard`."""

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
    """Whether the update leaves parameters and moments finite, and their reach after it.

    The bound alone answers, all but always. Where it cannot, the update is computed once more to
    look at it: a pass over all that there is.

    Args:
        optimizer: whose update it is.
        gradients: a device's part of them; parameters and state alike.
        norm: of the whole gradient.
        rate: the learning rate.
        params: before.
        state: before.
        before: the reach before.
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
    """Of all entries of all arrays; 0 of none."""
    found = [jnp.abs(leaf).max().astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(found).max() if found else jnp.zeros(())


def _is_finite_after_update(
    optimizer: Optimizer,
    gradients: Tree,
    norm: Float[jax.Array, ""],
    params: Tree,
    state: OptState,
) -> Bool[jax.Array, ""]:
    """Whether the update leaves all parameters and moments finite, computed and not kept.

    The barrier keeps this arithmetic apart from that of the update itself and within its branch. It
    is fused into a reduction; shared, or begun outside, some of it would stand in memory.
    """
    if optimizer.config.offload_state:
        return optimizer.is_finite_after_update(gradients, norm, params, state)
    given = jax.lax.optimization_barrier((gradients, norm, params, state))
    gradients, norm, params, state = given
    params, state = optimizer.update(gradients, state, params, norm=norm, draw=False)
    # One expression for all three: where each is reduced by itself, XLA keeps what they share.
    finite = jax.tree.map(
        lambda *entries: reduce(operator.and_, map(jnp.isfinite, entries)).all(),
        params,
        *state.trees.values(),
    )
    return jnp.stack(jax.tree.leaves(finite)).all()
