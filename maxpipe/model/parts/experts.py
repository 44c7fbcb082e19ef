"""A mixture of experts: gated MLPs, of which a router chooses a few for each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from maxpipe.model.parts.mlp import Gate, GatedMLP
from maxpipe.model.spec import (
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

    Without a capacity all tokens pass through all experts, with a weight of 0 where they are not
    routed to. With one an expert has room for a number of tokens of a sequence; the others lose it.
    """

    d_model: int
    d_mlp: int
    """Hidden width of one expert."""
    num_experts: int
    per_token: int
    """Experts that a token is sent to, those with the largest probabilities."""
    out_gain: float
    """Of the output projections, which write to the residual stream."""
    balance_weight: float
    """Coefficient of the balance loss."""
    z_weight: float = 0.0
    """Coefficient of the router's z-loss (arXiv:2202.08906)."""
    capacity: float = 0.0
    """Tokens that an expert has room for, as a multiple of an even share. 0: for all."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What becomes of the router's logits: probabilities, or scores that do not compete
    (arXiv:2412.19437)."""
    weight_scale: float = 1.0
    """Factor of the weights of experts."""
    shared: GatedMLP | None = None
    """Added for every token (arXiv:2401.06066)."""
    normalised: bool = True
    """Whether the probabilities of a token's experts are divided by their sum."""
    function: Gate = "silu"
    """Of the gates."""
    groups: Groups | None = None
    """None: a token may go to any experts."""
    balance_rate: float | None = None
    """By how much each step moves an expert's bias towards equal loads (arXiv:2408.15664). Biases
    are added to scores where experts are chosen, and not where they are weighted. None: none."""
    biased: bool = False
    """Whether biases are added to the router's logits and to all projections."""

    summaries: ClassVar[Mapping[str, Summary]] = {
        "moe/balance_loss": Summary(
            "balance",
            "mean",
            "",
            "Balance loss, mean over layers with experts, without its coefficient. 1 when experts "
            "get equally many tokens of each sequence, the number of experts divided by those of a "
            "token when all go to the same ones.",
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
        experts, embed = (self.num_experts, "experts"), (self.d_model, "embed")
        mlp = (self.d_mlp, "mlp")
        found = {
            "router": Param((embed, experts), Normal(self.d_model)),
            "gate": Param((embed, experts, mlp), Normal(self.d_model)),
            "up": Param((embed, experts, mlp), Normal(self.d_model)),
            "down": Param((experts, mlp, embed), Normal(self.d_mlp, self.out_gain)),
        }
        if self.balance_rate is not None:
            bias = Param((experts,), Constant(0.0), decays=False, trainable=False, exact=True)
            found["router_bias"] = bias
        if self.biased:
            dims = {"logit": (experts,), "gate": (experts, mlp), "up": (experts, mlp)}
            for name, each in (dims | {"down": (experts, embed)}).items():
                found[f"{name}_bias"] = Param(each, Constant(0.0), decays=False)
        return found | {f"shared_{name}": param for name, param in self._of_shared("params")}

    @property
    def follows(self) -> Mapping[str, Follows]:
        """The bias goes down where an expert gets more tokens than the mean, else up."""
        rate = self.balance_rate
        return {"router_bias": Follows("load", rate)} if rate else {}

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Both inputs of the gates, of all experts."""
        rows = (math.ceil(self.rows), "experts")
        hidden = (rows, *self._hidden[1:])
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
        return tuple(found)

    @property
    def statistics(self) -> Mapping[str, Dims]:
        """Target tokens of each expert."""
        return {"load": self._each}

    @property
    def losses(self) -> Mapping[str, float]:
        """How unequally a sequence's tokens are spread over experts, and how large logits are.

        The others are for the record.
        """
        found = {"balance": self.balance_weight, "router_z": self.z_weight, "entropy": 0.0}
        return found | ({"dropped": 0.0} if self.capacity else {})

    @property
    def traffic(self) -> Held:
        """Input and output; the gates' inputs, and what goes into the last matmul, twice."""
        found = self._with_rows(8.0, width=2.0)
        return found if self.shared is None else found + self.shared.traffic

    @property
    def working(self) -> Held:
        """The gates' inputs and outputs, weighted and not, and their gradients."""
        return self._with_rows(8.0)

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls and of the gates; the weights of experts.

        In float32 the probabilities, those of the z-loss, which of them are taken, and sums over
        experts. What the balance loss keeps of each sequence is too small to count.
        """
        extra = float(self.normalised)
        found = self._with_rows(4.0, width=1.0) + Held(
            narrow=((1.0, self._each),),
            wide=((3.0 + extra, self._each), (5.0 + 2.0 * extra, ())),
            flags=((1.0, ()),),
        )
        if self._weights_are_read_twice:
            found += Held(narrow=((1.0, self._each),))
        return found if self.shared is None else found + self.shared.residuals

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of all matmuls and cotangents of their outputs, those of the router in float32.

        Recomputed, what goes into the last matmul follows from the gates' output and the weights.
        """
        found, twice = Held(wide=((1.0, self._each),)), self._weights_are_read_twice
        if recomputed:
            weights = ((1.0, self._each),)
            found += self._with_rows(3.0, width=1.0)
            found += Held(wide=weights) if twice else Held(narrow=weights)
        else:
            found += self._with_rows(3.0, width=2.0) + Held(narrow=((float(twice), self._each),))
        if self.shared is None:
            return found
        return found + self.shared.deferred(recomputed=recomputed, normed=normed)

    @property
    def rows(self) -> float:
        """Experts that compute something for a token, on average, used or not."""
        if not self.capacity:
            return float(self.num_experts)
        return min(self.capacity * self.per_token, float(self.num_experts))

    def room(self, tokens: int) -> int:
        """Tokens of a sequence for which an expert has room."""
        each = tokens * self.per_token / self.num_experts
        return min(max(math.ceil(self.capacity * each), 1), tokens)

    @property
    def _weights_are_read_twice(self) -> bool:
        """By what goes into the last matmul, and by that of its biases."""
        return self.biased and not self.capacity

    def _with_rows(self, hidden: float, width: float = 0.0) -> Held:
        """Copies of what all experts compute; of the width, and of that in rows of experts."""
        share = self.rows / self.num_experts
        found = Held(narrow=((hidden * share, self._hidden), (width, self._width)))
        if self.capacity:
            found += Held(narrow=((2.0 * share, (self._each[0], *self._width)),))
        return found

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
        return ((self.num_experts, "experts"), (self.d_mlp, "mlp"))
