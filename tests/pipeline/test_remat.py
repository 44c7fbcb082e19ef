"""Split VJP of a layer: saved activations of each remat policy, and equality with autodiff."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.remat import (
    LayerConstants,
    LayerVJP,
    RematPolicy,
    differentiate_layer,
)
from tests.cases import MODEL
from tests.times import shared

# Wide enough that matmuls dominate the operations.
CONFIG = replace(MODEL, d_model=128, head_dim=16, d_mlp=256)
DECODER = Decoder(CONFIG, AxisRules.from_config(MeshConfig()))
ROWS, TOKENS = 2, 128
ACTIVATIONS = DECODER.model.activations["matmuls"]
KEEPS = [
    RematPolicy("full"),
    RematPolicy("names", ("gate", "up")),
    RematPolicy("names", ACTIVATIONS),
    RematPolicy("names", ("gate", "up"), offloaded=("query", "up")),
    RematPolicy("none"),
]


@shared
def arguments() -> tuple[Any, jax.Array, Any, jax.Array]:
    """Return weights, input, constants and cotangent."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (ROWS, TOKENS, CONFIG.d_model)
    ids = jnp.broadcast_to(jnp.arange(TOKENS), (ROWS, TOKENS))
    inputs = {"segment_ids": ids // 50, "positions": ids % 50}
    weights = DECODER.init_layer("layer", keys[0])
    x, cotangent = (jax.random.normal(key, shape) for key in keys[1:])
    return weights, x, LayerConstants(inputs, jnp.int32(1), None, {}), cotangent


LAYER = DECODER.layer("layer")


def layer(weights: Any, x: jax.Array, constants: LayerConstants) -> Any:
    return LAYER(weights, x, *constants[:3])


def pieces_of(keep: RematPolicy) -> LayerVJP:
    found: list[LayerVJP] = []

    def trace(weights: Any, x: jax.Array, constants: Any) -> jax.Array:
        found.append(differentiate_layer(LAYER, keep, weights, x, constants, halves=True))
        return x

    jax.eval_shape(trace, *arguments()[:3])
    return found[0]


def flops(function: Any, *inputs: Any) -> float:
    cost: Any = jax.jit(function).lower(*inputs).compile().cost_analysis()
    return cost["flops"]


def name_of(keep: RematPolicy) -> str:
    return "-".join([keep.remat, *map(str, (len(keep.names), len(keep.offloaded)))])


class Run(NamedTuple):
    """Results and FLOP counts of the compiled functions of one layer."""

    output: jax.Array
    whole: Any
    """Gradients of weights and input."""
    halves: Any
    """The same gradients computed by a split backward pass."""
    flops: dict[str, float]


@shared
def run_pieces(keep: RematPolicy) -> Run:
    """Compile and run each function once for all tests."""
    weights, x, constants, cotangent = arguments()
    pieces, costs = pieces_of(keep), {}

    def run(name: str, *inputs: Any) -> Any:
        compiled: Any = jax.jit(getattr(pieces, name)).lower(*inputs).compile()
        costs[name] = compiled.cost_analysis()["flops"]
        return compiled(*inputs)

    output, saved, *_ = run("forward", weights, x, constants)
    whole = run("backward", weights, saved, constants, cotangent)
    half_x, later = run("input_grad", weights, saved, constants, cotangent)
    return Run(output, whole, (run("weight_grad", later, constants), half_x), costs)


@shared
def whole_layer() -> Any:
    """Return output, and gradients of weights and input, by automatic differentiation."""
    weights, x, constants, cotangent = arguments()

    @jax.jit
    def whole(weights: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        output, pullback = jax.vjp(lambda w, x: layer(w, x, constants)[0], weights, x)
        return output, pullback(cotangent)

    return whole(weights, x, cotangent)


@pytest.mark.parametrize("keep", KEEPS, ids=name_of)
def test_split_vjp_matches_autodiff(keep: RematPolicy) -> None:
    pieces = run_pieces(keep)
    for a, b in zip(
        jax.tree.leaves(whole_layer()), jax.tree.leaves((pieces.output, pieces.whole)), strict=True
    ):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    # Both halves run the same operations, so the tolerance is tighter.
    for a, b in zip(jax.tree.leaves(pieces.whole), jax.tree.leaves(pieces.halves), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(a).max()


@pytest.mark.parametrize("keep", [keep for keep in KEEPS if not keep.offloaded], ids=name_of)
def test_split_backward_has_no_more_flops_than_full_backward(keep: RematPolicy) -> None:
    """Compares compiler FLOP counts; policies with offloading are excluded."""
    costs = run_pieces(keep).flops
    assert costs["input_grad"] + costs["weight_grad"] <= 1.02 * costs["backward"]
    # The second half reads no weight matrix, so it needs no gather.
    matrices = {leaf.shape for leaf in jax.tree.leaves(arguments()[0]) if leaf.ndim > 1}
    assert not matrices & {leaf.shape for leaf in pieces_of(keep).deferred}


def test_two_full_pullbacks_cost_more_than_one_backward() -> None:
    """Each of two separate pullbacks recomputes the layer, which the split backward avoids."""
    weights, x, constants, cotangent = arguments()

    def inputs_only(weights: Any, x: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: layer(weights, x, constants)[0], x)[1](cotangent)[0]

    def weights_only(weights: Any, x: jax.Array) -> Any:
        return jax.vjp(lambda w: layer(w, x, constants)[0], weights)[1](cotangent)

    twice = flops(inputs_only, weights, x) + flops(weights_only, weights, x)
    whole = run_pieces(RematPolicy("full")).flops["backward"]
    assert twice > 1.3 * whole


def test_saved_activations_of_each_mode() -> None:
    row = (ROWS, TOKENS, CONFIG.d_model)
    assert [leaf.shape for leaf in pieces_of(RematPolicy("full")).saved] == [row]
    some = pieces_of(RematPolicy("names", ("gate", "up"))).saved
    assert sorted(leaf.shape for leaf in some) == sorted([row, *[(ROWS, TOKENS, 256)] * 2])
    assert not any(leaf.on_host for leaf in some)
    # Every name in the schema refers to one activation of the layer.
    assert len(pieces_of(RematPolicy("names", ACTIVATIONS)).saved) == 1 + len(ACTIVATIONS)
    assert len(pieces_of(RematPolicy("none")).saved) > 1 + len(ACTIVATIONS)


def test_offloaded_names_are_saved_on_host() -> None:
    saved = pieces_of(RematPolicy("names", ("gate", "up"), offloaded=("up", "query"))).saved
    assert sorted(leaf.shape for leaf in saved if leaf.on_host) == [
        (ROWS, TOKENS, 8, 16),
        (ROWS, TOKENS, 256),
    ]
    assert sum(not leaf.on_host for leaf in saved) == 2


def test_saved_names_are_not_recomputed() -> None:
    full, names, none = (
        run_pieces(keep).flops["backward"]
        for keep in (RematPolicy("full"), RematPolicy("names", ACTIVATIONS), RematPolicy("none"))
    )
    # Gate and up are 128 x 256; query, key, value and output are 128 x 128 or half of that.
    matmuls = 2 * ROWS * TOKENS * 128 * (2 * 256 + 128 + 2 * 64)
    assert full - names >= matmuls
    assert none < names


SIZE = 4
DERIVED: dict[str, Any] = {
    "scaled": lambda w, ids: 2 * w,
    "narrow": lambda w, ids: w.astype(jnp.bfloat16).astype(jnp.float32),
    "turned": lambda w, ids: w.T,
    "normalised": lambda w, ids: w / jnp.linalg.norm(w, axis=0),
    "product": lambda w, ids: w @ w.T,
    "jitted": lambda w, ids: jax.jit(jnp.sin)(w),
    "picked": lambda w, ids: jnp.sin(w)[ids],
}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("halves", [False, True])
def test_values_derived_from_weights_are_never_saved(name: str, halves: bool) -> None:
    """With equal shapes everywhere, slots save only values that depend on the input."""

    def layer(weights: Any, x: jax.Array, ids: jax.Array, *_: Any) -> Any:
        mixed = jnp.sin(x @ DERIVED[name](weights["w"], ids)) * jnp.cos(ids.astype(jnp.float32))
        return mixed, {}, {}

    weights, x = (jax.random.normal(jax.random.key(n), (SIZE, SIZE)) for n in (1, 2))
    constants = LayerConstants(jnp.arange(SIZE)[::-1], jnp.int32(0), None, {})
    arguments = {"w": weights}, x, constants
    pieces = differentiate_layer(layer, RematPolicy("none"), *arguments, halves=halves)
    output, saved, *_ = pieces.forward(*arguments)
    other_x = pieces.forward(arguments[0], x + 1, arguments[2])[1]
    other_weights = pieces.forward({"w": weights + 1}, x, arguments[2])[1]
    assert saved
    for leaf, by_x, by_weights in zip(saved, other_x, other_weights, strict=True):
        assert (leaf != by_x).any() or (leaf == by_weights).all()
    wanted, pullback = jax.vjp(lambda w, x: layer(w, x, constants.inputs)[0], *arguments[:2])
    found = pieces.backward(arguments[0], saved, arguments[2], output)
    for a, b in zip(
        jax.tree.leaves((wanted, pullback(output))), jax.tree.leaves((output, found)), strict=True
    ):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(a).max()
