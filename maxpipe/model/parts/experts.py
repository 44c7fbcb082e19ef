"""A mixture of experts: gated MLPs, of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from maxpipe.model.spec import Dims, Held, Matmul, Normal, Operation, Param, Part, Summary


@dataclass(frozen=True)
class Experts(Part):
    """The weighted sum of each token's experts (arXiv:1701.06538, routed as arXiv:2401.04088).

    All tokens pass through all experts, with a weight of 0 where they are not routed to.
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
    normalised: bool = True
    """Whether the probabilities of a token's experts are divided by their sum."""
    function: Literal["silu", "gelu"] = "silu"
    """Of the gates."""

    summaries: ClassVar[Mapping[str, Summary]] = {
        "moe/balance_loss": Summary(
            "balance",
            "mean",
            "",
            "Balance loss, mean over layers with experts, without its coefficient. 1 when experts "
            "get equally many tokens of each sequence, the number of experts divided by those of a "
            "token when all go to the same ones.",
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
        return {
            "router": Param((embed, experts), Normal(self.d_model)),
            "gate": Param((embed, experts, mlp), Normal(self.d_model)),
            "up": Param((embed, experts, mlp), Normal(self.d_model)),
            "down": Param((experts, mlp, embed), Normal(self.d_mlp, self.out_gain)),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Both inputs of the gates, of all experts."""
        return {"expert_gate": self._hidden, "expert_up": self._hidden}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The router, and the projections of all experts, of which a token needs its own."""
        share = self.per_token / self.num_experts
        return Matmul("router"), *(Matmul(name, share) for name in ("gate", "up", "down"))

    @property
    def statistics(self) -> Mapping[str, Dims]:
        """Target tokens of each expert."""
        return {"load": self._each}

    @property
    def losses(self) -> Mapping[str, float]:
        """How unequally the tokens of a sequence are spread over experts."""
        return {"balance": self.balance_weight}

    @property
    def traffic(self) -> Held:
        """Input and output; the gates' inputs, and what goes into the last matmul, twice."""
        return Held(narrow=((2.0, self._width), (8.0, self._hidden)))

    @property
    def working(self) -> Held:
        """The gates' inputs and outputs, weighted and not, and their gradients."""
        return Held(narrow=((8.0, self._hidden),))

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls and of the gates; the weights of experts.

        In float32 the probabilities, which of them are taken, and sums over experts. What the
        balance loss keeps of each sequence is too small to count.
        """
        extra = float(self.normalised)
        return Held(
            narrow=((1.0, self._width), (4.0, self._hidden), (1.0, self._each)),
            wide=((2.0 + extra, self._each), (3.0 + 2.0 * extra, ())),
        )

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of all matmuls and cotangents of their outputs, those of the router in float32.

        Recomputed, what goes into the last matmul follows from the gates' output and the weights.
        """
        del normed
        scores = ((1.0, self._each),)
        if recomputed:
            narrow = ((1.0, self._width), (3.0, self._hidden), (1.0, self._each))
            return Held(narrow=narrow, wide=scores)
        return Held(narrow=((2.0, self._width), (3.0, self._hidden)), wide=scores)

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _each(self) -> Dims:
        return ((self.num_experts, "experts"),)

    @property
    def _hidden(self) -> Dims:
        return ((self.num_experts, "experts"), (self.d_mlp, "mlp"))
