"""A mixture of experts: tokens through all experts, through their own, or those that have room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import experts
from maxpipe.nn import grouped
from maxpipe.nn.exchange import from_experts, to_experts
from maxpipe.nn.mlp import gated, gated_mlp
from maxpipe.nn.part import Context, Output, PartModule
from maxpipe.nn.router import Routes, reported, routed
from maxpipe.nn.rows import (
    Rows,
    row_biases,
    row_weights,
    rows_in_line,
    sorted_rows,
    to_slots,
    to_tokens,
    weighted_biases,
)
from maxpipe.parallel.collectives import exchange, gather_shards, scatter_sum, size_of
from maxpipe.parallel.context import WHOLE_ROW, own_part, whole_rows
from maxpipe.parallel.low_precision import LowPrecision, rounded_einsum
from maxpipe.parallel.mesh import CONTEXT, EXPERT
from maxpipe.parallel.per_device import on_rows_of_device, vary
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
        part, split, shards = self.part, context.split(self.rules), x
        x = split.whole(x)
        bias = None if part.balance_rate is None else self.router_bias[...]
        logit_bias = self.logit_bias[...] if part.biased else None
        routes = routed(x, self.router[...], part, bias, logit_bias)
        out, lost = self._mixed(x, routes, context)
        out = split.summed(out)
        if self.part.shared is not None:
            always = gated_mlp(shards, self, self.part.shared.function, split, "shared_")
            if self.part.shared_gated:
                weight = self.shared_weight[...].astype(x.dtype)
                always *= jax.nn.sigmoid(jnp.einsum("btd,d->bt", shards, weight))[..., None]
            out += always
        mask = context.inputs.get("loss_mask")
        if mask is None:
            return Output(out)
        return Output(out, *reported(routes, lost, mask, part.balance_over))

    def _mixed(
        self, x: Float[Array, "B T D"], routes: Routes, context: Context
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T"] | None]:
        """Weighted sums of experts, and of each token the fraction of its choices that are lost."""
        limited = bool(self.part.capacity) and context.cache is None
        apart, divided = size_of(EXPERT) > 1, size_of(CONTEXT) > 1
        if limited and not (apart or divided):
            slots = self._slots(routes.places, context.inputs["segment_ids"])
            return self._with_room(x, routes, slots, context.low), slots.lost.reshape(x.shape[:2])
        places = self._admitted(routes.places, context.inputs) if limited else routes.places
        by_group = limited or self._groups(x, context)
        lost = (places == self.part.num_experts).mean(-1) if self.part.loses else None
        if by_group and apart:
            return self._exchanged(x, places, routes.weights, context)
        if by_group:
            run = partial(self._by_group, complete=not limited, low=context.low)
            return on_rows_of_device(run, (x, places, routes.weights), self._params(x)), lost
        return self._all_of_axis(x, routes.weights, context.low), lost

    def _exchanged(
        self,
        x: Float[Array, "B T D"],
        places: Int[Array, "B T k"],
        weights: Float[Array, "B T E"],
        context: Context,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T"] | None]:
        """`_mixed` where experts are on the devices of an axis."""
        rows, tokens = x.shape[:2]
        part, segments = self.part, context.inputs["segment_ids"]
        if context.cache is not None:
            part = replace(part, capacity=0.0, exchange=0.0)
        room = part.room_between(size_of(EXPERT), rows, tokens, tokens * size_of(CONTEXT))
        # Padding would take room of tokens that count.
        places = jnp.where((segments > 0)[..., None], places, part.num_experts)
        received, sent = to_experts(x, places, weights, room)
        filled = part.per_token * rows * tokens / (room * size_of(EXPERT))
        found = self._by_group(received, self._params(x), filled=min(filled, 1.0), low=context.low)
        lost = sent.slots.lost.reshape(x.shape[:2]) if self.part.loses else None
        return from_experts(found, sent).reshape(x.shape), lost

    def _params(self, x: Array) -> dict[str, Array]:
        """Those of the experts, in the type of `x`."""
        names = [*_PROJECTIONS, *(f"{name}_bias" for name in _PROJECTIONS if self.part.biased)]
        return {name: getattr(self, name)[...].astype(x.dtype) for name in names}

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
        *,
        complete: bool = True,
        filled: float = 1.0,
        low: LowPrecision | None,
    ) -> Float[Array, "B T D"]:
        """Of tokens through their own experts, of which `params` are.

        `complete`: all choices count, or what becomes of the others is not read. `filled`: the
        share of them that count, on average.
        """
        x, *routes = tokens
        places, weights = (each.reshape(-1, each.shape[-1]) for each in routes)
        num_experts = weights.shape[-1]
        rows, sizes = sorted_rows(places, num_experts)
        spread = grouped.Spread(grouped.split_over(self.rules), complete, low, filled)
        gate, up = grouped.expanded(x, (params["gate"], params["up"]), rows, sizes, spread)
        if self.part.biased:
            gate += row_biases(params["gate_bias"], places, rows)
            up += row_biases(params["up_bias"], places, rows)
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        of_rows = row_weights(weights, places, rows, num_experts).astype(x.dtype)
        hidden = constrain(gated(gate, up, self.part.function, of_rows), (None, "mlp"), self.rules)
        out = grouped.contracted(hidden, params["down"], rows, sizes, spread)
        if self.part.biased:
            out += weighted_biases(weights.astype(x.dtype), params["down_bias"])
        return out.reshape(x.shape)

    def _all_of_axis(
        self, x: Float[Array, "B T D"], weights: Float[Array, "B T E"], low: LowPrecision | None
    ) -> Float[Array, "B T D"]:
        """Of all tokens through all experts, those of other devices of the axis, too."""
        whole = gather_shards(x, EXPERT, 0)
        return scatter_sum(self._all(whole, exchange(weights, EXPERT, 2, 0), low), EXPERT, 0)

    def _all(
        self, x: Float[Array, "B T D"], weights: Float[Array, "B T E"], low: LowPrecision | None
    ) -> Float[Array, "B T D"]:
        """Of all tokens through all experts that are here."""
        gate = _multiplied("btd,def->btef", x, self.gate, low)
        up = _multiplied("btd,def->btef", x, self.up, low)
        gate, up = self._with_bias("gate", gate), self._with_bias("up", up)
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        weights = weights.astype(x.dtype)
        hidden = gated(gate, up, self.part.function, weights)
        hidden = constrain(hidden, (None, None, "experts", "mlp"), self.rules)
        out = _multiplied("btef,efd->btd", hidden, self.down, low)
        return self._with_bias("down", out, lambda bias: jnp.einsum("bte,ed->btd", weights, bias))

    def _with_room(
        self, x: Float[Array, "B T D"], routes: Routes, slots: Rows, low: LowPrecision | None
    ) -> Float[Array, "B T D"]:
        """Of tokens through the experts that have room for them."""
        num_experts = self.part.num_experts
        inside = to_slots(x, slots, x.shape).reshape(num_experts, -1, x.shape[-1])
        gate = _multiplied("end,def->enf", inside, self.gate, low)
        up = _multiplied("end,def->enf", inside, self.up, low)
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
        out = _multiplied("enf,efd->end", hidden, self.down, low)
        out = self._with_bias("down", out, lambda bias: weights[..., None] * bias[:, None])
        return to_tokens(out.reshape(-1, x.shape[-1]), slots).reshape(x.shape)

    def _with_bias(
        self, name: str, x: Array, spread: Callable[[Array], Array] = lambda bias: bias
    ) -> Array:
        """With what `spread` makes of a projection's biases `[E, ...]`; x itself without them."""
        if not self.part.biased:
            return x
        return x + spread(getattr(self, f"{name}_bias")[...].astype(x.dtype))

    def _admitted(
        self, places: Int[Array, "B T k"], inputs: Mapping[str, Any]
    ) -> Int[Array, "B T k"]:
        """Experts of each token, and E in place of those that have no room for it.

        Who has room follows from whole rows, of which this device may have some tokens.
        """
        whole = vary(whole_rows(places, 1))
        slots = self._slots(whole, inputs.get(WHOLE_ROW, inputs["segment_ids"]))
        has_room = (slots.row < len(slots.choice)).reshape(whole.shape)
        return jnp.where(own_part(has_room, 1), places, self.part.num_experts)

    def _slots(self, places: Int[Array, "B T k"], segments: Int[Array, "B T"]) -> Rows:
        """The room of all experts as rows: of each expert that for each sequence.

        Padding, of segment 0, takes no room.
        """
        rows, tokens, _ = places.shape
        queues = self.part.num_experts * rows
        queue = places * rows + jnp.arange(rows)[:, None, None]
        counts = (segments > 0)[..., None]
        queue = jnp.where(counts, queue, queues)
        asks = (places[..., None] == jnp.arange(self.part.num_experts)) & counts[..., None]
        lengths = asks.sum((1, 2), dtype=jnp.int32).T.reshape(-1)
        return rows_in_line(queue, lengths, self.part.room(tokens))


def _multiplied(form: str, x: Array, param: nnx.Param, low: LowPrecision | None) -> Array:
    weight = param[...].astype(x.dtype)
    return jnp.einsum(form, x, weight) if low is None else rounded_einsum(form, x, weight, low)
