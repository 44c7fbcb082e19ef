"""Layer inputs that depend on the token: lookup in a table, and a gated projection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from maxpipe.models.layers import per_layer_input
from maxpipe.models.layers.per_layer_input import EMBEDDING, SCALE
from maxpipe.nn.module import LayerContext, Output, SpecModule, rms_norm
from maxpipe.parallel.sharding import AxisRules


@jax.custom_vjp
def look_up(table: Float[Array, "V P"], tokens: Int[Array, "B T"]) -> Float[Array, "B T P"]:
    """Return the table's row of each token. The gradient is summed in float32."""
    return table[tokens]


def _look_up_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    # The empty array records the number of rows and the dtype.
    return look_up(table, tokens), (tokens, table[:, :0])


def _look_up_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    tokens, like = saved
    total = jnp.zeros((len(like), cotangent.shape[-1]), jnp.float32)
    return total.at[tokens].add(cotangent.astype(jnp.float32)).astype(like.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


class PerLayerInput(SpecModule):
    """Gated projection of a layer's embedding of each token."""

    table: nnx.Param
    project: nnx.Param
    gate: nnx.Param
    out: nnx.Param
    scale: nnx.Param

    def __init__(self, part: per_layer_input.PerLayerInput, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Output:
        """Apply the projections; the first layer also returns the scale that all layers share."""
        part, dtype, split = self.part, x.dtype, context.split(self.rules)
        project, gate, out = (
            getattr(self, name)[...].astype(dtype) for name in ("project", "gate", "out")
        )
        carried: dict[str, Array] = {}
        if part.is_first:
            scale = jnp.broadcast_to(self.scale[...].astype(dtype), (*x.shape[:2], part.size))
            carried = {SCALE: scale}
        else:
            scale = context.carried[SCALE]
        from_embedding = context.carried[EMBEDDING] @ project * part.d_model**-0.5
        normed = rms_norm(from_embedding, None, part.input_norm) * scale
        tokens, table = context.inputs["tokens"], self.table[...].astype(dtype)
        rows = look_up(table, tokens)
        if part.image_token_id is not None:
            is_image = (tokens == part.image_token_id)[..., None]
            rows = jnp.where(is_image, jax.lax.stop_gradient(table[part.pad_token_id]), rows)
        total = normed + split.split_tokens(rows) * part.size**0.5
        hidden = jax.nn.gelu(x @ gate, approximate=True) * (total * 2**-0.5)
        return Output(hidden @ out, carried=carried)
