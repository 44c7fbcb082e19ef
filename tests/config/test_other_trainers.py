"""Config files of other trainers: one error translates the file; others cover what is missing."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxpipe.config.load import load
from maxpipe.errors import ConfigError, Problem

AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "model_type": "LlamaForCausalLM",
    "tokenizer_type": "AutoTokenizer",
    "load_in_4bit": True,
    "strict": False,
    "datasets": [{"path": "chats.jsonl", "type": "chat_template", "field_messages": "turns"}],
    "dataset_prepared_path": "prepared",
    "val_set_size": 0.1,
    "adapter": "qlora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["q_proj", "down_proj"],
    "lora_target_linear": None,
    "sequence_len": 2048,
    "sample_packing": True,
    "eval_sample_packing": True,
    "pad_to_sequence_len": True,
    "wandb_watch": None,
    "max_steps": 50,
    "optimizer": "adamw_8bit",
    "train_on_inputs": False,
    "xformers_attention": None,
    "flash_attention": True,
    "loss_watchdog_threshold": 5.0,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False},
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_use_sudo": False,
}
DEEPSPEED: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_scatter": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100}},
    "train_batch_size": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def problems_of(args: list[str], *, to_train: bool = True) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(args, to_train=to_train)
    return caught.value.problems


def lines_of(problem: Problem) -> str:
    return textwrap.dedent(problem.action.partition("\n")[2]) + "\n"


def translate_file(tmp_path: Path, content: dict[str, Any]) -> tuple[Problem, dict[str, Any]]:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(content))
    first, *_ = problems_of([str(path)])
    return first, yaml.safe_load(lines_of(first))


def test_axolotl_file_is_translated_completely(tmp_path: Path):
    path = tmp_path / "axolotl.yml"
    path.write_text(yaml.safe_dump(AXOLOTL, sort_keys=False))
    [only] = problems_of([str(path)])
    lines = yaml.safe_load(lines_of(only))
    assert lines["model"] == "llama3-1b"
    assert lines["adapter"] == {
        "rank": 16,
        "alpha": 32,
        "base_quantization": "nf4",
        "targets": ["layers.attention.query", "layers.mlp.down"],
    }
    assert lines["data"] == {
        "source": "jsonl",
        "path": "chats.jsonl",
        "chat": "messages",
        "messages_field": "turns",
        "packing": "best_fit",
        "validation_fraction": 0.1,
    }
    assert lines["tokenizer"] == {"kind": "auto", "path": "Llama-3.2-1B"}
    assert lines["checkpoint"] == {"restore_from": "hf:Llama-3.2-1B"}
    assert "maxpipe fetch hf:meta-llama/Llama-3.2-1B --out Llama-3.2-1B" in only.action
    assert "unknown names" not in only.action
    ours = tmp_path / "ours.yml"
    ours.write_text(lines_of(only))
    config = load([str(ours)], to_train=True).config
    assert (config.train.steps, config.train.objective) == (50, "sft")


@pytest.mark.parametrize("content", [ACCELERATE, DEEPSPEED], ids=["accelerate", "deepspeed"])
def test_launcher_configs_are_translated_completely(content: dict[str, Any], tmp_path: Path):
    problem, lines = translate_file(tmp_path, content)
    assert "unknown names" not in problem.action
    assert "num_processes" not in lines.get("runtime", {}) and "platform" not in str(lines)
    assert lines.get("optim", {}).get("offload_state", False) == (content is DEEPSPEED)


def test_alpaca_dataset_includes_input_field(tmp_path: Path):
    content = AXOLOTL | {"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}
    data = translate_file(tmp_path, content)[1]["data"]
    assert data["chat"] == "prompt" and data["response_field"] == "output"
    assert data["prompt_field"] == r"{instruction}\n{input}"


def test_single_deepspeed_key_is_translated():
    [problem] = problems_of(["tiny", "zero_optimization.stage=3"], to_train=False)
    assert problem.action.startswith("Set mesh.ici_fsdp to the number of shards")


def test_file_that_names_model_reports_only_missing_run_length(tmp_path: Path):
    path = tmp_path / "args.json"
    args = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "num_train_epochs": 3}
    args |= {"per_device_train_batch_size": 2, "learning_rate": 2e-5, "output_dir": "out"}
    path.write_text(json.dumps(args))
    first, *others = problems_of([str(path)])
    assert "model: llama3.1-8b" in first.action and "batch_size: 2 " in first.action
    wheres = [each.where for each in others]
    assert "default: train.steps" in wheres
    assert not any("model." in each for each in wheres)


def test_errors_after_translation_refer_to_translated_settings(tmp_path: Path):
    path = tmp_path / "t.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = 10\nseq_len = 64\n'
        'dataset = "c4"\n[optimizer]\nlr = 1e-3\n[parallelism]\ntensor_parallel_degree = 3\n'
    )
    first, *others = problems_of([str(path)], to_train=False)
    assert "model: llama3-8b" in first.action and "hf:datasets/c4" in first.action
    # The translated model has 32 query heads and 8 KV heads, which are not divisible by 3.
    assert others and all("the tensor size" in each.rule for each in others)
    assert all(each.where.startswith("shipped config llama3-8b") for each in others)


def test_file_and_command_line_translate_to_same_batch_size(tmp_path: Path):
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "lr": 0.1}
    path = tmp_path / "args.json"
    path.write_text(json.dumps(given))
    base = ["tiny", "train.steps=5", "mesh.cpu_devices=2", "mesh.ici_data=2"]
    [in_file] = problems_of([*base, str(path)], to_train=False)
    answers = problems_of([*base, *(f"{k}={v}" for k, v in given.items())], to_train=False)
    assert "batch_size: 16 " in in_file.action
    assert any(each.action == "Write train.batch_size=16." for each in answers)


@pytest.mark.parametrize("levels", [40, 500])
def test_deeply_nested_json_is_config_error(levels: int, tmp_path: Path):
    path = tmp_path / "args.json"
    path.write_text('{"model": ' + "[" * levels + "]" * levels + "}")
    (problem,) = problems_of(["tiny", str(path)], to_train=False)
    assert problem.where == str(path) and "nested" in problem.rule


def test_translation_keeps_errors_of_other_arguments(tmp_path: Path):
    path = tmp_path / "args.json"
    path.write_text('{"max_steps": 5, "lr": 0.1, "save_steps": 3, "seed": 1}')
    first, other = problems_of(["tiny", str(path), "train.stpes=4"], to_train=False)
    assert first.where == str(path) and other.where.endswith("train.stpes")
