"""The decoder: one block authored in flax nnx, and the whole model as pure functions.

Parameters are a plain nested dict, `{embedding, layers, final_norm, head}`, with the
layers stacked in network order. `Decoder.apply` is the plain loop that every
pipelined run is held against; `layer` and `norm` are what the pipeline runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxpipe.config.schema import ModelConfig
from maxpipe.model.attention import Attention
from maxpipe.model.layers import GatedMLP, RMSNorm, dropout, weight
from maxpipe.parallel.sharding import AxisRules

Params = dict[str, Any]


class Block(nnx.Module):
    """One layer: attention and MLP, each normed first and added to the residual stream."""

    def __init__(self, config: ModelConfig, rules: AxisRules, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rules, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = GatedMLP(config, rules, rngs)
        self.dropout = config.dropout

    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
        keys: jax.Array | None = None,
    ) -> jax.Array:
        """`x [B, T, D]`; `keys [B, 2]` are the dropout keys of both branches, None in eval."""
        branch = self.attention(self.attention_norm(x), segment_ids, positions)
        if keys is not None:
            branch = dropout(branch, self.dropout, keys[:, 0])
        x = x + branch
        branch = self.mlp(self.mlp_norm(x))
        if keys is not None:
            branch = dropout(branch, self.dropout, keys[:, 1])
        return x + branch


@dataclass(frozen=True)
class Decoder:
    """A model as functions of its parameters."""

    config: ModelConfig
    rules: AxisRules

    def init_layer(self, key: jax.Array) -> Params:
        """One layer's parameters."""
        return _pure(Block(self.config, self.rules, nnx.Rngs(params=key)))

    def init(self, key: jax.Array) -> Params:
        """All parameters in network order; each layer's depend on its index alone."""
        return self.init_outer(key) | {
            "layers": {"layer": self.init_layers("layer", key, jnp.arange(self.config.num_layers))}
        }

    @property
    def kind_of(self) -> tuple[str, ...]:
        """The kind of each layer, in network order."""
        return ("layer",) * self.config.num_layers

    @property
    def layers(self) -> dict[str, Any]:
        """Functions of the layers, by kind."""
        return {"layer": lambda *given: (self.layer(*given), {}, {})}

    @property
    def loss_weights(self) -> dict[str, float]:
        """What each of the layers' losses counts."""
        return {}

    def init_layers(self, kind: str, key: jax.Array, layers: jax.Array) -> Params:
        """Parameters of the layers with these indices, stacked along a new first dim."""
        base = jax.random.fold_in(key, 0)
        return jax.vmap(lambda layer: self.init_layer(jax.random.fold_in(base, layer)))(layers)

    def init_outer(self, key: jax.Array) -> Params:
        """Everything but the layers."""
        config = self.config
        d, v, dtype = config.d_model, config.vocab_size, config.param_dtype
        params = {"final_norm": _pure(RMSNorm(config))}
        rngs = nnx.Rngs(params=jax.random.fold_in(key, 1))
        params["embedding"] = weight(rngs, (v, d), ("vocab", "embed"), fan_in=d, dtype=dtype)[...]
        if not config.tied_embeddings:
            rngs = nnx.Rngs(params=jax.random.fold_in(key, 2))
            params["head"] = weight(rngs, (d, v), ("embed", "vocab"), fan_in=d, dtype=dtype)[...]
        return params

    @cached_property
    def _block(self) -> tuple[Any, Any]:
        """Graph definition and abstract state of one block."""
        build = lambda: Block(self.config, self.rules, nnx.Rngs(params=jax.random.key(0)))  # noqa: E731
        return nnx.split(nnx.eval_shape(build))

    def axes(self) -> Params:
        """Logical axes of every parameter, those of one layer without the stacking axis."""
        _, state = self._block
        axes: Params = {
            "embedding": ("vocab", "embed"),
            "layers": {"layer": _axes_tree(state)},
            "final_norm": {"scale": ("norm",)},
        }
        if not self.config.tied_embeddings:
            axes["head"] = ("embed", "vocab")
        return axes

    def layer(
        self,
        params: Params,
        x: jax.Array,
        inputs: Params,
        index: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Layer `index` on `x [B, T, D]`.

        `inputs` holds `segment_ids` and `positions` `[B, T]` and `example_ids` `[B]`, the rows'
        numbers in the global batch: dropout is keyed by step (in `key`), layer and example, so
        that it is the same however the batch is cut. `key=None` turns dropout off.
        """
        graph, state = self._block
        nnx.replace_by_pure_dict(state := jax.tree.map(lambda leaf: leaf, state), params)
        keys = None
        if key is not None and self.config.dropout > 0:
            layer_key = jax.random.fold_in(key, index)
            keys = jax.vmap(
                lambda example: jax.random.split(jax.random.fold_in(layer_key, example))
            )(inputs["example_ids"])
        return nnx.merge(graph, state)(x, inputs["segment_ids"], inputs["positions"], keys)

    def norm(self, params: Params, x: jax.Array) -> jax.Array:
        """The norm between the last layer and the output projection."""
        module = nnx.eval_shape(lambda: RMSNorm(self.config))
        graph, state = nnx.split(module)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(x)

    def apply(self, params: Params, batch: Params, key: jax.Array | None = None) -> jax.Array:
        """Logits float32 `[B, T, V]` by the plain loop over layers, without a pipeline."""
        dtype = jnp.dtype(self.config.compute_dtype)
        x = params["embedding"].astype(dtype)[batch["tokens"]]

        def body(x: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
            return self.layer(layer[0], x, batch, layer[1], key), None

        indices = jnp.arange(self.config.num_layers)
        x, _ = jax.lax.scan(body, x, (params["layers"]["layer"], indices))
        x = self.norm(params["final_norm"], x)
        head = params["embedding"].T if self.config.tied_embeddings else params["head"]
        return jnp.einsum("btd,dv->btv", x, head.astype(dtype), preferred_element_type=jnp.float32)

    def loss(self, params: Params, batch: Params, key: jax.Array | None = None) -> jax.Array:
        """Mean cross entropy in nats over the target tokens, by the plain loop."""
        scores = jax.nn.log_softmax(self.apply(params, batch, key))
        picked = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
        mask = batch["loss_mask"].astype(jnp.float32)
        return -(picked * mask).sum() / jnp.maximum(mask.sum(), 1.0)


def _pure(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _axes_tree(state: Any) -> Params:
    """Nested dict of each parameter's logical axes, from where it was declared."""
    is_leaf = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return nnx.to_pure_dict(
        jax.tree.map(lambda leaf: leaf.replace(leaf.axes), state, is_leaf=is_leaf)
    )
