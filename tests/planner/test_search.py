"""Search over layouts and forecasts of single layouts, without jax."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.check import check
from maxpipe.config.load import LoadedConfig, from_dict, load, to_yaml
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError
from maxpipe.hardware import published_hardware
from maxpipe.planner.cost import predict_cost
from maxpipe.planner.report import forecast_values
from maxpipe.planner.search import (
    TIE,
    Candidate,
    SearchResult,
    _seconds,
    best_layouts,
    evaluate,
    forecast_layout,
    parse_fixed_keys,
    rank_candidates,
    search,
    short_schedules,
)
from maxpipe.planner.search_space import layouts
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.planner.topology import Topology, parse_topology

LAYERS = {
    "num_layers": 32,
    "d_model": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "d_mlp": 14336,
    "vocab_size": 128256,
}


def config_of(mesh: dict[str, int] | None = None, rows: int = 128, **pipeline: Any) -> Config:
    train = {"batch_size": rows, "sequence_length": 2048, "steps": 1}
    sections = {"model": LAYERS, "mesh": mesh or {}, "pipeline": pipeline, "train": train}
    return from_dict(sections)


V5E = parse_topology("v5e:4x4")
STAGED = {"ici_stage": 4, "ici_fsdp": 8}


def test_candidates_are_valid_and_use_all_devices() -> None:
    found = list(layouts(config_of(), 32, 1, {}))
    assert len(found) > 5000 and len(set(map(repr, found))) == len(found)
    for config in found[::97]:
        assert Sizes(config).mesh.num_devices == 32
        assert not check(config, {})


def test_search_for_mfu_varies_the_batch_size_up_to_the_limit() -> None:
    config = config_of(rows=16)
    fixed = {"mesh.ici_stage": 4, "mesh.ici_tensor": 1, "pipeline.remat": "full"}
    by_time = search(config, V5E.hardware, num_devices=16, fixed=fixed)
    by_mfu = search(config, V5E.hardware, num_devices=16, fixed=fixed, max_batch_size=100)
    assert {each.config.train.batch_size for each in by_time.best} == {16}
    assert "train.batch_size" not in by_time.best[0].layout_keys
    found = [each.config.train.batch_size for each in by_mfu.best]
    assert set(found) <= {16, 32, 64} and max(found) == 64
    assert by_mfu.best[0].layout_keys["train.batch_size"] == found[0]
    # More microbatches reduce the bubble.
    assert by_mfu.best[0].cost.mfu > 1.05 * by_time.best[0].cost.mfu
    for each in by_mfu.best:
        assert not check(each.config, {})


def test_search_for_mfu_prefers_the_smaller_of_equal_batches() -> None:
    small = evaluate(config_of({"ici_fsdp": 8}, 64, microbatches=8), V5E.hardware)
    large = evaluate(config_of({"ici_fsdp": 8}, 128, microbatches=16), V5E.hardware)
    assert large.cost.mfu == pytest.approx(small.cost.mfu, rel=TIE)
    assert rank_candidates([large, small]) == [small, large]
    pipelined = {"schedule": "1f1b", "remat": "full"}
    few = evaluate(config_of(STAGED, 64, microbatches=8, **pipelined), V5E.hardware)
    many = evaluate(config_of(STAGED, 128, microbatches=16, **pipelined), V5E.hardware)
    assert many.cost.seconds > few.cost.seconds
    assert rank_candidates([few, many]) == [many, few]


def moe_config(chunks: int = 1, capacity: float = 0.0) -> Config:
    moe = {"all_to_all_chunks": chunks, "all_to_all_capacity_factor": capacity}
    model = LAYERS | {"family": "moe", "num_layers": 4, "moe": moe}
    train = {"batch_size": 16, "sequence_length": 2048, "steps": 1}
    return from_dict({"model": model, "train": train, "mesh": {"ici_expert": 8}})


def test_search_varies_chunks_only_on_gpus_and_without_capacity_limit() -> None:
    def chunks(config: Config, platform: str) -> set[int]:
        found = layouts(config, 8, 1, {"mesh.ici_expert": 8}, platform=platform)
        return {each.model.own.all_to_all_chunks for each in found}

    assert chunks(moe_config(), "cuda") == {1, 2, 4}
    assert chunks(moe_config(), "tpu") == {1}
    assert chunks(moe_config(capacity=2.0), "cuda") == {1}
    candidate = evaluate(moe_config(chunks=4), published_hardware()["h100"])
    assert candidate.layout_keys["model.moe.all_to_all_chunks"] == 4


def test_chunks_overlap_the_exchange_on_gpus() -> None:
    def exchange(chunks: int, device: str) -> float:
        return evaluate(moe_config(chunks), published_hardware()[device]).cost.parts["exchange"]

    slow = dataclasses.replace(published_hardware()["h100"], link_gb_per_second=1.0)
    assert exchange(4, "h100") < exchange(2, "h100") < exchange(1, "h100")
    assert exchange(4, "v5p") >= exchange(1, "v5p")
    # With slow links, the experts cannot cover the exchange.
    one, four = (evaluate(moe_config(chunks), slow).cost.parts["exchange"] for chunks in (1, 4))
    assert 0.7 * one < four < one


def test_expert_kernels_copy_stacked_weights_on_tpus() -> None:
    def layers(device: str, gather: str = "step", **keys: str) -> float:
        moe = {"num_dense_layers": 0, **keys}
        model = LAYERS | {"family": "moe", "num_layers": 4, "moe": moe}
        config = from_dict(
            {
                "model": model,
                "train": {"batch_size": 16, "sequence_length": 2048, "steps": 1},
                "mesh": {"ici_data": 8},
                "pipeline": {"weight_gather": gather, "remat": "names", "microbatches": 2},
            }
        )
        return evaluate(config, published_hardware()[device]).cost.parts["layers"]

    added = layers("v5p") - layers("v5p", expert_backend="loop")
    # Per layer and microbatch, two copies of the weights at the rate of copies, and one pass over
    # float32 gradients.
    hardware, weights = published_hardware()["v5p"], 8 * 3 * 4096 * 14336
    rate = hardware.memory_gb_per_second * 1e9
    expected = 4 * 2 * (2 * 4 * weights / (rate * hardware.copy_efficiency) + 12 * weights / rate)
    assert added == pytest.approx(expected, rel=1e-3)
    assert layers("h100") == layers("h100", expert_backend="loop")
    # Shards are gathered for each layer, so there is no stack to copy from.
    assert layers("v5p", "iteration") == layers("v5p", "iteration", expert_backend="loop")


def test_search_varies_saved_names_and_repeats() -> None:
    found = list(layouts(config_of(), 32, 1, {"pipeline.remat": "names", "mesh.ici_stage": 4}))
    names = {tuple(each.pipeline.saved_names) for each in found}
    assert names == {("matmuls",), ("attention", "gate"), ("attention",)}
    assert {each.pipeline.repeats for each in found} == {1, 2, 3, 4, 6, 8}
    deep = dataclasses.replace(config_of().model, num_layers=80)
    deep = dataclasses.replace(config_of(), model=deep)
    found = list(layouts(deep, 16, 1, {"pipeline.remat": "full", "mesh.ici_stage": 16}))
    assert {each.pipeline.repeats for each in found} == {1, 2, 3, 4, 5}


def test_predicted_recomputation_depends_on_saved_names() -> None:
    def candidate(names: list[str], remat: str = "names") -> Candidate:
        pipeline = {"microbatches": 8, "remat": remat, "saved_names": names}
        return evaluate(config_of({"ici_fsdp": 8}, **pipeline), published_hardware()["v5p"])

    everything, gated, narrow = map(candidate, (["matmuls"], ["attention", "gate"], ["attention"]))
    full = candidate(["matmuls"], "full")
    memory = [each.memory.total for each in (everything, gated, narrow, full)]
    assert memory == sorted(memory, reverse=True)
    added = [each.cost.seconds - everything.cost.seconds for each in (gated, narrow, full)]
    assert added == sorted(added) and added[0] > 0
    assert narrow.layout_keys["pipeline.saved_names"] == "[attention]"


@pytest.mark.long
def test_sampled_search_finds_nearly_best_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"pipeline.remat": "full"}
    whole = search(config_of(rows=64), V5E.hardware, num_devices=16, fixed=fixed, keep=3)
    assert whole.computed == whole.considered
    monkeypatch.setattr("maxpipe.planner.search.MAX_EXHAUSTIVE", whole.considered // 10)
    some = search(config_of(rows=64), V5E.hardware, num_devices=16, fixed=fixed, keep=3)
    assert some.considered == whole.considered and some.computed < whole.considered / 2
    assert some.best[0].cost.seconds <= 1.05 * whole.best[0].cost.seconds


def test_layouts_on_two_slices_use_all_devices() -> None:
    for config in list(layouts(config_of(), 32, 2, {}))[::97]:
        assert Sizes(config).mesh.num_slices == 2 and Sizes(config).mesh.num_devices == 32


@pytest.mark.parametrize(
    ("schedule", "repeats", "group", "gather"),
    [
        ("1f1b", 1, 0, "iteration"),
        ("interleaved", 2, 0, "step"),
        ("interleaved", 4, 8, "window"),
        ("zb_h1", 1, 0, "iteration"),
        ("zb_v", 2, 0, "step"),
    ],
)
def test_short_schedules_predict_long_ones(
    schedule: str, repeats: int, group: int, gather: str
) -> None:
    config = config_of(
        STAGED,
        512,
        schedule=schedule,
        repeats=repeats,
        group=group,
        weight_gather=gather,
        microbatches=64,
        remat="names",
    )
    hardware = published_hardware()["v5p"]
    short = _seconds(config, *short_schedules(config), hardware)
    assert short == pytest.approx(
        predict_cost(Sizes(config), build_schedule(config), hardware).seconds, 0.01
    )


def test_predicted_times_have_expected_order() -> None:
    hardware = published_hardware()["v5p"]

    def seconds(mesh: dict[str, int] = STAGED, **changes: Any) -> float:
        pipeline = {"schedule": "interleaved", "repeats": 2, "microbatches": 16, **changes}
        return evaluate(config_of(mesh, **pipeline), hardware).cost.seconds

    assert seconds(remat="names") < seconds(remat="full") < seconds(remat="chunk")
    assert seconds(repeats=4) < seconds(repeats=2) < seconds(schedule="1f1b", repeats=1)
    # With few microbatches, the bubble costs more than deferring weight gradients.
    held: Any = {"remat": "none", "weight_gather": "step", "microbatches": 4}
    assert seconds(schedule="zb_v", **held) < seconds(**held)
    # The same work over the slow network.
    across = {"ici_stage": 4, "ici_fsdp": 4, "dcn_fsdp": 2}
    assert seconds() < seconds(across)


def test_predicted_times_depend_on_the_matmul_format() -> None:
    def layers(device: str, **model: Any) -> float:
        config = config_of({"ici_fsdp": 8}, microbatches=2)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
        return evaluate(config, published_hardware()[device]).cost.parts["layers"]

    plain = layers("b200")
    assert layers("h100", matmul="mxfp8") == layers("h100") == layers("h100", matmul="int8")
    assert layers("h100", matmul="fp8") < layers("h100")
    assert layers("b200", matmul="fp8", matmul_scales="block") == plain
    part = layers("b200", matmul="mxfp8", matmul_parts="mlp")
    everything = layers("b200", matmul="mxfp8")
    same = layers("b200", matmul="mxfp8", matmul_weight_gradients="same")
    assert plain / 2 < same < everything < part < plain
    assert layers("h100", matmul="nvfp4") >= layers("h100")
    few = layers("b200", matmul="nvfp4", matmul_weight_gradients="same")
    all_few = {"matmul": "nvfp4", "matmul_weight_gradients": "same"}
    none_plain = layers("b200", **all_few, matmul_unquantized_layers=0)
    assert plain / 4 < none_plain < few < plain and none_plain < same


@pytest.mark.long
def test_search_finds_layout_at_least_as_fast_as_given() -> None:
    topology = parse_topology("v5p:2x4x4")
    given = config_of(STAGED, schedule="interleaved", repeats=2, microbatches=16)
    found = best_layouts(
        given, topology, parse_fixed_keys(LoadedConfig(given, {}), ["mesh.ici_stage=4"])
    )
    seconds = [each.cost.seconds for each in found.best]
    # Simpler layouts come first among those within TIE of the fastest.
    assert all(first <= (1 + TIE) * min(seconds[i:]) for i, first in enumerate(seconds))
    assert min(seconds) <= evaluate(given, topology.hardware).cost.seconds
    assert all(each.config.mesh.ici_stage == 4 for each in found.best)


def long_rows(rows: int) -> Config:
    train = {"batch_size": rows, "sequence_length": 32768, "steps": 1}
    return from_dict({"model": LAYERS, "train": train})


@pytest.mark.parametrize(
    ("rows", "says"), [(16, "found no layout that fits"), (8, "found no valid layout")]
)
def test_search_uses_context_parallelism_for_long_sequences(rows: int, says: str) -> None:
    """Without context parallelism, no layout fits or there are fewer sequences than devices."""
    only = {"mesh.ici_tensor": 1, "mesh.ici_stage": 1}
    with pytest.raises(ConfigError, match=says):
        best_layouts(long_rows(rows), V5E, only | {"mesh.ici_context": 1})
    for each in best_layouts(long_rows(rows), V5E, only).best:
        assert each.config.mesh.ici_context > 1 and each.config.mesh.context_attention == "auto"
        assert not check(each.config, {})
        assert each.cost.parts["exchange"] > 0


def test_search_splits_sequences_over_slices() -> None:
    config = from_dict(
        {"model": ODD, "train": {"batch_size": 1, "sequence_length": 96, "steps": 1}}
    )
    found = best_layouts(config, parse_topology("cpu:2", 2), {}).best
    assert any(each.config.mesh.dcn_context == 2 for each in found)
    for each in found:
        assert not check(each.config, {})


ODD: dict[str, Any] = LAYERS | {"num_layers": 2, "d_model": 96, "head_dim": 16, "d_mlp": 192}


def search_small_model(rows: int, texts: list[str], topology: Topology) -> list[Candidate]:
    train = {"batch_size": rows, "sequence_length": 96, "steps": 1}
    config = from_dict({"model": ODD, "train": train})
    return best_layouts(config, topology, parse_fixed_keys(LoadedConfig(config, {}), texts)).best


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (parse_topology("v5e:2x2"), "mesh.sequence_parallel=true"),
        (parse_topology("v5e:2x2"), "pipeline.prologue_layers=1"),
        (parse_topology("v5e:2x2"), "pipeline.idle=compute"),
        (parse_topology("v5e:2x2"), "mesh.ici_context=4"),
        (parse_topology("cpu:6"), "mesh.ici_context=3"),
        (parse_topology("v5e:2x2", 2), "mesh.dcn_context=2"),
    ],
)
def test_search_respects_fixed_keys(topology: Topology, text: str) -> None:
    key, _, value = text.partition("=")
    for each in search_small_model(4 if "context" not in key else 1, [text], topology):
        assert str(each.layout_keys[key]).lower() == value
        assert not check(each.config, {})


def test_ring_attention_with_stages_requires_idle_compute() -> None:
    texts = ["mesh.context_attention=ring", "mesh.ici_context=2", "mesh.ici_stage=2"]
    for each in search_small_model(2, texts, parse_topology("v5e:2x2")):
        assert each.layout_keys["mesh.context_attention"] == "ring"
        assert each.layout_keys["pipeline.idle"] == "compute"


def test_search_splits_sequences_over_non_power_of_two_devices() -> None:
    assert all(
        each.config.mesh.ici_context % 3 == 0
        for each in search_small_model(1, [], parse_topology("cpu:6"))
    )


def test_error_without_valid_layout_does_not_mention_memory() -> None:
    with pytest.raises(ConfigError, match="found no valid layout on 5 devices") as error:
        search_small_model(1, [], parse_topology("cpu:5"))
    assert "fits" not in str(error.value)


@pytest.fixture(scope="module")
def found_on_eight() -> SearchResult:
    few = {"mesh.ici_tensor": 1, "pipeline.remat": "full", "pipeline.weight_gather": "iteration"}
    return best_layouts(config_of(rows=32), parse_topology("v5p:2x2x2"), few)


def test_search_keeps_short_sequences_on_one_device(found_on_eight: SearchResult) -> None:
    assert all(each.config.mesh.ici_context == 1 for each in found_on_eight.best)


EXPERTS: dict[str, Any] = LAYERS | {
    "family": "moe",
    "num_layers": 16,
    "d_model": 2048,
    "num_heads": 16,
    "d_mlp": 8192,
    "moe": {
        "num_experts": 64,
        "d_expert": 1024,
        "num_dense_layers": 0,
        "all_to_all_capacity_factor": 1.5,
    },
}


def test_search_uses_expert_parallelism_if_gathers_are_slower() -> None:
    train = {"batch_size": 64, "sequence_length": 2048, "steps": 1}
    config, topology = from_dict({"model": EXPERTS, "train": train}), parse_topology("v5p:2x4x4")
    only = {"mesh.ici_tensor": 1, "mesh.ici_stage": 1}
    best = best_layouts(config, topology, only).best[0]
    whole = best_layouts(config, topology, only | {"mesh.ici_expert": 1}).best[0]
    assert best.config.mesh.ici_expert > 1 and best.cost.seconds < whole.cost.seconds
    assert 64 % best.config.mesh.ici_expert == 0 and not check(best.config, {})


def test_best_layout_config_round_trips(found_on_eight: SearchResult, tmp_path: Path) -> None:
    best = found_on_eight.best[0].config
    (tmp_path / "best.yml").write_text(to_yaml(best))
    assert load([str(tmp_path / "best.yml")]).config == best


def test_forecast_suggests_changes_that_fit() -> None:
    given = config_of(
        {"ici_stage": 4, "ici_fsdp": 4},
        schedule="interleaved",
        repeats=2,
        microbatches=8,
        weight_gather="step",
        remat="none",
    )
    values, nearest = forecast_values(forecast_layout(LoadedConfig(given, {}), V5E), V5E)
    assert not values["fits"] and nearest
    for line in nearest:
        changed = load_with(given, line.partition(":")[0].split())
        assert forecast_values(forecast_layout(LoadedConfig(changed, {}), V5E), V5E)[0]["fits"], (
            line
        )


def load_with(config: Config, overrides: list[str]) -> Config:
    for text in overrides:
        key, _, value = text.partition("=")
        section, name = key.split(".")
        typed = int(value) if value.isdigit() else value
        part = dataclasses.replace(getattr(config, section), **{name: typed})
        config = dataclasses.replace(config, **{section: part})
    return config


def test_search_without_fitting_layout_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="found no layout that fits"):
        best_layouts(config_of(), parse_topology("v5e:1x1"), {})


def test_mesh_size_must_match_topology() -> None:
    with pytest.raises(
        ConfigError, match="the mesh has 32 in 1 slice, but the topology is v5p:2x2x2"
    ):
        forecast_layout(LoadedConfig(config_of(STAGED), {}), parse_topology("v5p:2x2x2"))


def test_planning_does_not_import_jax() -> None:
    code = "import sys, maxpipe.planner.report; print('jax' in sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "False"


def test_ties_are_ranked_by_simplicity() -> None:
    """Among steps within 0.5% of the fastest remaining one, the fewest stages rank first."""
    staged, flat = (
        evaluate(config_of({"ici_stage": stages, "ici_fsdp": 16 // stages}), V5E.hardware)
        for stages in (2, 1)
    )

    def taking(seconds: float, candidate: Candidate) -> Candidate:
        cost = dataclasses.replace(candidate.cost, parts={"compute": seconds})
        return dataclasses.replace(candidate, cost=cost)

    tied = [taking(1.0, staged), taking(1.004, flat), taking(1.006, flat)]
    assert [each.cost.seconds for each in rank_candidates(tied)] == [1.004, 1.0, 1.006]
    apart = [taking(1.02, flat), taking(1.0, staged)]
    assert [each.cost.seconds for each in rank_candidates(apart)] == [1.0, 1.02]
    many = [taking(1.0 + 1e-9 * i, (staged, flat)[i % 2]) for i in range(2000)]
    assert sorted(map(id, rank_candidates(many))) == sorted(map(id, many))
