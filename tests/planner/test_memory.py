"""Predicted memory against the engine's buffers, the parameters and the compiler."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import AxisType, PartitionSpec

from maxpipe.config.load import from_dict, to_dict
from maxpipe.config.schema import Config
from maxpipe.models.count import QUERY_BLOCK
from maxpipe.models.layers.attention import Attention, Rope
from maxpipe.models.layers.indexer import INDEX_TOPK, LOSS, Indexer
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.registry import describe
from maxpipe.models.spec import Part
from maxpipe.nn import decoder as decoder_module
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.collectives import FULL_SEGMENT_IDS, mark_varying
from maxpipe.parallel.mesh import AXES, CONTEXT
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.remat import LayerConstants, differentiate_layer
from maxpipe.planner import sizes as sizes_module
from maxpipe.planner.compile import build_steps, executions
from maxpipe.planner.memory import WORKSPACE, buffers, predict_memory, state
from maxpipe.planner.memory_terms import is_out_of_device_memory
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.step.build import make_remat_policy
from maxpipe.step.step import Steps
from tests.cases import buffer_bytes, keeping, thinned, with_attention, with_layer_norms

ROOT = Path(__file__).parents[2]

MODEL = {
    "num_layers": 12,
    "d_model": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "d_mlp": 96,
    "vocab_size": 262,
}


def config_of(
    model: dict[str, Any], mesh: dict[str, Any], pipeline: dict[str, Any], tokens: int = 32
) -> Config:
    shards = math.prod(mesh.get(f"ici_{axis}", 1) for axis in ("data", "fsdp", "expert"))
    rows = 2 * pipeline["microbatches"] * shards
    train = {"batch_size": rows, "sequence_length": tokens, "steps": 1}
    sections = {"model": MODEL | model, "mesh": mesh, "pipeline": pipeline, "train": train}
    return from_dict(sections)


def steps_of(config: Config) -> Steps:
    sizes = (getattr(config.mesh, f"ici_{axis}") for axis in AXES)
    return build_steps(config, jax.devices()[: math.prod(sizes)])


EXPERTS: dict[str, Any] = {
    "num_layers": 9,
    "family": "moe",
    "moe": {"num_experts": 5, "num_dense_layers": 2, "d_expert": 28},
}
STATES = {
    "num_layers": 7,
    "family": "qwen3_next",
    "qwen3_next": {
        "num_experts": 5,
        "d_expert": 28,
        "d_shared_expert": 38,
        "num_key_heads": 3,
        "num_value_heads": 6,
        "key_size": 7,
        "value_size": 11,
        "chunk": 16,
        "rope_size": 4,
    },
}
DENSE_STATES = {
    "num_layers": 7,
    "family": "qwen3_5",
    "qwen3_5": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 7,
        "linear_value_head_dim": 11,
        "gdn_chunk_size": 16,
        "rotary_dim": 4,
    },
}
MAMBA2: dict[str, Any] = {
    "num_layers": 7,
    "family": "granite4",
    "granite4": {
        "attention_layers": [2, 5],
        "num_experts": 5,
        "d_expert": 28,
        "mamba_num_heads": 6,
        "mamba_head_dim": 11,
        "mamba_num_groups": 2,
        "mamba_state_dim": 7,
        "mamba_chunk_size": 16,
    },
}
MAMBA2_DENSE = MAMBA2 | {"granite4": MAMBA2["granite4"] | {"num_experts": 0}}
FALCON: dict[str, Any] = {
    "num_layers": 7,
    "family": "falcon_h1",
    "falcon_h1": {
        "mamba_num_heads": 6,
        "mamba_head_dim": 11,
        "mamba_num_groups": 2,
        "mamba_state_dim": 7,
        "mamba_chunk_size": 16,
    },
}
OLMO_HYBRID: dict[str, Any] = {
    "num_layers": 7,
    "family": "olmo_hybrid",
    "olmo_hybrid": {
        "attention_layers": [3],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 7,
        "linear_value_head_dim": 11,
        "gdn_chunk_size": 16,
    },
}
KIMI: dict[str, Any] = {
    "num_layers": 7,
    "num_kv_heads": 6,
    "family": "kimi_linear",
    "kimi_linear": {
        "attention_layers": [2, 5],
        "num_dense_layers": 4,
        "num_experts": 5,
        "d_expert": 28,
        "linear_num_heads": 3,
        "linear_head_dim": 8,
        "kda_chunk_size": 16,
        "kv_lora_rank": 6,
        "qk_rope_head_dim": 2,
        "v_head_dim": 6,
    },
}
UNGATED: dict[str, Any] = {
    "num_layers": 8,
    "family": "nemotron_h",
    "nemotron_h": {
        "hybrid_override_pattern": "ME*-",
        "num_experts": 6,
        "d_expert": 28,
        "d_shared_expert": 38,
        "score_func": "sigmoid",
        "expert_bias": True,
        "mamba_num_heads": 6,
        "mamba_head_dim": 11,
        "mamba_num_groups": 2,
        "mamba_state_dim": 7,
        "mamba_chunk_size": 16,
    },
}
GLM: dict[str, Any] = {
    "num_layers": 6,
    "family": "glm4_moe",
    "glm4_moe": {"num_experts": 6, "d_expert": 28, "num_shared_experts": 1, "rotary_dim": 4}
    | {"attention_bias": True, "use_qk_norm": True, "score_func": "sigmoid", "expert_bias": True},
}
MINIMAX: dict[str, Any] = {
    "num_layers": 6,
    "family": "minimax_m2",
    "minimax_m2": {"num_experts": 5, "d_expert": 28, "rotary_dim": 4},
}
BIASED: dict[str, Any] = {
    "num_layers": 6,
    "family": "gpt_oss",
    "gpt_oss": {"num_experts": 5, "d_expert": 28},
}
LLAMA4: dict[str, Any] = {"num_layers": 6, "family": "llama4"}


def llama4(**own: Any) -> dict[str, Any]:
    own = {"moe_layer_interval": 2, "num_experts": 5, "d_expert": 28, **own}
    return LLAMA4 | {"llama4": own | {"attention_chunk_size": 8, "no_rope_layer_interval": 2}}


GEMMA4: dict[str, Any] = {"num_layers": 7, "family": "gemma4", "tied_embeddings": True}


def gemma4(**own: Any) -> dict[str, Any]:
    return {"gemma4": {"sliding_window_pattern": 3, "global_head_dim": 24, **own}}


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        GEMMA4 | gemma4(num_experts=5, d_expert=28, attention_k_eq_v=True),
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    (GEMMA4 | gemma4(), {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 4, "remat": "none"}),
    (
        GEMMA4 | gemma4(num_kv_shared_layers=4, hidden_size_per_layer_input=6) | {"num_layers": 9},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1"},
    ),
    (EXPERTS, {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 6, "schedule": "zb_h1"}),
    (
        EXPERTS,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "remat": "names", "prologue_layers": 3, "weight_gather": "window"},
    ),
    (
        BIASED | {"gpt_oss": BIASED["gpt_oss"] | {"dispatch": "dense"}},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1"},
    ),
    (
        STATES,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    (
        DENSE_STATES,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    (
        MAMBA2,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    (
        MAMBA2_DENSE,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "remat": "none"},
    ),
    *(
        (FALCON, {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 6, **pipeline})
        for pipeline in (
            {"schedule": "zb_h1", "remat": "names"},
            {"remat": "none"},
            {"schedule": "zb_h1"},
        )
    ),
    (
        UNGATED,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    (UNGATED, {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 6, "schedule": "zb_h1"}),
    (
        UNGATED | {"nemotron_h": UNGATED["nemotron_h"] | {"hybrid_override_pattern": "M-*-"}},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "remat": "none"},
    ),
    (
        GLM,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    (
        MINIMAX,
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    (
        llama4(),
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h1", "remat": "names"},
    ),
    ({}, {}, {"microbatches": 2}),
    (
        {"attention": "blockwise"},
        {"ici_stage": 2, "ici_context": 2, "context_attention": "all_gather"},
        {"microbatches": 4, "remat": "none"},
    ),
    ({}, {"ici_stage": 2, "ici_fsdp": 2, "ici_data": 2}, {"microbatches": 4, "schedule": "1f1b"}),
    ({}, {"ici_stage": 4, "ici_tensor": 2}, {"microbatches": 8, "repeats": 3}),
    ({}, {"ici_stage": 4, "ici_fsdp": 2}, {"microbatches": 8, "repeats": 2, "remat": "chunk"}),
    (
        {"compute_dtype": "float32"},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "repeats": 2, "remat": "names", "weight_gather": "step"},
    ),
    (
        {"tied_embeddings": True, "mtp_heads": 3},
        {"ici_stage": 2, "ici_fsdp": 4},
        {"microbatches": 5, "repeats": 5, "weight_gather": "window", "group": 4},
    ),
    ({}, {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 4, "remat": "none"}),
    (
        {"matmul": "int8"},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "repeats": 5, "weight_gather": "window", "group": 2},
    ),
    (
        {"matmul": "mxfp8", "head_dim": 32},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "weight_gather": "step"},
    ),
    (
        {"matmul": "nvfp4", "head_dim": 32, "matmul_unquantized_layers": 0},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "weight_gather": "step"},
    ),
    (
        {"matmul": "nvfp4", "head_dim": 32},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "weight_gather": "window"},
    ),
    ({"vocab_size": 263}, {"ici_stage": 4}, {"microbatches": 6, "schedule": "zb_h1"}),
    ({"mtp_heads": 2}, {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 4}),
    (
        EXPERTS | {"mtp_heads": 2, "mtp_kind": "layer"},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 4, "weight_gather": "step"},
    ),
    (
        {},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_h2", "remat": "names"},
    ),
    (
        {},
        {"ici_stage": 2, "ici_fsdp": 2},
        {"microbatches": 6, "schedule": "zb_v", "repeats": 2, "remat": "none"},
    ),
    (
        {},
        {"ici_stage": 4, "ici_fsdp": 2},
        {
            "microbatches": 8,
            "schedule": "circular",
            "repeats": 2,
            "prologue_layers": 3,
            "delayed_forwarding": True,
        },
    ),
    (
        {},
        {"ici_stage": 2, "ici_fsdp": 2},
        {
            "microbatches": 4,
            "remat": "names",
            "saved_names": ["attention"],
            "prologue_layers": 2,
            "weight_gather": "step",
        },
    ),
]


def check_buffers(config: Config, steps: Steps) -> None:
    """Check that the predicted size of each buffer equals the engine's."""
    found = buffer_bytes(steps)
    for name, size in buffers(Sizes(config), steps.train_schedule).items():
        assert size == found[name], name


@pytest.mark.parametrize(("model", "mesh", "pipeline"), thinned(CASES, 2))
def test_predicted_buffers_and_state_match_engine(
    model: dict[str, Any], mesh: dict[str, int], pipeline: dict[str, Any]
) -> None:
    config = config_of(model, mesh, pipeline)
    steps, sizes = steps_of(config), Sizes(config)
    if "ici_tensor" not in mesh:  # the compiler chooses how buffers are sharded along tensor
        check_buffers(config, steps)
    shards = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        steps.abstract_state,
        steps.state_sharding,
    )
    assert state(sizes)["state"] == pytest.approx(sum(jax.tree.leaves(shards)), abs=64)


@pytest.mark.parametrize("adapter", [{}, {"rank": 3}])
def test_grpo_reference_memory_is_copy_of_trained_parameters(adapter: dict[str, int]) -> None:
    mesh = {"ici_stage": 2, "ici_fsdp": 2}
    sections = to_dict(config_of({}, mesh, {"microbatches": 2, "schedule": "1f1b"}))
    train = sections["train"] | {"objective": "grpo"}
    grpo = {"prompts": "prompts.jsonl", "reward": "arithmetic", "group_size": 4, "max_tokens": 4}
    sections |= {"train": train, "adapter": adapter, "model": sections["model"] | {"dropout": 0.0}}
    alone, config = (from_dict(sections | {"grpo": grpo | {"kl_coef": kl}}) for kl in (0.0, 0.1))
    steps = steps_of(config)
    shards = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        steps.param_layout.select_trainable(steps.abstract_state.params),
        steps.param_layout.select_trainable(steps.state_sharding.params),
    )
    with_it, without = (
        predict_memory(Sizes(each), steps.train_schedule, platform="cpu")
        for each in (config, alone)
    )
    assert with_it.reference == sum(jax.tree.leaves(shards)) > 0 == without.reference
    assert with_it.total == without.total + with_it.reference


@pytest.mark.parametrize(
    "model",
    [
        EXPERTS | {"moe": EXPERTS["moe"] | {"norm_topk_prob": False, "dispatch": "dense"}},
        EXPERTS,
        EXPERTS | {"moe": EXPERTS["moe"] | {"capacity_factor": 1.25, "num_experts": 4}},
        BIASED,
        BIASED | {"compute_dtype": "float32"},
    ],
)
def test_experts_save_token_counts_beyond_prediction(model: dict[str, Any]) -> None:
    """The balance loss saves float32 token counts per sequence and expert."""
    pipeline = {"microbatches": 6, "schedule": "zb_h1", "remat": "none"}
    config = config_of(model, {"ici_stage": 2, "ici_fsdp": 2}, pipeline)
    steps, sizes = steps_of(config), Sizes(config)
    found, table = buffer_bytes(steps), steps.train_schedule
    wanted = buffers(sizes, table)
    num_experts = model[model["family"]]["num_experts"]
    per_sequence = (
        4 * sizes.batch.microbatch_size * num_experts * sizes.layers.chunk_slots["experts"]
    )
    assert found.pop("stash") == wanted.pop("stash") + table.num_stash * per_sequence
    assert wanted == {name: found[name] for name in wanted}


def small_config(random: np.random.Generator) -> Config:
    """Return a config with small random sizes, many of which coincide."""
    pick = lambda *values: values[random.integers(len(values))]  # noqa: E731
    stages, fsdp, heads = pick(1, 2, 4), pick(1, 2), pick(1, 2, 4)
    schedule = pick("interleaved", "1f1b", "gpipe", "circular", "zb_h1", "zb_v")
    repeats = 2 if schedule == "zb_v" else pick(1, 2) if schedule in ("interleaved",) else 1
    microbatches = pick(stages, 2 * stages)
    return from_dict(
        {
            "model": {
                "num_layers": 2 * stages * repeats,
                "d_model": pick(2, 4),
                "num_heads": heads,
                "num_kv_heads": pick(1, heads),
                "head_dim": pick(2, 4),
                "d_mlp": pick(2, 4),
                "vocab_size": pick(259, 260),
                "compute_dtype": pick("float32", "bfloat16"),
                "tied_embeddings": pick(False, True),
            },
            "mesh": {"ici_stage": stages, "ici_fsdp": fsdp},
            "pipeline": {
                "schedule": schedule,
                "repeats": repeats,
                "microbatches": microbatches,
                "weight_gather": pick("iteration", "window", "step"),
                "remat": pick("full", "chunk", "names", "none"),
            },
            "train": {
                "batch_size": pick(1, 2, 4) * microbatches * fsdp,
                "sequence_length": pick(2, 4),
                "steps": 1,
            },
        }
    )


@pytest.mark.parametrize(
    ("first", "count"), [(0, 4), pytest.param(4, 208, marks=pytest.mark.faults)]
)
def test_buffers_if_shapes_coincide(first: int, count: int) -> None:
    """Buffers match the prediction and slots hold no weights, even if sizes coincide."""
    for seed in range(first, first + count):
        config = small_config(np.random.default_rng(seed))
        try:
            check_buffers(config, steps_of(config))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {config}") from error


def test_buffers_if_activations_have_weight_shape() -> None:
    """Quickstart, resized so that a microbatch has the shape of attention's output weight."""
    text = (ROOT / "configs/quickstart.yml").read_text(encoding="utf-8")
    sections = yaml.safe_load(text)
    sections["train"] |= {"sequence_length": 32, "batch_size": 64}
    for remat in ("full", "none"):
        config = from_dict(sections | {"pipeline": sections["pipeline"] | {"remat": remat}})
        model, train = config.model, config.train
        rows = Sizes(config).batch.microbatch_size
        assert (rows, train.sequence_length) == (model.num_heads, model.head_dim)
        check_buffers(config, steps_of(config))


def test_declared_parameters_match_initialized_model() -> None:
    """Declared names, shapes and logical axes are exactly those of the initialized parameters."""
    decoder = steps_of(config_of({}, {}, {"microbatches": 1})).param_layout.decoder
    ((name, kind),) = describe(decoder.config).layer_types.items()
    drawn = jax.eval_shape(partial(decoder.init_layers, name), jax.random.key(0), jnp.arange(1))
    shapes = jax.tree.map(lambda leaf: tuple(leaf.shape[1:]), drawn)
    axes = decoder.axes()["layers"][name]
    found = {
        (part, name): (shapes[part][name], axes[part][name])
        for part in shapes
        for name in shapes[part]
    }
    assert found == {name: (each.shape, each.axes) for name, each in kind.params.items()}


def check_saved_bytes(
    changes: dict[str, Any],
    remat: str,
    tokens: int,
    unused: int = 0,
    *,
    context: int = 1,
    sublayer: str = "",
) -> None:
    """Compare traced and predicted saved bytes, with distinct sizes for every dim.

    `unused` are predicted bytes of deferred weight gradients that the program does not save. If
    `sublayer` is set, only dense layers with this sublayer are compared.
    """
    pipeline = {"microbatches": 2, "remat": remat, "schedule": "zb_h1"}
    unlike = {"d_model": 20, "num_heads": 6, "num_kv_heads": 2, "head_dim": 10, "d_mlp": 34}
    mesh = {"ici_stage": 2, "ici_context": context}
    config = config_of(unlike | changes, mesh, pipeline, tokens)
    sizes, decoder = Sizes(config), Decoder(config.model, AxisRules.from_config(config.mesh))
    kinds = sizes.model.layer_types
    if sublayer:
        kinds = {name: kind for name, kind in kinds.items() if {sublayer, "mlp"} <= {*kind.parts}}
    assert kinds
    for kind in kinds:
        saved, predicted, deferred, predicted_deferred = measured(kind, config, sizes, decoder)
        assert (saved, deferred + unused) == (predicted, predicted_deferred)


def measured(kind: str, config: Config, sizes: Sizes, decoder: Decoder) -> tuple[float, ...]:
    """Return the saved and the deferred bytes of a layer, each as traced and as predicted."""
    tokens, context = config.train.sequence_length, config.mesh.ici_context
    dtype, rows = jnp.dtype(config.model.compute_dtype), sizes.batch.microbatch_size
    shape = (rows, tokens // context)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    inputs = {"segment_ids": ids, "positions": ids, "example_ids": jnp.zeros(shape[:1], jnp.int32)}
    inputs["tokens"] = ids
    if context > 1:
        inputs[FULL_SEGMENT_IDS] = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    seeds = {}
    if LOSS in sizes.model.losses:
        inputs["loss_mask"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        seeds = {LOSS: jnp.float32(1)}
    key = jax.random.key(0) if config.model.dropout else None
    drawn = jax.eval_shape(partial(decoder.init_layers, kind), jax.random.key(0), jnp.arange(1))
    weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], dtype), drawn)
    x = jax.ShapeDtypeStruct((*shape, sizes.model.stream_width), dtype)
    found: list[Any] = []

    def trace(*given: Any) -> None:
        layer, keep = decoder.layer(kind), make_remat_policy(config.pipeline, config.model)
        found.append(differentiate_layer(layer, keep, *mark_varying(given), halves=True))

    with jax.set_mesh(jax.make_mesh((context,), (CONTEXT,), axis_types=(AxisType.Auto,))):
        run = jax.shard_map(
            trace, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={CONTEXT}
        )
        constants = LayerConstants(inputs, jnp.int32(0), key, seeds)
        jax.eval_shape(run if context > 1 else trace, weights, x, constants)

    def size(arrays: Any) -> int:
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)

    saved, deferred = size(found[0].saved), size(found[0].deferred)
    predicted = sizes.activations.saved_bytes(kind)[0], sizes.activations.deferred_bytes(kind)
    return saved, predicted[0], deferred, predicted[1]


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize("attention", ["xla", "blockwise"])
def test_llama4_saves_declared_activations(attention: str, remat: str) -> None:
    changes = LLAMA4 | {"attention": attention, "num_layers": 3}
    own = {"moe_layer_interval": 2, "num_experts": 5, "d_expert": 28}
    check_saved_bytes(changes | {"llama4": own}, remat, 7)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize("tokens", keeping([7, 3 * QUERY_BLOCK], 0))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compute_dtype": "float32"},
        {"dropout": 0.1},
        {"family": "gemma3", "tied_embeddings": True},
        {"family": "gemma2", "tied_embeddings": True},
        GEMMA4 | gemma4(),
        GEMMA4 | gemma4(attention_k_eq_v=True),
        GEMMA4 | gemma4(num_kv_shared_layers=3),
        # A smaller embedding than the activations of a microbatch would be stored in their place.
        GEMMA4 | gemma4(hidden_size_per_layer_input=6) | {"vocab_size": 2003},
        {"family": "qwen2"},
        {"family": "smollm3"},
        {"family": "ministral3"},
        {"attention": "blockwise"},
        {"attention": "blockwise", "compute_dtype": "float32"},
        {"attention": "blockwise", "family": "gemma2", "tied_embeddings": True},
    ],
)
def test_sublayers_save_declared_activations(
    changes: dict[str, Any], remat: str, tokens: int
) -> None:
    check_saved_bytes(changes, remat, tokens)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize("attention", ["xla", "blockwise"])
def test_layers_with_one_branch_save_declared_activations(attention: str, remat: str) -> None:
    own = {**UNGATED["nemotron_h"], "hybrid_override_pattern": "M-*"}
    check_saved_bytes(UNGATED | {"attention": attention, "nemotron_h": own}, remat, 16)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
def test_mamba_layers_save_declared_activations(remat: str) -> None:
    own = {**MAMBA2["granite4"], "num_experts": 0}
    check_saved_bytes(MAMBA2 | {"granite4": own}, remat, 16)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize("attention", ["xla", "blockwise"])
@pytest.mark.parametrize(
    ("own", "dropout"),
    [
        ({}, 0.0),
        ({}, 0.1),
        ({"mamba_rms_norm": True, "ssm_out_multiplier": 0.6, "attention_out_multiplier": 0.7}, 0.0),
    ],
)
def test_branches_with_one_input_save_declared_activations(
    own: dict[str, Any], dropout: float, attention: str, remat: str
) -> None:
    own = FALCON["falcon_h1"] | own
    changes = {"attention": attention, "dropout": dropout, "falcon_h1": own}
    check_saved_bytes(FALCON | changes, remat, 16)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
def test_kimi_delta_layers_save_declared_activations(remat: str) -> None:
    check_saved_bytes(KIMI, remat, 32, sublayer="kda")


@pytest.mark.parametrize("remat", keeping(["full", "names", "none"], 2))
@pytest.mark.parametrize(
    ("changes", "sublayer"), [(OLMO_HYBRID, "delta"), (KIMI, "kda"), (MAMBA2_DENSE, "mamba")]
)
@pytest.mark.parametrize("tokens", keeping([128, 40], 0))
def test_sharded_recurrent_layers_save_declared_activations(
    tokens: int, changes: dict[str, Any], sublayer: str, remat: str
) -> None:
    """Pieces of a sequence have two chunks, or fewer tokens than a chunk."""
    check_saved_bytes(changes, remat, tokens, context=2, sublayer=sublayer)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
def test_cudnn_attention_saves_declared_activations(remat: str) -> None:
    check_saved_bytes({"attention": "cudnn", "head_dim": 16}, remat, 28)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_layer_norms_save_declared_activations(remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoder_module, sizes_module):
        monkeypatch.setattr(module, "describe", lambda config: with_layer_norms(describe(config)))
    check_saved_bytes({}, remat, 7)
    sizes = Sizes(config_of({}, {}, {"microbatches": 2}))
    assert sizes.params.norm_elements == 2 * MODEL["d_model"]


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize("backend", ["xla", "blockwise"])
def test_attention_sinks_save_declared_activations(
    backend: str, remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Attention(20, 6, 2, 10, 1.0, backend, Rope(1e4), sinks=True)
    for module in (decoder_module, sizes_module):
        monkeypatch.setattr(
            module, "describe", lambda config: with_attention(describe(config), part)
        )
    check_saved_bytes({}, remat, 7)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize(
    ("q_lora_rank", "tokens", "changes", "backend"),
    [
        (11, 7, {}, "xla"),
        (0, 3 * QUERY_BLOCK, {}, "xla"),
        (11, 7, {"compute_dtype": "float32"}, "xla"),
        (11, 7, {}, "blockwise"),
        (0, 3 * QUERY_BLOCK, {"compute_dtype": "float32"}, "blockwise"),
    ],
)
def test_latent_attention_saves_declared_activations(
    q_lora_rank: int,
    tokens: int,
    changes: dict[str, Any],
    backend: str,
    remat: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rope = Rope(1e4, rotary_dims=4)
    part = LatentAttention(20, 3, 12, 14, 9, q_lora_rank, 1.0, backend, rope, 0.3, 1e-6)
    for module in (decoder_module, sizes_module):
        monkeypatch.setattr(
            module, "describe", lambda config: with_attention(describe(config), part)
        )
    check_saved_bytes(changes, remat, tokens)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize(
    ("stage", "weight", "tokens", "changes", "backend"),
    [
        ("sparse", 0.7, 7, {}, "xla"),
        ("sparse", 0.7, 7, {"compute_dtype": "float32"}, "xla"),
        ("sparse", 0.7, 3 * QUERY_BLOCK, {}, "xla"),
        ("sparse", 0.0, 7, {}, "xla"),
        ("dense", 0.7, 7, {}, "xla"),
        ("sparse", 0.7, 7, {}, "blockwise"),
        ("sparse", 0.0, 70, {"compute_dtype": "float32"}, "blockwise"),
        ("sparse", 0.7, 3 * QUERY_BLOCK, {}, "blockwise"),
    ],
)
def test_sparse_attention_saves_declared_activations(
    stage: Any,
    weight: float,
    tokens: int,
    changes: dict[str, Any],
    backend: str,
    remat: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indexer = Indexer(20, 11, 5, 13, 4, False, 3, stage, weight)
    rope = Rope(1e4, rotary_dims=4)
    part = LatentAttention(20, 3, 12, 14, 9, 11, 1.0, backend, rope, 0.3, 1e-6, indexer)
    values = {INDEX_TOPK: (3.0,) * MODEL["num_layers"]}
    for module in (decoder_module, sizes_module):
        monkeypatch.setattr(
            module,
            "describe",
            lambda config: replace(with_attention(describe(config), part), values=values),
        )
    unused = 0
    if backend == "blockwise" and remat == "names":
        # The saved attention output allows the deferred part to repeat the projection to values, so
        # that its weights are saved instead of its output.
        unused = 3 * 14 * (2 * tokens - 9) * (4 if changes else 2)
    check_saved_bytes(changes, remat, tokens, unused)


def attention_of(config: Config) -> Part:
    (kind,) = describe(config.model).layer_types.values()
    return kind.parts["attention"]


def test_fused_attention_saves_no_scores() -> None:
    pipeline = {"microbatches": 2, "remat": "none"}
    plain, fused = (config_of({"attention": name}, {}, pipeline) for name in ("xla", "cudnn"))
    pairs, mask = (
        Sizes(each).activations.stored_scores(attention_of(each)) for each in (plain, fused)
    )
    assert mask == Sizes(fused).batch.microbatch_size * 32**2  # shared by all heads
    assert pairs > mask
    # Per pair: a mask byte, a float32 score and a bfloat16 probability. Per query: one more
    # statistic.
    kept = (
        Sizes(plain).activations.saved_bytes("layer")[0]
        - Sizes(fused).activations.saved_bytes("layer")[0]
    )
    assert (
        kept
        == (1 + 4 + 2) * pairs + 4 * Sizes(fused).batch.microbatch_size * 32 * fused.model.num_heads
    )
    layers = build_schedule(plain).num_stash * Sizes(plain).layers.chunk_slots["layer"]
    needs = [
        predict_memory(Sizes(each), build_schedule(each), platform="cuda").temporary
        for each in (plain, fused)
    ]
    # More than the saved activations, because the running layer has scores too.
    assert needs[0] - needs[1] > layers * kept + 2 * (pairs - mask)


def test_gathered_accumulators_add_head_gradient_in_place() -> None:
    """As in the TPU compiler: sharded accumulators first need the whole reduced gradient."""
    model, mesh = {"vocab_size": 16384, "d_model": 48}, {"ici_stage": 2, "ici_fsdp": 2}
    logits = {}
    for gather in ("iteration", "step"):
        config = config_of(model, mesh, {"microbatches": 4, "weight_gather": gather})
        found = predict_memory(Sizes(config), build_schedule(config), platform="tpu").terms
        logits[gather] = found["logits"]
    of_a_stage = 16384 // 2
    assert logits["step"] == 4 * 2 * 32 * of_a_stage
    assert logits["iteration"] - logits["step"] == (4 + 2) * 48 * of_a_stage


@pytest.mark.parametrize("platform", ["tpu", "cpu", "gpu"])
def test_loss_blocks_reduce_logits_memory(platform: str) -> None:
    """Long sequences on one stage. Sums over blocks do not shrink with the block size."""
    sizes = {"vocab_size": 2**17, "compute_dtype": "float32"}
    found = {}
    for block in (0, 1024, 2048, -1):
        pipeline = {"microbatches": 2, "loss_block_tokens": block}
        config = config_of(sizes, {"ici_fsdp": 2}, pipeline, tokens=8192)
        terms = predict_memory(Sizes(config), build_schedule(config), platform=platform).terms
        found[block] = terms["logits"]
    copies = 3 if platform == "cpu" else 2 if platform == "gpu" else 1
    assert found[-1] == found[2048]
    assert found[2048] - found[1024] == pytest.approx(copies * 4 * 1024 * 2**17)
    assert found[0] - found[2048] > 0.9 * copies * 4 * (8192 - 2048) * 2**17


def test_gpus_keep_transposed_shards_and_the_logits_gradient() -> None:
    """As in the GPU compiler, see `benchmarks/gpu_ahead_of_time.md`."""
    model, mesh = {"vocab_size": 65536, "d_model": 48}, {"ici_stage": 2, "ici_fsdp": 2}
    found = {}
    for gather in ("iteration", "step"):
        config = config_of(model, mesh, {"microbatches": 4, "weight_gather": gather})
        sizes = Sizes(config)
        found[gather] = predict_memory(sizes, build_schedule(config), platform="cuda").terms
    pairs, matrix = 2 * 32 * 65536 // 2, 48 * 65536 // 2
    assert found["step"]["logits"] == (2 + 4) * pairs + WORKSPACE
    assert found["iteration"]["logits"] - found["step"]["logits"] == 2 * matrix
    # Output weights of attention and MLP are gathered over their last dim.
    params = sizes.model.layer_types["layer"].params
    last = [each.dims for each in params.values() if each.dims[-1][1] == "embed"]
    behind = [dims for dims in last if len(dims) > 1]
    assert len(behind) == 2
    turned = 4 * sizes.layers.slots["layer"] * sum(map(sizes.mesh.elements, behind))
    assert found["iteration"]["turned"] == turned and "turned" not in found["step"]


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_window_with_every_chunk_holds_weights_like_step_gather(platform: str) -> None:
    found = []
    for gather in ("step", "window"):
        pipeline = {"microbatches": 4, "repeats": 2, "weight_gather": gather}
        config = config_of({}, {"ici_stage": 2, "ici_fsdp": 2}, pipeline)
        schedule = build_schedule(config)
        assert schedule.weight_window.num_chunk_slots == 0
        found.append(predict_memory(Sizes(config), schedule, platform=platform))
    assert found[0].terms["held"] == found[1].terms["held"] > 0


def test_window_memory_includes_arriving_chunk() -> None:
    """As in the TPU compiler: gathered weights occupy memory until their slot is free."""
    pipeline = {"microbatches": 4, "repeats": 3, "weight_gather": "window", "group": 4}
    config = config_of({"num_layers": 24}, {"ici_stage": 2, "ici_fsdp": 2}, pipeline, tokens=8)
    schedule = build_schedule(config)
    chunk = Sizes(config).layers.chunk_slots["layer"] * Sizes(config).params.layer_elements(
        "layer", whole=True
    )
    found = predict_memory(Sizes(config), schedule, platform="tpu").terms
    assert found["window"] > 2 * (schedule.weight_window.num_chunk_slots + 0.5) * chunk
    assert not {"layer", "logits"} & found.keys()  # smaller, and not live at the same time


WORDS = {"vocab_size": 16384}
WIDE = {"d_model": 256, "d_mlp": 1024}
LAYERS_AHEAD = {"mtp_heads": 2, "mtp_kind": "layer"}
NARROW_TYPE = {"compute_dtype": "bfloat16"}
RINGS = {"sequence_parallel": True, "collective_matmul": True}
TEMPORARY: list[tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = [
    ({}, {"ici_stage": 2, "ici_fsdp": 4}, {"microbatches": 4, "repeats": 2}),
    ({}, {"ici_stage": 4, "ici_fsdp": 2}, {"microbatches": 8, "remat": "names"}),
    (WORDS, {"ici_fsdp": 8}, {"microbatches": 2}),
    (WORDS | {"mtp_heads": 2}, {"ici_stage": 2, "ici_fsdp": 4}, {"microbatches": 2}),
    (LAYERS_AHEAD | WIDE, {"ici_stage": 2, "ici_fsdp": 4}, {"microbatches": 4}),
    (LAYERS_AHEAD | WORDS, {"ici_stage": 2, "ici_fsdp": 4}, {"microbatches": 2}),
    (WORDS, {"ici_fsdp": 4, "ici_tensor": 2}, {"microbatches": 2}),
    (WORDS, {"ici_fsdp": 8}, {"microbatches": 2, "loss_block_tokens": 128}),
    (
        WORDS | NARROW_TYPE,
        {"ici_stage": 2, "ici_fsdp": 4},
        {"microbatches": 4, "loss_block_tokens": 128},
    ),
    (
        WIDE | {"attention": "xla"},
        {"ici_stage": 2, "ici_tensor": 4, "sequence_parallel": True},
        {"microbatches": 4, "remat": "names"},
    ),
    (
        WIDE | {"attention": "xla"},
        {"ici_stage": 2, "ici_fsdp": 2, "ici_tensor": 2} | RINGS,
        {"microbatches": 4, "remat": "none", "idle": "compute"},
    ),
    (WIDE, {"ici_fsdp": 8}, {"microbatches": 1}),
    (WIDE, {"ici_stage": 2, "ici_fsdp": 4}, {"microbatches": 4, "weight_gather": "step"}),
    (NARROW_TYPE, {"ici_fsdp": 8}, {"microbatches": 2, "remat": "names"}),
    (NARROW_TYPE | WIDE, {"ici_fsdp": 8}, {"microbatches": 2, "remat": "none"}),
    (NARROW_TYPE | WIDE, {"ici_fsdp": 8}, {"microbatches": 2, "weight_gather": "step"}),
    (
        NARROW_TYPE | WIDE,
        {"ici_stage": 2, "ici_fsdp": 4},
        {"microbatches": 8, "repeats": 3, "weight_gather": "window"},
    ),
    (WIDE, {"ici_stage": 2, "ici_fsdp": 4}, {"microbatches": 4, "remat": "chunk"}),
    (
        WIDE,
        {"ici_fsdp": 8},
        {"microbatches": 2, "remat": "names", "saved_names": ["attention"]},
    ),
    (
        WIDE,
        {"ici_stage": 2, "ici_fsdp": 4},
        {"microbatches": 8, "repeats": 3, "weight_gather": "window"},
    ),
    (NARROW_TYPE | WIDE, {"ici_fsdp": 4}, {"microbatches": 2, "remat": "names"}),
]


BLOCKED: list[tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = [
    ({}, {"ici_fsdp": 4}, {"microbatches": 2}),
    ({"num_heads": 4}, {"ici_stage": 2}, {"microbatches": 4, "remat": "names"}),
    (WIDE | {"head_dim": 64}, {"ici_fsdp": 2}, {"microbatches": 2, "remat": "none"}),
    ({"num_kv_heads": 8}, {"ici_fsdp": 2}, {"microbatches": 2, "weight_gather": "step"}),
    (NARROW_TYPE | WIDE, {"ici_stage": 2}, {"microbatches": 4, "remat": "names"}),
]


@pytest.mark.parametrize(("model", "mesh", "pipeline"), keeping(BLOCKED, 1))
def test_blockwise_attention_memory_is_close_to_compiler(
    model: dict[str, Any], mesh: dict[str, int], pipeline: dict[str, Any]
) -> None:
    """Sequences are long enough that full attention scores would dominate memory."""
    config = config_of({"compute_dtype": "float32"} | model, mesh, pipeline, tokens=768)
    steps = steps_of(config)
    assert steps.param_layout.decoder.config.attention == "blockwise"
    temporary = steps.compile_train().memory_analysis().temp_size_in_bytes
    predicted = predict_memory(Sizes(config), build_schedule(config), platform="cpu")
    assert predicted.temporary == pytest.approx(temporary, rel=0.1)


ROUTED: dict[str, Any] = {
    "family": "moe",
    "num_layers": 4,
    "d_model": 256,
    "moe": {
        "num_experts": 8,
        "d_expert": 512,
        "num_dense_layers": 0,
        "all_to_all_capacity_factor": 1.25,
    },
}
GATHERED = {"context_attention": "all_gather"}
DIVIDED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"ici_context": 4}, {"remat": "none"}),
    ({}, {"ici_context": 4} | GATHERED, {"attention": "blockwise", "remat": "none"}),
    (ROUTED, {"ici_expert": 4}, {}),
    ({}, {"ici_context": 4}, {"attention": "blockwise"}),
    ({}, {"ici_context": 4} | GATHERED, {}),
    ({}, {"ici_context": 4} | GATHERED, {"attention": "blockwise"}),
    ({}, {"ici_context": 4, "context_attention": "ring"}, {"attention": "blockwise"}),
    (
        {},
        {"ici_context": 4, "context_attention": "ulysses_ring", "ulysses_size": 2},
        {"attention": "blockwise"},
    ),
    ({"num_kv_heads": 1}, {"ici_context": 4, "context_attention": "ulysses"}, {"remat": "none"}),
    (ROUTED, {"ici_expert": 4}, {"remat": "none"}),
    (ROUTED, {"ici_expert": 2, "ici_context": 2}, {"attention": "blockwise"}),
]


@pytest.mark.parametrize(("model", "mesh", "pipeline"), keeping(DIVIDED, 6))
def test_context_and_expert_parallel_memory_is_close_to_compiler(
    model: dict[str, Any], mesh: dict[str, Any], pipeline: dict[str, Any]
) -> None:
    attention = pipeline.get("attention", "xla")
    named = {"compute_dtype": "float32", "attention": attention, "num_layers": 4} | WIDE
    tokens = 256 if model else 512 if attention == "xla" else 1024
    pipeline = {"microbatches": 2, "remat": pipeline.get("remat", "full")}
    config = config_of(named | model, mesh, pipeline, tokens)
    compiled = steps_of(config).compile_train().memory_analysis()
    predicted = predict_memory(Sizes(config), build_schedule(config), platform="cpu")
    assert predicted.arguments == pytest.approx(compiled.argument_size_in_bytes, rel=0.01)
    assert predicted.temporary == pytest.approx(compiled.temp_size_in_bytes, rel=0.1)


@pytest.mark.parametrize(("model", "mesh", "pipeline"), keeping(TEMPORARY, 8, 9, 12, 19))
def test_cpu_memory_is_close_to_compiler(
    model: dict[str, Any], mesh: dict[str, int], pipeline: dict[str, Any]
) -> None:
    named = {"compute_dtype": "float32", "attention": "xla"}
    config = config_of(named | model, mesh, pipeline, tokens=256)
    compiled = steps_of(config).compile_train().memory_analysis()
    predicted = predict_memory(Sizes(config), build_schedule(config), platform="cpu")
    assert predicted.arguments == pytest.approx(compiled.argument_size_in_bytes, rel=0.01)
    assert predicted.temporary == pytest.approx(compiled.temp_size_in_bytes, rel=0.1)


def test_mtp_layer_loops_have_known_trip_counts() -> None:
    """Loop bounds are runtime values, so XLA does not unroll the loops."""
    pipeline = {"microbatches": 4}
    for heads, form in ((0, "layer"), (2, "projection"), (2, "layer")):
        config = config_of({"mtp_heads": heads, "mtp_kind": form}, {"ici_stage": 2}, pipeline)
        trips, _ = executions(steps_of(config), "iteration", average=True)
        wanted = {r"/ahead/while$": 2} if heads and form == "layer" else {}
        assert {name: count for name, count in trips.items() if "ahead" in name} == wanted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.", True),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 294912", False),
        ("INTERNAL: a kernel failed", False),
    ],
)
def test_shared_memory_of_kernel_is_not_device_memory(text: str, expected: bool) -> None:
    assert is_out_of_device_memory(RuntimeError(text)) is expected
