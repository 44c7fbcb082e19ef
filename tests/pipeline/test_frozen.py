"""Frozen parameters have no gradients, accumulators or reductions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from maxpipe.models.count import num_trained, size, train_flops_per_token
from maxpipe.planner.compile import collective_traffic, profile_step
from maxpipe.planner.memory import buffers, predict_memory, state
from maxpipe.planner.sizes import Sizes
from maxpipe.step.step import Steps
from tests.cases import Case, buffer_bytes, keeping
from tests.pipeline import test_kinds
from tests.pipeline.test_engine import check_gradients
from tests.planner.test_memory import config_of, steps_of

ENDS = ("embedding", "final_norm.*", "head")
CASES = [
    Case(1, 1, 2, fsdp=2, gather="step", frozen=("layers.*",)),
    Case(2, 2, 4, fsdp=2, frozen=("layers.attention.*", "embedding")),
    Case(2, 1, 3, schedule="1f1b", tied=True, fsdp=2, remat="none", frozen=("embedding",)),
    Case(2, 3, 4, fsdp=2, layers=7, gather="window", frozen=("*_norm.scale", "layers.mlp.up")),
    Case(2, 2, 4, schedule="zb_v", remat="names", frozen=("layers.*.query", "head"), tensor=2),
    Case(3, 2, 7, schedule="v_half", layers=7, remat="none", frozen=ENDS, dropout=0.3),
    Case(2, 2, 5, outside=1, remat="chunk", idle="compute", fsdp=2, frozen=("layers.*", "head")),
    Case(4, 1, 9, schedule="zb_h1", outside=1, data=2, frozen=("embedding", "layers.mlp.*")),
    Case(2, 1, 3, ahead=2, fsdp=2, gather="step", frozen=("head", "final_norm.*")),
    Case(2, 2, 4, ahead=1, schedule="zb_v", tied=True, frozen=("ahead.*", "layers.*.up")),
]


@pytest.mark.parametrize("case", keeping(CASES, 4, 6), ids=str)
def test_trainable_gradients_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


KINDS = [
    test_kinds.Case(
        "nwpnwnnwn",
        3,
        2,
        7,
        outside=3,
        fsdp=2,
        gather="window",
        remat="chunk",
        frozen=("wide", "narrow.into"),
    ),
    test_kinds.Case("npwnnwp", 2, 1, 5, schedule="zb_h1", remat="names", frozen=("narrow", "head")),
    test_kinds.Case("pwnwn", 2, 1, 5, outside=1, fsdp=2, frozen=("plain", "embedding")),
]


@pytest.mark.parametrize("case", keeping(KINDS, 0), ids=str)
def test_frozen_layer_types_propagate_input_gradients(case: test_kinds.Case) -> None:
    test_kinds.check(case)


# Predictions against the compiled program.

ATTENTION = ["layers.attention.*", "embedding"]
PLANS: list[tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = [
    (
        {"frozen": ATTENTION},
        {"ici_stage": 2, "ici_fsdp": 2, "ici_data": 2},
        {"microbatches": 4, "schedule": "1f1b"},
    ),
    (
        {"frozen": ["layers.mlp.*", "head", "final_norm.scale"]},
        {"ici_stage": 2, "ici_fsdp": 4},
        {"microbatches": 5, "repeats": 5, "weight_gather": "window", "group": 4},
    ),
    (
        {"frozen": ["embedding"], "tied_embeddings": True},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "prologue_layers": 2, "weight_gather": "step", "remat": "names"},
    ),
    ({"frozen": ["layers.*"]}, {"ici_stage": 4}, {"microbatches": 6, "schedule": "zb_h1"}),
]


def state_bytes(steps: Steps) -> int:
    """Bytes of the train state on one device."""
    shards = jax.tree.map(
        lambda leaf, placed: size_of(placed.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        steps.abstract_state,
        steps.state_sharding,
    )
    return sum(jax.tree.leaves(shards))


def size_of(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found


@pytest.mark.parametrize(("model", "mesh", "pipeline"), PLANS)
def test_predicted_buffers_and_state_match_engine(
    model: dict[str, Any], mesh: dict[str, int], pipeline: dict[str, Any]
) -> None:
    config = config_of(model, mesh, pipeline)
    steps, sizes = steps_of(config), Sizes(config)
    found, predicted = buffer_bytes(steps), buffers(sizes, steps.train_schedule)
    assert predicted == {name: found[name] for name in predicted}
    assert state(sizes)["state"] == pytest.approx(state_bytes(steps), abs=64)
    whole = Sizes(replace(config, model=replace(config.model, frozen=[])))
    assert predicted["gradients"] < buffers(whole, steps.train_schedule)["gradients"]
    trained = jax.tree.leaves(steps.abstract_saved["optimizer"]["mu"])
    assert sum(leaf.size for leaf in trained) == num_trained(sizes.model)


def test_deferred_buffers_do_not_exceed_prediction() -> None:
    """A partly frozen layer may defer and save less than predicted; other buffers match exactly."""
    mesh, pipeline = {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 6, "schedule": "zb_h1"}
    for remat in ("full", "names", "none"):
        config = config_of({"frozen": ["layers.mlp.*"]}, mesh, pipeline | {"remat": remat})
        steps = steps_of(config)
        found, predicted = buffer_bytes(steps), buffers(Sizes(config), steps.train_schedule)
        whole = steps_of(replace(config, model=replace(config.model, frozen=[])))
        assert 0 < found["deferred"] <= predicted["deferred"]
        assert predicted["deferred"] < buffer_bytes(whole)["deferred"]
        assert found["stash"] <= predicted["stash"] and found["gradients"] == predicted["gradients"]


def compiled_traffic(config: Any) -> tuple[dict[tuple[str, str], tuple[float, float]], float]:
    """Return {(kind, axes): (count, bytes)} of a compiled step's collectives, and its FLOPs."""
    steps = steps_of(config)
    text = steps.compile_train().as_text()
    profile, _ = profile_step(text, steps, config.pipeline.weight_gather)
    found = {
        (each.kind, each.axes): (each.count, each.total_bytes)
        for each in collective_traffic(profile.collectives, steps.param_layout.mesh)
    }
    return found, profile.flops


def test_frozen_weights_have_no_gradient_reductions_or_matmuls() -> None:
    """Counts reductions over fsdp and data, and FLOPs, in the compiled program."""
    model, mesh, pipeline = PLANS[0]
    frozen = config_of(model | {"compute_dtype": "float32"}, mesh, pipeline)
    config = replace(frozen, model=replace(frozen.model, frozen=[]))
    (before, flops), (after, fewer) = compiled_traffic(config), compiled_traffic(frozen)
    sizes = Sizes(config)
    tables = sizes.params.embedding_elements()
    kind = sizes.model.layer_types["layer"]
    mine = [param for (part, _), param in kind.params.items() if part == "attention"]
    layers = sizes.batch.microbatches * sum(sizes.layers.partition) // sizes.mesh.stages
    scattered = ("reduce-scatter", "fsdp")
    # Four weights of each layer and microbatch; each device sends half of their bytes.
    assert before[scattered][0] - after[scattered][0] == 4 * layers
    sent = 4 * layers * sum(map(size, mine)) / 2
    assert before[scattered][1] - after[scattered][1] == pytest.approx(sent)
    summed = lambda found: sum(sent for (kind, axes), (_, sent) in found.items() if "data" in axes)  # noqa: E731
    shards = sum(sizes.layers.slots["layer"] * sizes.mesh.elements(param.dims) for param in mine)
    assert summed(before) - summed(after) == pytest.approx(4 * (shards + tables))
    # Weight gathers and stage messages are unchanged. The embedding lookup remains, but token IDs
    # are not gathered again for its gradient.
    assert before["collective-permute", "stage"] == after["collective-permute", "stage"]
    (times, sent), (fewer_times, less) = (each["all-gather", "fsdp"] for each in (before, after))
    ids = sizes.batch.microbatches * 4 * sizes.batch.tokens
    assert (times - fewer_times, sent - less) == (sizes.batch.microbatches, ids)
    rows, tokens = config.train.batch_size // 4, config.train.sequence_length
    product = (
        2 * rows * tokens * sum(map(size, mine)) * sum(sizes.layers.partition) // sizes.mesh.stages
    )
    assert flops - fewer == pytest.approx(product)
    whole, part = (train_flops_per_token(Sizes(each).model, tokens) for each in (config, frozen))
    assert (whole - part) * rows * tokens / sizes.mesh.stages == product


def test_frozen_parameters_reduce_predicted_memory() -> None:
    for model, mesh, pipeline in PLANS:
        config = config_of(model, mesh, pipeline)
        whole = replace(config, model=replace(config.model, frozen=[]))
        less, more = (
            predict_memory(Sizes(each), steps_of(each).train_schedule, platform="tpu")
            for each in (config, whole)
        )
        assert less.total < more.total and less.arguments < more.arguments
