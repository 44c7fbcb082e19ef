"""Configs of MaxText and torchtitan are converted value by value, and every key is reported."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.config.migration import maxtext, torchtitan
from maxpipe.config.migration.conversion import Conversion
from maxpipe.config.migration.peer_files import published, tables
from maxpipe.config.rules import value_of
from maxpipe.errors import ConfigError
from maxpipe.models.count import num_params
from maxpipe.models.registry import describe
from maxpipe.optim.lr_schedule import learning_rate

FIXTURES = Path(__file__).parents[1] / "golden" / "migration"
CONFIGS = FIXTURES / "maxtext" / "configs"
TOML = FIXTURES / "torchtitan"


def from_maxtext(name: str, *overrides: str, devices: int | None = 8) -> Conversion:
    return maxtext.convert(str(CONFIGS / f"{name}.yml"), overrides, devices)


def from_torchtitan(name: str, *overrides: str, devices: int | None = 8) -> Conversion:
    return torchtitan.convert(str(TOML / f"{name}.toml"), overrides, devices)


# Expected values are those of the published models and of the configs themselves.
MODELS: dict[str, dict[str, Any]] = {
    "models/llama3-8b": {
        **{"model.family": "llama", "model.num_layers": 32, "model.d_model": 4096},
        **{"model.num_heads": 32, "model.num_kv_heads": 8, "model.head_dim": 128},
        **{"model.d_mlp": 14336, "model.vocab_size": 128256, "model.rope_theta": 500000.0},
        **{"model.norm_epsilon": 1e-5, "model.tied_embeddings": False, "model.dropout": 0.0},
        **{"model.llama.rope_factor": 1.0, "train.batch_size": 96, "train.steps": 150001},
        **{"train.sequence_length": 2048, "optim.learning_rate": 3e-5, "run.name": "llama3-8b"},
        **{"optim.beta2": 0.95, "optim.epsilon": 1e-8, "optim.weight_decay": 0.1},
    },
    "models/llama3.1-8b": {
        **{"model.llama.rope_factor": 8.0, "model.llama.rope_type": "llama3"},
        "model.llama.original_max_position_embeddings": 8192,
    },
    "models/gemma2-9b": {
        **{"model.family": "gemma2", "model.num_layers": 42, "model.head_dim": 256},
        **{"model.gemma2.sliding_window": 4096, "model.gemma2.attn_logit_softcapping": 50.0},
        **{"model.gemma2.final_logit_softcapping": 30.0, "model.tied_embeddings": True},
        **{"model.vocab_size": 256128, "model.rope_theta": 10000.0, "model.norm_epsilon": 1e-6},
    },
    "models/gemma3-4b": {
        **{"model.family": "gemma3", "model.num_layers": 34, "model.rope_theta": 1e6},
        **{"model.gemma3.local_rope_theta": 1e4, "model.gemma3.rope_factor": 8.0},
        **{"model.gemma3.sliding_window": 1024, "model.gemma3.query_pre_attn_scalar": 0.0},
    },
    "models/mixtral-8x7b": {
        **{"model.family": "moe", "model.moe.num_experts": 8, "model.moe.top_k": 2},
        **{"model.moe.num_dense_layers": 0, "model.moe.d_expert": 14336},
        **{"model.moe.norm_topk_prob": True, "model.moe.load_balance_loss_weight": 0.0},
        **{"model.moe.capacity_factor": 0.0, "model.rope_theta": 1e6},
    },
    "models/qwen2.5-7b": {
        **{"model.family": "qwen2", "model.num_layers": 28, "model.num_heads": 28},
        **{"model.vocab_size": 152064, "model.norm_epsilon": 1e-6, "model.d_mlp": 18944},
    },
    "models/qwen3-30b-a3b": {
        **{"model.family": "qwen3_moe", "model.qwen3_moe.num_experts": 128},
        **{"model.qwen3_moe.top_k": 8, "model.qwen3_moe.d_expert": 768},
        **{"model.rope_theta": 1e7, "model.num_layers": 48, "model.head_dim": 128},
    },
    "models/qwen3-next-80b-a3b": {
        **{"model.family": "qwen3_next", "model.qwen3_next.full_attention_interval": 4},
        **{"model.qwen3_next.rotary_dim": 64, "model.qwen3_next.linear_num_value_heads": 32},
        **{"model.qwen3_next.num_experts": 512, "model.qwen3_next.d_shared_expert": 512},
    },
    "models/gpt-oss-20b": {
        **{"model.family": "gpt_oss", "model.gpt_oss.rope_factor": 32.0},
        **{"model.gpt_oss.sliding_window": 128, "model.gpt_oss.swiglu_limit": 7.0},
        **{"model.gpt_oss.num_experts": 32, "model.gpt_oss.top_k": 4},
    },
    "models/deepseek3-671b": {
        **{"model.family": "deepseek", "model.head_dim": 192, "model.num_layers": 61},
        **{"model.deepseek.q_lora_rank": 1536, "model.deepseek.kv_lora_rank": 512},
        **{"model.deepseek.num_dense_layers": 3, "model.deepseek.d_expert": 2048},
        **{"model.deepseek.rope_factor": 40.0, "model.deepseek.mscale": 1.0},
        **{"model.deepseek.mscale_all_dim": 1.0, "model.deepseek.score_func": "sigmoid"},
        **{"model.deepseek.routed_scaling_factor": 2.5, "model.deepseek.expert_bias": True},
        **{"model.deepseek.num_expert_groups": 1, "model.deepseek.expert_bias_update_rate": 0.0},
    },
    "models/kimi-k2-1t": {
        **{"model.family": "deepseek", "model.num_layers": 61, "model.num_heads": 64},
        **{"model.deepseek.rope_factor": 32.0, "model.deepseek.rope_beta_fast": 1.0},
        **{"model.deepseek.num_experts": 384, "model.deepseek.routed_scaling_factor": 2.827},
    },
    "gpu/models/llama3_8b": {
        **{"train.batch_size": 96, "train.sequence_length": 8192, "train.steps": 30},
        **{"model.attention": "cudnn", "runtime.platform": "cuda", "data.source": "synthetic"},
        **{"pipeline.remat": "names", "pipeline.saved_names": ["matmuls", "context"]},
        **{"run.name": "gpu_train_test", "checkpoint.every": 0, "model.num_layers": 32},
    },
    "gpu/models/mixtral_8x1b": {"model.num_layers": 32, "train.batch_size": 64},
    "post_train/sft": {
        **{"train.objective": "sft", "data.chat": "messages", "data.source": "huggingface"},
        **{"data.trained_roles": ["assistant"], "optim.learning_rate": 2e-5},
    },
    "post_train/dpo": {
        **{"train.objective": "preference", "data.chat": "pairs", "preference.beta": 0.1},
        **{"data.chosen_field": "chosen", "data.rejected_field": "rejected"},
        **{"model.family": "qwen3", "model.tied_embeddings": True, "optim.clip_norm": 10.0},
        **{"eval.every": 5, "eval.batches": 2, "data.packing": "pad", "train.batch_size": 16},
    },
}
JOBS: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        **{"model.family": "llama", "model.d_mlp": 14336, "model.llama.rope_factor": 8.0},
        **{"train.batch_size": 8, "train.sequence_length": 8192, "optim.schedule": "linear"},
        **{"optim.warmup_steps": 200, "optim.min_lr_ratio": 0.0, "mesh.ici_fsdp": -1},
        **{"tokenizer.path": "./assets/hf/Llama-3.1-8B", "data.packing": "concatenate"},
        **{"pipeline.saved_names": ["matmuls"], "run.name": "llama3_8b"},
    },
    "llama3_405b": {
        **{"model.d_mlp": 53248, "model.num_layers": 126, "model.matmul": "fp8"},
        **{"model.matmul_scales": "tensor", "mesh.ici_tensor": 8, "pipeline.remat": "full"},
        **{"mesh.sequence_parallel": True, "mesh.collective_matmul": True},
        **{"train.batch_size": 2, "log.trackers": ["tensorboard"]},
    },
    "qwen3_0.6b": {
        **{"model.family": "qwen3", "model.tied_embeddings": True, "model.rope_theta": 1e6},
        **{"train.batch_size": 32, "train.steps": 10},
    },
    "qwen3_moe_debug": {
        **{"model.family": "qwen3_moe", "model.qwen3_moe.num_experts": 64},
        **{"model.qwen3_moe.load_balance_loss_weight": 0.0, "model.qwen3_moe.top_k": 8},
    },
    "deepseek_v3_16b": {
        **{"model.family": "deepseek", "model.deepseek.rope_factor": 1.0},
        **{"mesh.ici_expert": 8, "mesh.ici_fsdp": -1, "train.batch_size": 32},
        **{"model.deepseek.norm_topk_prob": False, "model.deepseek.expert_bias_update_rate": 0.001},
    },
}
# Files of earlier dates. Llama 3 had no RoPE scaling before 2025-10-08.
_EARLIER: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        **{"model.d_mlp": 14336, "model.num_layers": 32, "train.batch_size": 8},
        **{"train.steps": 1000, "optim.learning_rate": 3e-4, "optim.warmup_steps": 200},
        **{"pipeline.saved_names": ["matmuls"], "mesh.ici_tensor": 1},
    },
    "llama3_70b": {
        **{"model.d_mlp": 28672, "model.num_layers": 80, "train.batch_size": 8},
        **{"train.steps": 1000, "optim.learning_rate": 1.5e-4, "optim.warmup_steps": 200},
        **{"pipeline.remat": "full", "mesh.ici_tensor": 8, "mesh.sequence_parallel": True},
    },
    "llama3_405b": {
        **{"model.d_mlp": 53248, "model.num_layers": 126, "train.batch_size": 2},
        **{"train.steps": 3000, "optim.learning_rate": 8e-5, "optim.warmup_steps": 600},
        **{"model.matmul": "fp8", "mesh.ici_tensor": 8, "mesh.collective_matmul": True},
    },
}
_OF_BOTH = {
    **{"model.family": "llama", "model.llama.rope_factor": 1.0, "model.rope_theta": 500000.0},
    **{"train.sequence_length": 8192, "model.vocab_size": 128256, "checkpoint.every": 0},
    **{"model.param_dtype": "float32", "model.compute_dtype": "bfloat16"},
}
JOBS |= {
    f"{date}/{name}": values | _OF_BOTH
    for name, values in _EARLIER.items()
    for date in ("2025-05", "2025-09")
}


def _check(found: Conversion, expected: dict[str, Any]) -> None:
    config = found.load().config
    actual = {key: value_of(config, key) for key in expected}
    assert actual == expected
    written = found.settings.keys() & expected.keys()
    assert {key: found.settings[key].value for key in written} == {
        key: expected[key] for key in written
    }


@pytest.mark.parametrize("name", MODELS)
def test_maxtext_config_has_the_expected_values(name: str) -> None:
    _check(from_maxtext(name), MODELS[name])


@pytest.mark.parametrize("name", JOBS)
def test_torchtitan_config_has_the_expected_values(name: str) -> None:
    _check(from_torchtitan(name), JOBS[name])


# Parameters of the published checkpoints; those of Gemma 2 have a smaller vocabulary.
COUNTS = {
    "llama3-8b": 8_030_261_248,
    "gemma2-9b": 9_241_705_984 + (256128 - 256000) * 3584,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek3-671b": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count_equals_the_published_count(name: str) -> None:
    model = describe(from_maxtext(f"models/{name}").load().config.model)
    assert num_params(model) == COUNTS[name]


def test_plan_prints_the_published_parameter_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.yml"
    file = str(CONFIGS / "models" / "mixtral-8x7b.yml")
    assert main(["config", "from-maxtext", file, "--devices", "8", "--out", str(out)]) == 0
    main(["plan", str(out), "runtime.platform=cpu", "mesh.cpu_devices=8"])
    assert "46.7 B parameters" in capsys.readouterr().out


ALL = [(from_maxtext, name) for name in MODELS] + [(from_torchtitan, name) for name in JOBS]


@pytest.mark.parametrize(("convert", "name"), ALL, ids=[name for _, name in ALL])
def test_every_key_of_the_source_is_reported_once(convert: Any, name: str) -> None:
    found: Conversion = convert(name)
    converted = {key for each in found.settings.values() for key in each.theirs}
    parts = [found.absent.keys(), set(found.needless), converted | found.differences.keys()]
    assert set().union(*parts) >= found.given.keys()
    for number, part in enumerate(parts):
        for other in parts[number + 1 :]:
            assert not part & other & found.given.keys()
    text = found.render()
    assert all(key in text for key in found.given)


@pytest.mark.parametrize(("convert", "name"), ALL, ids=[name for _, name in ALL])
def test_written_file_loads_as_the_same_config(convert: Any, name: str, tmp_path: Path) -> None:
    found: Conversion = convert(name)
    path = tmp_path / "run.yml"
    path.write_text(found.render())
    assert load([str(path)]).config == found.load().config


def test_overrides_replace_values_of_file_and_model() -> None:
    overrides = ("base_num_decoder_layers=5", "per_device_batch_size=0.5", "steps=7")
    found = from_maxtext("gpu/models/mixtral_8x1b", *overrides)
    values = {"model.num_layers": 5, "train.batch_size": 4, "train.steps": 7}
    _check(found, values)
    assert "base_num_decoder_layers" not in found.differences
    found = from_torchtitan("llama3_8b", "model.flavor=70B", "training.global_batch_size=32")
    _check(found, {"model.num_layers": 80, "train.batch_size": 32, "pipeline.microbatches": 4})


def test_value_that_the_model_file_replaces_is_reported() -> None:
    found = from_maxtext("gpu/models/mixtral_8x1b")
    assert "the value 5 of the file has no effect" in found.differences["base_num_decoder_layers"]


def test_defaults_of_the_peer_are_written_and_marked() -> None:
    text = from_maxtext("models/llama3-8b").render()
    assert "sequence_length: 2048  # max_target_length (default)" in text
    assert "clip_norm: 1.0  # gradient_clipping_threshold (default)" in text
    assert "base.yml of 2026-08-22 (commit e591f30cbbf2)" in text.replace("\n#   ", " ")


def test_base_file_next_to_the_config_replaces_published_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text("steps: 11\nadam_b1: 0.8\nrun_name: ''\n")
    (tmp_path / "middle.yml").write_text("base_config: base.yml\nadam_b2: 0.7\n")
    (tmp_path / "run.yml").write_text("base_config: middle.yml\nmodel_name: llama2-7b\n")
    found = maxtext.convert(str(tmp_path / "run.yml"), [], 1)
    _check(found, {"train.steps": 11, "optim.beta1": 0.8, "optim.beta2": 0.7})
    assert str(tmp_path / "base.yml") in found.render()


def test_load_balance_weight_is_per_layer_and_normalized() -> None:
    found = from_maxtext("models/qwen3-30b-a3b", "load_balance_loss_weight=0.012")
    assert math.isclose(
        found.settings["model.qwen3_moe.load_balance_loss_weight"].value, 0.012 * 8 / 48
    )
    assert "load_balance_loss_weight" in found.differences


def test_pipeline_of_maxtext_keeps_stages_repeats_and_microbatches() -> None:
    overrides = ("ici_pipeline_parallelism=4", "num_layers_per_pipeline_stage=2", "steps=5")
    found = from_maxtext("models/llama3-8b", *overrides, devices=8)
    _check(
        found,
        {
            **{"mesh.ici_stage": 4, "pipeline.repeats": 4, "pipeline.schedule": "circular"},
            **{"pipeline.microbatches": 4, "train.batch_size": 96},
        },
    )


def test_context_axes_of_maxtext_become_one_axis() -> None:
    overrides = ("context_parallel_strategy=usp", "ici_context_parallelism=2", "steps=5")
    found = from_maxtext(
        "models/llama3-8b", *overrides, "ici_context_usp_ulysses_parallelism=4", devices=8
    )
    _check(
        found,
        {
            **{"mesh.ici_context": 8, "mesh.context_attention": "ulysses_ring"},
            **{"mesh.ulysses_size": 4},
        },
    )


def test_profiler_of_maxtext_profiles_the_same_steps() -> None:
    """MaxText counts steps from 0, and skips the first one by default."""
    files = {"profile.at", "profile.steps"}
    found = from_maxtext("models/llama3-8b", "profiler=xplane", "skip_first_n_steps_for_profiler=4")
    settings = {key: setting.value for key, setting in found.settings.items() if key in files}
    assert settings == {"profile.at": [5], "profile.steps": 5}
    found = from_maxtext("models/llama3-8b", "profiler_steps=3")
    assert not files & found.settings.keys() and "profiler_steps" in found.absent


def test_profiler_of_torchtitan_profiles_the_first_steps_of_its_interval() -> None:
    every = ("profiling.profile_freq=50", "profiling.profiler_active=2")
    found = from_torchtitan("llama3_8b", "profiling.enable_profiling=true", *every)
    values = {key: found.settings[key].value for key in ("profile.at", "profile.steps")}
    assert values == {"profile.at": [50], "profile.steps": 2}


def test_pipeline_of_torchtitan_keeps_schedule_and_microbatches() -> None:
    overrides = (
        *("parallelism.pipeline_parallel_degree=4", "training.local_batch_size=8"),
        "parallelism.pipeline_parallel_schedule=Interleaved1F1B",
    )
    found = from_torchtitan("llama3_8b", *overrides, devices=8)
    _check(
        found,
        {
            **{"mesh.ici_stage": 4, "pipeline.repeats": 2, "pipeline.schedule": "interleaved"},
            **{"pipeline.microbatches": 8, "train.batch_size": 16},
        },
    )


# Learning rates, compared with the formulas of both trainers.


def _maxtext_rate(step: int, steps: int, values: dict[str, Any]) -> float:
    """`create_learning_rate_schedule` of MaxText."""
    total = values.get("learning_rate_schedule_steps", steps)
    warmup = int(total * values.get("warmup_steps_fraction", 0.1))
    final = values.get("learning_rate_final_fraction", 0.1)
    decay = total - warmup
    if values.get("lr_schedule_type") == "wsd":
        decay = int(total * values.get("wsd_decay_steps_fraction", 0.1))
    if step >= total:
        return 0.0
    if step < warmup:
        return step / warmup
    if step < total - decay:
        return 1.0
    done = (step - (total - decay)) / (decay - 1) if decay > 1 else 1.0
    if values.get("lr_schedule_type") == "wsd" and values.get("wsd_decay_style") != "cosine":
        return 1 + (final - 1) * done
    bend = 0.5 * (math.cos(math.pi * done) + 1)
    return bend + final * (1 - bend)


def _torchtitan_rate(step: int, steps: int, values: dict[str, Any]) -> float:
    """`linear_warmup_stable_decay` of torchtitan."""
    total = values.get("total_steps", steps)
    warmup, ratio = values["warmup_steps"], values.get("decay_ratio")
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    stable, floor = total + 1 - warmup - decay, values.get("min_lr_factor", 0.0)
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    progress = (step + 1 - warmup - stable) / decay
    linear = values.get("decay_type", "linear") == "linear"
    shape = 1 - progress if linear else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * shape


SCHEDULES: list[tuple[str, int, dict[str, Any]]] = [
    ("maxtext", 40, {}),
    ("maxtext", 40, {"learning_rate_schedule_steps": 30, "learning_rate_final_fraction": 0.0}),
    ("maxtext", 20, {"learning_rate_schedule_steps": 50, "warmup_steps_fraction": 0.2}),
    ("maxtext", 40, {"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.25}),
    ("maxtext", 33, {"lr_schedule_type": "wsd", "wsd_decay_style": "cosine"}),
    ("maxtext", 10, {"warmup_steps_fraction": 0.0}),
    ("maxtext", 1, {}),
    ("torchtitan", 40, {"warmup_steps": 8}),
    ("torchtitan", 40, {"warmup_steps": 8, "decay_type": "cosine", "min_lr_factor": 0.1}),
    ("torchtitan", 40, {"warmup_steps": 3, "decay_ratio": 0.5, "min_lr_factor": 0.2}),
    ("torchtitan", 40, {"warmup_steps": 3, "decay_ratio": 0.5, "decay_type": "cosine"}),
    ("torchtitan", 30, {"warmup_steps": 1, "decay_ratio": 0.3, "decay_type": "cosine"}),
    ("torchtitan", 20, {"warmup_steps": 4, "total_steps": 50}),
    ("torchtitan", 20, {"warmup_steps": 0}),
]


@pytest.mark.parametrize(("peer", "steps", "values"), SCHEDULES)
def test_learning_rate_of_every_step_equals_that_of_the_peer(
    peer: str, steps: int, values: dict[str, Any]
) -> None:
    if peer == "maxtext":
        settings = [f"{key}={value}" for key, value in values.items()]
        found = from_maxtext("models/llama3-8b", f"steps={steps}", *settings)
        rate = _maxtext_rate
    else:
        settings = [f"lr_scheduler.{key}={value}" for key, value in values.items()]
        found = from_torchtitan("llama3_8b", f"training.steps={steps}", *settings)
        rate = _torchtitan_rate
    optim = found.load().config.optim
    schedule = learning_rate(optim, steps)
    for step in range(steps):
        expected = optim.learning_rate * rate(step, steps, values)
        assert np.asarray(schedule(step)).item() == pytest.approx(expected, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize(
    ("weight", "sparse", "stage"),
    [(0.0, False, "sparse"), (0.5, False, "dense"), (0.5, True, "sparse")],
)
def test_maxtext_indexer_becomes_deepseek_v32(weight: float, sparse: bool, stage: str) -> None:
    sizes = ("use_indexer=true", "indexer_topk=512", "indexer_n_heads=32", "indexer_head_dim=96")
    training = (f"indexer_loss_scaling_factor={weight}", f"indexer_sparse_training={sparse}")
    found = from_maxtext("models/deepseek3-671b", *sizes, *training).load().config.model
    assert (found.family, found.head_dim) == ("deepseek_v32", 192)
    assert found.own == dataclasses.replace(
        from_maxtext("models/deepseek3-671b", *sizes).load().config.model.own,
        indexer_stage=stage,
        indexer_loss_weight=weight,
    )
    assert (found.own.index_topk, found.own.num_index_heads) == (512, 32)
    assert (found.own.index_head_dim, found.own.q_lora_rank) == (96, 1536)


def test_maxtext_approximate_indexer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="indexer_use_approx_top_k"):
        settings = ("use_indexer=true", "indexer_use_approx_top_k=true")
        from_maxtext("models/deepseek3-671b", *settings)


# Values that cannot be represented, and hostile files.


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("use_indexer=true", "model.family=llama has no other variant"),
        ("decoder_block=gemma4", "does not have"),
        ("engram_layers=[1,4]", "engram"),
        ("use_multimodal=true", "text only"),
        ("ici_fsdp_transpose_parallelism=2", "no such axis"),
        ("ici_context_usp_ulysses_parallelism=2", "only used with context_parallel_strategy=usp"),
        ("opt_type=sgd", "not supported"),
        ("training_objective=block_diffusion", "not supported"),
        ("stepz=3", "Did you mean steps?"),
        ("steps=many", "must be an integer"),
        ("steps=1" + "0" * 5000, "must be an integer"),
        ("steps=[1,2]", "must be an integer"),
        ("steps={a: 1}", "must be an integer"),
        ("warmup_steps_fraction=2", "at most 1"),
        ("per_device_batch_size=0", "greater than 0"),
        ("per_device_batch_size=0.01", "less than one sequence"),
        ("ici_tensor_parallelism=3", "must divide 8"),
        ("dropout_rate=nan", "must be a number"),
        ("attention_bias=maybe", "must be true or false"),
        ("model_name=llama9-8b", "is not a model of MaxText"),
        ("model_name=../../../etc/passwd", "is not a model of MaxText"),
        ("dpo=3", "must be a mapping"),
        ("base_config=/dev/zero", "has no effect on the command line"),
    ],
)
def test_maxtext_value_without_equivalent_is_an_error(override: str, words: str) -> None:
    extra = ["use_dpo=true"] if override.startswith("dpo") else []
    with pytest.raises(ConfigError) as caught:
        from_maxtext("models/llama3-8b", override, *extra)
    assert words in str(caught.value)
    key = override.partition("=")[0]
    assert key in str(caught.value) or "fsdp" in str(caught.value)


@pytest.mark.parametrize("name", ["mx", "quantize.linear.mx"])
def test_torchtitan_mx_converter_becomes_mxfp8(name: str) -> None:
    settings = from_torchtitan("llama3_8b", f"model.converters=[{name}]").settings
    assert settings["model.matmul"].value == "mxfp8"
    assert settings["model.matmul_weight_gradients"].value == "same"
    with pytest.raises(ConfigError, match="has no equivalent"):
        from_torchtitan(
            "llama3_8b", f"model.converters=[{name}]", "quantize.linear.mx.recipe_name=nvfp4"
        )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.name=flux", "does not have"),
        ("model.flavor=9B", "is not a flavor"),
        ("lr_scheduler.decay_type=sqrt", "not supported"),
        ("lr_scheduler.decay_ratio=7", "from 0 to 1"),
        ("lr_scheduler.warmup_steps=x", "must be an integer"),
        ("optimizer.name=Adam", "not supported"),
        ("training.stepz=3", "Did you mean training.steps?"),
        ("model.converters=[nvfp4]", "has no equivalent"),
        ("training.dtype=float16", "not supported"),
        ("parallelism.data_parallel_shard_degree=3", "does not divide the devices"),
        ("training.global_batch_size=3", "must be a multiple of 8"),
        ("debug.seed=x", "must be an integer"),
        ("model.norm_type=layernorm", "must be rmsnorm"),
        ("mesh.sequence_paralel=false", "Did you mean mesh.sequence_parallel?"),
    ],
)
def test_torchtitan_value_without_equivalent_is_an_error(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_torchtitan("llama3_8b", override)
    assert words in str(caught.value)


HOSTILE = {
    "bomb.yml": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "tag.yml": "steps: !!python/object/apply:os.system [id]\n",
    "list.yml": "- base_config\n- x\n",
    "scalar.yml": "42\n",
    "empty.yml": "",
    "twice.yml": "steps: 1\nsteps: 2\n",
    "deep.yml": "a: " + "[" * 100 + "]" * 100,
    "comment.yml": "# steps: 1\n",
    "empty.toml": "",
    "comment.toml": "[training]\n# steps = 1\n",
    "huge.yml": "\n".join(f"k{n}: 1" for n in range(30_000)),
    "broken.yml": "steps: [1\n",
    "binary.yml": "steps: \x00\n",
    "wrong.yml": "base_config: [a]\n",
    "missing.yml": "base_config: nowhere.yml\n",
    "loop.yml": "base_config: loop2.yml\n",
    "loop2.yml": "base_config: loop.yml\n",
    "self.yml": "base_config: self.yml\n",
    "types.yml": "base_emb_dim: {a: 1}\ndecoder_block: [llama2]\nvocab_size: many\n",
    "model.yml": "base_config: base.yml\nmodel_name: [a]\nsteps: 3\nmodel_names: x\n",
    "broken.toml": "[model\n",
    "types.toml": "[training]\nsteps = 'many'\nseq_len = [1]\nlr = {a = 1}\n",
    "digits.toml": f"[training]\nsteps = {'9' * 5000}\n",
    "deep.toml": "a = " + "[" * 2000 + "]" * 2000,
    "array.toml": "[[training]]\nsteps = 3\n",
    "section.toml": "training = 3\n",
    "unknown.toml": "[trainer]\nsteps = 3\n",
    "code.py": "raise SystemExit(0)\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_an_error_without_traceback(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each, text in HOSTILE.items():
        (tmp_path / each).write_text(text)
    command = "from-maxtext" if name.endswith(".yml") else "from-torchtitan"
    assert main(["config", command, str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert not printed.out
    assert len(printed.err) < 20_000


def test_unreadable_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("from-maxtext", "from-torchtitan"):
        for path in (tmp_path / "nowhere.yml", tmp_path):
            assert main(["config", command, str(path)]) == 2
            assert "cannot be read" in capsys.readouterr().err


def test_existing_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.yml"
    out.write_text("kept")
    file = str(CONFIGS / "models" / "llama3-8b.yml")
    command = ["config", "from-maxtext", file, "--out", str(out)]
    assert main(command) == 2
    assert out.read_text() == "kept"
    assert main([*command, "--overwrite"]) == 0
    assert "num_layers: 32" in out.read_text()
    capsys.readouterr()


def test_report_names_every_part_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "gpu" / "models" / "llama3_8b.yml")
    assert main(["config", "from-maxtext", file, "z_loss_multiplier=1e-5"]) == 0
    printed = capsys.readouterr()
    assert "Keys that differ in meaning:" in printed.err
    assert "z_loss_multiplier: the loss has no z-loss" in printed.err
    assert "use --devices N for N devices" in printed.err
    assert "27 keys of MaxText" in printed.err
    assert printed.out.startswith("# Converted from MaxText:")


@pytest.mark.parametrize("action", ["train.sequence_length=8200", "mesh.sequence_parallel=false"])
def test_action_of_a_violated_rule_works_as_an_override(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(TOML / "llama3_8b.toml"), tmp_path / "run.yml"
    values = ("parallelism.tensor_parallel_degree=8", "training.seq_len=8193")
    command = ["config", "from-torchtitan", file, *values, "--out", str(out)]
    assert main(command) == 2
    assert action in capsys.readouterr().err
    assert main([*command, action]) == 0
    key, _, value = action.partition("=")
    assert f"{key} = {value}: set on the command line; replaces" in capsys.readouterr().err
    assert str(value_of(load([str(out)]).config, key)).lower() == value


def test_override_of_maxpipe_replaces_list_and_unset_key() -> None:
    overrides = ("pipeline.saved_names=[mlp]", "log.every=7", "steps=9")
    found = from_maxtext("gpu/models/llama3_8b", *overrides)
    _check(found, {"pipeline.saved_names": ["mlp"], "log.every": 7, "train.steps": 9})
    assert found.overridden.keys() == {"pipeline.saved_names", "log.every"}


def test_override_that_violates_a_rule_is_an_error() -> None:
    with pytest.raises(ConfigError, match="train.batch_size"):
        from_maxtext("models/llama3-8b", "train.batch_size=-3")


def test_name_that_both_trainers_have_is_the_peers() -> None:
    found = from_torchtitan("llama3_8b", "training.steps=3", "checkpoint.folder=x")
    assert not found.overridden


TORCH_SCHEDULES = {
    **{"1F1B": "1f1b", "GPipe": "gpipe", "LoopedBFS": "breadth_first"},
    **{"Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb_v", "DualPipeV": "dualpipe_v"},
}


@pytest.mark.parametrize("prefix", ["", "Schedule"])
@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_schedule_of_pytorch_is_converted(name: str, prefix: str) -> None:
    key = "parallelism.pipeline_parallel_schedule"
    stages = ("parallelism.pipeline_parallel_degree=4", "training.local_batch_size=8")
    found = from_torchtitan("llama3_8b", *stages, f"{key}={prefix}{name}")
    _check(found, {"pipeline.schedule": TORCH_SCHEDULES[name]})


def test_schedule_without_equivalent_suggests_a_value_of_its_key() -> None:
    key = "parallelism.pipeline_parallel_schedule"
    stages = ("parallelism.pipeline_parallel_degree=4", "training.local_batch_size=8")
    with pytest.raises(ConfigError, match=f"Set {key}=zb_h1"):
        from_torchtitan("llama3_8b", *stages, f"{key}=InterleavedZeroBubble")
    _check(from_torchtitan("llama3_8b", *stages, f"{key}=zb_h1"), {"pipeline.schedule": "zb_h1"})


def test_earlier_names_are_accepted_and_reported() -> None:
    found = from_torchtitan("2025-05/llama3_8b", "training.local_batch_size=3")
    assert found["training.local_batch_size"] == 3
    assert found.renamed["training.batch_size"] == "training.local_batch_size since 2025-06-05"
    assert "rope_scaling_args" in found.differences["model.flavor"]
    found = from_torchtitan(
        "llama3_8b",
        *("experimental.pipeline_parallel_degree=2", "training.seed=3"),
        "parallelism.pipeline_parallel_split_points=[layers.3]",
    )
    _check(found, {"mesh.ici_stage": 2, "run.seed": 3, "model.llama.rope_factor": 8.0})
    assert "2025-10-13" in found.absent["parallelism.pipeline_parallel_split_points"]


def test_current_name_replaces_the_earlier_name_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "both.toml"
    path.write_text("[training]\nlocal_batch_size = 2\nbatch_size = 1\n")
    found = torchtitan.convert(str(path), [], 1)
    _check(found, {"train.batch_size": 2})
    assert "the current name is used" in found.renamed["training.batch_size"]


def test_every_earlier_name_refers_to_a_current_key() -> None:
    data = tables(torchtitan.NAME)
    known = published(torchtitan.NAME).known
    assert {entry["name"] for entry in data["renamed"].values()} <= known
    assert not known & (data["renamed"].keys() | data["removed"].keys())
    assert not data["renamed"].keys() & data["removed"].keys()


def test_name_of_a_bundled_config_is_an_error_with_two_ways_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("from-maxtext", "from-torchtitan"):
        assert main(["config", command, "llama3-8b"]) == 2
        error = capsys.readouterr().err
        assert "maxpipe plan llama3-8b" in error
        assert "configs/models/llama3-8b.yml" in error


def test_arguments_after_an_option_are_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "models" / "llama3-8b.yml")
    assert main(["config", "from-maxtext", file, "--devices", "8", "steps=7", "log.every=3"]) == 0
    assert "steps: 7  # steps" in capsys.readouterr().out
    assert main(["config", "from-maxtext", file, "--devices", "8", "-x"]) == 2
    assert "unrecognized arguments: -x" in capsys.readouterr().err
    assert main(["config", "from-maxtext"]) == 2
    assert "arguments are required: FILE." in capsys.readouterr().err


def test_output_that_is_not_a_regular_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.yml"
    os.mkfifo(pipe)
    command = ["config", "from-maxtext", str(CONFIGS / "models" / "llama3-8b.yml"), "--out"]
    assert main([*command, str(pipe), "--overwrite"]) == 74
    assert "not a regular file" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert main([*command, ""]) == 2
    assert not capsys.readouterr().out
