"""A mixture of experts, each computed for every token."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from maxpipe.model.modules.mlp import gated
from maxpipe.model.modules.part import Context, Output, PartModule
from maxpipe.model.parts import experts
from maxpipe.parallel.sharding import AxisRules, constrain


class Experts(PartModule):
    """The sum of a token's experts, weighted by the router's probabilities (arXiv:2401.04088)."""

    router: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, part: experts.Experts, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> Output:
        """Returns losses and statistics where there is a `loss_mask`."""
        part, dtype = self.part, x.dtype
        shares, chosen = self._routed(x)
        weights = shares * chosen
        if part.normalised:
            weights /= weights.sum(-1, keepdims=True)
        gate = jnp.einsum("btd,def->btef", x, self.gate[...].astype(dtype))
        up = jnp.einsum("btd,def->btef", x, self.up[...].astype(dtype))
        gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
        hidden = gated(gate, up, part.function) * weights.astype(dtype)[..., None]
        hidden = constrain(hidden, (None, None, "experts", "mlp"), self.rules)
        out = jnp.einsum("btef,efd->btd", hidden, self.down[...].astype(dtype))
        mask = context.inputs.get("loss_mask")
        return Output(out) if mask is None else Output(out, *_balance(shares, chosen, mask))

    def _routed(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
        """Probability of each expert, float32, and 1 for those that a token is sent to, else 0.

        Of equal probabilities those of the first experts count as larger.
        """
        router = self.router[...].astype(x.dtype)
        scores = jnp.einsum("btd,de->bte", x, router, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores)
        _, places = lax.top_k(lax.stop_gradient(shares), self.part.per_token)
        return shares, jax.nn.one_hot(places, self.part.num_experts, dtype=jnp.float32).sum(-2)


def _balance(
    shares: Float[Array, "B T E"], chosen: Float[Array, "B T E"], mask: Float[Array, "B T"]
) -> tuple[Mapping[str, Float[Array, ""]], Mapping[str, Float[Array, " E"]]]:
    """(losses, statistics) of the target tokens.

    The balance loss of arXiv:2101.03961 for each sequence by itself, so that it does not depend on
    how a batch is cut. With f the share of a sequence's tokens that an expert gets, and p its mean
    probability, it is `E / k * sum(f * p)` for each token; gradients flow through p.
    """
    counts = mask.astype(jnp.float32)[..., None]
    used, likely = ((counts * each).sum(1) for each in (chosen, shares))
    # As many are used as tokens times k: divided by their mean they are E / k * f.
    relative = used / jnp.maximum(used.mean(-1, keepdims=True), 1e-9)
    return {"balance": (relative * likely).sum()}, {"load": used.sum(0)}
