"""Stacked parameters, and their conversion to network order and back."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.errors import ConfigError
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.optim.lr_schedule import learning_rate
from maxpipe.optim.update import Optimizer
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.schedule.table import Ring, balance_layers
from maxpipe.step.state import ParamLayout
from tests.cases import keeping

KEY = jax.random.key(11)
# Neither the 5 layers nor the vocabulary of 37 is divisible by the number of shards.
SMALL = ModelConfig(
    num_layers=5,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    d_mlp=24,
    vocab_size=37,
    mtp_heads=3,
)
MESHES = {
    "one device, three repeats": ({}, 3),
    "four stages, fsdp": ({"ici_stage": 4, "ici_fsdp": 2}, 1),
    "tensor": ({"ici_tensor": 2, "ici_data": 2}, 1),
    "stages, fsdp, tensor": ({"ici_stage": 2, "ici_fsdp": 2, "ici_tensor": 2}, 2),
    "one outside": ({"ici_stage": 4, "ici_fsdp": 2}, 1, 1),
    "two outside, padded": ({"ici_stage": 2, "ici_fsdp": 2, "ici_tensor": 2}, 1, 2),
}
"""Mesh sizes, repeats, and prologue layers."""


def make_mesh(sizes: dict[str, Any]) -> Mesh:
    return build_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod([1, *sizes.values()]))])


def make_partition(
    sizes: dict[str, Any],
    repeats: int = 1,
    outside: int = 0,
    *,
    rules: dict[str, list[str]] | None = None,
    **model: Any,
) -> ParamLayout:
    mesh = make_mesh(sizes)
    config = dataclasses.replace(SMALL, **model)
    decoder = Decoder(config, AxisRules.from_config(MeshConfig(axis_rules=rules or {})))
    ring = Ring(mesh.shape["stage"], repeats)
    cut = balance_layers([1.0] * (config.num_layers - outside), ring.num_chunks)
    layout = LayerLayout(ring, cut, outside)
    return ParamLayout(decoder, layout, mesh)


def named_leaves(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def assert_same_bits(got: Any, wanted: Any) -> None:
    got, wanted = named_leaves(got), named_leaves(wanted)
    assert got.keys() == wanted.keys()
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(leaf), err_msg=name)
        assert got[name].dtype == leaf.dtype


@pytest.fixture(scope="module")
def network() -> dict[str, Any]:
    """The plain model's parameters, on one device."""
    return jax.device_get(jax.jit(Decoder(SMALL, AxisRules.from_config(MeshConfig())).init)(KEY))


@cache
def drawn_stacked(name: str) -> tuple[ParamLayout, Any]:
    """Return the layout of this name, and its initialized stacked parameters."""
    partition = make_partition(*MESHES[name])
    draw = jax.jit(partition.init, out_shardings=partition.shardings(partition.specs))
    return partition, draw(KEY)


@pytest.mark.parametrize("name", keeping(MESHES, 5))
def test_init_is_bitwise_equal_to_unstacked_model(name: str, network: dict[str, Any]) -> None:
    partition, stacked = drawn_stacked(name)

    def there_and_back(stacked: Any) -> tuple[Any, ...]:
        plain, saved = partition.unstack(stacked), partition.to_saved(stacked)
        return plain, partition.stack(plain), saved, partition.from_saved(saved)

    places = None, None, *partition.shardings((partition.saved_specs, partition.specs))
    plain, again, saved, restored = jax.jit(there_and_back, out_shardings=places)(stacked)
    assert_same_bits(plain, network)
    assert_same_bits(again, stacked)
    # A model with one layer type saves it without the type name.
    assert_same_bits(saved, network | {"layers": network["layers"]["layer"]})
    assert_same_bits(restored, stacked)


@pytest.mark.parametrize(
    "name", keeping(["stages, fsdp, tensor", "four stages, fsdp", "two outside, padded"], 2)
)
def test_padding_is_zero_and_shapes_are_divisible(name: str) -> None:
    partition, stacked = drawn_stacked(name)
    layout, shape = partition.layout, partition.mesh.shape
    unused = layout.layer_at < 0
    assert unused.any()
    for leaf in jax.tree.leaves(stacked["layers"]):
        assert leaf.shape[:3] == unused.shape
        assert not np.asarray(leaf)[unused].any() and np.asarray(leaf)[~unused].any()
    vocabulary, shards = stacked["embedding"].shape[0], shape["stage"] * shape["tensor"]
    assert vocabulary % shards == 0 and 37 < vocabulary < 37 + shards
    assert stacked["head"].shape == (16, vocabulary)
    assert not np.asarray(stacked["embedding"])[37:].any()
    assert not np.asarray(stacked["head"])[:, 37:].any()
    for leaf, spec in zip(
        jax.tree.leaves(stacked), named_leaves(partition.specs).values(), strict=True
    ):
        assert leaf.sharding.spec == spec


def test_tied_embeddings_round_trip(network: dict[str, Any]) -> None:
    partition = make_partition({"ici_stage": 2}, tied_embeddings=True)
    plain = {name: leaf for name, leaf in network.items() if name != "head"}
    stacked = jax.jit(partition.stack)(plain)
    assert "head" not in stacked and stacked["embedding"].shape == (38, 16)
    assert_same_bits(jax.jit(partition.unstack)(stacked), plain)


def test_prologue_layers_are_replicated_over_stages(network: dict[str, Any]) -> None:
    partition, stacked = drawn_stacked("two outside, padded")
    first = jax.tree.map(lambda leaf: leaf[:2], network["layers"])
    assert_same_bits(stacked["outside"], first)
    for leaf, specs in zip(
        jax.tree.leaves(stacked["outside"]),
        named_leaves(partition.specs["outside"]).values(),
        strict=True,
    ):
        assert leaf.sharding.spec == specs and "stage" not in str(specs)


@pytest.mark.parametrize("outside", [0, 1])
def test_stacking_works_on_abstract_arrays(outside: int) -> None:
    partition = make_partition({"ici_stage": 2}, 2, outside)
    abstract = jax.eval_shape(partition.init, KEY)
    back = jax.eval_shape(partition.unstack, abstract)
    wanted = jax.eval_shape(partition.decoder.init, KEY)
    assert jax.tree.map(lambda leaf: leaf.shape, back) == jax.tree.map(
        lambda leaf: leaf.shape, wanted
    )
    assert jax.tree.structure(back) == jax.tree.structure(wanted)


# Sharding.

# Weights are sharded over every axis that shards the batch or its tokens, except `data`.
GATHERED = ("fsdp", "expert", "context")


def test_stacked_partition_specs() -> None:
    specs = named_leaves(make_partition({"ici_stage": 2}).specs)
    assert specs["embedding"] == PartitionSpec(("stage", "tensor"), GATHERED)
    assert specs["head"] == PartitionSpec(GATHERED, ("stage", "tensor"))
    assert specs["final_norm.scale"] == PartitionSpec(None)
    stacked = (None, "stage", None)
    assert specs["layers.layer.attention.key"] == PartitionSpec(*stacked, GATHERED, "tensor", None)
    assert specs["layers.layer.attention.out"] == PartitionSpec(*stacked, "tensor", None, GATHERED)
    assert specs["layers.layer.mlp.down"] == PartitionSpec(*stacked, "tensor", GATHERED)
    assert specs["layers.layer.mlp_norm.scale"] == PartitionSpec(*stacked, None)
    assert not [name for name in specs if name.startswith("outside")]


def test_prologue_layers_have_specs_of_other_layers() -> None:
    specs = make_partition({"ici_stage": 2}, 2, 1).specs
    in_ring, outside = named_leaves(specs["layers"]), named_leaves(specs["outside"])
    assert {name: PartitionSpec(None, *spec[3:]) for name, spec in in_ring.items()} == outside


@pytest.mark.parametrize(("num_layers", "on"), [(4, "stage"), (5, None)])
@pytest.mark.parametrize(("vocab_size", "split"), [(40, ("stage", "tensor")), (37, None)])
@pytest.mark.parametrize("outside", [0, 1])
def test_saved_partition_specs_shard_divisible_dims(
    num_layers: int,
    on: str | None,
    vocab_size: int,
    split: tuple[str, str] | None,
    outside: int,
) -> None:
    partition = make_partition(
        {"ici_stage": 2, "ici_tensor": 2},
        outside=outside,
        num_layers=num_layers,
        vocab_size=vocab_size,
    )
    specs = named_leaves(partition.saved_specs)
    assert specs["embedding"] == PartitionSpec(split, GATHERED)
    assert specs["head"] == PartitionSpec(GATHERED, split)
    assert specs["layers.mlp.gate"] == PartitionSpec(on, GATHERED, "tensor")
    assert specs["layers.attention_norm.scale"] == PartitionSpec(on, None)
    # Every array can be placed with its spec.
    shapes = jax.eval_shape(lambda key: partition.to_saved(partition.init(key)), KEY)
    shardings = partition.shardings(partition.saved_specs)
    jax.tree.map(lambda sharding, leaf: sharding.shard_shape(leaf.shape), shardings, shapes)


def test_axis_rule_conflict_names_parameter() -> None:
    partition = make_partition({}, rules={"head_dim": ["tensor"]})
    with pytest.raises(
        ConfigError, match=r"layers\.layer\.attention\.(key|out|query|value) has dims"
    ):
        _ = partition.specs


def test_all_parameters_except_norm_scales_have_weight_decay() -> None:
    targets = make_partition({}, 1, 1).trainable_params(OptimConfig())
    decayed = {".".join(path): each.decay for path, each in targets.items()}
    assert {name for name, decays in decayed.items() if not decays} == {
        "final_norm.scale",
        "layers.layer.attention_norm.scale",
        "layers.layer.mlp_norm.scale",
        "outside.layer.attention_norm.scale",
        "outside.layer.mlp_norm.scale",
    }


@pytest.mark.parametrize("outside", keeping([0, 1], 1))
def test_moments_are_stacked_like_parameters(network: dict[str, Any], outside: int) -> None:
    partition = make_partition({"ici_stage": 2}, 2, outside)
    stack, unstack = jax.jit(partition.stack), jax.jit(partition.unstack)
    stacked = stack(network)
    optim = OptimConfig(clip_norm=0.0)
    optimizer = Optimizer(optim, learning_rate(optim, 10), partition.trainable_params(optim))
    _, state = jax.jit(optimizer.update)(stacked, optimizer.init(stacked), stacked)
    for moment in state.trees.values():
        there = unstack(moment)
        assert jax.tree.structure(there) == jax.tree.structure(network)
        assert_same_bits(stack(there), moment)
