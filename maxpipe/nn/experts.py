"""Mixture of experts: routing, dispatch over the expert axis, and computation of the experts.

With expert parallelism, every device reserves capacity for tokens from every other device. Tokens
are sent in fixed-size buffers, whose last rows may be empty. On TPUs and NVIDIA GPUs, a ragged
all-to-all sends only the used rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from maxpipe.models.layers import experts
from maxpipe.models.layers.experts import AllToAll
from maxpipe.models.layers.mlp import input_projections
from maxpipe.nn import grouped_matmul
from maxpipe.nn.expert_backends.blocks import num_multiplied_rows
from maxpipe.nn.mlp import apply_activation, apply_mlp
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.nn.router import Routing, compute_router_metrics, route_tokens
from maxpipe.nn.token_permutation import (
    TokenPermutation,
    assign_capacity_slots,
    custom_vjp_with_static,
    permute_tokens,
    row_biases,
    row_weights,
    sort_by_expert,
    unpermute_tokens,
    weighted_biases,
)
from maxpipe.parallel.collectives import (
    FULL_SEGMENT_IDS,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    gather_sequences,
    local_shard,
    map_batch_shards,
    mark_varying,
    reduce_scatter,
)
from maxpipe.parallel.lora_weight import LoraWeight, base_weights
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.mesh import CONTEXT, EXPERT
from maxpipe.parallel.quantized_matmul import quantized_einsum
from maxpipe.parallel.sharding import AxisRules, constrain


class ReceivedTokens(NamedTuple):
    """Tokens received from all devices along the expert axis for the e local experts."""

    x: Float[Array, "1 S D"]
    expert_ids: Int[Array, "1 S 1"]
    """Local expert index of the token in each row; e for an empty row."""
    weights: Float[Array, "1 S e"]
    """Weight applied to each expert's output; 0 for experts that the token does not use."""


class SentTokens(NamedTuple):
    """Dispatch state needed to return expert outputs to the senders."""

    slots: TokenPermutation
    counts: Int[Array, " X"]
    """Number of rows sent to each device."""
    received_counts: Int[Array, " X"]
    """Number of rows received from each device."""


def dispatch_tokens(
    x: Float[Array, "B T D"],
    places: Int[Array, "B T k"],
    weights: Float[Array, "B T E"],
    room: int,
    method: AllToAll = "auto",
) -> tuple[ReceivedTokens, SentTokens]:
    """Send each token to the devices that hold its experts. `room` is the maximum number of rows
    sent from one device to another.

    Expert index E means that a choice selects no expert. If the capacity is exceeded, first choices
    have priority over second choices and earlier tokens over later tokens, regardless of the
    expert.
    """
    size, num_experts = axis_size(EXPERT), weights.shape[-1]
    local_experts = num_experts // size
    target = places // local_experts
    lengths = (target.reshape(-1, 1) == jnp.arange(size)).sum(0, dtype=jnp.int32)
    slots = assign_capacity_slots(target, lengths, room)
    counts = jnp.minimum(lengths, room)
    sent = SentTokens(slots, counts, all_to_all(counts, EXPERT, 0, 0))
    flat, of_tokens = places.reshape(-1, places.shape[-1]), weights.reshape(-1, num_experts)
    factors = row_weights(of_tokens, flat, slots, num_experts)
    expert = flat.reshape(-1).at[slots.choice_of_row].get(mode="fill", fill_value=num_experts)
    # Empty rows get the expert index that follows the last local expert.
    expert = all_to_all(
        jnp.where(expert < num_experts, expert % local_experts, local_experts), EXPERT, 0, 0
    )
    factors = all_to_all(factors, EXPERT, 0, 0)
    of_mine = jnp.where(expert[:, None] == jnp.arange(local_experts), factors[:, None], 0)
    rows = permute_tokens(x, slots, x.shape)
    rows = exchange_rows(rows, sent.counts, sent.received_counts, method)
    return ReceivedTokens(rows[None], expert[None, :, None], of_mine[None]), sent


def combine_tokens(
    x: Float[Array, "1 S D"], sent: SentTokens, method: AllToAll = "auto"
) -> Float[Array, "n D"]:
    """Sum the expert outputs of each token."""
    rows = exchange_rows(x[0], sent.received_counts, sent.counts, method)
    return unpermute_tokens(rows, sent.slots)


@custom_vjp_with_static(static=3)
def exchange_rows(
    x: Float[Array, "S D"], sent: Int[Array, " X"], received: Int[Array, " X"], method: AllToAll
) -> Float[Array, "S D"]:
    """Send each device its block of rows; only the first `sent` rows of a block are used.

    Unused rows in the result are uninitialized and never read.
    """
    padded = lambda x, sent, received: all_to_all(x, EXPERT, 0, 0)  # noqa: E731
    if method == "padded":
        return padded(x, sent, received)
    in_tiles = partial(_ragged, together=_rows_together(len(x) // axis_size(EXPERT)))
    return lax.platform_dependent(x, sent, received, tpu=in_tiles, cuda=_ragged, default=padded)


exchange_rows.defvjp(
    lambda x, sent, received, method: (
        exchange_rows(x, sent, received, method),
        (sent, received),
    ),
    lambda method, saved, cotangent: (
        exchange_rows(cotangent, *reversed(saved), method),
        None,
        None,
    ),
)


_TILE_ROWS = 8
"""Number of rows in a tile of a TPU's memory layout."""


def _rows_together(room: int) -> int:
    """Return the number of rows that a TPU exchanges together, if a block has `room` rows.

    XLA would store single rows in another layout than matmuls use, and copy them before and after
    each exchange. Complete tiles need no copy, but up to 7 unused rows are sent to each device.
    """
    return _TILE_ROWS if room % _TILE_ROWS == 0 else 1


def _ragged(x: Array, sent: Array, received: Array, together: int = 1) -> Array:
    """Exchange only the used rows of each block, rounded up to a multiple of `together`."""
    size, me = axis_size(EXPERT), axis_index(EXPERT)
    rows = x if together == 1 else x.reshape(-1, together, x.shape[1])
    sent, received = (-(-count // together) for count in (sent, received))
    room = len(rows) // size
    own, there = jnp.arange(size, dtype=jnp.int32) * room, jnp.full(size, me * room, jnp.int32)
    # If input and output shared a buffer, XLA would copy the rows one tile line at a time.
    empty = mark_varying(lax.empty(rows.shape, rows.dtype))
    return lax.ragged_all_to_all(
        rows, empty, mark_varying(own), sent, mark_varying(there), received, axis_name=EXPERT
    ).reshape(x.shape)


@jax.custom_vjp
def start_after(x: Float[Array, "*dims"], other: Array) -> Float[Array, "*dims"]:
    """Return `x`, on which operations start after `other` is computed, on TPUs. Operations on its
    gradient also wait for `other`, which a backward pass may have to recompute.
    """
    return _start_after(x, other)


def _start_after(x: Array, other: Array) -> Array:
    return lax.platform_dependent(
        x,
        other,
        tpu=lambda x, other: lax.optimization_barrier((x, other))[0],
        default=lambda x, other: x,
    )


start_after.defvjp(
    lambda x, other: (_start_after(x, other), other),
    lambda other, cotangent: (_start_after(cotangent, other), None),
)


class Experts(SpecModule):
    """Weighted sum of the outputs of each token's experts (arXiv:2401.04088)."""

    router: nnx.Param
    router_bias: nnx.Param
    token_experts: nnx.Param
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
    input_norm: nnx.Param
    router_norm: nnx.Param
    expert_scale: nnx.Param

    def __init__(self, part: experts.Experts, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the experts; if there is a `loss_mask`, also return losses and statistics.

        No tokens are dropped in decoding, because the capacity would depend on the number of tokens
        per call.
        """
        part, split, shards = self.part, context.split(self.rules), x
        x = split.gather_tokens(x)
        bias = None if part.expert_bias_update_rate is None else self.router_bias[...]
        logit_bias = self.logit_bias[...] if part.biased else None
        routed, scale = x, None
        if part.input_norm is not None:
            routed = rms_norm(x, self.router_norm[...], part.input_norm) * part.d_model**-0.5
            x = rms_norm(x, self.input_norm[...], part.input_norm)
        if part.expert_scaled:
            scale = self.expert_scale[...]
        ids = self.token_experts[...][context.inputs["tokens"]] if part.is_hashed else None
        routes = route_tokens(routed, self.router[...], part, bias, logit_bias, scale, ids)
        out, lost = self._apply_experts(x, routes, context)
        out = split.reduce_scatter_tokens(out)
        if self.part.shared is not None:
            always = apply_mlp(
                shards,
                self,
                self.part.shared.function,
                split,
                "shared_",
                recorder=context.recorder,
            )
            if self.part.shared_gated:
                weight = self.shared_weight[...].astype(x.dtype)
                always *= jax.nn.sigmoid(jnp.einsum("btd,d->bt", shards, weight))[..., None]
            out += always
        mask = context.inputs.get("loss_mask")
        if mask is None:
            return Output(out)
        if context.recorder is not None:
            context.recorder.record_router(routes.probabilities, mask)
        return Output(out, *compute_router_metrics(routes, lost, mask, part.load_balance_scope))

    def _apply_experts(
        self, x: Float[Array, "B T D"], routes: Routing, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T"] | None]:
        """Return the weighted sums of expert outputs, and the fraction of each token's experts that
        dropped the token.
        """
        limited = bool(self.part.capacity) and context.cache is None
        apart, divided = axis_size(EXPERT) > 1, axis_size(CONTEXT) > 1
        if limited and not (apart or divided):
            slots = self._capacity_slots(routes.expert_ids, context.inputs["segment_ids"])
            return self._capacity_experts(
                x, routes, slots, context.quantizer
            ), slots.dropped_fraction.reshape(x.shape[:2])
        places = (
            self._drop_over_capacity(routes.expert_ids, context.inputs)
            if limited
            else routes.expert_ids
        )
        by_group = limited or self._groups(x, context)
        lost = (places == self.part.num_experts).mean(-1) if self.part.drops_tokens else None
        if by_group and apart:
            return self._apply_expert_parallel(x, places, routes.weights, context)
        if by_group:
            run = partial(self._grouped_experts, complete=not limited, low=context.quantizer)
            return map_batch_shards(run, (x, places, routes.weights), self._params(x)), lost
        return self._dense_experts_of_axis(x, routes.weights, context.quantizer), lost

    def _apply_expert_parallel(
        self,
        x: Float[Array, "B T D"],
        places: Int[Array, "B T k"],
        weights: Float[Array, "B T E"],
        context: LayerContext,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T"] | None]:
        """Implement `_apply_experts` with experts sharded over the expert axis.

        Chunks of tokens are independent, so the compiler can exchange the tokens of one chunk while
        the experts process another chunk.
        """
        part, params = self.part, self._params(x)
        if context.cache is not None:
            part = replace(part, capacity=0.0, send_capacity_factor=0.0, all_to_all_chunks=1)
        # Sequences that evaluations score can have other lengths than those in training.
        chunks = math.gcd(part.all_to_all_chunks, x.shape[1])
        part = replace(part, all_to_all_chunks=chunks)
        # Padding must not consume capacity that real tokens need.
        segments = context.inputs["segment_ids"]
        places = jnp.where((segments > 0)[..., None], places, part.num_experts)
        # The compiler must not shard the tokens of a chunk, as sequence parallelism shards those
        # of a sequence. It would reshard them by collectives of all stages, although the stages
        # can run different parts of the schedule at the same time.
        whole = (x, places, weights) if chunks == 1 else self._replicate((x, places, weights))
        arrays = zip(*(jnp.split(array, chunks, axis=1) for array in whole), strict=True)
        found = self._exchange_chunks(part, params, list(arrays), context)
        joined = tuple(jnp.concatenate(each, axis=1) for each in zip(*found, strict=True))
        out, lost = joined if chunks == 1 else self._replicate(joined)
        return out, lost if self.part.drops_tokens else None

    def _replicate(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Replicate arrays and their cotangents over the axes that the compiler shards."""
        return tuple(constrain(array, (None,) * array.ndim, self.rules) for array in arrays)

    def _exchange_chunks(
        self,
        part: experts.Experts,
        params: Mapping[str, Any],
        chunks: Sequence[tuple[Float[Array, "B T D"], Int[Array, "B T k"], Float[Array, "B T E"]]],
        context: LayerContext,
    ) -> list[tuple[Float[Array, "B T D"], Float[Array, "B T"]]]:
        """Send the tokens of each chunk to their experts, apply the experts, and send the results
        back. Also return the fraction of each token's experts that dropped the token.

        Tokens are sent after the gates of the previous chunk, and they arrive before its output
        projection, which can overlap with the return of older results. XLA for TPU would otherwise
        complete the exchanges of all chunks before the experts start, because only one exchange
        can be in progress.
        """
        rows, tokens = chunks[0][0].shape[:2]
        whole = tokens * part.all_to_all_chunks * axis_size(CONTEXT)
        room = part.send_capacity(axis_size(EXPERT), rows, tokens, whole)
        filled = part.per_token * rows * tokens / (room * axis_size(EXPERT))
        exchanged = [dispatch_tokens(*chunks[0], room, part.all_to_all)]
        gates: list[Array] = []
        found = []

        def send_next(gate: Array) -> Array | None:
            gates.append(gate)
            if len(exchanged) == len(chunks):
                return None
            x, places, weights = chunks[len(exchanged)]
            x = start_after(x, gate)
            exchanged.append(dispatch_tokens(x, places, weights, room, part.all_to_all))
            return exchanged[-1][0].x

        for number, (x, *_) in enumerate(chunks):
            received, sent = exchanged[number]
            outputs = self._grouped_experts(
                received,
                params,
                filled=min(filled, 1.0),
                low=context.quantizer,
                before_down=send_next,
            )
            out = combine_tokens(outputs, sent, part.all_to_all).reshape(x.shape)
            # The backward pass sends the gradients of a chunk after the gates of the previous one.
            out = start_after(out, gates[number - 1]) if number else out
            found.append((out, sent.slots.dropped_fraction.reshape(x.shape[:2])))
        return found

    def _params(self, x: Array) -> dict[str, Any]:
        """Return the parameters of the experts in the dtype of `x`."""
        names = [*self._inputs, "down"]
        names += [f"{name}_bias" for name in names] if self.part.biased else []
        return {name: getattr(self, name)[...].astype(x.dtype) for name in names}

    def _groups(self, x: Float[Array, "B T D"], context: LayerContext) -> bool:
        """Return whether to use grouped dispatch. During decoding, grouped dispatch is used only if
        it computes fewer rows.
        """
        tokens = x.shape[0] * x.shape[1]
        if context.cache is None:
            return self.part.grouped
        visited = num_multiplied_rows(tokens * self.part.per_token, self.part.num_experts)
        return visited < tokens * self.part.num_experts

    def _grouped_experts(
        self,
        tokens: tuple[Float[Array, "B T D"], Int[Array, "B T k"], Float[Array, "B T E"]],
        params: Mapping[str, Any],
        *,
        complete: bool = True,
        filled: float = 1.0,
        low: MatmulQuantizer | None,
        before_down: Callable[[Float[Array, "N F"]], Array | None] = lambda gate: None,
    ) -> Float[Array, "B T D"]:
        """Apply the selected experts to each token; `params` are the parameters of the experts.

        `complete` means that no token-expert pair is empty, or that the results of empty pairs are
        never read. `filled` is the mean fraction of nonempty pairs. `before_down` is called with
        the outputs of the gates, and can return an array for which the output projection waits.
        """
        x, *routes = tokens
        places, weights = (array.reshape(-1, array.shape[-1]) for array in routes)
        num_experts = weights.shape[-1]
        rows, sizes = sort_by_expert(places, num_experts)
        spread = grouped_matmul.GroupedMatmulOptions(
            grouped_matmul.expert_width_axes(self.rules), complete, low, filled, self.part.backend
        )
        into = tuple(params[name] for name in self._inputs)
        inputs = _up_projection(x, into, rows, sizes, spread)
        if self.part.biased:
            biases = (params[f"{name}_bias"] for name in self._inputs)
            inputs = [
                each + row_biases(bias, places, rows)
                for each, bias in zip(inputs, biases, strict=True)
            ]
        inputs = self._named(inputs)
        of_rows = row_weights(weights, places, rows, num_experts).astype(x.dtype)
        hidden = apply_activation(inputs, self.part.function, of_rows)
        if (other := before_down(inputs[0])) is not None:
            hidden = start_after(hidden, other)
        hidden = constrain(hidden, (None, "mlp"), self.rules)
        out = _down_projection(hidden, params["down"], rows, sizes, spread)
        if self.part.biased:
            out += weighted_biases(weights.astype(x.dtype), params["down_bias"])
        return out.reshape(x.shape)

    def _dense_experts_of_axis(
        self, x: Float[Array, "B T D"], weights: Float[Array, "B T E"], low: MatmulQuantizer | None
    ) -> Float[Array, "B T D"]:
        """Apply all experts to all tokens, including experts on other devices."""
        whole = all_gather(x, EXPERT, 0)
        return reduce_scatter(
            self._dense_experts(whole, all_to_all(weights, EXPERT, 2, 0), low), EXPERT, 0
        )

    def _dense_experts(
        self, x: Float[Array, "B T D"], weights: Float[Array, "B T E"], low: MatmulQuantizer | None
    ) -> Float[Array, "B T D"]:
        """Apply all local experts to all tokens."""
        forms = ("btd,def->btef", "btd,der->bter", "bter,ref->btef")
        inputs = self._named(
            [
                self._with_bias(name, _expert_matmul(forms, x, getattr(self, name), low))
                for name in self._inputs
            ]
        )
        weights = weights.astype(x.dtype)
        hidden = apply_activation(inputs, self.part.function, weights)
        hidden = constrain(hidden, (None, None, "experts", "mlp"), self.rules)
        forms = ("btef,efd->btd", "btef,efr->bter", "bter,erd->btd")
        out = _expert_matmul(forms, hidden, self.down, low)
        return self._with_bias("down", out, lambda bias: jnp.einsum("bte,ed->btd", weights, bias))

    def _capacity_experts(
        self,
        x: Float[Array, "B T D"],
        routes: Routing,
        slots: TokenPermutation,
        low: MatmulQuantizer | None,
    ) -> Float[Array, "B T D"]:
        """Apply each expert to the tokens within its capacity."""
        num_experts = self.part.num_experts
        inside = permute_tokens(x, slots, x.shape).reshape(num_experts, -1, x.shape[-1])
        forms = ("end,def->enf", "end,der->enr", "enr,ref->enf")
        projected = (
            (name, _expert_matmul(forms, inside, getattr(self, name), low)) for name in self._inputs
        )
        inputs = self._named(
            [self._with_bias(name, each, lambda bias: bias[:, None]) for name, each in projected]
        )
        places, weights = (
            array.reshape(-1, array.shape[-1]) for array in (routes.expert_ids, routes.weights)
        )
        weights = row_weights(weights, places, slots, num_experts).reshape(num_experts, -1)
        weights = weights.astype(x.dtype)
        hidden = apply_activation(inputs, self.part.function, weights)
        hidden = constrain(hidden, ("experts", None, "mlp"), self.rules)
        forms = ("enf,efd->end", "enf,efr->enr", "enr,erd->end")
        out = _expert_matmul(forms, hidden, self.down, low)
        out = self._with_bias("down", out, lambda bias: weights[..., None] * bias[:, None])
        return unpermute_tokens(out.reshape(-1, x.shape[-1]), slots).reshape(x.shape)

    @property
    def _inputs(self) -> tuple[str, ...]:
        return input_projections(self.part.function)

    def _named(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Name the inputs of the activation, for `pipeline.saved_names`."""
        named = zip(self._inputs, inputs, strict=True)
        return tuple(checkpoint_name(each, f"expert_{name}") for name, each in named)

    def _with_bias(
        self, name: str, x: Array, spread: Callable[[Array], Array] = lambda bias: bias
    ) -> Array:
        """Add the projection's biases, if any; `spread` makes them broadcastable to `x`."""
        if not self.part.biased:
            return x
        return x + spread(getattr(self, f"{name}_bias")[...].astype(x.dtype))

    def _drop_over_capacity(
        self, places: Int[Array, "B T k"], inputs: Mapping[str, Any]
    ) -> Int[Array, "B T k"]:
        """Return the experts of each token; index E replaces experts that are at capacity.

        Capacity is counted over full sequences, even if this device holds only a shard of each.
        """
        whole = mark_varying(gather_sequences(places, 1))
        slots = self._capacity_slots(whole, inputs.get(FULL_SEGMENT_IDS, inputs["segment_ids"]))
        has_room = (slots.row_of_choice < len(slots.choice_of_row)).reshape(whole.shape)
        return jnp.where(local_shard(has_room, 1), places, self.part.num_experts)

    def _capacity_slots(
        self, places: Int[Array, "B T k"], segments: Int[Array, "B T"]
    ) -> TokenPermutation:
        """Assign token-expert pairs to the experts' capacity slots, separately for each sequence.

        Padding (segment 0) does not count toward capacity.
        """
        rows, tokens, _ = places.shape
        queues = self.part.num_experts * rows
        queue = places * rows + jnp.arange(rows)[:, None, None]
        counts = (segments > 0)[..., None]
        queue = jnp.where(counts, queue, queues)
        asks = (places[..., None] == jnp.arange(self.part.num_experts)) & counts[..., None]
        lengths = asks.sum((1, 2), dtype=jnp.int32).T.reshape(-1)
        return assign_capacity_slots(queue, lengths, self.part.expert_capacity(tokens))


def _expert_matmul(
    forms: tuple[str, str, str], x: Array, param: nnx.Param, low: MatmulQuantizer | None
) -> Array:
    """Multiply by the weights of all experts. `forms` are the einsum equations of the matmuls with
    the weight and with the two factors of its low-rank update.
    """
    form, inner_form, outer_form = forms
    weight = param[...].astype(x.dtype)
    (base,) = base_weights([weight])
    out: Any = jnp.einsum(form, x, base) if low is None else quantized_einsum(form, x, base, low)
    if not isinstance(weight, LoraWeight):
        return out
    inner = jnp.einsum(inner_form, x, weight.down)
    return weight.combine(out, jnp.einsum(outer_form, inner, weight.up))


def _up_projection(
    x: Float[Array, "B T D"],
    weights: tuple[Array | LoraWeight, ...],
    rows: TokenPermutation,
    sizes: Int[Array, " E"],
    spread: grouped_matmul.GroupedMatmulOptions,
) -> list[Float[Array, "N F"]]:
    """Multiply the token in each row by its expert's weights, for each weight."""
    outputs = list(
        grouped_matmul.up_projection(x, tuple(base_weights(weights)), rows, sizes, spread)
    )
    adapted = {n: each for n, each in enumerate(weights) if isinstance(each, LoraWeight)}
    if not adapted:
        return outputs
    plain = spread._replace(quantizer=None)
    downs = tuple(weight.down for weight in adapted.values())
    inner = grouped_matmul.up_projection(x, downs, rows, sizes, plain._replace(axes=()))
    how = grouped_matmul.RowProjection(plain, is_hidden_output=True)
    for (number, weight), each in zip(adapted.items(), inner, strict=True):
        change = grouped_matmul.row_projection(each, weight.up, sizes, how)
        outputs[number] = weight.combine(outputs[number], change)
    return outputs


def _down_projection(
    hidden: Float[Array, "N F"],
    weight: Array | LoraWeight,
    rows: TokenPermutation,
    sizes: Int[Array, " E"],
    spread: grouped_matmul.GroupedMatmulOptions,
) -> Float[Array, "n D"]:
    """Multiply each row by its expert's weights, and sum over each token's rows."""
    (base,) = base_weights([weight])
    out: Array = grouped_matmul.down_projection(hidden, base, rows, sizes, spread)
    if not isinstance(weight, LoraWeight):
        return out
    plain = spread._replace(quantizer=None)
    how = grouped_matmul.RowProjection(plain, is_hidden_output=False)
    inner = grouped_matmul.row_projection(hidden, weight.down, sizes, how)
    whole = plain._replace(axes=())
    return weight.combine(out, grouped_matmul.down_projection(inner, weight.up, rows, sizes, whole))
