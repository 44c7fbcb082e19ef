"""Layer of a decoder: residual branches around the modules of its sublayers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Key

from maxpipe.models.layers import (
    attention,
    compressed_attention,
    experts,
    gated_delta,
    hyper_connections,
    kda,
    latent_attention,
    mamba2,
    mlp,
    per_layer_input,
)
from maxpipe.models.registry import PLUGIN_MODULES
from maxpipe.models.spec import Branch, LayerType, Part
from maxpipe.nn.attention_layer import Attention
from maxpipe.nn.compressed_attention import CompressedAttention
from maxpipe.nn.experts import Experts
from maxpipe.nn.gated_delta import GatedDelta
from maxpipe.nn.hyper_connections import HyperConnectionModule, StreamHeadModule
from maxpipe.nn.kda import KimiDelta
from maxpipe.nn.latent_attention import LatentAttention
from maxpipe.nn.mamba2 import Mamba2
from maxpipe.nn.mlp import MLP
from maxpipe.nn.module import (
    LayerContext,
    LayerNorm,
    LayerScalar,
    Output,
    RMSNorm,
)
from maxpipe.nn.per_layer_input import PerLayerInput
from maxpipe.parallel import scopes, stochastic_rounding
from maxpipe.parallel.collectives import local_positions
from maxpipe.parallel.lora_weight import dropout
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules, constrain

_NORMS: Mapping[type, Any] = {
    mlp.RMSNorm: RMSNorm,
    mlp.LayerNorm: LayerNorm,
    mlp.LayerScalar: LayerScalar,
}
_MODULES: Mapping[type, Any] = {
    attention.Attention: Attention,
    compressed_attention.CompressedAttention: CompressedAttention,
    latent_attention.LatentAttention: LatentAttention,
    gated_delta.GatedDelta: GatedDelta,
    kda.KimiDelta: KimiDelta,
    mamba2.Mamba2: Mamba2,
    mlp.MLP: MLP,
    experts.Experts: Experts,
    per_layer_input.PerLayerInput: PerLayerInput,
    hyper_connections.HyperConnection: HyperConnectionModule,
    hyper_connections.StreamHead: StreamHeadModule,
}
"""Module class that implements each sublayer class of this package."""


def sublayer_module(part: Part) -> Any:
    """Return the module class that computes a sublayer other than a norm."""
    kind = type(part)
    return _MODULES[kind] if kind in _MODULES else PLUGIN_MODULES[kind]


def norm_module(part: Part) -> Any:
    """Return the module that computes a norm or the scale of a layer's output."""
    return _NORMS[type(part)](part)


class _BranchInput(NamedTuple):
    """Input of a sublayer, after the connection and the pre-norm of its branch."""

    x: Float[Array, "B T D"]
    max_abs: Float[Array, "B T 1"] | None = None
    """Largest magnitude of each token, if matmuls need it and the pre-norm computes it."""
    projected: Array | None = None
    """Data that `Block._add` needs for a hyper-connection."""


class Block(nnx.Module):
    """A layer, which computes `x + scale * dropout(after(part(before(x))))` for each branch.

    With hyper-connections, x is a row of several residual streams: a branch reads one array from
    them, and its output is added to all of them (`HyperConnection`).
    """

    def __init__(
        self, layer_type: LayerType, rules: AxisRules, carried: Mapping[str, int] | None = None
    ):
        """Initialize the layer; `carried` are the arrays that follow the residual stream in its
        input and output (`Model.carried`).
        """
        for branch in layer_type.branches:
            for name, part in branch.parts.items():
                is_norm = part is not branch.part and part is not branch.connection
                module = norm_module(part) if is_norm else sublayer_module(part)(part, rules)
                setattr(self, name, module)
        if layer_type.output_scale is not None:
            self.output = norm_module(layer_type.output_scale)
        self.layer_type, self.rules, self.carried = layer_type, rules, carried or {}

    def __call__(
        self, x: Float[Array, "B T D"], context: LayerContext, key: Key[Array, ""] | None
    ) -> Output:
        """Apply the layer; `key` is the layer's dropout key, or None to disable dropout."""
        branches, keys = self.layer_type.branches, None
        if key is not None and any(branch.dropout for branch in branches):
            # Each example has its own key, so dropout does not depend on how the batch is sharded.
            keys = jax.vmap(
                lambda example: jax.random.split(jax.random.fold_in(key, example), len(branches))
            )(context.inputs["example_ids"])
        losses, statistics, caches = {}, {}, {}
        split = context.split(self.rules)
        x = split.split_tokens(x)
        x, carried = self._divide(x, split) if self.carried else (x, {})
        if self.layer_type.input_stored_as:
            carried[self.layer_type.input_stored_as] = x
        inner = _BranchInput(x)
        first = x  # output of the first of two branches with one residual sum
        for number, branch in enumerate(branches):
            keys_of_branch = context.rounding_keys
            if keys_of_branch is not None:
                keys_of_branch = stochastic_rounding.fold_in(keys_of_branch, number)
            branch_context = replace(
                context,
                carried=carried,
                rounding_keys=keys_of_branch,
                cache=None if context.cache is None else context.cache.get(branch.name, {}),
            )
            if not branch.shares_input:
                inner = self._read(branch, x, context, split)
            output = self._branch(branch, inner, branch_context)
            change = output.x
            context.record(f"output.{branch.name}", change)
            carried |= output.carried
            losses |= output.losses
            statistics |= output.statistics
            if output.cache is not None:
                caches[branch.name] = output.cache
            following = branches[number + 1] if number + 1 < len(branches) else None
            if branch.sum_norm is not None:
                name = _sum_norm(branch)
                with jax.named_scope(scopes.part(name)):
                    change = getattr(self, name)(first + change)
            elif following is not None and following.sum_norm is not None:
                first = change
                continue
            if keys is not None and branch.dropout:
                places = local_positions(x.shape[1])
                change = dropout(change, branch.dropout, keys[:, number], places)
            change = change if branch.scale == 1.0 else change * branch.scale
            change = first + change if branch.shares_input else change
            if following is not None and following.shares_input:
                first = change
                continue
            x = self._add(branch, x, change, inner.projected, split)
            context.record(f"residual.{branch.name}", x)
        if self.layer_type.output_scale is not None:
            x = self.output(x)
        if names := self.layer_type.added_arrays:
            arrays = [carried[name] for name in names]
            x = split.split_tokens(x + arrays[0])
            shifted = [*arrays[1:], jnp.zeros_like(arrays[0])]
            carried |= dict(zip(names, shifted, strict=True))
        if carried:
            parts = [self._whole(part, split) for part in (x, *carried.values())]
            x = self._whole(jnp.concatenate(parts, axis=-1), split)
        if context.recorder is not None:
            statistics |= context.recorder.statistics
        return Output(x, losses, statistics, None if context.cache is None else caches)

    def _read(
        self,
        branch: Branch,
        x: Float[Array, "B T W"],
        context: LayerContext,
        split: SequenceParallel,
    ) -> _BranchInput:
        """Return the input of a branch's sublayer."""
        projected = max_abs = None
        if branch.connection is not None:
            name = _connection(branch)
            with jax.named_scope(scopes.part(name)):
                inner, projected = getattr(self, name).read(self._whole(x, split))
            x = self._whole(inner, split)
        if branch.pre_norm is not None:
            name = f"{branch.name}_norm"
            module = getattr(self, name)
            with jax.named_scope(scopes.part(name)):
                if isinstance(module, RMSNorm) and context.has_token_scales:
                    max_abs = module.max_abs(x)
                x = module(x)
        return _BranchInput(x, max_abs, projected)

    def _add(
        self,
        branch: Branch,
        x: Float[Array, "B T W"],
        change: Float[Array, "B T D"],
        projected: Array | None,
        split: SequenceParallel,
    ) -> Float[Array, "B T W"]:
        """Add the output of a branch to the residual stream or streams."""
        if projected is None:
            return split.split_tokens(x + change)
        name = _connection(branch)
        with jax.named_scope(scopes.part(name)):
            change = self._whole(change, split)
            return self._whole(getattr(self, name).write(x, change, projected), split)

    def _divide(
        self, x: Float[Array, "B T W"], split: SequenceParallel
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B T size"]]]:
        """Return the residual stream and the carried arrays."""
        width = x.shape[-1] - sum(self.carried.values())
        ends = itertools.accumulate([width, *self.carried.values()])
        x, *others = jnp.split(self._whole(x, split), [*ends][:-1], axis=-1)
        others = [self._whole(part, split) for part in others]
        return self._whole(x, split), dict(zip(self.carried, others, strict=True))

    def _whole(self, x: Float[Array, "B T size"], split: SequenceParallel) -> Array:
        """Constrain the sharding so that devices hold all entries of a token.

        Otherwise, XLA shards arrays that are split or concatenated, with collectives that all
        stages would have to execute.
        """
        return split.split_tokens(x) if split.axis else constrain(x, (None,) * 3, self.rules)

    def _branch(self, branch: Branch, inner: _BranchInput, context: LayerContext) -> Output:
        """Return the output of a branch's sublayer, after the post-norm."""
        with jax.named_scope(scopes.part(branch.name)):
            context = replace(context, max_abs=inner.max_abs)
            output = getattr(self, branch.name)(inner.x, context)
        if branch.post_norm is not None:
            name = f"{branch.name}_after_norm"
            with jax.named_scope(scopes.part(name)):
                output = output._replace(x=getattr(self, name)(output.x))
        return output


def _sum_norm(branch: Branch) -> str:
    return f"{branch.name}_sum_norm"


def _connection(branch: Branch) -> str:
    return f"{branch.name}_connection"
