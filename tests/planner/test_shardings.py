"""Arrays listed by `maxpipe plan --shardings` against those of the engine."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import pytest

from maxpipe.cli import main
from maxpipe.parallel.axes import MESH_AXES
from maxpipe.planner.memory import state
from maxpipe.planner.shardings import compute_shardings, format_shardings
from maxpipe.planner.sizes import Sizes
from tests.cases import keeping
from tests.planner.test_memory import config_of, steps_of

CASES: list[tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = [
    ({}, {"ici_stage": 2, "ici_fsdp": 2, "ici_tensor": 2}, {"microbatches": 4, "repeats": 2}),
    (
        {"tied_embeddings": True, "num_layers": 11, "vocab_size": 263, "mtp_heads": 2},
        {"ici_stage": 4, "ici_data": 2},
        {"microbatches": 4, "prologue_layers": 2},
    ),
    (
        {"num_layers": 2},
        {"ici_context": 2, "ici_fsdp": 2, "ici_tensor": 2},
        {"microbatches": 2},
    ),
    (
        {"num_layers": 3, "family": "moe", "moe": {"num_experts": 6, "num_dense_layers": 1}},
        {"ici_stage": 2, "ici_expert": 2, "ici_context": 2},
        {"microbatches": 2},
    ),
]


def axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@pytest.mark.parametrize(("model", "mesh", "pipeline"), CASES)
def test_listed_parameter_shardings_match_engine(
    model: dict[str, Any], mesh: dict[str, int], pipeline: dict[str, Any]
) -> None:
    config = config_of(model, mesh, pipeline)
    steps, found = steps_of(config), compute_shardings(config)

    def row(path: Any, leaf: Any, sharding: Any) -> tuple[str, Any]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        spec = [axes_of(entry) for entry in sharding.spec]
        spec += [()] * (leaf.ndim - len(spec))
        shard = sharding.shard_shape(leaf.shape)
        size = math.prod(shard) * leaf.dtype.itemsize
        copies = sharding.num_devices * math.prod(shard) // leaf.size
        return name, (tuple(spec), leaf.shape, shard, size, copies)

    def rows_of(abstract: Any, placed: Any) -> dict[str, Any]:
        rows = jax.tree_util.tree_map_with_path(row, abstract, placed)
        return dict(jax.tree.leaves(rows, is_leaf=lambda leaf: isinstance(leaf, tuple)))

    state_of = steps.abstract_state
    engine = rows_of(state_of.params, steps.state_sharding.params)
    # Optimizer trees are sharded like the parameters.
    placed = steps.state_sharding.optimizer.trees
    for name, tree in state_of.optimizer.trees.items():
        assert rows_of(tree, placed[name]) == engine, name
    mine = {
        each.name: (each.spec, each.shape, each.shard, each.num_bytes, each.copies)
        for each in found.parameters
    }
    assert mine == engine
    for each in found.parameters:
        assert each.copies == math.prod(found.mesh[axis] for axis in each.replicated)
        assert len(each.axes) == len(each.shape)
    scalars = 12  # step and counters
    assert found.state_bytes + scalars == state(Sizes(config))["state"]


@pytest.mark.parametrize("mode", keeping(["auto", "explicit"], 1))
def test_listed_shards_match_compiled_program(mode: str) -> None:
    _, mesh, pipeline = CASES[-1]
    moe = {"num_experts": 6, "num_dense_layers": 0}
    model = {"num_layers": 2, "family": "moe", "moe": moe}
    config = config_of(model, mesh | {"shard_mode": mode}, pipeline, tokens=16)
    steps, found = (
        steps_of(config),
        {each.name: each for each in compute_shardings(config).parameters},
    )
    compiled = steps.compile_train()
    (taken, batch), _ = compiled.input_shardings
    for placement in (taken, compiled.output_shardings[0]):
        for tree in (placement.params, *placement.optimizer.trees.values()):
            shapes = jax.tree.leaves_with_path(steps.abstract_state.params)
            for (path, leaf), placed in zip(shapes, jax.tree.leaves(tree), strict=True):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                assert placed.shard_shape(leaf.shape) == found[name].shard, name
    # The loop over ticks carries messages: the residual stream of a microbatch on a device.
    (stream,) = (
        each for each in compute_shardings(config).activations if each.name == "residual stream"
    )
    for message in steps.buffer_shapes()["sent"]:
        assert message.shape[-3:] == stream.shard
    rows = batch["tokens"].shard_shape(steps.shape)[0]
    assert rows == pipeline["microbatches"] * stream.shard[0]


def test_activations_are_sharded_over_batch_and_tensor() -> None:
    config = config_of(*CASES[0], tokens=32)
    rows = {each.name: each for each in compute_shardings(config).activations}
    stream, gate = rows["residual stream"], rows["layer.gate"]
    assert stream.shape == (4, 32, 64) and stream.shard == (2, 32, 64)
    # The residual stream is replicated along tensor.
    assert (stream.replicated, stream.copies) == (("tensor",), 2)
    assert gate.spec == (("data", "fsdp", "expert"), ("context",), ("tensor",))
    assert (gate.shard, gate.num_bytes, gate.copies) == ((2, 32, 48), 2 * 2 * 32 * 48, 1)
    assert stream.num_bytes == 2 * Sizes(config).activations.hidden


ARGUMENTS = ["plan", "tiny", "train.steps=1", "--topology", "cpu:4", "mesh.ici_fsdp=4"]


def test_shardings_command_prints_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--shardings"]) == 0
    page = capsys.readouterr().out
    assert "layers.layer.attention.query" in page and "fsdp 4" in page
    # Axes with one device are omitted.
    assert not any(f"+{axis}" in page or f"{axis}+" in page for axis in MESH_AXES)
    assert main([*ARGUMENTS, "--shardings", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["mesh"] == {"fsdp": 4}
    names = [each["name"] for each in values["parameters"]]
    assert names[0] == "embedding" and "final_norm.scale" in names
    total = sum(each["num_bytes"] for each in values["parameters"])
    assert values["state_bytes"] == 3 * total


def test_norms_are_replicated() -> None:
    config = config_of(*CASES[0])
    page = format_shardings(compute_shardings(config)).splitlines()
    (line,) = (each for each in page if each.split()[:1] == ["final_norm.scale"])
    assert line.endswith("stage x fsdp x tensor: 8 devices")


def test_shardings_rejects_options_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--shardings", "--search"]) == 2
    assert "--shardings" in capsys.readouterr().err
    for option in ("--draw", "--draw-timeline"):
        assert main([*ARGUMENTS, "--shardings", option, "plan.svg"]) == 2
        assert f"command line: {option}" in capsys.readouterr().err
