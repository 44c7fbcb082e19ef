"""Names of other trainers produce an error with a working suggestion or a reason."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from maxpipe.config.foreign_keys import foreign_tables
from maxpipe.config.load import load
from maxpipe.config.rules import did_you_mean, normalize_name
from maxpipe.config.schema import KEYS, SECTIONS
from maxpipe.config.sections.data import SourceConfig
from maxpipe.config.translation import convert_value
from maxpipe.errors import ConfigError
from maxpipe.schedule.catalog import SCHEDULES

TINY = str(Path(__file__).parents[2] / "configs/model/tiny.yml")


def error_text(*arguments: str) -> str:
    """Return the message of the only problem."""
    with pytest.raises(ConfigError) as caught:
        load([TINY, "train.steps=1", *arguments])
    assert len(caught.value.problems) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("pipeline.schedule=1F1B", "Set pipeline.schedule=1f1b."),
        ("pipeline.schedule=ZB-H1", "Set pipeline.schedule=zb_h1."),
        (
            "pipeline.schedule=zerobubble",
            "Set pipeline.schedule=zb_h1 (same memory as 1f1b), zb_h2",
        ),
        ("pipeline.schedule=Interleaved1F1B", "Set pipeline.schedule=interleaved."),
        ("pipeline.schedule=1f1", "Set pipeline.schedule=1f1b."),
        ("data.source=pq", "Set data.source=parquet."),
        ("data.source=hf", "Set data.source=huggingface."),
        ("data.source=json", "Set data.source=jsonl."),
        ("model.compute_dtype=bf16", "Set model.compute_dtype=bfloat16."),
        ("model.compute_dtype=FP16", "float16 is not supported. Set model.compute_dtype=bfloat16."),
        ("runtime.platform=gpu", "Set runtime.platform=cuda."),
        ("runtime.platform=CPU", "Set runtime.platform=cpu."),
        ("model.attention=flash", "Set model.attention=auto"),
        ("model.moe=true", "is a section"),
        ("model.mixture_of_experts=true", "Set model.family=moe;"),
        ("model.experts=8", "Write model.family=moe model.moe.num_experts=8."),
        ("num_experts_per_tok=2", "Write model.family=moe model.moe.top_k=2."),
        ("model.num_local_experts=8", "Write model.family=moe model.moe.num_experts=8."),
        ("n_routed_experts=8", "Write model.family=moe model.moe.num_experts=8."),
        ("moe_intermediate_size=64", "Write model.family=moe model.moe.d_expert=64."),
        (
            "router_aux_loss_coef=0.1",
            "Write model.family=moe model.moe.load_balance_loss_weight=0.1.",
        ),
        (
            "model.moe.first_k_dense_replace=1",
            "Write model.family=moe model.moe.num_dense_layers=1.",
        ),
        ("n_shared_experts=2", "Write model.family=moe model.moe.num_shared_experts=2."),
        ("norm_topk_prob=true", "Write model.family=moe model.moe.norm_topk_prob=true."),
        ("optim.name=soap", "is not supported. Set optim.name=adamw, or muon"),
        ("optim.name=AdamW", "Set optim.name=adamw."),
        ("optim.soap=true", "AdamW, Lion, Adafactor and Muon"),
        ("optimizer=lion", "Write optim.name=lion."),
        ("lion=true", "Set optim.name to one of these names;"),
        ("train.epochs=3", "Set train.steps or train.tokens"),
        ("train.gradient_accumulation=4", "Write pipeline.microbatches=4."),
        ("train.gradient_accumulation_steps=4", "Write pipeline.microbatches=4."),
        ("log.wandb=true", "Write 'log.trackers=[tensorboard, wandb]'."),
        ("wandb.project=mine", "Write tracker.project=mine."),
        ("report_to=none", "Write 'log.trackers=[]'."),
        ("report_to=[mlflow,wandb]", "Write 'log.trackers=[wandb, mlflow]'."),
        ("report_to=comet_ml", "Set log.trackers=[tensorboard]."),
        ("prometheus_port=9090", "Write tracker.prometheus_port=9090."),
        ("trainer.max_steps=5", "Write train.steps=5."),
        ("train.per_device_batch_size=2", "Write train.batch_size=2."),
        ("train.bf16=true", "Set model.compute_dtype=bfloat16"),
        ("model.hidden_size=64", "Write model.d_model=64."),
        ("lr=1e-4", "Write optim.learning_rate=1e-4."),
        ("tp=4", "Write mesh.ici_tensor=4."),
        ("expert_parallel_size=2", "Write mesh.ici_expert=2."),
        ("mesh.ep=2", "Write mesh.ici_expert=2."),
        ("context_parallel_size=2", "Write mesh.ici_context=2."),
        ("sp=true", "Write mesh.sequence_parallel=true."),
        ("max-steps=9", "Write train.steps=9."),
        ("--seq_len=9", "Write train.sequence_length=9."),
        ("optim.warmup_ratio=0.5", "Write optim.warmup_steps=1."),
        ("train.stpes=1", "Did you mean train.steps?"),
        ("data.path=[a.jsonl,b.jsonl]", "write a glob pattern such as"),
        ("--fp4-recipe=nvfp4", "Write model.matmul=nvfp4."),
        ("fp4_format=e2m1", "Write model.matmul=nvfp4."),
        ("fp8_recipe=mxfp8", "Write model.matmul=mxfp8."),
        ("fp8_recipe=blockwise", "Set model.matmul=fp8 model.matmul_scales=block."),
        ("fp8_format=hybrid", "Set model.matmul=mxfp8 if fp8_recipe is mxfp8"),
        ("num_layers_at_end_in_bf16=2", "Write model.matmul_unquantized_layers=2."),
        ("num_layers_at_start_in_bf16=2", "Leave it out"),
        ("model.matmul=mxfp4", "Set model.matmul=nvfp4, mxfp8"),
    ],
)
def test_foreign_key_or_value_suggests_our_setting(given: str, answer: str) -> None:
    assert answer in error_text(given)


def test_list_in_data_path_suggests_glob_pattern(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text("data:\n  source: jsonl\n  path: [a.jsonl, b.jsonl]\n")
    assert "must be a string, not a list." in error_text(str(file))
    assert "'data/*.jsonl'" in error_text(str(file))


def test_settings_in_suggestions_are_valid() -> None:
    tables = foreign_tables()
    texts = [entry.get(part, "") for entry in tables["absent_keys"] for part in ("why", "action")]
    texts += [entry["use"] for entries in tables["values"].values() for entry in entries]
    named = re.findall(r"\b([a-z]+\.[a-z0-9_]+)(?:=([a-z0-9_]+))?", " ".join(texts))
    sections = {key.partition(".")[0] for key in KEYS}
    checked = 0
    for key, value in named:
        others = ("data.jsonl", "tokenizer.json", "tokenizer.model", *SECTIONS)
        if key.partition(".")[0] not in sections or key in others:
            continue
        checked += 1
        assert key in KEYS, key
        choices = SCHEDULES if key == "pipeline.schedule" else typing.get_args(KEYS[key])
        choices = () if KEYS[key] == list[str] else choices
        choices = (*choices, "file") if key == "pipeline.schedule" else choices
        assert not value or not choices or value in choices, (key, value)
    assert checked > 30
    of_sets = set(re.findall(r"data\.validation\.held_out\.(\w+)=", " ".join(texts)))
    fields = {field.name for field in dataclasses.fields(SourceConfig)}
    assert of_sets
    assert of_sets <= fields
    assert set(tables["keys"]) <= set(KEYS)


def test_suggested_values_are_accepted_by_their_keys() -> None:
    for key, entries in foreign_tables()["values"].items():
        choices = SCHEDULES if key == "pipeline.schedule" else typing.get_args(KEYS[key])
        choices = () if KEYS[key] == list[str] else choices
        for found in (entry["use"] for entry in entries):
            accepted = (
                found in choices
                if choices
                else convert_value(key, found)[0] in (found, f"[{found}]")
            )
            assert accepted or " " in found, (key, found)


def test_foreign_names_are_unique_and_differ_from_our_keys() -> None:
    tables = foreign_tables()
    names = [*tables["keys"].values(), *(entry["names"] for entry in tables["absent_keys"])]
    written = [normalize_name(name) for name in " ".join(names).split() if "*" not in name]
    assert len(written) == len(set(written)), {n for n in written if written.count(n) > 1}
    ours = {normalize_name(key.rpartition(".")[2]) for key in KEYS}
    assert ours & set(written) == {"project"}  # used by experiment trackers and by Google Cloud


def test_did_you_mean_prefers_match_ignoring_case_and_separators() -> None:
    assert did_you_mean("A-B", ["a_bc", "ab"]) == "ab"
    assert did_you_mean("Tensor", ["tensors", "tensor"]) == "tensor"
    assert not did_you_mean("qqq", ["tensor"])
