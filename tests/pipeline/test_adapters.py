"""Adapters: the engine against the unpipelined model, and that model against merged weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.adapters import DOWN, LENGTH, UP
from maxpipe.models.config import AdapterConfig
from maxpipe.models.count import num_trained, size
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.weights import replace_subtree, select_trainable
from maxpipe.planner.memory import buffers, predict_memory, state
from maxpipe.planner.sizes import Sizes
from tests.cases import TOLERANCE, Case, batch_of, buffer_bytes, keeping
from tests.pipeline.test_engine import check_gradients, with_changes
from tests.pipeline.test_families import GPT_OSS, GROUPED, LLAMA4, MOE, NEXT, ROOM, V3
from tests.pipeline.test_frozen import compiled_traffic, state_bytes
from tests.planner.test_memory import config_of, steps_of

LORA, DORA = AdapterConfig(rank=3, alpha=6.0), AdapterConfig(rank=2, kind="dora", alpha=3.0)
DROPPED = AdapterConfig(rank=2, dropout=0.4, rslora=True, targets=["*.query", "*.down"])
INT8 = AdapterConfig(rank=2, base_quantization="int8", kind="dora", alpha=3.0)
NF4 = AdapterConfig(rank=4, base_quantization="nf4", targets=["layers.attention.*"])
TWICE = replace(NF4, double_quantization=True)

CASES = [
    Case(2, 2, 4, fsdp=2, tensor=2, adapter=LORA),
    Case(1, 1, 2, fsdp=2, gather="step", adapter=DROPPED),
    Case(2, 1, 3, schedule="1f1b", tied=True, data=2, remat="none", adapter=DORA),
    Case(2, 2, 4, schedule="zb_v", remat="names", tensor=2, adapter=DORA),
    Case(2, 3, 4, fsdp=2, layers=7, gather="window", adapter=DORA),
    Case(2, 2, 4, tensor=2, split="sequence", adapter=INT8),
    Case(3, 2, 7, schedule="v_half", layers=7, remat="none", dropout=0.3, adapter=DROPPED),
    Case(2, 2, 5, outside=1, remat="chunk", idle="compute", fsdp=2, adapter=NF4),
    Case(4, 1, 9, schedule="zb_h1", outside=1, data=2, adapter=INT8),
    Case(1, 2, 2, context=2, adapter=DROPPED, layers=2),
    Case(2, 2, 4, tensor=2, split="ring", idle="compute", adapter=LORA),
    Case(2, 3, 4, fsdp=2, layers=7, gather="window", adapter=NF4),
    Case(2, 2, 4, fsdp=2, data=2, remat="none", adapter=TWICE),
]


# Heterogeneous layers, some with matrices that have no adapter.
FAMILIES = [
    Case(2, 2, 4, layers=5, own=ROOM, fsdp=2, remat="none", adapter=LORA),
    Case(2, 1, 3, layers=5, own=V3, schedule="zb_h1", tensor=2, adapter=DORA),
    Case(2, 1, 3, layers=5, own=NEXT, epsilon=0.01, fsdp=2, adapter=INT8),
    Case(2, 2, 4, layers=5, own=GROUPED, gather="step", expert=1, fsdp=2, adapter=NF4),
]

# Adapters on routed experts, for each way of dispatching tokens.
ROUTED = AdapterConfig(rank=2, alpha=6.0, targets=["*.experts.*"])
ROUTED_NF4 = AdapterConfig(
    rank=2,
    base_quantization="nf4",
    double_quantization=True,
    targets=["*.gate", "*.experts.down"],
)
ROUTED_INT8 = replace(ROUTED, rslora=True, base_quantization="int8")
SPLIT = replace(GROUPED, num_experts=6)
EXPERTS = [
    Case(2, 2, 4, layers=5, own=GROUPED, fsdp=2, tensor=2, adapter=ROUTED),
    Case(2, 1, 3, layers=5, own=SPLIT, expert=2, fsdp=2, gather="step", adapter=ROUTED),
    Case(2, 1, 3, layers=5, own=V3, schedule="zb_h1", expert=2, remat="none", adapter=ROUTED_NF4),
    Case(2, 1, 3, layers=5, own=MOE, tensor=2, remat="none", adapter=ROUTED_INT8),
    Case(2, 2, 4, layers=5, own=ROOM, schedule="zb_v", fsdp=2, adapter=ROUTED),
    Case(1, 1, 2, layers=5, own=GPT_OSS, epsilon=0.01, tensor=2, adapter=ROUTED),
    Case(1, 1, 2, layers=4, own=LLAMA4, expert=1, context=2, adapter=ROUTED),
]


@pytest.mark.parametrize("case", keeping([*CASES, *FAMILIES, *EXPERTS], 0, 18), ids=str)
def test_gradients_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


@pytest.mark.parametrize(
    ("own", "adapter"),
    keeping(
        [
            *((None, LORA), (V3, DORA), (NEXT, LORA), (None, INT8)),
            *((own, ROUTED) for own in (GROUPED, MOE, ROOM, GPT_OSS, LLAMA4)),
        ],
        *(0, 4),
    ),
)
def test_adapted_model_matches_merged_weights(own: Any, adapter: AdapterConfig) -> None:
    """Compare loss and gradients of factors and magnitudes with weights merged in this test."""
    epsilon = 0.01 if own is NEXT else Case.epsilon
    layers = 2 if own is None else 4  # enough for every layer type
    case = Case(layers=layers, own=own, epsilon=epsilon, adapter=adapter)
    rules = AxisRules.from_config(case.mesh)
    decoder = Decoder(case.model, rules)
    merged = Decoder(replace(case.model, adapter=None), rules)
    params = jax.jit(lambda key: with_changes(decoder.init(key)))(jax.random.key(0))
    mine, batch = select_trainable(params, decoder.trainable()), batch_of(3, case=case)
    scale = adapter.alpha / adapter.rank

    def put_together(mine: Any) -> Any:
        both, found = replace_subtree(params, mine), {}
        for kind, described in decoder.model.layer_types.items():
            layers: Any = {}
            for part, name in described.declared:
                every = both["layers"][kind][part]
                weight = every[name]
                if weight.dtype == jnp.int8:
                    weight = weight * every[f"{name}_scale"]
                if name + DOWN in every:
                    summed = every[name + DOWN].ndim - 2
                    form = {0: "lefr,lerd->lefd", 1: "lder,lref->ldef"}.get(
                        described.declared[part, name].expert_dim, "l...r,lrn->l...n"
                    )
                    factors = every[name + DOWN], every[name + UP]
                    flat = factors[1].reshape(*factors[1].shape[:2], -1)
                    factors = factors if "e" in form else (factors[0], flat)
                    change = jnp.einsum(form, *factors).reshape(weight.shape)
                    weight = weight + scale * change
                    if name + LENGTH in every:
                        dims = tuple(range(1, 1 + summed))
                        norms = jnp.linalg.norm(
                            weight.reshape(len(weight), -1, *weight.shape[1 + summed :]), axis=1
                        )
                        ratio = every[name + LENGTH] / jax.lax.stop_gradient(norms)
                        weight = weight * jnp.expand_dims(ratio, dims)
                layers.setdefault(part, {})[name] = weight
            found[kind] = layers
        return both | {"layers": found}

    def reference(mine: Any, batch: Any) -> jax.Array:
        return merged.objective(put_together(mine), batch)

    def ours(mine: Any, batch: Any) -> jax.Array:
        return decoder.objective(replace_subtree(params, mine), batch)

    wanted, found = (jax.jit(jax.value_and_grad(run))(mine, batch) for run in (reference, ours))
    np.testing.assert_allclose(found[0], wanted[0], rtol=TOLERANCE)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(wanted[1]), jax.tree.leaves(found[1]), strict=True
    ):
        error = np.abs(a - b).max() / np.abs(a).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


# Predictions against the compiled program.

PLANS: list[tuple[AdapterConfig, dict[str, int], dict[str, Any]]] = [
    (LORA, {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 6, "schedule": "zb_h1"}),
    (INT8, {"ici_stage": 2, "ici_fsdp": 4}, {"microbatches": 4, "weight_gather": "step"}),
    (NF4, {"ici_stage": 2, "ici_data": 2}, {"microbatches": 4, "prologue_layers": 2}),
    (TWICE, {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 4}),
    (
        DORA,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 5, "repeats": 5, "weight_gather": "window", "group": 4},
    ),
]


@pytest.mark.parametrize(("adapter", "mesh", "pipeline"), PLANS)
def test_predicted_buffers_and_state_match_engine(
    adapter: AdapterConfig, mesh: dict[str, int], pipeline: dict[str, Any]
) -> None:
    plain = config_of({}, mesh, pipeline)
    config = replace(plain, adapter=adapter)
    steps, sizes = steps_of(config), Sizes(config)
    found, predicted = buffer_bytes(steps), buffers(sizes, steps.train_schedule)
    deferred = predicted.pop("deferred")
    assert found["deferred"] <= deferred and bool(found["deferred"]) == bool(deferred)
    assert predicted == {name: found[name] for name in predicted}
    assert state(sizes)["state"] == pytest.approx(state_bytes(steps), abs=64)
    trained_leaves = jax.tree.leaves(steps.abstract_saved["optimizer"]["mu"])
    assert sum(leaf.size for leaf in trained_leaves) == num_trained(sizes.model)
    less, more = (
        predict_memory(Sizes(each), steps.train_schedule, platform="tpu")
        for each in (config, plain)
    )
    assert less.total < more.total and less.arguments < more.arguments
    assert less.terms["gradients"] < 0.2 * more.terms["gradients"]


@pytest.mark.layouts
def test_base_weights_have_no_gradient_matmuls() -> None:
    """Compares compiled FLOPs with those of frozen layers after a trained embedding."""
    mesh, pipeline = {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 4, "schedule": "1f1b"}
    frozen = ["head", "final_norm.scale", "layers.*"]
    plain = config_of({"compute_dtype": "float32", "frozen": frozen}, mesh, pipeline)
    adapted = config_of({"compute_dtype": "float32"}, mesh, pipeline)
    adapted = replace(adapted, adapter=AdapterConfig(rank=1))
    (_, before), (_, after) = compiled_traffic(plain), compiled_traffic(adapted)
    sizes = Sizes(adapted)
    kind = sizes.model.layer_types["layer"]
    factors = sum(size(kind.params[key]) for key in kind.params if kind.params[key].trainable)
    tokens = (
        sizes.batch.microbatches
        * sizes.batch.tokens
        * sum(sizes.layers.partition)
        // sizes.mesh.stages
    )
    # Forward, recomputation, and both gradients.
    assert 0 < after - before <= 2 * tokens * 4 * factors
    base = sum(size(param) for param in kind.declared.values() if len(param.dims) > 1)
    assert 4 * factors < base / 4
