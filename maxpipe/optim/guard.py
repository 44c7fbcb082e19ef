"""Bad steps, detected where the numbers are: on the devices, before the update is taken.

The host learns of a step when the next one is under way, too late to hold an update back. So
the step itself compares its loss and gradient norm with what it remembers, and leaves parameters
and optimizer state as they were when the numbers are bad. What the run does then is in `watch.py`.

Source: measuring loss and gradient norm against recent steps is OLMo's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int

from maxpipe.config.schema import GuardConfig
from maxpipe.parallel.mesh import AXES

Tree = Any
Check = Callable[..., tuple[Any, Any]]


class GuardState(NamedTuple):
    """What is remembered from step to step, the same on all devices."""

    skipped: Int[Array, ""]
    """Steps whose update was not taken, int32."""
    spikes: Int[Array, ""]
    """Steps that were spikes, int32."""
    recent: Float[Array, "2 window"]
    """Loss in nats per token, and gradient norm, of the last updates, the newest last; float32. NaN
    where there was none yet; the window is 0 when no spikes are looked for."""
    bounds: Float[Array, " 2"]
    """Bounds on the size of any parameter and of any first moment, float32; infinite where they
    were not measured. See `optim.reach_after`."""

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values, for a checkpoint; the reach is measured again."""
        recent = np.asarray(self.recent)
        return {
            "skipped": int(self.skipped),
            "spikes": int(self.spikes),
            "recent": recent[:, np.isfinite(recent[0])].tolist(),
        }


def init_guard_state(config: GuardConfig, facts: Mapping[str, Any] | None = None) -> GuardState:
    """The state of a new run, or one with these facts, as numpy arrays."""
    facts = facts or {"skipped": 0, "spikes": 0, "recent": [[], []]}
    window = config.spike_window if config.spike_sigmas else 0
    known = np.asarray(facts["recent"], np.float32)
    recent = np.concatenate([np.full((2, window), np.nan, np.float32), known], axis=1)
    skipped, spikes = (np.asarray(facts[name], np.int32) for name in ("skipped", "spikes"))
    reach = np.full(2, np.inf, np.float32)
    return GuardState._make((skipped, spikes, recent[:, recent.shape[1] - window :], reach))


def check_step(
    config: GuardConfig,
    mesh: Mesh,
    state: GuardState,
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
    check: Check = lambda: (True, np.inf),
    operands: Tree = (),
    specs: Tree = (),
) -> tuple[Bool[Array, ""], GuardState]:
    """(whether the update is taken, what to remember); the answer is one for all devices.

    `loss` is in nats per token, `grad_norm` that of the whole gradient before it is clipped.
    `check` says of a device's part of the operands, divided over the mesh as `specs` say, whether
    the update leaves it finite, and how far it may reach: where it does not, nothing is updated.
    """
    seen = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    flags = jnp.stack([~jnp.isfinite(seen).all(), _is_spike(config, state.recent, seen)])
    broken, spike, reach = _reduce_over_devices(mesh, flags, check, operands, specs)
    spike = spike & ~broken
    taken = ~broken & ~(spike & (config.on_spike != "note"))
    newer = jnp.concatenate([state.recent, seen[:, None]], axis=1)[:, 1:]
    recent, reach = select_update(taken, (newer, reach), (state.recent, state.bounds))
    return taken, GuardState(state.skipped + ~taken, state.spikes + spike, recent, reach)


def select_update(taken: Bool[Array, ""] | bool, new: Tree, old: Tree) -> Tree:
    """`new` where the update is taken, else `old`.

    The choice, entry by entry, is fused into the arithmetic that makes `new`: where `old` has no
    other reader afterwards, no second copy is held.
    """
    return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, old)


def _is_spike(
    config: GuardConfig, recent: Float[Array | np.ndarray, "2 window"], seen: Float[Array, " 2"]
) -> Bool[Array, ""]:
    window = recent.shape[1]
    if not window:
        return jnp.zeros((), bool)
    known = jnp.isfinite(recent)
    count = known.sum(axis=1)
    mean = jnp.where(known, recent, 0).sum(axis=1) / count
    variance = jnp.where(known, jnp.square(recent - mean[:, None]), 0).sum(axis=1) / count
    limit = mean + config.spike_sigmas * jnp.sqrt(variance)
    return ((2 * count >= window) & (seen > limit)).any()


def _reduce_over_devices(
    mesh: Mesh, flags: Bool[Array, " 2"], check: Check, operands: Tree, specs: Tree
) -> tuple[Bool[Array, ""], Bool[Array, ""], Float[Array, " 2"]]:
    """(broken, spike, reach): the largest of all devices, on every device.

    A device looks at its own part of the operands. Of all else devices compute the same numbers,
    unless one of them computes or remembers wrongly: then they still have to decide alike, or
    processes would wait for each other forever.
    """

    def largest(flags: Array, operands: Tree) -> Array:
        finite, reach = check(*operands)
        broken, spike = flags.at[0].set(flags[0] | ~jnp.asarray(finite))
        mine = jnp.stack([broken, spike, *jnp.broadcast_to(reach, 2)]).astype(jnp.float32)
        return mine if mesh.size == 1 else jax.lax.pmax(mine, AXES)

    if mesh.size > 1:
        everywhere = PartitionSpec()
        largest = jax.shard_map(
            largest, mesh=mesh, in_specs=(everywhere, specs), out_specs=everywhere, check_vma=False
        )
    found = largest(flags, operands)
    return found[0] > 0, found[1] > 0, found[2:]
