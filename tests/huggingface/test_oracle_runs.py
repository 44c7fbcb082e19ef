"""Training, losses and generated tokens equal those of transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.config.load import load
from maxpipe.generation.decoding import DecodeEngine, DecodeShape, Sampling
from maxpipe.huggingface.folder import open_folder
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.restore.initial_weights import read_folder_params
from maxpipe.step.build import steps_from_config
from maxpipe.step.step import Steps
from tests.huggingface.test_oracle import (
    CLASSES,
    PYTHON,
    ROPE,
    YARN,
    by_layer_type,
    job_of,
    reason,
    run_oracle,
    selected,
    use_fixed_frequencies,
)

pytestmark = pytest.mark.oracle

LAYERS, ROWS, TOKENS, STEPS, NEW = 5, 8, 23, 3, 64
TRAINED = (
    *("llama", "gemma3", "gemma4", "gemma4_moe", "gemma4_small"),
    *("mixtral", "qwen3_5", "qwen3_5_moe", "llama4", "deepseek_v32", "granite4", "nemotron_h"),
    *("kimi_linear", "olmo_hybrid", "deepseek_v4", "falcon_h1"),
)
LINEAR = "linear_attention"
UNTRAINED = (
    *("index_query", "index_key", "index_key_norm", "index_key_norm_bias", "index_weights"),
    *("index_value", "index_gate", "index_bias", "index_norm", "token_experts"),
)
"""Parameters that transformers does not train: the indexer runs without gradients."""
ALL_FEATURES: dict[str, dict[str, Any]] = {
    "olmo3": {"sliding_window": 5, "layer_types": None}
    | by_layer_type(ROPE | YARN, ROPE | {"rope_theta": 50.0}),
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 2},
    "ministral3": {
        "rope_parameters": ROPE
        | YARN
        | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.7}
    },
    # With one expert per token, normalized routing weights are 1 and routers have no gradient.
    "qwen3_5_moe": {"num_experts_per_tok": 2},
    "gemma4_moe": {"top_k_experts": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        **{"mamba_num_heads": 4, "n_groups": 2, "conv_kernel": 3, "norm_topk_prob": True},
    },
    "deepseek_v4": {
        "layer_types": [
            *("sliding_attention", "heavily_compressed_attention"),
            *("compressed_sparse_attention", "heavily_compressed_attention"),
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 3,
        **{"num_attention_heads": 4, "o_lora_rank": 6, "q_lora_rank": 8, "rms_norm_eps": 1e-2},
    },
    "granite4": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
        **{"mamba_n_heads": 4, "mamba_expand": 4, "mamba_n_groups": 2},
    },
    "falcon_h1": {
        **{"mamba_n_heads": 4, "mamba_d_head": 5, "mamba_d_ssm": 20, "mamba_n_groups": 2},
        **{"mamba_rms_norm": False, "key_multiplier": 0.7, "attention_in_multiplier": 1.2},
        **{"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.6, 1.4]},
        "ssm_multipliers": [0.4, 0.7, 1.3, 0.5, 1.6],
    },
    "kimi_linear": {
        "layer_types": [*[LINEAR] * 3, "full_attention", LINEAR],
        **{"linear_num_heads": 3, "linear_head_dim": 6, "linear_conv_kernel_dim": 3},
        **{"first_k_dense_replace": 1, "q_lora_rank": None, "moe_renormalize": True},
    },
    "olmo_hybrid": {
        "layer_types": [LINEAR, "full_attention", LINEAR, LINEAR, "full_attention"],
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 5, "linear_allow_neg_eigval": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "llama4": {
        **{"no_rope_layer_interval": 3, "attention_chunk_size": 5, "use_qk_norm": True},
        **{"attn_temperature_tuning": True, "attn_scale": 0.7, "floor_scale": 3},
        **{"interleave_moe_layer_step": 2, "num_experts_per_tok": 2},
    },
}
"""Keys of config.json that enable all features of a family."""
STAGED = ["mesh.cpu_devices=8", "mesh.ici_stage=4", "mesh.ici_fsdp=2"]
LAYOUTS = {"one": [], "staged": [*STAGED, "mesh.axis_rules.latent=[]"]}  # latent sizes are odd
OPTIM = {"learning_rate": 1e-3, "weight_decay": 0.1, "epsilon": 1e-8}
BETAS = (0.9, 0.95)
# A few gradients of these classes are as small as their rounding errors, which Adam would amplify.
EPSILONS = {"Qwen3_5MoeForCausalLM": 1e-5, "KimiLinearForCausalLM": 1e-5}
LENGTHS = (19, 5, 23, 2, 11, 13, 7, 17, 24, 3, 20, 9)
"""Document lengths; some sequences hold two documents, and most end with padding."""

Batch = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Jobs by family of the selected tests, each with a float32 folder."""
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    base = tmp_path_factory.mktemp("runs")
    kinds = [kind for kind in CLASSES if kind in selected(request, "kind")]
    found = {
        kind: job_of(kind, 0, base, num_hidden_layers=LAYERS, **ALL_FEATURES.get(kind, {}))
        for kind in kinds
    }
    for job in found.values():
        use_fixed_frequencies(job["config"])
    run_oracle("make", [*found.values()], base)
    return found


def documents(job: dict[str, Any], step: int) -> list[list[int]]:
    draw = np.random.default_rng(step)
    return [draw.integers(0, job["config"]["vocab_size"], size).tolist() for size in LENGTHS]


def packed(texts: list[list[int]]) -> Batch:
    """Pack documents into sequences that are padded at the end."""
    names = ("tokens", "targets", "segment_ids", "positions")
    batch: Batch = {name: np.zeros((ROWS, TOKENS), np.int32) for name in names}
    batch["loss_mask"] = np.zeros((ROWS, TOKENS), np.float32)
    batch["example_ids"] = np.arange(ROWS, dtype=np.int32)
    used, segments = [0] * ROWS, [0] * ROWS
    for text in texts:
        size = len(text) - 1
        row = next(row for row in range(ROWS) if used[row] + size <= TOKENS)
        place = slice(used[row], used[row] + size)
        segments[row] += 1
        batch["tokens"][row, place] = text[:-1]
        batch["targets"][row, place] = text[1:]
        batch["segment_ids"][row, place] = segments[row]
        batch["positions"][row, place] = np.arange(size)
        batch["loss_mask"][row, place] = 1
        used[row] += size
    assert max(segments) > 1 and min(used) < TOKENS
    return batch


def optim_of(job: dict[str, Any]) -> dict[str, float]:
    return OPTIM | {"epsilon": EPSILONS.get(job["architecture"], OPTIM["epsilon"])}


def steps_at(job: dict[str, Any], layout: str) -> tuple[Steps, Any]:
    """Return the steps of a run that starts from the folder, and its initial state."""
    source = open_folder(job["folder"])
    section = {**source.description.section, "compute_dtype": "float32"}
    own = section["family"]
    if "top_k" in section[own]:
        section[own] = {**section[own], "load_balance_loss_weight": 0.0, "z_loss_weight": 0.0}
    if "index_topk" in section[own]:
        section[own] = {**section[own], "indexer_loss_weight": 0.0}
        section["frozen"] = ["*.attention.index_*", "*.router_bias"]
    if "expert_bias" in section[own] or "index_topk" in section[own]:
        # transformers does not update the biases
        section[own] = {**section[own], "expert_bias_update_rate": 0.0}
    known = {
        "model": section,
        "train": {"steps": STEPS, "batch_size": ROWS, "sequence_length": TOKENS},
        "optim": {**optim_of(job), "beta1": BETAS[0], "beta2": BETAS[1]}
        | {"clip_norm": 0.0, "schedule": "constant"},
        "pipeline": {"microbatches": 4 if LAYOUTS[layout] else 1},
        "tokenizer": {"kind": "huggingface", "path": "none"},
    }
    config = load(LAYOUTS[layout], known, "test").config
    mesh = build_mesh(config.mesh, jax.devices()[: config.mesh.cpu_devices])
    steps = steps_from_config(config, mesh, np.zeros(config.model.vocab_size, np.int32))
    return steps, steps.init_from_params(read_folder_params(source, steps.abstract_saved["params"]))


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.fixture(scope="module")
def trained(jobs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory):
    """The folder with the model of each family that torch has trained."""
    base = tmp_path_factory.mktemp("trained")
    asking = []
    for kind in [kind for kind in TRAINED if kind in jobs]:
        listed = base / f"{kind}.json"
        listed.write_text(json.dumps([documents(jobs[kind], step) for step in range(STEPS)]))
        asking.append(
            {**jobs[kind], **optim_of(jobs[kind]), "betas": BETAS}
            | {"documents": str(listed), "trained": str(base / kind)}
        )
    run_oracle("train", asking, base)
    return base


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TRAINED)
def test_trained_weights_equal_torch(kind: str, layout: str, jobs, trained: Path) -> None:
    with jax.default_matmul_precision("highest"):
        steps, state = steps_at(jobs[kind], layout)
        step = steps.compile_train()
        for number in range(STEPS):
            batch = packed(documents(jobs[kind], number))
            state, _ = step(state, jax.device_put(batch, steps.batch_sharding))
    params = leaves_by_name(jax.device_get(steps.to_saved(state)["params"]))
    before, after = open_folder(jobs[kind]["folder"]), open_folder(str(trained / kind))
    for name, found in params.items():
        whole = [slice(None)] * found.ndim
        old, wanted = (
            each.read_region(name, np.dtype(np.float32), whole) for each in (before, after)
        )
        close(found, wanted)
        change = np.abs(found - old).max()
        is_fixed = name.endswith((".output.scale", ".router_bias", *UNTRAINED))
        assert change > 1e-3 or (is_fixed and not change), name


@pytest.fixture(scope="module")
def answered(jobs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory):
    """Results of transformers by (action, family)."""
    base = tmp_path_factory.mktemp("answered")
    found = {}
    for action in ("losses", "greedy"):
        asking = []
        for kind, job in jobs.items():
            listed, out = base / f"{kind}-{action}.in", base / f"{kind}-{action}.out"
            listed.write_text(json.dumps(asked_of(job, action)))
            asking.append({**job, "documents": str(listed), "found": str(out), "count": NEW})
        run_oracle(action, asking, base)
        for kind in jobs:
            found[action, kind] = json.loads((base / f"{kind}-{action}.out").read_text())
    return found


def asked_of(job: dict[str, Any], action: str) -> list[list[int]]:
    texts = documents(job, STEPS)
    return texts if action == "losses" else texts[:3]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CLASSES)
def test_packed_and_padded_loss_equals_transformers(kind: str, layout: str, jobs, answered) -> None:
    texts = asked_of(jobs[kind], "losses")
    with jax.default_matmul_precision("highest"):
        steps, state = steps_at(jobs[kind], layout)
        batch = jax.device_put(packed(texts), steps.batch_sharding)
        found = jax.device_get(steps.compile_eval()(state.params, batch))
    assert found["targets"] == sum(len(text) - 1 for text in texts)
    assert float(found["loss"]) == pytest.approx(answered["losses", kind], rel=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_greedy_tokens_equal_transformers(kind: str, jobs, answered) -> None:
    prompts = asked_of(jobs[kind], "greedy")
    with jax.default_matmul_precision("highest"):
        steps, state = steps_at(jobs[kind], "one")
        decoder = Decoder(steps.param_layout.decoder.config, AxisRules.from_config(MeshConfig()))
        params = steps.param_layout.split_layer_types(steps.to_saved(state)["params"])
        sampling = Sampling(temperature=0.0)
        decoding = DecodeEngine(decoder, steps.param_layout.mesh, sampling, seed=0)
        rows = decoding.run(params, prompts, [0, 1, 2], DecodeShape(3, 32, NEW))
        found = np.stack([tokens for tokens, _ in rows], 1)
    assert found.tolist() == answered["greedy", kind]
