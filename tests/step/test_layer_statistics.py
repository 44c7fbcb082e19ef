"""Layer statistics of train steps, compared with a plain model, across layouts, and bit by bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.sections.layer_stats import LayerStatsConfig
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.config import AdapterConfig
from maxpipe.models.gemma2 import Gemma2Config
from maxpipe.models.gpt_oss import GptOssConfig
from maxpipe.models.moe import MoeConfig
from maxpipe.pipeline import program, prologue, slots
from maxpipe.step.layer_statistics import largest_values, summarize
from maxpipe.step.step import LAYER_STATS
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of
from tests.pipeline.test_engine import matrix
from tests.step.states import same_bits
from tests.step.test_step import nan_of
from tests.times import shared

ROWS = 8
OPTIM = OptimConfig(learning_rate=3e-3, warmup_steps=2)
EVERYTHING = LayerStatsConfig(every=1, histograms=True)


def batch_with_padding(rows: int, step: int, case: Case) -> dict[str, np.ndarray]:
    """Return a batch whose last tokens are padding in some sequences."""
    batch = batch_of(rows, step, case)
    padded = np.arange(case.tokens) >= case.tokens - np.arange(rows)[:, None] % 3
    batch["segment_ids"] = np.where(padded, 0, batch["segment_ids"])
    batch["loss_mask"] = np.where(padded, 0, batch["loss_mask"])
    return batch


def record_of(
    case: Case, rows: int = ROWS, config: LayerStatsConfig = EVERYTHING, num_steps: int = 2
) -> dict[str, Any]:
    """Return the record of the last of these steps; the second step is the first that changes
    parameters.
    """
    steps = steps_of(case, rows, optim=OPTIM)
    run, state = steps.with_layer_statistics(config).compile_train(), steps.init()
    metrics: dict[str, Any] = {}
    for step in range(num_steps):
        batch = jax.device_put(batch_with_padding(rows, step, case), steps.batch_sharding)
        state, metrics = run(state, batch)
    return summarize(steps.param_layout.decoder.model, metrics[LAYER_STATS])


def check_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare two records; counts of bins may differ by entries that are rounded differently."""
    assert found.keys() == wanted.keys() and found["layers"] == wanted["layers"]
    for part in ("values", "outside", "experts"):
        assert found[part].keys() == wanted[part].keys()
        for name, values in wanted[part].items():
            own = found[part][name]
            if part == "outside":
                assert own == pytest.approx(values, rel=TOLERANCE, abs=1e-9), name
                continue
            assert [value is None for value in own] == [value is None for value in values], name
            for value, other in zip(own, values, strict=True):
                if other is not None:
                    np.testing.assert_allclose(
                        value, other, rtol=TOLERANCE, atol=1e-9, err_msg=name
                    )
    for name, each in wanted.get("histograms", {}).items():
        counts, others = spread(found["histograms"][name]), spread(each)
        assert [row is None for row in counts] == [row is None for row in others]
        for row, other in zip(counts, others, strict=True):
            if row is not None and other is not None:
                assert row.sum() == other.sum(), name
                assert np.abs(row - other).sum() <= 0.01 * other.sum() + 2, name


def spread(histogram: dict[str, Any]) -> list[np.ndarray | None]:
    """Return the counts of each layer in bins from the smallest to the largest edge."""
    edges = histogram["edges"]

    def place(edge: float) -> int:
        return int(math.copysign(math.log2(abs(edge)) + 25, edge)) + 50

    rows = []
    for counts in histogram["counts"]:
        row = None if counts is None else np.zeros(101)
        if row is not None:
            row[[place(edge) for edge in edges[:-1]]] = counts
        rows.append(row)
    return rows


# A plain implementation of the model, which shares no code with the layers.


def plain_record(case: Case, rows: int) -> dict[str, Any]:
    """Return the values of a Llama model, computed in float64 with numpy from plain formulas."""
    steps = steps_of(case, rows, optim=OPTIM)
    run, state = steps.compile_train(), steps.init()
    state, _ = run(state, jax.device_put(batch_with_padding(rows, 0, case), steps.batch_sharding))
    batch = batch_with_padding(rows, 1, case)
    before = jax.device_get(steps.to_saved(state)["params"])
    decoder = steps.param_layout.decoder
    plain = steps.param_layout.split_layer_types(before)
    gradients = jax.device_get(jax.jit(jax.grad(decoder.objective))(plain, batch))
    state, _ = run(state, jax.device_put(batch, steps.batch_sharding))
    after = jax.device_get(steps.to_saved(state)["params"])
    gradients = gradients | {"layers": gradients["layers"]["layer"]}
    values: dict[str, list[float]] = {}
    outside: dict[str, float] = {}

    def norm(x: np.ndarray) -> float:
        return float(np.sqrt(np.square(np.asarray(x, np.float64)).sum()))

    updates = jax.tree.map(lambda new, old: np.float64(new) - np.float64(old), after, before)
    for tree, params in (("param", before), ("grad", gradients), ("update", updates)):
        for name in ("embedding", "head"):
            outside[f"{tree}_norm/{name}"] = norm(params[name])
            outside[f"{tree}_rms/{name}"] = norm(params[name]) / params[name].size ** 0.5
        for part, params_of_part in params["layers"].items():
            for name, stack in params_of_part.items():
                for layer in stack:
                    values.setdefault(f"{tree}_norm/{part}.{name}", []).append(norm(layer))
                    rms = norm(layer) / layer.size**0.5
                    values.setdefault(f"{tree}_rms/{part}.{name}", []).append(rms)
    for name in [name for name in values if name.startswith("update_norm/")]:
        norms = values[name.replace("update", "param")]
        ratios = [own / norm for own, norm in zip(values[name], norms, strict=True)]
        values[f"update_ratio/{name.partition('/')[2]}"] = ratios
    for name in ("embedding", "head"):
        ratio = outside[f"update_norm/{name}"] / outside[f"param_norm/{name}"]
        outside[f"update_ratio/{name}"] = ratio
    x = np.asarray(before["embedding"], np.float64)[batch["tokens"]]
    for layer in range(case.layers):
        params = jax.tree.map(lambda stack, n=layer: np.float64(stack[n]), before["layers"])
        x = plain_layer(params, x, batch, values, case.epsilon)
    return {"values": values, "outside": outside}


def plain_layer(
    params: Any, x: np.ndarray, batch: Any, values: dict[str, list[float]], epsilon: float
) -> np.ndarray:
    """Append the statistics of one layer to `values`, and return the layer's output."""
    counted = batch["segment_ids"] > 0

    def add(name: str, activation: np.ndarray) -> None:
        chosen = activation[counted]
        rms = float(np.sqrt(np.square(chosen).mean()))
        values.setdefault(f"activation_rms/{name}", []).append(rms)
        values.setdefault(f"activation_max/{name}", []).append(float(np.abs(chosen).max()))

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * scale

    def rotated(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        turns = 10000.0 ** (-np.arange(half) / half)
        angles = batch["positions"][..., None, None] * turns
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], -1)

    mine, hidden_in = params["attention"], normed(x, params["attention_norm"]["scale"])
    query, key, value = (
        np.einsum("btd,dnh->btnh", hidden_in, mine[name]) for name in ("query", "key", "value")
    )
    query, key = rotated(query), rotated(key)
    for name, heads in (("query", query), ("key", key), ("value", value)):
        add(name, heads)
    repeats = query.shape[2] // key.shape[2]
    key, value = (np.repeat(each, repeats, axis=2) for each in (key, value))
    logits = np.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    segments, tokens = batch["segment_ids"], x.shape[1]
    seen = (segments[:, :, None] == segments[:, None]) & np.tri(tokens, dtype=bool)
    logits = np.where(seen[:, None], logits, -np.inf)
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    count = min(64, tokens)
    places = [int((2 * n + 1) * tokens / (2 * count)) for n in range(count)]
    entropy = -np.where(likely > 0, likely * np.log(np.maximum(likely, 1e-300)), 0).sum(-1)
    chosen = counted[:, places]
    of_places = entropy.mean(1)[:, places]
    values.setdefault("attention_entropy", []).append(float(of_places[chosen].mean()))
    largest = np.where(chosen[:, None], logits.max(-1)[:, :, places], -np.inf).max()
    values.setdefault("attention_logit_max", []).append(float(largest))
    mixed = np.einsum("bnts,bsnh->btnh", likely, value)
    change = np.einsum("btnh,nhd->btd", mixed, mine["out"])
    add("output.attention", change)
    x = x + change
    add("residual.attention", x)
    mine, hidden_in = params["mlp"], normed(x, params["mlp_norm"]["scale"])
    gate, up = hidden_in @ mine["gate"], hidden_in @ mine["up"]
    hidden = gate / (1 + np.exp(-gate)) * up
    add("hidden", hidden)
    change = hidden @ mine["down"]
    add("output.mlp", change)
    x = x + change
    add("residual.mlp", x)
    values.setdefault("dead_units/hidden", []).append(0.0)
    return x


@pytest.mark.parametrize(
    "case",
    keeping(
        [
            Case(1, 1, 2),
            Case(2, 2, 2, fsdp=2, tensor=2, length=160),
            Case(2, 1, 2, schedule="zb_h1", context=2, fsdp=2, idle="compute", length=132),
        ],
        0,
        2,
    ),
    ids=str,
)
def test_statistics_match_plain_formulas(case: Case) -> None:
    """Lengths above 64 tokens sample the queries of attention."""
    found, wanted = record_of(case), plain_record(case, ROWS)
    assert found["values"].keys() == wanted["values"].keys()
    for name, values in wanted["values"].items():
        np.testing.assert_allclose(
            found["values"][name], values, rtol=TOLERANCE, atol=1e-9, err_msg=name
        )
    for name, value in wanted["outside"].items():
        assert found["outside"][name] == pytest.approx(value, rel=TOLERANCE), name


# Layouts.

SPARSE = MoeConfig(num_experts=4, top_k=2, d_expert=8, num_dense_layers=1, num_shared_experts=1)
FAMILIES = {
    "llama": Case(layers=8, dropout=0.1, length=80),
    "moe": Case(layers=6, own=SPARSE, ahead=1, form="layer"),
    "gemma2": Case(layers=6, own=Gemma2Config()),
    "gpt_oss": Case(layers=4, own=GptOssConfig(num_experts=4, top_k=2, d_expert=8)),
    "adapters": Case(layers=5, adapter=AdapterConfig(rank=2, alpha=4.0, dropout=0.1)),
    "mtp": Case(layers=5, ahead=2, tied=True),
}


@shared
def unsharded_record(family: str) -> dict[str, Any]:
    return record_of(FAMILIES[family])


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"stages": 2, "microbatches": 4, "schedule": "gpipe", "gather": "step"}),
    ("llama", {"stages": 4, "microbatches": 4, "schedule": "1f1b", "fsdp": 2}),
    (
        "llama",
        {"stages": 2, "repeats": 2, "microbatches": 4, "tensor": 2, "remat": "names"},
    ),
    (
        "llama",
        {"stages": 2, "microbatches": 2, "schedule": "zb_h1", "context": 2, "remat": "chunk"},
    ),
    (
        "llama",
        {"stages": 2, "repeats": 2, "microbatches": 4, "schedule": "zb_v", "remat": "none"}
        | {"idle": "compute"},
    ),
    (
        "llama",
        {"stages": 3, "repeats": 2, "microbatches": 4, "outside": 2, "gather": "window"}
        | {"fsdp": 2},
    ),
    ("llama", {"stages": 2, "microbatches": 2, "tensor": 2, "split": "sequence", "fsdp": 2}),
    (
        "llama",
        {"stages": 2, "microbatches": 2, "context": 2, "attends": "ring", "data": 2}
        | {"idle": "compute"},
    ),
    ("llama", {"stages": 2, "microbatches": 2, "context": 2, "attends": "ulysses"}),
    ("llama", {"stages": 2, "microbatches": 2, "shard_mode": "explicit", "tensor": 2, "fsdp": 2}),
    ("llama", {"microbatches": 2, "attention": "blockwise", "tensor": 2}),
    ("moe", {"stages": 2, "microbatches": 2, "expert": 2, "schedule": "1f1b"}),
    ("moe", {"stages": 2, "microbatches": 4, "outside": 2, "idle": "compute", "data": 2}),
    ("moe", {"stages": 2, "microbatches": 2, "schedule": "zb_h1", "tensor": 2, "remat": "names"}),
    ("gemma2", {"stages": 2, "microbatches": 2, "context": 2, "idle": "compute"}),
    ("gpt_oss", {"stages": 2, "microbatches": 2, "context": 2, "tensor": 2}),
    ("adapters", {"stages": 2, "microbatches": 2, "fsdp": 2, "tensor": 2, "remat": "chunk"}),
    ("mtp", {"stages": 2, "repeats": 2, "microbatches": 4, "fsdp": 2, "gather": "window"}),
]


@pytest.mark.parametrize(
    "family, layout", keeping(LAYOUTS, 3, 5, 9, 11), ids=lambda value: str(value)
)
def test_statistics_are_equal_under_every_layout(family: str, layout: dict[str, Any]) -> None:
    check_equal(record_of(replace(FAMILIES[family], **layout)), unsharded_record(family))


MATRIX = matrix()[7::97]


@pytest.mark.layouts
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_statistics_in_config_matrix_sample(case: Case) -> None:
    model = {name: getattr(case, name) for name in ("layers", "dropout", "tied", "ahead")}
    check_equal(record_of(case, case.rows), record_of(Case(**model), case.rows))


# Statistics do not change training.

UNCHANGED = [
    Case(2, 2, 4, fsdp=2, tensor=2, dropout=0.1),
    Case(2, 1, 4, schedule="zb_h1", fsdp=2, context=2, remat="chunk", idle="compute"),
    Case(1, 1, 4, dropout=0.1),
    Case(4, 1, 4, schedule="gpipe", data=2, width=64, remat="names"),
    Case(2, 2, 4, schedule="zb_v", layers=8, fsdp=2, remat="none"),
    Case(2, 2, 4, outside=1, fsdp=2, gather="window", tied=True, dtype="bfloat16"),
    Case(2, 1, 4, ahead=1, form="layer", data=2, gather="step"),
    Case(2, 1, 4, own=SPARSE, expert=2, tensor=2, layers=6, schedule="1f1b"),
    Case(2, 1, 4, own=Gemma2Config(), context=2, data=2, layers=6, idle="compute"),
    Case(2, 1, 4, adapter=AdapterConfig(rank=2), fsdp=2, remat="chunk"),
    Case(2, 1, 4, width=128, layers=4, length=256, stored="bfloat16", dtype="bfloat16"),
]


@pytest.mark.parametrize("case", keeping(UNCHANGED, 0, 1), ids=str)
def test_recording_steps_are_bitwise_equal_to_other_steps(case: Case) -> None:
    """For 20 steps, losses, metrics and the full state are equal bit by bit."""
    check_same_bits(case, OPTIM)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_recording_steps_are_bitwise_equal_with_other_optimizers(name: Any) -> None:
    check_same_bits(Case(2, 2, 4, fsdp=2, layers=4), replace(OPTIM, name=name))


def check_same_bits(case: Case, optim: OptimConfig) -> None:
    """Compare 20 steps of the ordinary program and of the program that records statistics."""
    rows = case.rows
    steps = steps_of(case, rows, 20, optim)
    plain = steps.compile_train()
    recording = steps.with_layer_statistics(EVERYTHING).compile_train()
    state, other = steps.init(), steps.init()
    metrics: dict[str, Any] = {}
    for step in range(20):
        batch = jax.device_put(batch_of(rows, step, case), steps.batch_sharding)
        state, metrics = plain(state, batch)
        other, recorded = recording(other, batch)
        del recorded[LAYER_STATS]
        assert all(same_bits(metrics, recorded).values()), step
        unequal = [name for name, same in same_bits(state, other).items() if not same]
        assert not unequal, (step, unequal)
    assert float(metrics["train/loss"]) < 4.0


def test_ramped_batches_are_recorded() -> None:
    """Smaller batches use fewer microbatches of the same size."""
    case = Case(2, 1, 4, fsdp=2)
    steps = steps_of(case, 16).with_batch_size(8).with_layer_statistics(EVERYTHING)
    batch = jax.device_put(batch_of(8), steps.batch_sharding)
    _, metrics = steps.compile_train()(steps.init(), batch)
    record = summarize(steps.param_layout.decoder.model, metrics[LAYER_STATS])
    alone = steps_of(Case(), 8).with_layer_statistics(EVERYTHING)
    _, metrics = alone.compile_train()(alone.init(), batch_of(8))
    check_equal(record, summarize(alone.param_layout.decoder.model, metrics[LAYER_STATS]))


POISONED = [
    Case(4, 2, 4, layers=10, idle="compute", gather="window"),
    Case(3, 1, 4, schedule="zb_h1", outside=2, layers=7, remat="chunk", idle="compute"),
    Case(4, 1, 4, outside=2, layers=7, remat="names"),
]


@pytest.mark.parametrize("case", keeping(POISONED, 1), ids=str)
def test_idle_slots_and_padding_do_not_affect_statistics(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaNs in the padding of stacks and in empty buffers leave the statistics unchanged."""
    wanted = record_of(case, num_steps=1)
    for module in (slots, program, prologue):
        monkeypatch.setattr(
            module, "empty_slots", lambda *like, real=slots.empty_slots: nan_of(real(*like))
        )
    steps = steps_of(case, ROWS, optim=OPTIM)
    run, state = steps.with_layer_statistics(EVERYTHING).compile_train(), steps.init()
    used = jnp.asarray(steps.param_layout.layout.layer_at >= 0)
    assert not used.all()
    layers = jax.tree.map(
        lambda leaf: jnp.where(jnp.expand_dims(used, range(3, leaf.ndim)), leaf, jnp.nan),
        state.params["layers"],
    )
    state = state._replace(params=state.params | {"layers": layers})
    state = jax.device_put(state, steps.state_sharding)
    batch = jax.device_put(batch_with_padding(ROWS, 0, case), steps.batch_sharding)
    _, metrics = run(state, batch)
    found = summarize(steps.param_layout.decoder.model, metrics[LAYER_STATS])
    for name, values in wanted["values"].items():
        if not name.startswith("update"):  # the padding causes the update to be skipped
            assert found["values"][name] == values, name
    assert found["histograms"] == wanted["histograms"]


def test_non_finite_activations_are_reported() -> None:
    """A NaN in one layer is visible in the statistics of this layer and of all later layers."""
    case = Case(2, 1, 2, layers=4)
    steps = steps_of(case, 4).with_layer_statistics(LayerStatsConfig(every=1))
    state = steps.init()
    query = state.params["layers"]["layer"]["attention"]["query"]
    layers = state.params["layers"]["layer"]
    attention = layers["attention"] | {"query": query.at[0, 1, 0].set(jnp.nan)}
    params = state.params | {"layers": {"layer": layers | {"attention": attention}}}
    state = jax.device_put(state._replace(params=params), steps.state_sharding)
    _, metrics = steps.compile_train()(state, jax.device_put(batch_of(4), steps.batch_sharding))
    record = summarize(steps.param_layout.decoder.model, metrics[LAYER_STATS])
    largest = record["values"]["activation_max/residual.attention"]
    assert [math.isnan(value) for value in largest] == [False, False, True, True]
    assert largest_values(record)["layers/activation_max_layer"] < 2


def test_heterogeneous_layers_have_null_entries() -> None:
    """Layers without a parameter or activation have None; MTP layers follow the other layers."""
    record = unsharded_record("moe")
    assert record["layers"] == 7
    values = record["values"]
    missing = {name: [value is None for value in values[name]] for name in values}
    assert missing["param_norm/mlp.gate"] == [False] + 6 * [True]
    assert missing["router_entropy"] == [True] + 6 * [False]
    assert missing["param_norm/mtp.projection"] == 6 * [True] + [False]
    assert missing["param_norm/attention.query"] == 7 * [False]
    loads = record["experts"]["router_load"]
    assert loads[0] is None and all(sum(load) == pytest.approx(1.0) for load in loads[1:])


def test_adapters_have_statistics_of_trainable_parameters_only() -> None:
    record = unsharded_record("adapters")
    names = {name.partition("/")[2] for name in record["values"] if name.startswith("param_norm/")}
    assert names and all("lora" in name or "adapter" in name or "_" in name for name in names)
    assert "attention.query" not in names and not record["outside"]


def test_statistics_without_activations() -> None:
    record = record_of(Case(2, 1, 2), config=LayerStatsConfig(every=1, activations=False))
    measures = {name.partition("/")[0] for name in record["values"]}
    assert "histograms" not in record and measures == {
        *(f"{tree}_{kind}" for tree in ("param", "grad", "update") for kind in ("norm", "rms")),
        "update_ratio",
    }
