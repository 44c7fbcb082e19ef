"""A mixture of experts: gated MLPs, of which a router chooses a few for each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from maxpipe.models.layers.mlp import Gate, GatedMLP
from maxpipe.models.spec import (
    NOTHING,
    Constant,
    Dims,
    Follows,
    Held,
    Matmul,
    Normal,
    Operation,
    Param,
    Part,
    Summary,
)

BalanceOver = Literal["sequence", "microbatch", "devices"]
"""Tokens of which the balance loss takes the shares that experts get."""


class Groups(NamedTuple):
    """Experts in groups of one size; a token goes to experts of few groups (arXiv:2405.04434)."""

    num_groups: int
    per_token: int
    """Groups that a token is sent to."""
    by: Literal["max", "top2"]
    """What a group's score is: its largest score, or the sum of its two largest."""


@dataclass(frozen=True)
class Experts(Part):
    """The weighted sum of each token's experts (arXiv:1701.06538, routed as arXiv:2401.04088).

    Without a capacity tokens pass through their own experts, or through all of them with a weight
    of 0 where they are not routed to: `dispatch`. With one an expert has room for a number of
    tokens of a sequence; the others lose it.
    """

    d_model: int
    d_mlp: int
    """Hidden width of one expert."""
    num_experts: int
    per_token: int
    """Experts that a token is sent to, those with the largest probabilities."""
    out_gain: float
    """Of the output projections, which write to the residual stream."""
    load_balance_loss_weight: float
    """Coefficient of the balance loss."""
    z_loss_weight: float = 0.0
    """Coefficient of the router's z-loss (arXiv:2202.08906)."""
    capacity: float = 0.0
    """Tokens that an expert has room for, as a multiple of an even share. 0: for all."""
    send_capacity_factor: float = 0.0
    """Choices for which a device has room at each other one of the expert axis, as a multiple of an
    even share. 0: for all."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What becomes of the router's logits: probabilities, or scores that do not compete
    (arXiv:2412.19437)."""
    weight_scale: float = 1.0
    """Factor of the weights of experts."""
    shared: GatedMLP | None = None
    """Added for every token (arXiv:2401.06066)."""
    shared_gated: bool = False
    """Whether it is multiplied by a sigmoid of the token's own."""
    normalised: bool = True
    """Whether the probabilities of a token's experts are divided by their sum."""
    function: Gate = "silu"
    """Of the gates."""
    dispatch: Literal["auto", "all", "grouped"] = "auto"
    """Whether tokens pass through all experts or through their own. `auto`: through their own when
    that is at most half of them."""
    groups: Groups | None = None
    """None: a token may go to any experts."""
    load_balance_scope: BalanceOver = "sequence"
    """`sequence`: each by itself. `microbatch`: the rows that a device has in one. `devices`: the
    rows that all devices have in one."""
    expert_bias_update_rate: float | None = None
    """By how much each step moves an expert's bias towards equal loads (arXiv:2408.15664). Biases
    are added to scores where experts are chosen, and not where they are weighted. None: none."""
    biased: bool = False
    """Whether biases are added to the router's logits and to all projections."""
    rows_received: float | None = None
    """Rows of experts that a device has room for, for each of its tokens, where experts or a row's
    tokens are divided over devices. None: as many as it computes."""
    shards: int = 1
    """Devices over which experts are divided."""

    metrics: ClassVar[Mapping[str, Summary]] = {
        "moe/balance_loss": Summary(
            "balance",
            "mean",
            "",
            "Balance loss, mean over layers with experts, without its coefficient. 1 when experts "
            "get equally many tokens of each sequence, or of what `load_balance_scope` says; the number "
            "of experts divided by those of a token when all go to the same ones.",
        ),
        "moe/router_z_loss": Summary(
            "router_z",
            "mean",
            "",
            "Square of the logarithm of the router's partition function, mean over layers with "
            "experts and tokens, without its coefficient.",
        ),
        "moe/router_entropy": Summary(
            "entropy",
            "mean",
            "nats",
            "Entropy of a token's scores over the experts, mean over layers with experts. The "
            "logarithm of their number when the router does not choose at all.",
        ),
        "moe/dropped": Summary(
            "dropped",
            "mean",
            "",
            "Fraction of the choices of tokens for which an expert had no room, mean over layers "
            "with experts. With a `capacity_factor`.",
        ),
        "moe/load_max": Summary(
            "load",
            "largest",
            "",
            "Tokens of the most used expert in any layer, as a multiple of an expert's mean.",
        ),
        "moe/load_min": Summary(
            "load",
            "smallest",
            "",
            "Tokens of the least used expert in any layer, as a multiple of an expert's mean: 0 "
            "when an expert gets none.",
        ),
    }

    @property
    def params(self) -> Mapping[str, Param]:
        """The router, and the projections of all experts.

        With the dims that are summed over in front, or with those that are kept at the end, each
        projection of all experts is one plain matmul: nothing is transposed.
        """
        experts, routes = (self.num_experts, "experts"), (self.num_experts, "routes")
        embed, within = (self.d_model, "embed"), (self.d_model, "expert_embed")
        mlp = (self.d_mlp, "mlp")
        found = {
            "router": Param((embed, routes), Normal(self.d_model)),
            "gate": Param((within, experts, mlp), Normal(self.d_model)),
            "up": Param((within, experts, mlp), Normal(self.d_model)),
            "down": Param((experts, mlp, within), Normal(self.d_mlp, self.out_gain)),
        }
        if self.expert_bias_update_rate is not None:
            bias = Param(
                (routes,), Constant(0.0), decays=False, trainable=False, own_dtype="float32"
            )
            found["router_bias"] = bias
        if self.biased:
            dims = {"logit": (routes,), "gate": (experts, mlp), "up": (experts, mlp)}
            for name, each in (dims | {"down": (experts, within)}).items():
                found[f"{name}_bias"] = Param(each, Constant(0.0), decays=False)
        found |= {f"shared_{name}": param for name, param in self._of_shared("params")}
        if self.shared_gated:
            found["shared_weight"] = Param((embed,), Normal(self.d_model))
        return found

    @property
    def balance_updates(self) -> Mapping[str, Follows]:
        """The bias goes down where an expert gets more tokens than the mean, else up."""
        rate = self.expert_bias_update_rate
        return {"router_bias": Follows("load", rate)} if rate else {}

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Both inputs of the gates, of all rows of experts."""
        hidden = ((math.ceil(self._rows_in_memory), "experts"), *self._hidden)
        found: dict[str, Dims] = {"expert_gate": hidden, "expert_up": hidden}
        return found | {f"shared_{name}": dims for name, dims in self._of_shared("activations")}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The router, and the projections of all experts, of which a token needs its own.

        A bias counts as one more row of its projection.
        """
        needed, computed = self.per_token / self.num_experts, self.rows / self.num_experts
        found = [Matmul("router")]
        names = ["gate", "up", "down"]
        names += [f"{name}_bias" for name in names] if self.biased else []
        found += [Matmul(name, needed, computed) for name in names]
        if self.shared is not None:
            found += [Matmul(f"shared_{name}") for name in self.shared.params]
        if self.shared_gated:
            found.append(Matmul("shared_weight"))
        return tuple(found)

    @property
    def statistics(self) -> Mapping[str, Dims]:
        """Target tokens of each expert."""
        return {"load": self._each}

    @property
    def losses(self) -> Mapping[str, float]:
        """How unequally tokens are spread over experts, and how large logits are.

        The others are for the record.
        """
        found = {
            "balance": self.load_balance_loss_weight,
            "router_z": self.z_loss_weight,
            "entropy": 0.0,
        }
        return found | ({"dropped": 0.0} if self.drops_tokens else {})

    @property
    def traffic(self) -> Held:
        """Input and output; the gates' inputs, and what goes into the last matmul, twice."""
        found = self._with_rows(6.0, width=2.0, placed=2.0)
        return found if self.shared is None else found + self.shared.traffic

    @property
    def backward_peak(self) -> Held:
        """The gates' inputs and outputs and their gradients; what is sent to other devices."""
        return self._with_rows(6.0, placed=2.0 + (self.shards > 1))

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls and of the gates; the weights of experts; where tokens are placed.

        In float32 the probabilities, those of the z-loss, which of them are taken, and sums over
        experts. What the balance loss keeps of each sequence is too small to count.
        """
        extra = float(self.normalised)
        found = self._with_rows(3.0, width=1.0, placed=1.0 if self.capacity else 0.0)
        found += self._weights + Held(
            float32=((3.0 + extra, self._each), (5.0 + 2.0 * extra, ())), one_byte=((1.0, ()),)
        )
        if self.permutes_tokens:
            found += self._places + Held(float32=((2.0, self._choices),))
        if self.permutes_tokens and self.shards > 1:
            found += self._received
        if self.biased and self.permutes_tokens:
            found += self._weights_for_biases
        if self.shared is None:
            return found
        # Gated: what it is multiplied with, and what with it.
        gate = Held(compute_dtype=((1.0, self._width), (2.0, ()))) if self.shared_gated else NOTHING
        return found + self._without_inputs(self.shared.residuals) + gate

    @property
    def _received(self) -> Held:
        """Rows from other devices, the expert of each, and what it weighs at all that are here."""
        weights = self._per_token_rows(1.0, ((self.num_experts // self.shards, ""),))
        places = Held(float32=(self._per_token_rows(1.0, ()), (2.0, self._choices)))
        return (
            Held(compute_dtype=(self._per_token_rows(1.0, self._width),), float32=(weights,))
            + places
        )

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of all matmuls and cotangents of their outputs, those of the router in float32.

        Recomputed, what goes into the last matmul follows from the gates' inputs and the weights,
        unless it has been needed.
        """
        found = self._places + Held(float32=((1.0, self._each),))
        if not recomputed:
            found += self._with_rows(3.0, width=2.0, placed=1.0 if self.capacity else 0.0)
            found += self._weights_for_biases if self.biased else Held()
        elif normed:
            found += self._with_rows(3.0, width=1.0)
        else:
            found += self._with_rows(4.0, width=1.0) + self._weights
        if self.biased and self.grouped:
            found += Held(float32=((1.0, self._choices),))
            found += self._weights_for_biases if recomputed else Held()
        if self.shared is None:
            return found
        gate = Held(compute_dtype=((2.0, ()),)) if self.shared_gated else NOTHING
        held = self.shared.deferred(recomputed=recomputed, normed=normed or self.shared_gated)
        return found + self._without_inputs(held) + gate

    def _without_inputs(self, held: Held) -> Held:
        """Of the shared expert: what goes in is there already, and so is what comes back."""
        return replace(
            held, compute_dtype=tuple(each for each in held.compute_dtype if each[1] != self._width)
        )

    @property
    def rows(self) -> float:
        """Experts that compute something for a token, on average, used or not."""
        if not self.capacity:
            return float(self.per_token if self.grouped else self.num_experts)
        if self.rows_received is not None:  # what is not sent is not computed
            return min(self.capacity, 1.0) * self.per_token
        return min(self.capacity * self.per_token, float(self.num_experts))

    def with_shards(self, shards: int, rows: int, tokens: int, whole: int) -> Experts:
        """The same on `shards` devices; each has `tokens` of the `whole` tokens of `rows` rows."""
        if not self.permutes_tokens:
            return self
        found = self.per_token * rows * tokens
        if shards > 1:
            found = shards * self.send_capacity(shards, rows, tokens, whole)
        return replace(self, rows_received=found / (rows * tokens), shards=shards)

    @property
    def _rows_in_memory(self) -> float:
        """Rows of experts in memory, for each token."""
        return self.rows if self.rows_received is None else self.rows_received

    @property
    def grouped(self) -> bool:
        """Whether tokens are sorted by expert, and pass through their own only."""
        if self.capacity:
            return False
        if self.dispatch == "auto":
            return 2 * self.per_token <= self.num_experts
        return self.dispatch == "grouped"

    @property
    def note(self) -> str:
        """Which experts are computed for a token, and by what."""
        if self.capacity:
            return f"{self.num_experts} experts with room for {self.capacity:g} x an even share"
        if not self.grouped:
            return f"all {self.num_experts} experts for each token"
        kernel = not (self.d_model % 128 or self.d_mlp % 128)
        by = "kernels on TPUs, else blocks of rows" if kernel else "blocks of rows"
        return f"{self.per_token} of {self.num_experts} experts for each token, by {by}"

    @property
    def permutes_tokens(self) -> bool:
        """Whether tokens are brought to the rows of their experts, and back."""
        return self.grouped or bool(self.capacity)

    @property
    def drops_tokens(self) -> bool:
        """Whether tokens may lose experts, for which there is no room."""
        return bool(self.capacity or self.send_capacity_factor)

    def send_capacity(self, shards: int, rows: int, tokens: int, whole: int) -> int:
        """Choices for which a device has room at each of the `shards` of the expert axis.

        It has `tokens` tokens of each of `rows` rows, which have `whole` tokens.
        """
        choices, mine = rows * tokens * self.per_token, self.num_experts // shards
        most = rows * tokens * min(self.per_token, mine)
        if self.capacity:
            most = min(most, mine * rows * min(self.expert_capacity(whole), tokens))
        if self.send_capacity_factor:
            most = min(most, math.ceil(self.send_capacity_factor * choices / shards))
        return most

    def expert_capacity(self, tokens: int) -> int:
        """Tokens of a sequence for which an expert has room."""
        each = tokens * self.per_token / self.num_experts
        return min(max(math.ceil(self.capacity * each), 1), tokens)

    def _with_rows(self, hidden: float, width: float = 0.0, placed: float = 0.0) -> Held:
        """Copies of what experts compute; of the width, for each token and each row of experts."""
        found = Held(
            compute_dtype=(self._per_token_rows(hidden, self._hidden), (width, self._width))
        )
        if self.permutes_tokens:
            found += Held(compute_dtype=(self._per_token_rows(placed, self._width),))
        return found

    @property
    def _weights(self) -> Held:
        """Those of rows."""
        return Held(compute_dtype=(self._per_token_rows(1.0, ()),))

    @property
    def _weights_for_biases(self) -> Held:
        """What the biases of the last projection are multiplied with."""
        return self._weights if self.capacity else Held(compute_dtype=((1.0, self._each),))

    @property
    def _choices(self) -> Dims:
        return ((self.per_token, "experts"),)

    @property
    def _places(self) -> Held:
        """Which choice is in each row, and how many rows each expert has."""
        if not self.permutes_tokens:
            return Held()
        counts = (self._each,) if self.grouped else ()
        return Held(float32=(self._per_token_rows(1.0, ()),), float32_token_independent=counts)

    def _per_token_rows(self, copies: float, dims: Dims) -> tuple[float, Dims]:
        """Copies of something that each row of experts has, as a number for each token."""
        if self._rows_in_memory.is_integer():
            return copies, ((int(self._rows_in_memory), "experts"), *dims)
        return copies * self._rows_in_memory / self.num_experts, (*self._each, *dims)

    def _of_shared(self, what: Literal["params", "activations"]) -> Iterable[tuple[str, Any]]:
        return () if self.shared is None else getattr(self.shared, what).items()

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _each(self) -> Dims:
        return ((self.num_experts, "experts"),)

    @property
    def _hidden(self) -> Dims:
        return ((self.d_mlp, "mlp"),)
