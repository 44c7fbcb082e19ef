from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.config import check, rules
from maxpipe.config.load import load
from maxpipe.config.rules import BOUNDS, ITEM, NAME
from maxpipe.config.schema import ITEM_KEYS, KEYS, NAMED_KEYS, Config, section_of, without_none
from maxpipe.config.sections.train import TrainConfig, total_steps
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.models.param_names import declared
from maxpipe.models.registry import describe
from maxpipe.parallel import axes
from maxpipe.parallel.axes import MeshConfig

ROOT = Path(__file__).parents[2]
BASE = [str(ROOT / "configs/model/tiny.yml"), "train.steps=10"]
SUGGESTION = re.compile(r"\b([a-z]\w*(?:\.\w+)+=\S+)")


def problems(overrides: list[str]) -> list[Problem]:
    try:
        load([*BASE, *overrides])
    except ConfigError as error:
        return list(error.problems)
    return []


def suggestion(problem: Problem) -> str:
    """Return the first `key=value` in a problem's action."""
    found = SUGGESTION.search(problem.action)
    assert found, problem.action
    return found[1].rstrip(",.")


GRPO = "train.objective=grpo grpo.prompts=prompts.jsonl"

# (overrides that break one rule, the key that the error names, part of the message)
BROKEN: list[tuple[str, str, str]] = [
    ("run.name=a/b", "run.name", "letters, digits"),
    ("run.name=..", "run.name", "letters, digits"),
    ("run.name=", "run.name", "letters, digits"),
    ("run.dir=", "run.dir", "must not be empty"),
    ("run.dir=memory://b/c", "run.dir", "must be a folder"),
    ("data.text_field=", "data.text_field", "must not be empty"),
    (
        "checkpoint.local_dir=gs://b checkpoint.local_every=1",
        "checkpoint.local_dir",
        "must be a folder",
    ),
    ("checkpoint.dir=https://b/c", "checkpoint.dir", "https://"),
    ("checkpoint.dir=gs:///c", "checkpoint.dir", "bucket"),
    ("checkpoint.restore_from=file:///c", "checkpoint.restore_from", "file://"),
    ("model.num_heads=6", "model.num_heads", "multiple of model.num_kv_heads (4)"),
    ("model.head_dim=7", "model.head_dim", "must be even"),
    ("model.attention=cudnn", "model.compute_dtype", "no float32 kernel"),
    (
        "model.attention=cudnn model.compute_dtype=bfloat16 runtime.platform=cpu",
        "model.attention",
        "runtime.platform is cpu",
    ),
    (
        "model.attention=cudnn model.compute_dtype=bfloat16 train.sequence_length=127",
        "train.sequence_length",
        "must be even with model.attention=cudnn",
    ),
    (
        "model.attention=cudnn model.compute_dtype=bfloat16 model.head_dim=20",
        "model.head_dim",
        "multiple of 8 and at most 256",
    ),
    ("model.attention=splash runtime.platform=cpu", "model.attention", "requires a TPU"),
    (
        "model.attention=splash train.sequence_length=200",
        "train.sequence_length",
        "multiple of 128 with model.attention=splash",
    ),
    ("model.vocab_size=258", "model.vocab_size", "at least 259 with tokenizer.kind=bytes"),
    ("model.mtp_heads=-1", "model.mtp_heads", "at least 0"),
    (
        "model.mtp_heads=16 train.sequence_length=16",
        "model.mtp_heads",
        "less than train.sequence_length (16)",
    ),
    ("mesh.ici_data=0", "mesh.ici_data", "at least 1, or -1"),
    ("mesh.dcn_stage=-2", "mesh.dcn_stage", "at least 1, or -1"),
    ("mesh.ici_data=-1 mesh.ici_fsdp=-1", "mesh.ici_fsdp", "only one mesh.ici_* axis"),
    ("mesh.dcn_data=-1 mesh.dcn_stage=-1", "mesh.dcn_data", "only one mesh.dcn_* axis"),
    ("mesh.ici_expert=2 train.batch_size=64", "mesh.ici_expert", "have no experts"),
    ("mesh.ici_context=3 train.sequence_length=64", "train.sequence_length", "2 x context (3) = 6"),
    (
        "mesh.ici_context=2 mesh.context_attention=ring model.attention=xla",
        "model.attention",
        "must be blockwise or auto with mesh.context_attention=ring",
    ),
    (
        "mesh.ici_context=4 mesh.context_attention=ulysses_ring mesh.ulysses_size=2 "
        "model.attention=xla",
        "model.attention",
        "must be blockwise or auto with mesh.context_attention=ulysses_ring",
    ),
    (
        "mesh.ici_context=4 mesh.context_attention=ulysses_ring mesh.ulysses_size=2 "
        "mesh.ici_stage=2",
        "pipeline.idle",
        "must be compute with mesh.context_attention=ulysses_ring",
    ),
    (
        "mesh.ici_context=4 mesh.context_attention=ulysses_ring mesh.ulysses_size=3",
        "mesh.ulysses_size",
        "must divide context (4)",
    ),
    (
        "mesh.ici_context=16 mesh.context_attention=ulysses_ring mesh.ulysses_size=16",
        "mesh.ulysses_size",
        "must divide model.num_heads (8) / tensor (1)",
    ),
    (
        "mesh.ici_context=16 mesh.context_attention=ulysses",
        "mesh.context_attention",
        "requires model.num_heads (8) to be a multiple of context (16) x tensor (1)",
    ),
    ("mesh.ulysses_size=-1", "mesh.ulysses_size", "at least 0"),
    ("mesh.ici_context=2 model.mtp_heads=1", "mesh.ici_context", "target tokens"),
    (
        "mesh.ici_tensor=4 mesh.sequence_parallel=true train.sequence_length=66",
        "train.sequence_length",
        "multiple of tensor (4)",
    ),
    (
        "mesh.ici_tensor=4 mesh.ici_context=3 mesh.sequence_parallel=true train.sequence_length=66",
        "train.sequence_length",
        "multiple of context (3) x tensor (4)",
    ),
    ("mesh.collective_matmul=true", "mesh.collective_matmul", "mesh.sequence_parallel=true"),
    (
        "mesh.sequence_parallel=true mesh.collective_matmul=true mesh.ici_tensor=2 "
        "mesh.ici_stage=2",
        "mesh.collective_matmul",
        "pipeline.idle=compute",
    ),
    ("profile.at=[0,5]", "profile.at", "at least 1"),
    ("profile.at=[5,6]", "profile.at", "at least profile.steps=3 apart"),
    ("profile.slow_step=0.9", "profile.slow_step", "must be more than 1"),
    ("profile.alarm=1", "profile.alarm", "must be more than 1"),
    ("mesh.axis_rules.hedas=[]", "mesh.axis_rules.hedas", "not one of the logical axes"),
    ("mesh.axis_rules.batch=[]", "mesh.axis_rules.batch", "cannot be changed"),
    ("mesh.axis_rules.experts=[]", "mesh.axis_rules.experts", "cannot be changed"),
    ("mesh.axis_rules.mlp=[fsdp]", "mesh.axis_rules.mlp", "must be [] or [tensor]"),
    ("mesh.axis_rules.embed=[tensor]", "mesh.axis_rules.embed", "must be [] or [fsdp]"),
    ("mesh.axis_rules.vocab=[]", "mesh.axis_rules.vocab", "[stage] or [stage, tensor]"),
    ("mesh.axis_rules.vocab=[tensor,stage]", "mesh.axis_rules.vocab", "[stage] or [stage, tensor]"),
    ("mesh.axis_rules.head_dim=[tensor]", "mesh.axis_rules.head_dim", "heads and kv_heads"),
    ("mesh.ici_fsdp=3 train.batch_size=3", "model.d_model", "fsdp size (3)"),
    ("mesh.ici_tensor=3 model.num_kv_heads=1", "model.num_heads", "tensor size (3)"),
    ("mesh.ici_tensor=8", "model.num_kv_heads", "tensor size (8)"),
    ("mesh.ici_tensor=4 model.d_mlp=6", "model.d_mlp", "tensor size (4)"),
    ("pipeline.schedule=gpipe pipeline.repeats=2", "pipeline.repeats", "one chunk per stage"),
    ("eval.batch_size=3 mesh.ici_data=2", "eval.batch_size", "data (2) x fsdp (1) = 2"),
    (
        "pipeline.schedule=1f1b pipeline.repeats=2",
        "pipeline.repeats",
        "one chunk per stage",
    ),
    ("pipeline.schedule=zb_v", "pipeline.repeats", "whose chunks form a V"),
    ("pipeline.schedule=1fb1", "pipeline.schedule", "must be one of gpipe, circular, 1f1b"),
    ("pipeline.delayed_forwarding=true", "pipeline.delayed_forwarding", "gpipe, circular and file"),
    (
        "pipeline.layers_per_chunk=[1,2]",
        "pipeline.layers_per_chunk",
        "must be 1 (stages x repeats) positive integers",
    ),
    (
        "pipeline.layers_per_chunk=[8,0] mesh.ici_stage=2",
        "pipeline.layers_per_chunk",
        "model.num_layers (8)",
    ),
    (
        "pipeline.layers_per_chunk=[4,4] mesh.ici_stage=2 pipeline.prologue_layers=2",
        "pipeline.layers_per_chunk",
        "model.num_layers (8) - pipeline.prologue_layers (2) = 6",
    ),
    (
        "pipeline.prologue_layers=3 mesh.ici_stage=3 pipeline.repeats=2",
        "pipeline.prologue_layers",
        "at most 2 = model.num_layers (8) - stages (3) x repeats (2)",
    ),
    ("pipeline.saved_names=[gates]", "pipeline.saved_names", "neither an activation"),
    (
        "pipeline.offload_weights=true pipeline.weight_gather=step",
        "pipeline.offload_weights",
        "must be false with pipeline.weight_gather=step",
    ),
    ("pipeline.offloaded_names=[up]", "pipeline.offloaded_names", "pipeline.remat=names"),
    ("mesh.ici_stage=4 pipeline.repeats=3", "pipeline.repeats", "at least 12 layers"),
    ("mesh.dcn_stage=2 mesh.ici_stage=5", "mesh.ici_stage", "at least 10 layers"),
    ("pipeline.schedule=1f1b pipeline.group=1", "pipeline.group", "pipeline.schedule=interleaved"),
    (
        "pipeline.group=3 pipeline.microbatches=8 mesh.ici_stage=4",
        "pipeline.group",
        "between the stages (4) and the microbatches (8)",
    ),
    ("pipeline.group=9 pipeline.microbatches=8", "pipeline.group", "the microbatches (8)"),
    ("pipeline.microbatches=3", "train.batch_size", "pipeline.microbatches (3)"),
    (
        "pipeline.microbatches=100000 train.batch_size=200000 mesh.ici_stage=4",
        "pipeline.microbatches",
        "400,000 forward slots with stages (4) x repeats (1)",
    ),
    ("mesh.ici_data=16", "train.batch_size", "x data (16) x fsdp (1) = 16"),
    *(
        (f"data.source={source}", "data.path", f"data.source={source}")
        for source in ("text", "jsonl", "arrayrecord", "tfds")
    ),
    ("data.validation_fraction=0", "data.validation_fraction", "eval.batches is 8"),
    *(
        (f"tokenizer.kind={kind}", "tokenizer.path", f"with tokenizer.kind={kind}")
        for kind in ("auto", "huggingface", "sentencepiece")
    ),
    ("tokenizer.path=tokenizer.json", "tokenizer.path", "is ignored with tokenizer.kind=bytes"),
    ("tokenizer.preset=llama3", "tokenizer.preset", "requires tokenizer.kind=tiktoken"),
    (
        "tokenizer.kind=tiktoken tokenizer.path=a",
        "tokenizer.preset",
        "how text is split",
    ),
    (
        "tokenizer.kind=auto tokenizer.path=a tokenizer.special_tokens=[a]",
        "tokenizer.split_pattern",
        "how text is split",
    ),
    (
        "tokenizer.kind=auto tokenizer.path=a tokenizer.special_tokens=[a] tokenizer.preset=gpt2",
        "tokenizer.special_tokens",
        "tokenizer.preset=gpt2",
    ),
    (
        "tokenizer.kind=auto tokenizer.path=a tokenizer.special_tokens=[a,a] "
        "tokenizer.split_pattern=x",
        "tokenizer.special_tokens",
        "unique",
    ),
    (
        "runtime.num_processes=2 runtime.process_id=2 runtime.coordinator=a:1",
        "runtime.process_id",
        "less than runtime.num_processes (2)",
    ),
    ("runtime.num_processes=2", "runtime.coordinator", "host:port"),
    ("optim.name=muon optim.epsilon=1e-31", "optim.epsilon", "more than 1e-30"),
    ("optim.name=muon optim.beta1=0.9999999", "optim.beta1", "less than 0.999999"),
    ("optim.name=muon optim.beta2=0.9999999", "optim.beta2", "less than 0.999999"),
    ("train.objective=grpo", "grpo.prompts", "a file of prompts"),
    (f"{GRPO} grpo.group_size=3", "grpo.group_size", "must divide train.batch_size (8)"),
    (f"{GRPO} grpo.group_size=2 train.batch_size=1", "grpo.group_size", "train.batch_size (1)"),
    (f"{GRPO} grpo.max_tokens=1024", "grpo.max_tokens", "less than train.sequence_length (1024)"),
    (
        f"{GRPO} grpo.allow_code=true grpo.reward_file=a.txt",
        "grpo.reward_file",
        "as FILE.py:FUNCTION",
    ),
    (
        f"{GRPO} grpo.reward_file=a.py:b grpo.allow_code=false",
        "grpo.reward_file",
        "with your permissions",
    ),
    (
        f"{GRPO} pipeline.offload_weights=true",
        "pipeline.offload_weights",
        "must be false with train.objective=grpo",
    ),
    (f"{GRPO} data.end=stop", "data.end", "must be repeat with train.objective=grpo"),
    (f"{GRPO} model.dropout=0.1", "model.dropout", "must be 0.0 with train.objective=grpo"),
    (f"{GRPO} model.mtp_heads=1", "model.mtp_heads", "must be 0 with train.objective=grpo"),
    (f"{GRPO} grpo.updates_per_rollout=3", "train.steps", "grpo.updates_per_rollout (3)"),
    (f"{GRPO} grpo.updates_per_rollout=3", "checkpoint.every", "complete rollouts"),
    (
        f"{GRPO} grpo.updates_per_rollout=2 guard.bad_steps=rollback",
        "guard.bad_steps",
        "in the middle of a rollout",
    ),
    (
        f"{GRPO} grpo.updates_per_rollout=2 guard.spike_sigmas=6 guard.on_spike=rollback",
        "guard.on_spike",
        "in the middle of a rollout",
    ),
    *(
        (f"runtime.num_processes=2 runtime.coordinator={address}", "runtime.coordinator", "host:p")
        for address in (
            *("host", "host:", ":1", "host:0", "host:65536", "a b:1", "http://a:1"),
            *("a..b:1", ".a:1", f"{64 * 'a'}.com:1", f"{'.'.join(5 * [60 * 'a'])}:1"),
            *("256.1.1.1:1", "[...]:1", "[abc]:1", "[::1:1", "::1:1", "[1.2.3.4]:1"),
        )
    ),
]


@pytest.mark.parametrize(("overrides", "key", "message"), BROKEN)
def test_broken_rule_is_reported_with_working_suggestion(overrides: str, key: str, message: str):
    given = overrides.split()
    found = problems(given)
    blamed = [p for p in found if p.where.endswith(f": {key}")]
    assert len(blamed) == 1, "\n".join(map(str, found))
    [problem] = blamed
    assert message in problem.rule
    assert problem.value and problem.rule.endswith(".") and problem.action.endswith(".")
    after = problems([*given, suggestion(problem)])
    assert problem.where not in [p.where for p in after]
    # The action causes no other error.
    assert len(after) == len(found) - 1, "\n".join(map(str, after))


@pytest.mark.parametrize(("chunks", "context", "largest"), [(5, 1, 4), (32, 2, 24), (64, 1, 48)])
def test_suggested_chunks_are_the_most_that_divide_the_tokens(
    chunks: int, context: int, largest: int
) -> None:
    given = ["model.family=moe", "train.sequence_length=96", f"mesh.ici_context={context}"]
    [problem] = problems([*given, f"model.moe.all_to_all_chunks={chunks}"])
    assert problem.rule.startswith(f"must divide the {96 // context} tokens")
    assert problem.action == f"Set model.moe.all_to_all_chunks={largest}."
    assert not problems([*given, suggestion(problem)])


@pytest.mark.parametrize("key", [key for key in BOUNDS if ITEM not in key and NAME not in key])
def test_range_error_is_reported_with_working_suggestion(key: str):
    bound = BOUNDS[key]
    assert bound.holds(bound.example)
    assert bound.low_is_inside == bound.holds(bound.low)
    outside: list[float] = [int(bound.low) - 1]
    if bound.high != float("inf"):
        outside.append(bound.high * 2 if bound.high > 1e9 else int(bound.high) + 1)
    section = section_of(key)
    family = [f"model.family={section.rpartition('.')[2]}"] if "." in section else []
    for value in outside:
        [problem] = [p for p in problems([*family, f"{key}={value}"]) if p.where.endswith(key)]
        assert problem.value == str(value if KEYS[key] is int else float(value))
        assert problem.rule.startswith("must be ") and str(bound) in problem.rule
        assert bound.key in suggestion(problem)
        after = problems([*family, suggestion(problem)])
        assert not [p for p in after if "must be " + str(bound) in p.rule]


@pytest.mark.parametrize("declared_key", [key for key in BOUNDS if NAME in key])
def test_range_error_in_named_section_has_working_suggestion(declared_key: str) -> None:
    bound, key = BOUNDS[declared_key], declared_key.replace(f".{NAME}.", ".own.")
    assert bound.holds(bound.example)
    for value in (int(bound.low) - 1, bound.high * 2):
        if bound.holds(value):
            continue
        found = [p for p in problems([f"{key}={value}"]) if p.where.endswith(key)]
        (problem,) = (p for p in found if str(bound) in p.rule)
        assert key in suggestion(problem)
        after = problems([suggestion(problem)])
        assert not [p for p in after if p.where.endswith(key) and "must be " in p.rule]


@pytest.mark.fault("N7")
@pytest.mark.parametrize(
    "value",
    [
        *(f"optim.learning_rate={rate}" for rate in ("1e308", "3.5e38", "inf", "nan", "1e-46")),
        "optim.learning_rate=1e-37 optim.warmup_steps=1000",
        "optim.epsilon=1e-50",
        "optim.weight_decay=1e39",
        "optim.clip_norm=inf",
        "model.norm_epsilon=1e-46",
    ],
)
def test_numbers_outside_float32_range_are_rejected(value: str):
    key = value.partition("=")[0]
    assert [p for p in problems(value.split()) if p.where.endswith(key)]


def test_every_number_has_a_range():
    numbers = (int, float, dict[str, float])
    ours = {key for key, hint in (KEYS | ITEM_KEYS).items() if without_none(hint) in numbers}
    sizes = {f"mesh.{link}_{axis}" for link in ("ici", "dcn") for axis in axes.MESH_AXES}
    of_plugins = {"train.objective_options"}  # a plug-in checks its own numbers
    assert ours - sizes - of_plugins == {key for key in BOUNDS if NAME not in key}


def test_numbers_in_named_sections_have_a_range() -> None:
    numbers = {key for key, hint in NAMED_KEYS.items() if without_none(hint) in (int, float)}
    unlimited = {"alerts.rules.NAME.threshold"}  # metrics have any range
    assert numbers - unlimited == {key for key in BOUNDS if NAME in key}


@pytest.mark.parametrize(
    "overrides",
    [
        "pipeline.microbatches=2 mesh.ici_stage=4",  # fewer microbatches than stages only idle
        "pipeline.group=2 pipeline.microbatches=2 mesh.ici_stage=4",
        "pipeline.group=8 pipeline.microbatches=8 mesh.ici_stage=4",
        "mesh.ici_stage=3 pipeline.repeats=2",  # layers need not divide
        "mesh.ici_stage=-1 pipeline.repeats=8",
        "mesh.ici_stage=3 pipeline.repeats=2 pipeline.prologue_layers=2",
        "mesh.ici_stage=2 pipeline.prologue_layers=3 pipeline.layers_per_chunk=[2,3]",
        "mesh.ici_stage=-1 pipeline.prologue_layers=7",
        "mesh.ici_data=-1 mesh.dcn_data=-1",
        "mesh.ici_tensor=8 mesh.axis_rules.kv_heads=[]",
        "mesh.ici_tensor=8 mesh.axis_rules={heads: [], kv_heads: [], head_dim: [tensor]}",
        "train.steps=0 train.tokens=100000",
        "optim.warmup_steps=1000",  # a shortened run stays legal
        "optim.schedule=wsd optim.warmup_steps=9",
        "data.source=synthetic data.validation_fraction=0",
        "data.validation_fraction=0 eval.batches=0",
        "runtime.num_processes=0 runtime.process_id=3",
        *(
            f"runtime.num_processes=2 runtime.process_id=1 runtime.coordinator={host}:1234"
            for host in ("[::1]", "10.0.0.1", "a_b-c.d.", "10-0-0-1.host", 63 * "a")
        ),
        "optim.lr_multipliers=[{pattern: head, multiplier: 0}]",
        "optim.beta1=0.9999999 optim.epsilon=1e-31",
        "run.name=a.b_c-1",
        "run.seed=4294967295",
        "model.dropout=0.99",
        f"{GRPO} grpo.reward_file=a.py:b grpo.allow_code=true",
        f"{GRPO} grpo.updates_per_rollout=5 guard.bad_steps=skip",
        f"{GRPO} grpo.clip_ratio=0.2 grpo.clip_ratio_high=0.28",
    ],
)
def test_valid_combinations_of_keys_are_accepted(overrides: str):
    assert problems(re.split(r" (?=[a-z]+\.)", overrides)) == []


def test_all_rules_are_reported_together():
    found = problems(["model.num_heads=6", "model.head_dim=7", "optim.beta1=2", "data.source=text"])
    assert len(found) == 4


def test_message_format():
    [problem] = problems(["model.num_heads=6"])
    assert str(problem) == (
        "command line: model.num_heads = 6  [MP-MODEL-001]\n"
        "  must be a multiple of model.num_kv_heads (4): query heads share key/value heads "
        "evenly.\n"
        "  Set model.num_heads=8, or model.num_kv_heads to 1, 2, 3 or 6."
    )


def test_message_names_file_or_default_as_origin(tmp_path: Path):
    file = tmp_path / "run.yml"
    file.write_text("mesh: {axis_rules: {mlp: [data]}}\ntrain: {steps: 0}\n")
    first, second = problems([str(file)])[:1], problems(["pipeline.microbatches=3"])
    assert first[0].where == f"{file}: mesh.axis_rules.mlp"
    assert first[0].value == "[data]"
    assert second[0].where == "default: train.batch_size"


_FAMILY = {"model.family", "model.own", "model.adapter"}
"""Keys that no rule declares: the family selects which keys exist; others are derived."""


class _Spy:
    """Proxy of a config or section that records the full name of every key that is read."""

    def __init__(self, value: Any, read: set[str], prefix: str = ""):
        self._spied = value, read, prefix

    def __getattr__(self, name: str) -> Any:
        value, read, prefix = self._spied
        found = getattr(value, name)
        if not prefix:
            return _Spy(found, read, f"{name}.")
        if not name.startswith("__"):
            read.add(prefix + name)
        return found


def _config(overrides: str) -> Config:
    """Return the config with these overrides, without checking any rules."""
    config = load(BASE).config
    for override in overrides.split():
        key, _, text = override.partition("=")
        section, name = key.split(".")
        kinds = {int: int, float: float, list[int]: yaml.safe_load, list[str]: yaml.safe_load}
        kind = kinds.get(KEYS[f"{section}.{name}"], str)
        part = dataclasses.replace(getattr(config, section), **{name: kind(text)})
        config = dataclasses.replace(config, **{section: part})
    return config


def test_rules_declare_the_keys_they_read():
    """A rule is skipped if one of its keys is invalid, so it must declare every key it reads."""
    configs = [_config(o) for o, _, _ in BROKEN if "axis_rules" not in o and " b:1" not in o] + [
        load(BASE).config
    ]
    configs = [
        config
        for config in configs
        if all(
            bound.holds(rules.value_of(config, key))
            for key, bound in BOUNDS.items()
            if ITEM not in key and NAME not in key
        )
    ]
    for rule in rules.RULES:
        read: set[str] = set()
        for config in configs:
            for finding in rule.find(_Spy(config, read)):  # type: ignore[arg-type]
                assert finding.key in rule.keys
        assert read - _FAMILY <= set(rule.keys), rule
        assert set(rule.keys) <= set(KEYS)


@pytest.mark.parametrize(
    "family", ["qwen3_next", "granite4", "nemotron_h", "kimi_linear", "olmo_hybrid", "falcon_h1"]
)
def test_recurrent_layers_support_context_axis(family: str):
    sizes = ("model.num_kv_heads=8", "model.head_dim=96")  # valid for all families
    loaded = load(
        [BASE[0], "train.steps=1", f"model.family={family}", *sizes, "mesh.ici_context=2"]
    )
    assert loaded.config.mesh.ici_context == 2


def test_axis_size():
    assert rules.axis_size(MeshConfig(ici_stage=2, dcn_stage=3), "stage") == 6
    assert rules.axis_size(MeshConfig(ici_stage=-1), "stage") is None
    assert rules.axis_size(MeshConfig(dcn_stage=-1), "stage") is None
    assert rules.axis_size(MeshConfig(dcn_stage=0), "stage") is None


def test_axis_table_is_the_default_with_changes():
    table = axes.axis_table(MeshConfig(axis_rules={"mlp": []}))
    assert table == axes.DEFAULT_AXIS_RULES | {"mlp": ()}
    assert set(axes.DEFAULT_AXIS_RULES) == set(axes.LOGICAL_AXES)
    assert all(set(each) <= set(axes.MESH_AXES) for each in table.values())


def test_total_steps_rounds_tokens_up():
    assert total_steps(TrainConfig(steps=7, tokens=5)) == 7
    assert total_steps(TrainConfig(tokens=8 * 1024 + 1)) == 2


SIZES = st.sampled_from([-1, 1, 1, 1, 2, 3, 4, 8])
SMALL = st.integers(1, 12)


@settings(max_examples=50)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            **{f"mesh.{link}_{a}": SIZES for link in ("ici", "dcn") for a in axes.MESH_AXES},
            **{f"pipeline.{name}": SMALL for name in ("microbatches", "repeats", "group")},
            "pipeline.prologue_layers": SMALL,
            **{f"model.{name}": SMALL for name in ("num_layers", "num_heads", "num_kv_heads")},
            "model.d_model": st.integers(1, 300),
            "model.d_mlp": st.integers(1, 100),
            "model.moe.num_experts": SMALL,
            "model.moe.d_expert": st.integers(0, 40),
            "mesh.axis_rules.embed": st.sampled_from(["[]", "[fsdp]", "[fsdp,expert,context]"]),
            "mesh.max_replicated_bytes": st.sampled_from([0, 1000, 10**6]),
            "train.sequence_length": st.integers(2, 100),
            "eval.batch_size": st.integers(0, 20),
            "train.batch_size": st.integers(1, 64),
            "optim.warmup_steps": st.integers(0, 20),
            "pipeline.schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_v"]),
        },
    )
)
def test_following_suggestions_yields_loadable_config(values: dict[str, object]):
    family = ["model.family=moe"] if any("moe" in key for key in values) else []
    given = [*family, *(f"{key}={value}" for key, value in values.items())]
    for _ in range(6):
        found = problems(given)
        if not found:
            break
        given += [suggestion(problem) for problem in found]
    assert problems(given) == []


@pytest.mark.fault("N7")
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], None),
        (["optim.clip_norm=0"], None),
        (["optim.clip_norm=1e-30"], "optim.epsilon"),
        (["optim.epsilon=1e20"], "optim.epsilon"),
        (["optim.epsilon=1e20", "optim.clip_norm=0"], "optim.epsilon"),
        (["optim.learning_rate=1e-30"], "optim.learning_rate"),
        (["optim.weight_decay=1e4"], "optim.weight_decay"),
        (["optim.weight_decays=[{pattern: embedding, weight_decay: 1e38}]"], "optim.weight_decays"),
    ],
)
def test_warning_if_optimizer_settings_prevent_learning(overrides: list[str], key: str | None):
    config = load([BASE[0], "train.steps=1", *overrides]).config
    assert [each.where for each in check.find_warnings(config)] == ([key] if key else [])


@pytest.mark.parametrize(
    ("at", "action"),
    [("[5,100]", None), ("[]", None), ("[5,101]", "[5]"), ("[200]", "[]")],
)
def test_warning_if_profiles_start_after_the_run(at: str, action: str | None):
    config = load([*BASE, "train.steps=100", f"profile.at={at}"]).config
    warnings = [each for each in check.find_warnings(config) if each.where == "profile.at"]
    assert [each.value for each in warnings] == ([at] if action else [])
    if warnings:
        assert "step 100" in warnings[0].rule and f"profile.at={action}," in warnings[0].action


@pytest.mark.parametrize(("warmup", "is_reported"), [(99, False), (100, True), (5000, True)])
def test_warning_if_warmup_exceeds_run_length(warmup: int, is_reported: bool):
    config = load([BASE[0], "train.steps=100", f"optim.warmup_steps={warmup}"]).config
    warnings = [each for each in check.find_warnings(config) if each.where == "optim.warmup_steps"]
    assert bool(warnings) == is_reported
    if warnings:
        assert "100 steps" in warnings[0].rule
        assert "optim.warmup_steps=10" in warnings[0].action


@pytest.mark.parametrize(
    ("given", "words", "action"),
    [
        (
            "[layers.atention.*,head]",
            "'layers.atention.*', which matches none of the parameters: embedding, ",
            "Set model.frozen=[head,layers.attention.*].",
        ),
        (
            "[layers.layer.mlp.dwon]",
            "none of the parameters",
            "Set model.frozen=[layers.layer.mlp.down].",
        ),
        ("[zzz]", "none of the parameters", "Set model.frozen=[]."),
        ("['']", "contains '', which", "Set model.frozen=[]."),
        ("['*']", "freezes every parameter", "Set model.frozen=[layers.*] to train"),
        ("[embedding,final_norm.*,head,layers.*]", "every parameter", "or model.frozen=[] to"),
        ("layers.mlp.*", "must be a list of names.", "Set model.frozen=[layers.mlp.*]."),
    ],
)
def test_invalid_frozen_patterns_are_rejected(given: str, words: str, action: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["tiny", "train.steps=1", f"model.frozen={given}"])
    assert words in str(caught.value) and action in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("[{pattern: '*', multiplier: 0}]", "nothing is learned"),
        (
            "[{pattern: embedding, multiplier: 0}, {pattern: '*', multiplier: 0.0}]",
            "nothing is learned",
        ),
    ],
)
def test_lr_multipliers_of_zero_for_all_parameters_are_rejected(given: str, words: str) -> None:
    assert load(["tiny", "train.steps=1", "optim.lr_multipliers=[{pattern: head, multiplier: 0}]"])
    with pytest.raises(ConfigError, match=words):
        load(["tiny", "train.steps=1", f"optim.lr_multipliers={given}"])


def test_unmatched_lr_multiplier_patterns_are_rejected() -> None:
    names = ("hed", "layers.*", "zzz")
    given = ", ".join(f"{{pattern: '{name}', multiplier: 2}}" for name in names)
    first, second = problems([f"optim.lr_multipliers=[{given}]"])
    assert first.where.endswith("optim.lr_multipliers[0].pattern") and first.value == "hed"
    assert first.action == "Did you mean `pattern: head`?"
    assert second.where.endswith("optim.lr_multipliers[2].pattern")
    assert second.action == "Leave this item out."


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mesh.sequence_parallel=true", "one scale per block of 64 columns of an MLP (192)"),
        ("mesh.sequence_parallel=true model.matmul_scales=tensor", ""),
        ("mesh.sequence_parallel=true model.d_mlp=512", ""),
        ("mesh.sequence_parallel=false", ""),
        ("mesh.ici_tensor=1 mesh.ici_context=2 train.sequence_length=96", ""),
        (
            "mesh.ici_tensor=1 mesh.ici_context=2 train.sequence_length=96 "
            "model.matmul_weight_gradients=same",
            "one scale per block of 32 tokens (96)",
        ),
    ],
)
def test_sharding_that_splits_quantization_blocks_is_rejected(given: str, words: str) -> None:
    block = ["model.matmul=int8", "model.matmul_scales=block", "mesh.ici_tensor=2"]
    found = [each.rule for each in problems([*block, *given.split()])]
    assert [words in rule for rule in found] == ([True] if words else [])


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ("", "", ""),
        ("mesh.ici_fsdp=2 mesh.ici_tensor=2", "", ""),
        ("model.mtp_heads=2 model.mtp_kind=layer", "", ""),
        ("model.mtp_heads=2 model.mtp_kind=projection", "", ""),
        ("model.matmul_scales=tensor", "model.matmul_scales", "has no effect"),
        ("model.head_dim=16", "model.matmul", "head_dim of layers.attention.query (16) must be"),
        ("model.head_dim=16 model.matmul_parts=mlp", "", ""),
        (
            "mesh.ici_fsdp=8",
            "model.matmul",
            "(128) must be a multiple of 256: each of its 8 shards",
        ),
        ("mesh.ici_fsdp=8 mesh.ici_tensor=2 mesh.sequence_parallel=true", "", ""),
        ("mesh.ici_tensor=4", "model.matmul", "dim mlp of layers.mlp.gate (192) must be"),
        ("train.sequence_length=80", "", ""),
        (
            "train.sequence_length=80 model.matmul_weight_gradients=same",
            "model.matmul",
            "train.sequence_length (80) must be a multiple of 32.",
        ),
        (
            "train.sequence_length=96 mesh.ici_context=2 model.matmul_weight_gradients=same",
            "model.matmul",
            "a multiple of 128: each of its 4 shards",
        ),
    ],
)
def test_mxfp8_needs_complete_blocks(given: str, key: str, words: str) -> None:
    found = problems(["model.matmul=mxfp8", "model.head_dim=32", *given.split()])
    assert [each.where.endswith(key) for each in found] == [True] * bool(words)
    assert all(words in each.rule for each in found)


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ("", "", ""),
        ("model.head_dim=16", "", ""),
        ("model.head_dim=8", "model.matmul", "query (8) must be a multiple of 16."),
        ("model.d_mlp=200 model.matmul_parts=mlp", "model.matmul", "(200) must be a multiple of"),
        (
            "model.d_mlp=200 model.matmul_unquantized_layers=64",
            "model.matmul_unquantized_layers",
            "selects all layers (64), so model.matmul=nvfp4 has no effect",
        ),
        ("model.num_layers=1", "model.matmul_unquantized_layers", "selects all layers (1)"),
        ("model.num_layers=1 model.matmul_unquantized_layers=0", "", ""),
        ("model.d_mlp=160 mesh.ici_tensor=4", "model.matmul", "dim mlp of "),
        ("train.sequence_length=72 model.matmul_weight_gradients=same", "model.matmul", "of 16."),
        ("model.matmul_scales=block", "model.matmul_scales", "has no effect"),
        ("model.family=moe", "model.matmul", "does not support models with experts"),
        ("model.matmul_unquantized_layers=65", "model.matmul_unquantized_layers", "at most"),
        ("model.matmul_unquantized_layers=-2", "model.matmul_unquantized_layers", "at least -1"),
    ],
)
def test_nvfp4_needs_complete_blocks(given: str, key: str, words: str) -> None:
    base = ["model.matmul=nvfp4", "model.head_dim=32", "model.num_layers=64"]
    found = problems([*base, *given.split()])
    assert [each.where.endswith(key) for each in found] == [True] * bool(words)
    assert all(words in each.rule for each in found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", ""),
        ("model.deepseek.kv_lora_rank=48", "kv_lora_rank (48) must be a multiple of 32."),
        ("model.deepseek.q_lora_rank=40", "q_lora_rank (40)"),
        ("model.deepseek.v_head_dim=48", "v_head_dim (48)"),
        ("model.head_dim=80", "head_dim (80)"),
        ("model.deepseek.qk_rope_head_dim=16", "head_dim without qk_rope_head_dim (48)"),
        ("model.deepseek.kv_lora_rank=48 model.matmul_parts=mlp", ""),
    ],
)
def test_mxfp8_needs_complete_blocks_of_latents(given: str, words: str) -> None:
    """The weights of latent attention are quantized after they have been gathered."""
    sizes = "model.family=deepseek model.head_dim=64 model.num_kv_heads=4 model.num_heads=4"
    own = "kv_lora_rank=64 q_lora_rank=64 v_head_dim=32 qk_rope_head_dim=32 d_expert=64"
    sizes += "".join(f" model.deepseek.{each}" for each in own.split())
    found = problems(["model.matmul=mxfp8", *sizes.split(), *given.split()])
    assert [words in each.rule for each in found] == [True] * bool(words)


def test_freezing_all_parameters_reports_only_model_frozen() -> None:
    assert [each.where for each in problems(["model.frozen=['*']"])] == [
        "command line: model.frozen"
    ]


@pytest.mark.parametrize("key", ["optim.beta1", "optim.beta2"])
def test_betas_that_round_to_one_in_float32_are_rejected(key: str) -> None:
    for value, is_rejected in ((1 - 2.0**-24, False), (1 - 2.0**-25, True), (1 - 1e-12, True)):
        assert (np.float32(value) == 1) == is_rejected
        assert bool(problems([f"{key}={value!r}"])) == is_rejected
        assert not problems([f"{key}={value!r}", "optim.name=lion"])


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("[{percent: 20, shape: linear, from: 0, to: 1}, {shape: linear, to: 0}]", None),
        # The run ends during the second phase.
        ("[{steps: 8, shape: linear, from: 0, to: 1}, {steps: 99, shape: linear, to: 0}]", None),
        ("[{steps: 10, shape: linear, to: 1}, {shape: linear, to: 0}]", "the run has 10"),
        (
            "[{steps: 10, shape: linear, to: 0.5}, {steps: 7, shape: linear, to: 1, times: 3}]",
            "before the last 3 phases",
        ),
    ],
)
def test_warning_for_lr_phases_beyond_run_length(texts: str, words: str | None) -> None:
    found = list(check.find_warnings(load([*BASE, f"optim.lr_phases={texts}"]).config))
    assert [words in each.rule for each in found if words] == ([True] if words else [])
    assert len(found) == bool(words)


def test_frozen_patterns_match_checkpoint_names_first() -> None:
    """A layer type may have the same name as one of its sublayers."""
    given = ["tiny-moe", "train.steps=1", "model.frozen=[layers.experts.*]"]
    for dense, trained in ((1, {"head", "layers.dense.mlp.up"}), (0, {"layers.attention.query"})):
        model = describe(load([*given, f"model.moe.num_dense_layers={dense}"]).config.model)
        names = {name for name, param in declared(model).items() if param.trainable}
        assert trained <= names and not any(name.startswith("layers.experts.") for name in names)


@pytest.mark.parametrize("frozen", ["[layers.*]", "[embedding,layers.layer.attention.*]", "[]"])
def test_frozen_accepts_names_with_and_without_layer_type(frozen: str) -> None:
    assert load(["tiny", "train.steps=1", f"model.frozen={frozen}"])


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("launch.workdir", "/" + "x" * 300, "at most 255 characters"),
        ("launch.workdir", "/x" * 600, "at most 1024 characters"),
        ("launch.queue", "q" * 2000, "at most 1024 characters"),
        ("launch.program", "p" * 256, "at most 255 characters"),
        ("launch.environment", f"[{','.join('A' for _ in range(1001))}]", "at most 1000 names"),
        ("launch.environment", f"[{'A' * 256}]", "at most 255 characters"),
    ],
)
def test_launch_values_beyond_limits_are_rejected(key: str, value: str, rule: str) -> None:
    (found,) = problems([f"{key}={value}"])
    assert rule in found.rule and found.where.endswith(key)


def test_launch_values_at_limits_are_accepted() -> None:
    name = "x" * 255
    assert not problems([f"launch.workdir=/{name}/{name}", f"launch.environment=[{name}]"])


def test_mesh_mismatch_is_reported_before_errors_that_follow_from_it():
    arguments = ["quickstart", "runtime.platform=cpu", "mesh.ici_fsdp=3"]
    with pytest.raises(ConfigError) as error:
        load(arguments, to_train=True)
    first, *others = error.value.problems
    assert (first.code, first.where, first.value) == (Code.MESH_DEVICES, "mesh", "stage 4 x fsdp 3")
    assert "the run needs 12, but there are 8 cpu devices" in first.rule
    assert {each.code for each in others} == {Code.CFG_SIZES}
    for other in ("mesh.cpu_devices=12", "launch.topology=cpu:12", "runtime.num_processes=0"):
        with pytest.raises(ConfigError) as error:
            load([*arguments, other], to_train=True)
        assert Code.MESH_DEVICES not in {each.code for each in error.value.problems}
