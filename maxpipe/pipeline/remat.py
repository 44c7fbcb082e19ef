"""One layer, differentiated once: what a forward slot keeps and what backward slots make of it.

The layer is traced into a forward that also returns what its backward needs, and the backward as a
function of that. Weights and the batch's own arrays are at hand in a backward slot anyway: they and
what is computed from weights alone are never kept, as the data flow says, whatever its shape. With
a split backward the trace is cut in two (`split`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from maxpipe.parallel.low_precision import is_rounded
from maxpipe.parallel.per_device import vary
from maxpipe.pipeline.split import Flat, split
from maxpipe.pipeline.trainable import joined, trained

Tree = Any
Remat = Literal["chunk", "full", "names", "none"]


LayerFn = Callable[..., tuple[jax.Array, Mapping[str, jax.Array], Mapping[str, jax.Array]]]
"""(weights, x [B, T, D], inputs, layer index, key) -> (output [B, T, D], losses, statistics).

Losses are scalars, summed over the target tokens of the rows: they are added up as they are, and
their gradients flow. Statistics are arrays, summed over tokens, without a gradient.
"""


@dataclass(frozen=True)
class RematPolicy:
    """What forward slots keep for backward slots.

    `chunk` and `full` keep inputs and recompute, of a chunk or of each layer; `names` keeps each
    layer's input and the activations with these names; `none` keeps all that the backward needs.
    """

    remat: Remat = "full"
    names: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    """Names kept in host memory instead of on the device, whether among `names` or not."""

    def wrap(self, layer: LayerFn) -> LayerFn:
        """The layer with what it recomputes marked."""
        policies = jax.checkpoint_policies
        if self.remat == "none":
            return layer
        policy = policies.nothing_saveable
        if self.remat == "names":
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[n for n in self.names if n not in self.offloaded],
                names_which_can_be_offloaded=list(self.offloaded),
                offload_src="device",
                offload_dst="pinned_host",
            )
        # Forward and backward are in different loops: there is nothing to be merged by mistake.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)


class Kept(NamedTuple):
    """An array that waits between slots."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    on_host: bool

    @classmethod
    def of(cls, aval: Any) -> Kept:
        """The form of arrays with this abstract value."""
        return cls(aval.shape, aval.dtype, aval.memory_space == jax.memory.Space.Host)


class Constants(NamedTuple):
    """What a layer reads besides weights and input. Nothing in it has a gradient."""

    inputs: Tree
    """The microbatch's arrays."""
    layer: jax.Array
    """The layer's position in the network."""
    key: jax.Array | None
    """Of the step's randomness."""
    seeds: Tree
    """Cotangent of each of the layers' losses; a layer may return some of them."""


@dataclass(frozen=True)
class LayerVJP:
    """The pieces of one layer, differentiated."""

    forward: Callable[[Tree, jax.Array, Constants], tuple[jax.Array, list[jax.Array], Tree, Tree]]
    """(weights, x, constants) -> (output, saved, losses, statistics)."""
    backward: Callable[[Tree, list[jax.Array], Constants, jax.Array], tuple[Tree, jax.Array]]
    """(weights, saved, constants, cotangent) -> (weight gradients, input gradient)."""
    input_grad: Callable[..., tuple[jax.Array, list[jax.Array]]]
    """(weights, saved, constants, cotangent) -> (input gradient, deferred)."""
    weight_grad: Callable[[list[jax.Array], Constants], Tree]
    """(deferred, constants) -> weight gradients."""
    saved: tuple[Kept, ...]
    deferred: tuple[Kept, ...]
    losses: tuple[str, ...]
    statistics: dict[str, tuple[int, ...]]
    """Shapes by name."""


def differentiate(
    layer: LayerFn,
    keep: RematPolicy,
    weights: Tree,
    x: jax.Array,
    constants: Constants,
    *,
    halves: bool,
    trainable: Tree = None,
) -> LayerVJP:
    """Trace a layer with arguments like these.

    `halves` makes `input_grad` and `weight_grad` as well as `backward`. `trainable` is a tree of
    bools, None for all: weight gradients are those of such weights.
    """
    structure: list[Any] = []  # of the pullback, known once the forward is traced
    wrapped = keep.wrap(layer)
    trainable = jax.tree.map(lambda _: True, weights) if trainable is None else trainable

    def run(weights: Tree, x: jax.Array, constants: Constants) -> tuple[Any, list[jax.Array]]:
        def differentiable(mine: Tree, x: jax.Array) -> tuple[tuple[jax.Array, Tree], Tree]:
            output, losses, statistics = wrapped(joined(weights, mine), x, *constants[:3])
            return (output, losses), statistics

        mine = jax.tree.map(
            partial(_variable, x.dtype), trained(weights, trainable), is_leaf=is_rounded
        )
        (output, losses), pullback, statistics = jax.vjp(differentiable, mine, x, has_aux=True)
        leaves, tree = jax.tree.flatten(pullback)
        structure.append(tree)
        return (output, losses, statistics), leaves

    traced, (of_outputs, _) = jax.make_jaxpr(run, return_shape=True)(weights, x, constants)
    outputs = jax.tree.structure(of_outputs)
    flat = Flat(traced)
    sources = _Sources.of(flat, len(jax.tree.leaves(weights)))
    leaves = flat.outputs[outputs.num_leaves :]
    # Several shapes of an array are one to keep.
    stored = [v for v in dict.fromkeys(map(flat.unshaped, leaves)) if sources.must_wait(v)]

    def forward(
        weights: Tree, x: jax.Array, constants: Constants
    ) -> tuple[jax.Array, list[jax.Array], Tree, Tree]:
        found = jex.jaxpr_as_fun(traced)(*jax.tree.leaves((weights, x, constants)))
        output, losses, statistics = outputs.unflatten(found[: outputs.num_leaves])
        arrays = dict(zip(map(flat.unshaped, leaves), found[outputs.num_leaves :], strict=True))
        saved = [arrays[value].reshape(flat.aval[value].shape) for value in stored]
        return output, saved, losses, statistics

    def backward(
        weights: Tree, saved: list[jax.Array], constants: Constants, cotangent: jax.Array
    ) -> tuple[Tree, jax.Array]:
        known = [*jax.tree.leaves(weights), *saved, *jax.tree.leaves(constants)]
        values = flat.environment([*sources.weights, *stored, *sources.constants], known)
        flat.run(flat.between(set(values), leaves), values)
        pullback = jax.tree.unflatten(structure[-1], [values[leaf] for leaf in leaves])
        return pullback((cotangent, {name: constants.seeds[name] for name in of_outputs[1]}))

    output, saved, losses, statistics = forward(weights, x, constants)
    pieces = LayerVJP(
        forward,
        backward,
        _whole,
        _whole,
        saved=tuple(Kept.of(jax.typeof(leaf)) for leaf in saved),
        deferred=(),
        losses=tuple(losses),
        statistics={name: leaf.shape for name, leaf in statistics.items()},
    )
    return _with_halves(pieces, weights, saved, constants, output) if halves else pieces


def _variable(dtype: jnp.dtype, weight: Tree) -> jax.Array:
    """What has the gradient: a weight, or zeros of its shape in place of one in 8 bits."""
    return vary(jnp.zeros(weight.shape, dtype)) if is_rounded(weight) else weight


@dataclass(frozen=True)
class _Sources:
    """Where the values of a layer's forward come from, by their numbers in the flat program."""

    flat: Flat
    weights: list[int]
    x: int
    constants: list[int]

    @classmethod
    def of(cls, flat: Flat, num_weights: int) -> _Sources:
        weights, (x, *constants) = flat.inputs[:num_weights], flat.inputs[num_weights:]
        return cls(flat, weights, x, constants)

    def must_wait(self, value: int) -> bool:
        """Whether a value has to be kept from the forward slot to the backward slot.

        Inputs other than `x` are at hand there. What follows from weights without `x` is computed
        again, however dear: kept, it would take its room in every slot, and be the same in all of
        them. So is what depends on nothing, as zeros do that a mask leaves behind. What follows
        from the microbatch's own arrays alone waits: it is another one in each slot.
        """
        sources = self.flat.sources(value)
        if self.x in sources:
            return True
        return bool(sources) and sources.isdisjoint(self.weights) and value not in self.constants


def _with_halves(
    pieces: LayerVJP,
    weights: Tree,
    saved: list[jax.Array],
    constants: Constants,
    like: jax.Array,
) -> LayerVJP:
    """The backward cut in two."""
    traced, (d_weights, _) = jax.make_jaxpr(pieces.backward, return_shape=True)(
        weights, saved, constants, like
    )
    sizes = [len(jax.tree.leaves(tree)) for tree in (weights, saved, constants)]
    first_constant = sizes[0] + sizes[1]
    parts = split(
        traced,
        first_outputs=[len(traced.out_avals) - 1],
        free_inputs=range(first_constant, first_constant + sizes[2]),
    )
    structure = jax.tree.structure(d_weights)

    def input_grad(
        weights: Tree, saved: list[jax.Array], constants: Constants, cotangent: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        (found,), kept = parts.first(jax.tree.leaves((weights, saved, constants, cotangent)))
        return found, kept

    def weight_grad(deferred: list[jax.Array], constants: Constants) -> Tree:
        return structure.unflatten(parts.second(deferred, jax.tree.leaves(constants)))

    return dataclasses.replace(
        pieces,
        input_grad=input_grad,
        weight_grad=weight_grad,
        deferred=tuple(map(Kept.of, parts.kept)),
    )


def _whole(*_: Any) -> Any:
    raise AssertionError("this layer's backward was not cut in two")
