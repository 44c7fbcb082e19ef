"""A mixture of experts: tokens through all experts, through their own, or those that have room."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.model.modules import grouped
from maxpipe.model.modules.grouped import Rows, by_token, own_vjp, row_weights, sorting, tokens_of
from maxpipe.model.modules.mlp import gated, gated_mlp
from maxpipe.model.modules.part import Context, Output, PartModule
from maxpipe.model.modules.router import Routes, reported, routed
from maxpipe.model.parts import experts
from maxpipe.parallel.per_device import on_rows_of_device
from maxpipe.parallel.sharding import AxisRules, constrain


class Experts(PartModule):
    """The sum of a token's experts, weighted by what the router makes of it (arXiv:2401.04088)."""

    router: nnx.Param
    router_bias: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
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
        bias = None if self.part.balance_rate is None else self.router_bias[...]
        routes, lost = routed(x, self.router[...], self.part, bias), None
        if self.part.capacity and context.cache is None:
            slots = self._slots(routes.places, context.inputs["segment_ids"])
            out = self._with_room(x, routes, slots)
            lost = (slots.row == len(slots.choice)).mean(-1).reshape(x.shape[:2])
        elif self._groups(x, context) or self._groups(x, context):
            weights = (getattr(self, name)[...].astype(x.dtype) for name in ("gate", "up", "down"))
            out = on_rows_of_device(self._by_group, (x, routes.places, routes.weights), (*weights,))
        else:
            out = self._all(x, routes)
        if self.part.shared is not None:
            out += gated_mlp(x, self, self.part.shared.function, self.rules, "shared_")
        mask = context.inputs.get("loss_mask")
        return Output(out) if mask is None else Output(out, *reported(routes, lost, mask))

    def _groups(self, x: Float[Array, "B T D"], context: Context) -> bool:
        """As declared. In decoding, where a call may have few tokens, if less is computed."""
        tokens = x.shape[0] * x.shape[1]
        if context.cache is None:
            return self.part.grouped
        visited = grouped.num_visited(tokens * self.part.per_token, self.part.num_experts)
        return visited < tokens * self.part.num_experts

    def _by_group(
        self,
        tokens: tuple[Float[Array, "B T D"], Int[Array, "B T k"], Float[Array, "B T E"]],
        params: tuple[Float[Array, "D E F"], Float[Array, "D E F"], Float[Array, "E F D"]],
    ) -> Float[Array, "B T D"]:
        """Of tokens through their own experts."""
        x, *routes = tokens
        places, weights = (each.reshape(-1, each.shape[-1]) for each in routes)
        rows, sizes = grouped.sorted_rows(places, self.part.num_experts)
        axes = grouped.split_over(self.rules)
        gate, up = grouped.expanded(x, params[:2], rows, sizes, axes)
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        weights = grouped.row_weights(weights, places, rows, self.part.num_experts)
        hidden = gated(gate, up, self.part.function, weights.astype(x.dtype))
        hidden = constrain(hidden, (None, "mlp"), self.rules)
        return grouped.contracted(hidden, params[2], rows, sizes, axes).reshape(x.shape)

    def _all(self, x: Float[Array, "B T D"], routes: Routes) -> Float[Array, "B T D"]:
        """Of all tokens through all experts."""
        gate = jnp.einsum("btd,def->btef", x, self.gate[...].astype(x.dtype))
        up = jnp.einsum("btd,def->btef", x, self.up[...].astype(x.dtype))
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        hidden = gated(gate, up, self.part.function, routes.weights.astype(x.dtype))
        hidden = constrain(hidden, (None, None, "experts", "mlp"), self.rules)
        return jnp.einsum("btef,efd->btd", hidden, self.down[...].astype(x.dtype))

    def _with_room(
        self, x: Float[Array, "B T D"], routes: Routes, slots: Rows
    ) -> Float[Array, "B T D"]:
        """Of tokens through the experts that have room for them."""
        num_experts = self.part.num_experts
        inside = to_slots(x, slots, x.shape).reshape(num_experts, -1, x.shape[-1])
        gate = jnp.einsum("end,def->enf", inside, self.gate[...].astype(x.dtype))
        up = jnp.einsum("end,def->enf", inside, self.up[...].astype(x.dtype))
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        places, weights = (
            each.reshape(-1, each.shape[-1]) for each in (routes.places, routes.weights)
        )
        weights = row_weights(weights, places, slots, num_experts).reshape(num_experts, -1)
        hidden = gated(gate, up, self.part.function, weights.astype(x.dtype))
        hidden = constrain(hidden, ("experts", None, "mlp"), self.rules)
        out = jnp.einsum("enf,efd->end", hidden, self.down[...].astype(x.dtype))
        return to_tokens(out.reshape(-1, x.shape[-1]), slots).reshape(x.shape)

    def _slots(self, places: Int[Array, "B T k"], segments: Int[Array, "B T"]) -> Rows:
        """The room of all experts as rows: of each expert that for each sequence.

        First choices go before second ones, earlier tokens before later ones (arXiv:2006.16668).
        Padding, of segment 0, takes no room.
        """
        rows, tokens, chosen = places.shape
        num_experts, room = self.part.num_experts, self.part.room(tokens)
        counts, queues = segments > 0, num_experts * rows
        queue = jnp.where(
            counts[..., None], places * rows + jnp.arange(rows)[:, None, None], queues
        )
        queue = queue.transpose(2, 0, 1).reshape(-1)  # all first choices, then all second ones
        asks = (places.reshape(rows, -1, 1) == jnp.arange(num_experts)) & jnp.repeat(
            counts, chosen, axis=1
        )[..., None]
        lengths = asks.sum(1, dtype=jnp.int32).T.reshape(-1)
        first = jnp.cumsum(lengths) - lengths
        in_line = sorting(queue)
        before = sorting(in_line) - first.at[queue].get(mode="clip")
        none = queues * room
        slot = jnp.where((queue < queues) & (before < room), queue * room + before, none)
        number = jnp.arange(room)
        found = in_line.at[first[:, None] + number].get(mode="clip")
        num_tokens = rows * tokens
        choice = found % num_tokens * chosen + found // num_tokens
        choice = jnp.where(number < lengths[:, None], choice, num_tokens * chosen)
        return Rows(choice.reshape(-1), slot.reshape(chosen, -1).T)


# A slot has one token, a token a slot for each of its choices: the transpose of each of the two
# functions is the other one. So no gradient is scattered, which is slow on TPUs. Empty slots hold
# some token: its weight is 0, and so is all that comes of it.


@own_vjp(static=2)
def to_slots(x: Float[Array, "B T D"], slots: Rows, shape: tuple[int, ...]) -> Float[Array, "S D"]:
    """Each slot's token; `shape` is that of `x`."""
    assert x.shape == shape
    return tokens_of(x, slots)


@jax.custom_vjp
def to_tokens(x: Float[Array, "S D"], slots: Rows) -> Float[Array, "n D"]:
    """Each token's sum over its slots."""
    return by_token([x], slots.row, complete=False)


to_slots.defvjp(
    lambda x, slots, shape: (to_slots(x, slots, shape), slots.row),
    lambda shape, row, cotangent: (
        by_token([cotangent], row, complete=False).reshape(shape),
        None,
    ),
)
to_tokens.defvjp(
    lambda x, slots: (to_tokens(x, slots), slots),
    lambda slots, cotangent: (tokens_of(cotangent, slots), None),
)
