"""A mixture of experts: tokens through all experts, through their own, or those that have room."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

_PROJECTIONS = ("gate", "up", "down")


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
    shared_weight: nnx.Param

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
            lost = (slots.row == len(slots.choice)).mean(-1).reshape(x.shape[:2])
        elif self._groups(x, context):
            names = [*_PROJECTIONS, *(f"{name}_bias" for name in _PROJECTIONS if part.biased)]
            params = {name: getattr(self, name)[...].astype(x.dtype) for name in names}
            out = on_rows_of_device(self._by_group, (x, routes.places, routes.weights), params)
        else:
            out = self._all(x, routes)
        if self.part.shared is not None:
            always = gated_mlp(x, self, self.part.shared.function, self.rules, "shared_")
            if self.part.shared_gated:
                weight = self.shared_weight[...].astype(x.dtype)
                always *= jax.nn.sigmoid(jnp.einsum("btd,d->bt", x, weight))[..., None]
            out += always
        mask = context.inputs.get("loss_mask")
        if mask is None:
            return Output(out)
        return Output(out, *reported(routes, lost, mask, part.balance_over))

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
        params: Mapping[str, Array],
    ) -> Float[Array, "B T D"]:
        """Of tokens through their own experts."""
        x, *routes = tokens
        places, weights = (each.reshape(-1, each.shape[-1]) for each in routes)
        rows, sizes = grouped.sorted_rows(places, self.part.num_experts)
        axes = grouped.split_over(self.rules)
        gate, up = grouped.expanded(x, (params["gate"], params["up"]), rows, sizes, axes)
        if self.part.biased:
            gate += grouped.row_biases(params["gate_bias"], places, rows)
            up += grouped.row_biases(params["up_bias"], places, rows)
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        of_rows = row_weights(weights, places, rows, self.part.num_experts).astype(x.dtype)
        hidden = constrain(gated(gate, up, self.part.function, of_rows), (None, "mlp"), self.rules)
        out = grouped.contracted(hidden, params["down"], rows, sizes, axes)
        if self.part.biased:
            out += weights.astype(x.dtype) @ params["down_bias"]
        return out.reshape(x.shape)

    def _all(self, x: Float[Array, "B T D"], routes: Routes) -> Float[Array, "B T D"]:
        """Of all tokens through all experts."""
        gate = jnp.einsum("btd,def->btef", x, self.gate[...].astype(x.dtype))
        up = jnp.einsum("btd,def->btef", x, self.up[...].astype(x.dtype))
        gate, up = self._with_bias("gate", gate), self._with_bias("up", up)
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        weights = routes.weights.astype(x.dtype)
        hidden = gated(gate, up, self.part.function, weights)
        hidden = constrain(hidden, (None, None, "experts", "mlp"), self.rules)
        out = jnp.einsum("btef,efd->btd", hidden, self.down[...].astype(x.dtype))
        return self._with_bias("down", out, lambda bias: jnp.einsum("bte,ed->btd", weights, bias))

    def _with_room(
        self, x: Float[Array, "B T D"], routes: Routes, slots: Rows
    ) -> Float[Array, "B T D"]:
        """Of tokens through the experts that have room for them."""
        num_experts = self.part.num_experts
        inside = to_slots(x, slots, x.shape).reshape(num_experts, -1, x.shape[-1])
        gate = jnp.einsum("end,def->enf", inside, self.gate[...].astype(x.dtype))
        up = jnp.einsum("end,def->enf", inside, self.up[...].astype(x.dtype))
        gate, up = (
            self._with_bias(name, each, lambda bias: bias[:, None])
            for name, each in (("gate", gate), ("up", up))
        )
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        places, weights = (
            each.reshape(-1, each.shape[-1]) for each in (routes.places, routes.weights)
        )
        weights = row_weights(weights, places, slots, num_experts).reshape(num_experts, -1)
        weights = weights.astype(x.dtype)
        hidden = gated(gate, up, self.part.function, weights)
        hidden = constrain(hidden, ("experts", None, "mlp"), self.rules)
        out = jnp.einsum("enf,efd->end", hidden, self.down[...].astype(x.dtype))
        out = self._with_bias("down", out, lambda bias: weights[..., None] * bias[:, None])
        return to_tokens(out.reshape(-1, x.shape[-1]), slots).reshape(x.shape)

    def _with_bias(
        self, name: str, x: Array, spread: Callable[[Array], Array] = lambda bias: bias
    ) -> Array:
        """With what `spread` makes of a projection's biases `[E, ...]`; x itself without them."""
        if not self.part.biased:
            return x
        return x + spread(getattr(self, f"{name}_bias")[...].astype(x.dtype))

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
