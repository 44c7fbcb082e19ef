"""Grouped matmuls, which compute only each token's experts, compared with plain loops."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layers import experts
from maxpipe.nn import token_permutation
from maxpipe.nn.experts import Experts
from maxpipe.nn.module import LayerContext
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import BATCH_SPEC, AxisRules
from tests.cases import TOLERANCE, keeping
from tests.nn.parts import assert_close, context

WIDTH, HIDDEN, EXPERTS, CHOICES = 6, 10, 7, 3


def layer(
    dispatch: Any,
    params: dict[str, Any],
    x: Any,
    rules: AxisRules,
    cache: Any = None,
    biased: bool = False,
) -> Any:
    """Return the output of experts with these parameters."""
    options: dict[str, Any] = {"dispatch": dispatch, "biased": biased}
    part = experts.Experts(WIDTH, HIDDEN, EXPERTS, CHOICES, 1.0, 0.1, **options)
    module = Experts(part, rules)
    for name, value in params.items():
        getattr(module, name)[...] = value
    ids = context([[1] * x.shape[1]] * len(x), [range(x.shape[1])] * len(x))
    return module(x, LayerContext(ids.inputs, ids.index, cache=cache)).x


def token_by_token(params: dict[str, Any], x: Any) -> Any:
    """Compute the output of experts by a loop over tokens and their selected experts."""

    def of_token(token: Any) -> Any:
        scores = jax.nn.softmax(token @ params["router"])
        best = jnp.argsort(-jax.lax.stop_gradient(scores), stable=True)[:CHOICES]
        change = 0.0
        for expert in best:
            hidden = jax.nn.silu(token @ params["gate"][:, expert])
            hidden *= token @ params["up"][:, expert]
            change += scores[expert] / scores[best].sum() * (hidden @ params["down"][expert])
        return change

    return jax.lax.map(of_token, x.reshape(-1, WIDTH)).reshape(x.shape)


@pytest.fixture(scope="module")
def given() -> tuple[dict[str, Any], jax.Array]:
    """Parameters with which one expert gets no token and one gets all, and inputs."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "router": jax.random.normal(keys[0], (WIDTH, EXPERTS)),
        "gate": jax.random.normal(keys[1], (WIDTH, EXPERTS, HIDDEN)),
        "up": jax.random.normal(keys[2], (WIDTH, EXPERTS, HIDDEN)),
        "down": jax.random.normal(keys[3], (EXPERTS, HIDDEN, WIDTH)),
    }
    params["router"] = params["router"].at[0].set([0.0, -30.0, 0, 0, 30.0, 0, 0])
    x = jax.random.normal(keys[4], (4, 9, WIDTH))
    return params, x.at[..., 0].set(1.0)


def test_grouped_matmul_and_gradients_equal_loop_over_tokens(given: Any) -> None:
    params, x = given
    wanted, pull = jax.vjp(jax.jit(token_by_token), params, x[:2, :4])
    cotangent = jax.random.normal(jax.random.key(1), wanted.shape)
    rules = AxisRules.from_config(MeshConfig())
    for dispatch in ("grouped", "dense"):
        run = partial(layer, dispatch, rules=rules)
        found, pull_found = jax.vjp(lambda *given, run=run: jax.jit(run)(*given), params, x[:2, :4])
        assert_close(found, wanted)
        gradients = jax.tree_util.tree_leaves_with_path(pull(cotangent))
        for (path, a), b in zip(gradients, jax.tree.leaves(pull_found(cotangent)), strict=True):
            error = np.abs(a - b).max() / np.abs(a).max()
            assert error < TOLERANCE, (dispatch, jax.tree_util.keystr(path), error)


def test_grouped_dispatch_applies_expert_biases(given: Any) -> None:
    params, x = given
    part = experts.Experts(WIDTH, HIDDEN, EXPERTS, CHOICES, 1.0, 0.1, biased=True)
    drawn = jax.random.split(jax.random.key(2), len(part.params))
    params = {
        name: params.get(name, jax.random.normal(key, param.shape))
        for key, (name, param) in zip(drawn, part.params.items(), strict=True)
    }
    found = []
    for dispatch in ("dense", "grouped"):
        run = partial(layer, dispatch, rules=AxisRules.from_config(MeshConfig()), biased=True)
        value, pull = jax.vjp(jax.jit(run), params, x)
        found.append((value, pull(value)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.abs(a - b).max() < TOLERANCE * np.abs(a).max()


def test_each_device_sorts_only_its_own_tokens(given: Any) -> None:
    """The program is partitioned automatically, as in generation."""
    params, x = given
    config = MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)
    mesh, rules = build_mesh(config, jax.devices()[:8]), AxisRules.from_config(config)
    placed = {
        name: jax.device_put(params[name], jax.NamedSharding(mesh, rules.spec(axes)))
        for name, axes in (
            ("router", ("embed", "routes")),
            ("gate", ("expert_embed", "experts", "mlp")),
            ("up", ("expert_embed", "experts", "mlp")),
            ("down", ("experts", "mlp", "expert_embed")),
        )
    }
    with jax.set_mesh(mesh):
        batch = jax.device_put(x, jax.NamedSharding(mesh, BATCH_SPEC))
        run = jax.jit(partial(layer, "grouped", rules=rules)).lower(placed, batch).compile()
        found = run(placed, batch)
    assert re.search(r"= u32\[27\].* sort\(", run.as_text() or "")
    run = jax.jit(partial(layer, "dense", rules=AxisRules.from_config(MeshConfig())))
    assert_close(found, run(params, x))


@pytest.mark.parametrize("largest", [5, 2**31 - 1])
@pytest.mark.parametrize("number", [1, 2, 7, 64, 1000])
def test_stable_argsort_keeps_order_of_equal_keys(number: int, largest: int) -> None:
    keys = np.random.default_rng(number).integers(0, 6, number).astype(np.int32)
    keys[-1] = largest
    order = token_permutation.stable_argsort(jnp.asarray(keys), largest)
    assert order.tolist() == np.argsort(keys, kind="stable").tolist()
    assert token_permutation.invert_permutation(order)[order].tolist() == list(range(number))


@pytest.mark.parametrize("tokens", keeping([1, 40], 0))
def test_decoding_selects_cheaper_dispatch(given: Any, tokens: int) -> None:
    params, x = given
    x = jnp.tile(x, (1, 5, 1))[:1, :tokens]
    run = partial(layer, rules=AxisRules.from_config(MeshConfig()), cache=())
    program = str(jax.make_jaxpr(partial(run, "dense"))(params, x))
    assert ("scan[" in program) == (tokens == 40)
    assert_close(*(jax.jit(partial(run, dispatch))(params, x) for dispatch in ("grouped", "dense")))
