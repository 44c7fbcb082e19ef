"""A mixture of experts: every token through every expert, or through those that have room."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.model.modules.mlp import gated, gated_mlp
from maxpipe.model.modules.part import Context, Output, PartModule
from maxpipe.model.modules.router import Routes, reported, routed
from maxpipe.model.parts import experts
from maxpipe.parallel.sharding import AxisRules, constrain


class Slots(NamedTuple):
    """Room of experts, and who has it."""

    tokens: Int[Array, "B S"]
    """The token in each slot, those of one expert side by side; T where there is none."""
    slots: Int[Array, "B k T"]
    """The slot of each choice of each token; S where there was no room."""


class Experts(PartModule):
    """The sum of a token's experts, weighted by what the router makes of it (arXiv:2401.04088)."""

    router: nnx.Param
    router_bias: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    logit_bias: nnx.Param
    gate_bias: nnx.Param
    up_bias: nnx.Param
    down_bias: nnx.Param
    shared_gate: nnx.Param
    shared_up: nnx.Param
    shared_down: nnx.Param

    def __init__(self, part: experts.Experts, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> Output:
        """Returns losses and statistics where there is a `loss_mask`.

        No token is dropped in decoding: how many there are in a call says nothing about the model.
        """
        part = self.part
        bias = None if part.balance_rate is None else self.router_bias[...]
        logit_bias = self.logit_bias[...] if part.biased else None
        routes, lost = routed(x, self.router[...], part, bias, logit_bias), None
        if self.part.capacity and context.cache is None:
            slots = self._slots(routes.places, context.inputs["segment_ids"])
            out = self._with_room(x, routes, slots)
            lost = (slots.slots == slots.tokens.shape[1]).mean(1)
        else:
            out = self._all(x, routes)
        if self.part.shared is not None:
            out += gated_mlp(x, self, self.part.shared.function, self.rules, "shared_")
        mask = context.inputs.get("loss_mask")
        return Output(out) if mask is None else Output(out, *reported(routes, lost, mask))

    def _all(self, x: Float[Array, "B T D"], routes: Routes) -> Float[Array, "B T D"]:
        """Of all tokens through all experts."""
        gate = jnp.einsum("btd,def->btef", x, self.gate[...].astype(x.dtype))
        up = jnp.einsum("btd,def->btef", x, self.up[...].astype(x.dtype))
        gate, up = self._with_bias("gate", gate), self._with_bias("up", up)
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        hidden = gated(gate, up, self.part.function) * routes.weights.astype(x.dtype)[..., None]
        hidden = constrain(hidden, (None, None, "experts", "mlp"), self.rules)
        out = jnp.einsum("btef,efd->btd", hidden, self.down[...].astype(x.dtype))
        weights = routes.weights.astype(x.dtype)
        return self._with_bias("down", out, lambda bias: jnp.einsum("bte,ed->btd", weights, bias))

    def _with_room(
        self, x: Float[Array, "B T D"], routes: Routes, slots: Slots
    ) -> Float[Array, "B T D"]:
        """Of tokens through the experts that have room for them."""
        rows, _, width = x.shape
        room = (rows, self.part.num_experts, -1)
        inside = to_slots(x, slots).reshape(*room, width)
        gate = jnp.einsum("becd,def->becf", inside, self.gate[...].astype(x.dtype))
        up = jnp.einsum("becd,def->becf", inside, self.up[...].astype(x.dtype))
        gate, up = (
            self._with_bias(name, each, lambda bias: bias[:, None])
            for name, each in (("gate", gate), ("up", up))
        )
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        weights = jnp.take_along_axis(
            routes.weights.swapaxes(1, 2),
            slots.tokens.reshape(room),
            axis=2,
            mode="fill",
            fill_value=0,
        ).astype(x.dtype)[..., None]
        hidden = gated(gate, up, self.part.function) * weights
        hidden = constrain(hidden, (None, "experts", None, "mlp"), self.rules)
        out = jnp.einsum("becf,efd->becd", hidden, self.down[...].astype(x.dtype))
        out = self._with_bias("down", out, lambda bias: weights * bias[:, None])
        return to_tokens(out.reshape(rows, -1, width), slots)

    def _with_bias(
        self, name: str, x: Array, spread: Callable[[Array], Array] = lambda bias: bias
    ) -> Array:
        """With what `spread` makes of a projection's biases `[E, ...]`; x itself without them."""
        if not self.part.biased:
            return x
        return x + spread(getattr(self, f"{name}_bias")[...].astype(x.dtype))

    def _slots(self, places: Int[Array, "B T k"], segments: Int[Array, "B T"]) -> Slots:
        """First choices go before second ones, earlier tokens before later ones (arXiv:2006.16668).

        Padding, of segment 0, takes no room.
        """
        rows, tokens, _ = places.shape
        num_experts, room = self.part.num_experts, self.part.room(tokens)
        experts = places.swapaxes(1, 2).reshape(rows, -1)  # all first choices, then all second ones
        counts = jnp.tile(segments > 0, (1, self.part.per_token))
        asks = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32) * counts[..., None]
        before = ((jnp.cumsum(asks, axis=1) - asks) * asks).sum(-1)
        none = num_experts * room
        slots = jnp.where(counts & (before < room), experts * room + before, none)
        token = jnp.tile(jnp.arange(tokens), self.part.per_token)
        row = jnp.arange(rows)[:, None]
        taken = jnp.full((rows, none), tokens).at[row, slots].set(token, mode="drop")
        return Slots(taken, slots.reshape(rows, -1, tokens))


# A slot has one token, a token a slot for each of its choices: the transpose of each of the two
# functions is the other one. So no gradient is scattered, which is slow on TPUs.


@jax.custom_vjp
def to_slots(x: Float[Array, "B T D"], slots: Slots) -> Float[Array, "B S D"]:
    """Each slot's token, zeros in empty slots."""
    return _rows_at(x, slots.tokens)


@jax.custom_vjp
def to_tokens(x: Float[Array, "B S D"], slots: Slots) -> Float[Array, "B T D"]:
    """Each token's sum over its slots."""
    found = [_rows_at(x, slots.slots[:, number]) for number in range(slots.slots.shape[1])]
    return sum(found[1:], found[0])


def _rows_at(x: Float[Array, "B n D"], index: Int[Array, "B m"]) -> Float[Array, "B m D"]:
    """Rows of each sequence; zeros where there is none of that number."""
    return jnp.take_along_axis(x, index[..., None], axis=1, mode="fill", fill_value=0)


to_slots.defvjp(
    lambda x, slots: (to_slots(x, slots), slots),
    lambda slots, cotangent: (to_tokens(cotangent, slots), None),
)
to_tokens.defvjp(
    lambda x, slots: (to_tokens(x, slots), slots),
    lambda slots, cotangent: (to_slots(cotangent, slots), None),
)
