"""Mixture of experts: a router selects a few MLPs for each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from maxpipe.models.initialization import TokenHash
from maxpipe.models.layer_reports import Follows, Summary
from maxpipe.models.layers.mlp import MLP, Activation, RMSNorm, input_projections
from maxpipe.models.spec import (
    NOTHING,
    Constant,
    Dims,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Part,
)

BalanceOver = Literal["sequence", "microbatch", "devices"]
"""Set of tokens over which the load-balance loss computes expert loads."""

ExpertBackend = Literal["auto", "loop", "ragged_dot"]
"""Implementation of the grouped matmuls of experts."""

AllToAll = Literal["auto", "padded"]
"""Implementation of the exchange of tokens between devices."""


RouterScores = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""Activation of router logits."""


class Groups(NamedTuple):
    """Groups of experts. Each token is routed only to experts in a few of the groups
    (arXiv:2405.04434).
    """

    num_groups: int
    per_token: int
    """Number of groups selected per token."""
    by: Literal["max", "top2"]
    """Score of a group: the largest expert score in the group, or the sum of its two largest expert
    scores."""


@dataclass(frozen=True)
class Experts(Part):
    """Weighted sum of the outputs of each token's experts (arXiv:1701.06538, routed as in
    arXiv:2401.04088).

    Without a capacity limit, `dispatch` selects whether a token is processed by its selected
    experts only, or by all experts, with weight 0 for unselected experts. With a capacity limit,
    each expert accepts a limited number of tokens per sequence, and excess tokens are dropped.
    """

    d_model: int
    d_mlp: int
    """Hidden width of one expert."""
    num_experts: int
    per_token: int
    """Number of experts selected per token. The experts with the largest probabilities are
    selected."""
    out_gain: float
    """Gain of the output projections, which write to the residual stream."""
    load_balance_loss_weight: float
    """Coefficient of the load-balance loss."""
    z_loss_weight: float = 0.0
    """Coefficient of the router z-loss (arXiv:2202.08906)."""
    capacity: float = 0.0
    """Expert capacity: maximum number of tokens per expert, as a multiple of the average per
    expert. 0 disables the limit."""
    send_capacity_factor: float = 0.0
    """All-to-all capacity: number of token-expert pairs that a device sends to each device of the
    expert axis, as a multiple of the average per device. 0 disables the limit."""
    scores: RouterScores = "softmax"
    """Activation of the router logits: `softmax` probabilities, or independent scores, which are
    `sigmoid` (arXiv:2412.19437) or `sqrtsoftplus`, the square root of softplus."""
    weight_scale: float = 1.0
    """Factor that multiplies the routing weights of the experts."""
    shared: MLP | None = None
    """Shared expert that processes every token (arXiv:2401.06066)."""
    shared_gated: bool = False
    """Whether the shared expert's output is multiplied by a per-token sigmoid gate."""
    normalised: bool = True
    """Whether the probabilities of a token's experts are normalized so that they sum to 1."""
    function: Activation = "silu"
    """Activation function of the experts."""
    dispatch: Literal["auto", "dense", "grouped"] = "auto"
    """Whether tokens are processed by all experts or only by the selected experts. `auto` applies
    only the selected experts if they are at most half of all experts."""
    backend: ExpertBackend = "auto"
    """Implementation of grouped matmuls. `auto` uses Pallas kernels on TPUs, Triton kernels on
    NVIDIA GPUs, and a loop over blocks of rows elsewhere."""
    all_to_all: AllToAll = "auto"
    """Whether only the used rows are exchanged, where the platform supports this, or full
    buffers."""
    all_to_all_chunks: int = 1
    """Number of chunks in which tokens are sent to experts on other devices."""
    groups: Groups | None = None
    """Expert groups for group-limited routing. If None, a token can select any experts."""
    load_balance_scope: BalanceOver = "sequence"
    """Set of tokens over which the load-balance loss is computed. `sequence`: each sequence
    separately. `microbatch`: one device's sequences within a microbatch. `devices`: all devices'
    sequences within a microbatch."""
    expert_bias_update_rate: float | None = None
    """Step size of the router bias update, which balances expert loads (arXiv:2408.15664). The
    biases affect which experts are selected, but not the weights of the experts. None disables the
    biases."""
    hash_vocabulary: int = 0
    """Number of token IDs in a table that selects the experts of each token instead of the router
    (arXiv:2106.04426). The table is not trained. If 0, the router selects the experts."""
    biased: bool = False
    """Whether the router and all expert projections have biases."""
    input_norm: RMSNorm | None = None
    """Norm of the experts' input. The router then has a separate norm of the same input, whose
    output is divided by the square root of `d_model`."""
    expert_scaled: bool = False
    """Whether each expert's routing weight is multiplied by a learned scale, after the weights have
    been normalized."""
    rows_received: float | None = None
    """Capacity of a device, as token-expert pairs per local token, if experts or tokens are
    sharded. If None, the capacity is the number of pairs that the device computes."""
    shards: int = 1
    """Number of devices over which experts are sharded."""

    metrics: ClassVar[Mapping[str, Summary]] = {
        "moe/balance_loss": Summary(
            "balance",
            "mean",
            "",
            "Load-balance loss before multiplication by its coefficient, averaged over layers "
            "with experts. The loss is 1 if all experts receive the same number of tokens of each "
            "sequence, or of the tokens that `load_balance_scope` selects. The loss is the number "
            "of experts divided by `top_k` if all tokens select the same experts.",
        ),
        "moe/router_z_loss": Summary(
            "router_z",
            "mean",
            "",
            "Squared log partition function of the router before multiplication by its "
            "coefficient, averaged over tokens and layers with experts.",
        ),
        "moe/router_entropy": Summary(
            "entropy",
            "mean",
            "nats",
            "Entropy of each token's distribution over the experts, averaged over layers with "
            "experts. The maximum, reached by a uniform router, is the logarithm of the number of "
            "experts.",
        ),
        "moe/dropped": Summary(
            "dropped",
            "mean",
            "",
            "Fraction of token-expert pairs that were dropped because the expert was full, "
            "averaged over layers with experts. Reported only if `capacity_factor` is set.",
        ),
        "moe/load_max": Summary(
            "load",
            "largest",
            "",
            "Largest number of tokens that any expert received, relative to the mean in the same "
            "layer.",
        ),
        "moe/load_min": Summary(
            "load",
            "smallest",
            "",
            "Smallest number of tokens that any expert received, relative to the mean in the same "
            "layer. The ratio is 0 if an expert received no tokens.",
        ),
    }

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the router and the projections of all experts.

        The dims are ordered so that a single matmul without transposes computes a projection of all
        experts.
        """
        experts, routes = (self.num_experts, "experts"), (self.num_experts, "routes")
        embed, within = (self.d_model, "embed"), (self.d_model, "expert_embed")
        mlp = (self.d_mlp, "mlp")
        into = Param((within, experts, mlp), Normal(self.d_model), linear=1, expert_dim=1)
        params = {
            "router": Param((embed, routes), Normal(self.d_model)),
            **dict.fromkeys(self._inputs, into),
            "down": Param(
                (experts, mlp, within), Normal(self.d_mlp, self.out_gain), linear=1, expert_dim=0
            ),
        }
        if self.is_hashed:
            ids = (self.hash_vocabulary, "layer_vocab"), (self.per_token, "")
            table = TokenHash(self.num_experts)
            params["token_experts"] = Param(
                ids, table, decays=False, trainable=False, own_dtype="int32"
            )
        if self.expert_bias_update_rate is not None:
            bias = Param(
                (routes,), Constant(0.0), decays=False, trainable=False, own_dtype="float32"
            )
            params["router_bias"] = bias
        if self.biased:
            dims: dict[str, Dims] = {"logit": (routes,), "down": (experts, within)}
            for name, each in (dims | dict.fromkeys(self._inputs, (experts, mlp))).items():
                params[f"{name}_bias"] = Param(each, Constant(0.0), decays=False)
        if self.input_norm is not None:
            scale = self.input_norm.params["scale"]
            params |= {"input_norm": scale, "router_norm": scale}
        if self.expert_scaled:
            params["expert_scale"] = Param((routes,), Constant(1.0), decays=False)
        params |= {f"shared_{name}": param for name, param in self._of_shared("params")}
        if self.shared_gated:
            params["shared_weight"] = Param((embed,), Normal(self.d_model))
        return params

    @property
    def is_hashed(self) -> bool:
        """Return whether a table selects the experts of each token ID."""
        return self.hash_vocabulary > 0

    @property
    def balance_updates(self) -> Mapping[str, Follows]:
        """Return the update rule of the router bias: the bias decreases for experts with more than
        the mean load and increases for the others.
        """
        rate = self.expert_bias_update_rate
        return {"router_bias": Follows("load", rate)} if rate else {}

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the inputs of the activation for all token-expert pairs."""
        hidden = ((math.ceil(self._rows_in_memory), "experts"), *self._hidden)
        dims_of: dict[str, Dims] = {f"expert_{name}": hidden for name in self._inputs}
        return dims_of | {f"shared_{name}": dims for name, dims in self._of_shared("activations")}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the router and the projections of all experts.

        A token needs only the projections of its selected experts. A bias counts as one additional
        row of its projection.
        """
        needed, computed = self.per_token / self.num_experts, self.rows / self.num_experts
        operations = [Matmul("router")]
        names = [*self._inputs, "down"]
        names += [f"{name}_bias" for name in names] if self.biased else []
        operations += [Matmul(name, needed, computed) for name in names]
        if self.shared is not None:
            operations += [Matmul(f"shared_{name}") for name in self.shared.params]
        if self.shared_gated:
            operations.append(Matmul("shared_weight"))
        return tuple(operations)

    @property
    def statistics(self) -> Mapping[str, Dims]:
        """Return the number of target tokens routed to each expert."""
        return {"load": self._each}

    @property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficients of the load-balance loss and the z-loss.

        The other losses are logged but not added to the training loss, so their coefficient is 0.
        """
        statistics = {
            "balance": self.load_balance_loss_weight,
            "router_z": self.z_loss_weight,
            "entropy": 0.0,
        }
        return statistics | ({"dropped": 0.0} if self.drops_tokens else {})

    @property
    def traffic(self) -> Held:
        """Return the input, the output, the inputs of the activation, and two copies of the last
        matmul's input.
        """
        arrays = self._with_rows(self._around_activation, width=2.0, placed=2.0)
        return arrays if self.shared is None else arrays + self.shared.traffic

    @property
    def backward_peak(self) -> Held:
        """Return the inputs and outputs of the activation, their gradients, and the tokens sent to
        other devices.
        """
        return self._with_rows(self._around_activation, placed=2.0 + (self.shards > 1))

    @property
    def gpu_peak(self) -> Held:
        """Return the arrays that are live on a GPU with kernels. Tokens sent to other devices need
        no copy, unless chunks are in flight.
        """
        placed = 2.0 + 0.75 * (self.all_to_all_chunks > 1)
        return self._with_rows(self._around_activation, placed=placed)

    @property
    def backward_moments(self) -> tuple[tuple[Held, float | None], ...]:
        """Return the arrays while tokens are received from other devices, while the activation is
        differentiated, while the inputs' cotangents are computed, and during the weight gradients.

        The output projection is used before the activation is differentiated. All weights are used
        before the weight gradients.
        """
        if not self.grouped:
            return ()
        sent = self.shards > 1
        moments = (
            (self.backward_peak, self._count / (self._count + 1)),
            (self._with_rows(self._count + 1.0, placed=5.0 + sent), 0.0),
            (self._with_rows(1.0 * sent, placed=3.0 * sent), None),
        )
        return ((self._with_rows(0.0, placed=5.0), 1.0), *moments) if sent else moments

    @property
    def residuals(self) -> Held:
        """Return the inputs of matmuls and activations, the expert weights, and the indices of
        permuted tokens.

        The float32 arrays are the probabilities, the z-loss terms, the selected experts, and sums
        over experts. The residuals of the load-balance loss are negligible.
        """
        extra = float(self.normalised)
        placed = 1.0 if self.capacity else 0.0
        arrays = self._with_rows(self._count + 1.0, width=1.0, placed=placed)
        scores = Held(
            float32=((3.0 + extra, self._each), (5.0 + 2.0 * extra, ())), one_byte=((1.0, ()),)
        )
        if self.scores != "softmax" and not self.normalised:
            scores = Held(float32=((2.0, self._each),))
        arrays += self._weights + scores
        if self.permutes_tokens:
            arrays += self._places + Held(float32=((2.0, self._choices),))
        if self.permutes_tokens and self.shards > 1:
            arrays += self._received
        if self.biased and self.permutes_tokens:
            arrays += self._weights_for_biases
        if self.input_norm is not None:
            arrays += self.input_norm.residuals + self.input_norm.residuals
            arrays += Held(
                compute_dtype=((1.0, ()),),
                float32=((1.0, self._each),),
                one_byte=((1.0, self._each),),
            )
        if self.shared is None:
            return arrays
        # Gating also saves the shared expert's output and the gate value.
        gate = Held(compute_dtype=((1.0, self._width), (2.0, ()))) if self.shared_gated else NOTHING
        return arrays + self._without_inputs(self.shared.residuals) + gate

    @property
    def _received(self) -> Held:
        """Return the tokens received from other devices, with their experts and routing weights."""
        weights = self.per_token_rows(1.0, ((self.num_experts // self.shards, ""),))
        places = Held(float32=(self.per_token_rows(1.0, ()), (2.0, self._choices)))
        return (
            Held(compute_dtype=(self.per_token_rows(1.0, self._width),), float32=(weights,))
            + places
        )

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the inputs of all matmuls and the cotangents of their outputs (float32 for the
        router).

        If `recomputed` is set, the input of the last matmul is recomputed from the inputs of the
        activation and the routing weights, unless it has been saved.
        """
        saved = self._count + 1.0
        arrays = self._places + Held(float32=((1.0, self._each),))
        if not recomputed:
            arrays += self._with_rows(saved, width=2.0, placed=1.0 if self.capacity else 0.0)
            arrays += self._weights_for_biases if self.biased else Held()
        elif normed:
            arrays += self._with_rows(saved, width=1.0)
        else:
            arrays += self._with_rows(2.0 * self._count, width=1.0) + self._weights
        if self.biased and self.grouped:
            arrays += Held(float32=((1.0, self._choices),))
            arrays += self._weights_for_biases if recomputed else Held()
        if self.input_norm is not None and not recomputed:
            # The router's input, the cotangents of both inputs, and the arrays of both norms.
            arrays += Held(compute_dtype=((7.0, self._width),))
        if self.input_norm is not None and recomputed:
            norm = self.input_norm.deferred(recomputed=True, normed=False)
            arrays += norm + norm
        if self.expert_scaled and recomputed:
            arrays += self._for_expert_scale
        if self.shared is None:
            return arrays
        gate = Held(compute_dtype=((2.0, ()),)) if self.shared_gated else NOTHING
        held = self.shared.deferred(recomputed=recomputed, normed=normed or self.shared_gated)
        return arrays + self._without_inputs(held) + gate

    @property
    def _for_expert_scale(self) -> Held:
        """Return the scales, the selected experts and the cotangents of the routing weights. The
        number of rows per expert is then recomputed from the selected experts.
        """
        arrays = Held(token_independent=(self._each,), float32=((1.0, self._choices),))
        if not self.grouped:
            return arrays + Held(compute_dtype=((1.0, self._each),))
        return arrays + Held(float32=((1.0, self._choices),))

    def _without_inputs(self, held: Held) -> Held:
        """Return the shared expert's arrays without its input and output, which other terms already
        include.
        """
        return replace(
            held,
            compute_dtype=tuple(array for array in held.compute_dtype if array[1] != self._width),
        )

    @property
    def rows(self) -> float:
        """Return the mean number of experts applied per token, whether or not the token selected
        them.
        """
        if not self.capacity:
            return float(self.per_token if self.grouped else self.num_experts)
        if self.rows_received is not None:  # dropped tokens are not processed
            return min(self.capacity, 1.0) * self.per_token
        return min(self.capacity * self.per_token, float(self.num_experts))

    def with_shards(self, shards: int, rows: int, tokens: int, whole: int) -> Experts:
        """Return a copy of this sublayer for `shards` devices that each hold `tokens` of the
        `whole` tokens per sequence.

        `rows` is the number of sequences.
        """
        if not self.permutes_tokens:
            return self
        rows_in_memory = self.per_token * rows * tokens
        if shards > 1:
            rows_in_memory = shards * self.send_capacity(shards, rows, tokens, whole)
        return replace(self, rows_received=rows_in_memory / (rows * tokens), shards=shards)

    @property
    def _rows_in_memory(self) -> float:
        """Return the number of token-expert pairs held in memory per token."""
        return self.rows if self.rows_received is None else self.rows_received

    @property
    def grouped(self) -> bool:
        """Return True if tokens are sorted by expert and only selected experts process them."""
        if self.capacity:
            return False
        if self.dispatch == "auto":
            return 2 * self.per_token <= self.num_experts
        return self.dispatch == "grouped"

    @property
    def note(self) -> str:
        """Describe which experts are applied to each token, and by which method."""
        if self.capacity:
            return f"{self.num_experts} experts with capacity for {self.capacity:g} x the mean load"
        if not self.grouped:
            return f"all {self.num_experts} experts for each token"
        on_tpu = not (self.d_model % 128 or self.d_mlp % 128)
        kernels = "kernels on TPUs and GPUs" if on_tpu else "kernels on GPUs"
        by = {"auto": f"{kernels}, a loop elsewhere", "loop": "a loop"}.get(self.backend, "XLA")
        return f"{self.per_token} of {self.num_experts} experts for each token, by {by}"

    @property
    def permutes_tokens(self) -> bool:
        """Return True if tokens are permuted into expert order and back."""
        return self.grouped or bool(self.capacity)

    @property
    def drops_tokens(self) -> bool:
        """Return True if tokens can be dropped because of a capacity limit."""
        return bool(self.capacity or self.send_capacity_factor)

    def send_capacity(self, shards: int, rows: int, tokens: int, whole: int) -> int:
        """Return the maximum number of token-expert pairs that one device sends to each of the
        `shards` devices.

        The device holds `tokens` of the `whole` tokens in each of the `rows` sequences.
        """
        choices, local_experts = rows * tokens * self.per_token, self.num_experts // shards
        most = rows * tokens * min(self.per_token, local_experts)
        if self.capacity:
            most = min(most, local_experts * rows * min(self.expert_capacity(whole), tokens))
        if self.send_capacity_factor:
            most = min(most, math.ceil(self.send_capacity_factor * choices / shards))
        return most

    def expert_capacity(self, tokens: int) -> int:
        """Return the capacity of an expert in tokens per sequence."""
        each = tokens * self.per_token / self.num_experts
        return min(max(math.ceil(self.capacity * each), 1), tokens)

    def _with_rows(self, hidden: float, width: float = 0.0, placed: float = 0.0) -> Held:
        """Return the memory held by `hidden` arrays of the expert width per token-expert pair,
        `width` arrays of the model width per token, and `placed` arrays of the model width per
        permuted token.
        """
        arrays = Held(
            compute_dtype=(self.per_token_rows(hidden, self._hidden), (width, self._width))
        )
        if self.permutes_tokens:
            arrays += Held(compute_dtype=(self.per_token_rows(placed, self._width),))
        return arrays

    @property
    def _inputs(self) -> tuple[str, ...]:
        return input_projections(self.function)

    @property
    def _count(self) -> int:
        return len(self._inputs)

    @property
    def _around_activation(self) -> float:
        """Return the number of inputs and outputs of the activation, and of their gradients."""
        return 2.0 * self._count + 2.0

    @property
    def _weights(self) -> Held:
        return Held(compute_dtype=(self.per_token_rows(1.0, ()),))

    @property
    def _weights_for_biases(self) -> Held:
        """Return the routing weights that multiply the biases of the last projection."""
        return self._weights if self.capacity else Held(compute_dtype=((1.0, self._each),))

    @property
    def _choices(self) -> Dims:
        return ((self.per_token, "experts"),)

    @property
    def _places(self) -> Held:
        """Return the token-expert pair index of each row, and the number of rows per expert."""
        if not self.permutes_tokens:
            return Held()
        counts = (self._each,) if self.grouped and not self.expert_scaled else ()
        return Held(float32=(self.per_token_rows(1.0, ()),), float32_token_independent=counts)

    def per_token_rows(self, copies: float, dims: Dims) -> tuple[float, Dims]:
        """Return the (copies, dims) per token of an array with one entry per token-expert pair."""
        if self._rows_in_memory.is_integer():
            return copies, ((int(self._rows_in_memory), "experts"), *dims)
        return copies * self._rows_in_memory / self.num_experts, (*self._each, *dims)

    def _of_shared(self, attribute: Literal["params", "activations"]) -> Iterable[tuple[str, Any]]:
        return () if self.shared is None else getattr(self.shared, attribute).items()

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _each(self) -> Dims:
        return ((self.num_experts, "experts"),)

    @property
    def _hidden(self) -> Dims:
        return ((self.d_mlp, "mlp"),)
