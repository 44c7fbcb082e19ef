"""A layer of any kind: its residual branches, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Key

from maxpipe.models.layers import attention, delta, experts, latent, mlp, norm
from maxpipe.models.spec import Branch, Kind, Part
from maxpipe.nn.attention_layer import Attention
from maxpipe.nn.delta import GatedDelta
from maxpipe.nn.experts import Experts
from maxpipe.nn.latent import LatentAttention
from maxpipe.nn.mlp import GatedMLP
from maxpipe.nn.norm import LayerNorm, RMSNorm
from maxpipe.nn.part import Context, Output
from maxpipe.parallel import stated
from maxpipe.parallel.context import own_places
from maxpipe.parallel.dropout import dropout
from maxpipe.parallel.sharding import AxisRules

_NORMS: Mapping[type, Any] = {norm.RMSNorm: RMSNorm, norm.LayerNorm: LayerNorm}
_MODULES: Mapping[type, Any] = {
    attention.Attention: Attention,
    latent.LatentAttention: LatentAttention,
    delta.GatedDelta: GatedDelta,
    mlp.GatedMLP: GatedMLP,
    experts.Experts: Experts,
}
"""What computes each class of part."""


def norm_module(part: Part) -> Any:
    """The module of a norm: x -> x."""
    return _NORMS[type(part)](part)


def empty_cache(kind: Kind, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
    """Of the one part of a layer that keeps something of earlier tokens; None without one."""
    return _first(lambda module, part: module.empty_cache(part, rows, tokens, dtype), kind)


def window(kind: Kind) -> str:
    """The per-layer value that says what its cache may lack; empty if it may lack nothing."""
    return _first(lambda module, part: module.window(part) or None, kind) or ""


def cache_axes(kind: Kind) -> Any:
    """Logical axes of each array in it."""
    return _first(lambda module, part: module.cache_axes(part), kind)


def _first(find: Callable[[Any, Part], Any], kind: Kind) -> Any:
    found = (find(_MODULES[type(branch.part)], branch.part) for branch in kind.branches)
    return next((each for each in found if each is not None), None)


class Block(nnx.Module):
    """A layer: `x + scale * dropout(after(part(before(x))))` for each of its branches."""

    def __init__(self, kind: Kind, rules: AxisRules):
        for branch in kind.branches:
            for name, part in branch.parts.items():
                inner = part is branch.part
                module = _MODULES[type(part)](part, rules) if inner else norm_module(part)
                setattr(self, name, module)
        self.kind, self.rules = kind, rules

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, key: Key[Array, ""] | None
    ) -> Output:
        """`key` is the layer's for dropout; None turns it off."""
        branches, keys = self.kind.branches, None
        if key is not None and any(branch.dropout for branch in branches):
            # Keyed by example, so that dropout is the same however the batch is cut.
            keys = jax.vmap(
                lambda example: jax.random.split(jax.random.fold_in(key, example), len(branches))
            )(context.inputs["example_ids"])
        losses, statistics, cache = {}, {}, None
        split = context.split(self.rules)
        x = split.shards(x)
        for number, branch in enumerate(branches):
            found = self._branch(branch, x, context)
            change = found.x
            if keys is not None and branch.dropout:
                places = own_places(x.shape[1])
                change = dropout(change, branch.dropout, keys[:, number], places)
            x = split.shards(x + (change if branch.scale == 1.0 else change * branch.scale))
            losses |= found.losses
            statistics |= found.statistics
            cache = cache if found.cache is None else found.cache
        return Output(x, losses, statistics, cache)

    def _branch(self, branch: Branch, x: Array, context: Context) -> Output:
        found = Output(x)
        for name, part in branch.parts.items():
            module = getattr(self, name)
            inner = part is branch.part
            with jax.named_scope(stated.part(name)):
                if inner:
                    found = module(found.x, context)
                    continue
                if context.low is not None and isinstance(module, RMSNorm):
                    context = replace(context, largest=module.largest(found.x))
                found = found._replace(x=module(found.x))
        return found
