"""Heterogeneous layers in counts, sizes and predictions, which are sums over layer types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from maxpipe.config.schema import Config
from maxpipe.hardware import published_hardware
from maxpipe.models import count
from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.registry import describe
from maxpipe.models.spec import Branch, Dims, LayerType, Matmul, Model, Operation
from maxpipe.planner import sizes as sizes_module
from maxpipe.planner.cost import predict_cost
from maxpipe.planner.cost_model import CostModel
from maxpipe.planner.memory import buffers, predict_memory, state
from maxpipe.planner.memory_terms import optimizer_bytes
from maxpipe.planner.sizes import Sizes, build_schedule
from tests.planner.test_memory import config_of

PATTERN = ("wide",) * 3 + ("layer",) * 5 + ("wide",)
"""Mixes the standard layer type with one whose MLP is four times as wide."""
MESH, PIPELINE = {"ici_stage": 2, "ici_fsdp": 2}, {"microbatches": 4}


@dataclass(frozen=True)
class Routed(MLP):
    """MLP of which each token needs a quarter of the weights, although all are multiplied."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the matmuls of the MLP."""
        return tuple(Matmul(name, needed=0.25) for name in ("gate", "up", "down"))

    @property
    def losses(self) -> Mapping[str, float]:
        """Return the weight of one scalar loss."""
        return {"size": 0.1}

    @property
    def statistics(self) -> Mapping[str, Dims]:
        """Return statistics with 15 values per layer."""
        return {"square": ((3, "embed"), (5, "mlp"))}


def heterogeneous_model(config: ModelConfig) -> Model:
    """Return the config's model with wider MLPs in some layers."""
    plain = describe(replace(config, num_layers=len(PATTERN)))
    attention, mlp = plain.layer_types["layer"].branches
    wide = Branch("mlp", Routed(config.d_model, 4 * config.d_mlp, 1.0), mlp.pre_norm)
    kinds = {"wide": LayerType((attention, wide)), "layer": plain.layer_types["layer"]}
    return Model(kinds, PATTERN, plain.ends)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    models: dict[ModelConfig, Model] = {}
    cached = lambda model: models.setdefault(model, heterogeneous_model(model))  # noqa: E731
    monkeypatch.setattr(sizes_module, "describe", cached)
    return config_of({"num_layers": len(PATTERN)}, MESH, PIPELINE)


def homogeneous_model(kind: str, config: Config, layers: int) -> Model:
    """Return the same model with layers of one type."""
    model = heterogeneous_model(config.model)
    return Model({kind: model.layer_types[kind]}, (kind,) * layers, model.ends)


def test_counts_are_sums_over_layers(config: Config) -> None:
    model = heterogeneous_model(config.model)
    one = {name: count.layer_params(kind) for name, kind in model.layer_types.items()}
    empty = count.num_params(homogeneous_model("layer", config, 1)) - one["layer"]
    assert count.num_params(model) == empty + 4 * one["wide"] + 5 * one["layer"]
    hidden = 3 * config.model.d_model * 4 * config.model.d_mlp
    # Three quarters of a wide MLP are computed but not needed.
    wasted = 2 * 4 * 0.75 * hidden
    assert count.active_params(model) == count.num_params(model) - wasted / 2
    pairs = 2 * 2 * 9 * config.model.num_heads * config.model.head_dim * (32 - 16)
    needed = count.forward_flops_per_token(model, 32)
    head = 2 * count.size(model.ends.head or model.ends.embedding)
    assert sum(count.layer_costs(model, 32)) + head == needed + wasted + pairs


def test_attention_window_reduces_needed_but_not_computed_flops(config: Config) -> None:
    plain = describe(config.model)
    (kind,) = plain.layer_types.values()
    (scores,) = (each for each in kind.parts["attention"].operations if hasattr(each, "window"))

    @dataclass(frozen=True)
    class Windowed:
        inner: Any

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        @property
        def operations(self) -> tuple[Operation, ...]:
            return (scores._replace(window="window"),)  # type: ignore[union-attr]

    attention: Any = Windowed(kind.parts["attention"])
    branch = replace(kind.branches[0], part=attention)
    window = (8.0, 0.0)
    model = Model({"layer": LayerType((branch,))}, ("layer",) * 2, plain.ends, {"window": window})
    full = replace(model, values={"window": (0.0, 0.0)})
    heads = 4 * config.model.num_heads * config.model.head_dim
    # Each of 32 queries attends to at most 8 keys; without a window the mean is half of 32.
    fewer = count.forward_flops_per_token(full, 32) - count.forward_flops_per_token(model, 32)
    assert fewer == heads * (16 - (8 - 8**2 / 64))
    assert count.layer_costs(model, 32) == count.layer_costs(full, 32)


def test_layer_partition_is_balanced_by_cost(config: Config) -> None:
    costs = count.layer_costs(heterogeneous_model(config.model), config.train.sequence_length)
    assert len({*costs}) == 2 and costs[0] > 2 * costs[3]
    assert Sizes(config).layers.partition == (3, 6)
    outside = replace(config.pipeline, prologue_layers=1)
    fewer = Sizes(replace(config, pipeline=outside))
    assert sum(fewer.layers.partition) == 8 and fewer.layers.prologue == {"wide": 1}


@pytest.mark.parametrize("remat", ["full", "chunk", "names", "none"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_memory_is_sum_over_layer_types(config: Config, schedule: str, remat: str) -> None:
    pipeline = replace(config.pipeline, remat=remat, schedule=schedule, weight_gather="step")
    config = replace(config, pipeline=pipeline)
    sizes, table = Sizes(config), build_schedule(config)
    assert (
        sizes.layers.chunk_slots == {"wide": 3, "layer": 5}
        and sizes.layers.slots == sizes.layers.chunk_slots
    )
    found = buffers(sizes, table)
    kept = {kind: sizes.activations.saved_bytes(kind)[0] for kind in sizes.layers.chunk_slots}
    chunk = (
        2.0 * sizes.activations.hidden if remat == "chunk" else 3 * kept["wide"] + 5 * kept["layer"]
    )
    assert found["stash"] == table.num_stash * chunk
    assert found["reports"] == 4 * (1 + 3 * 15)
    if schedule == "zb_h1":
        deferred = 3 * sizes.activations.deferred_bytes(
            "wide"
        ) + 5 * sizes.activations.deferred_bytes("layer")
        assert found["deferred"] == table.num_deferred * deferred
    assert (kept["wide"] > kept["layer"]) == (remat in ("names", "none"))
    parameters = 3 * sizes.params.layer_elements("wide") + 5 * sizes.params.layer_elements("layer")
    tables = (
        sizes.params.embedding_elements()
        + sizes.params.head_elements()
        + sizes.params.norm_elements
    )
    # Two moments in float32.
    assert optimizer_bytes(sizes) == 2 * 4 * (parameters + tables)
    assert state(sizes)["state"] == 3 * 4 * (parameters + tables) + 12
    # Working memory is that of the larger layer type.
    working = predict_memory(sizes, table, platform="tpu").terms["layer"]
    assert working >= 3 * 2 * sizes.activations.elements(((4 * config.model.d_mlp, "mlp"),))


def test_tick_time_is_sum_of_layer_times(config: Config) -> None:
    hardware = published_hardware()["v5p"]
    model = CostModel(Sizes(config), hardware)
    wide, usual = model.layers["wide"].slot("F"), model.layers["layer"].slot("F")
    assert wide > usual
    assert model.slots("F", {"wide": 2, "layer": 3}) == pytest.approx(2 * wide + 3 * usual)
    found = predict_cost(Sizes(config), build_schedule(config), hardware)
    slots = [model.slots(action, {"wide": 4, "layer": 5}) for action in "FB"]
    assert found.parts["layers"] == pytest.approx(4 * sum(slots) / 2)


def _computing(config: Config, schedule: str, devices: str) -> tuple[float, float]:
    """Return seconds of layers with `pipeline.idle` = skip and = compute."""
    found = []
    for idle in ("skip", "compute"):
        run = replace(config, pipeline=replace(config.pipeline, schedule=schedule, idle=idle))
        shared = 2.0 if devices == "cpu" else 0.0
        hardware = replace(published_hardware()[devices], shared_by=shared, measured="now")
        parts = predict_cost(Sizes(run), build_schedule(run), hardware).parts
        found.append(sum(parts.get(name, 0.0) for name in ("layers", "exchange", "bubble")))
    return found[0], found[1]


def test_idle_compute_slows_devices_that_share_cores() -> None:
    # With two stages, 4 microbatches take 5 ticks, of which each stage needs 4.
    run = config_of({"num_layers": 8}, MESH, PIPELINE)
    skips, computes = _computing(run, "1f1b", "cpu")
    assert computes == pytest.approx(5 / 4 * skips)
    skips, computes = _computing(run, "1f1b", "v5p")  # other stages wait for the busy one anyway
    assert computes == pytest.approx(skips)
    # In a mixed tick, all stages run every action that any stage has. The two stages of zb_h1 share
    # one of their 8 forward ticks, and none of their ticks of I and W.
    model = CostModel(Sizes(run), replace(published_hardware()["v5p"], measured="now"))
    forward, backward, weights = (model.slots(action, {"layer": 4}) for action in "FIW")
    _, computes = _computing(run, "zb_h1", "v5p")
    assert computes == pytest.approx(7 * forward + 8 * backward + 8 * weights)


def test_idle_compute_runs_every_layer_type_at_each_position(config: Config) -> None:
    model = CostModel(Sizes(config), published_hardware()["v5p"])
    assert model.sizes.layers.chunks == ({"wide": 3}, {"layer": 5, "wide": 1})
    # The wide layer of the last chunk is at its end, where the first chunk has none.
    hardware = replace(model.hardware, measured="now")
    model = CostModel(model.sizes, hardware)
    first, last, both = (
        sum(model.slots(action, layers) for action in "FB")
        for layers in ({"wide": 3}, {"layer": 5, "wide": 1}, {"wide": 4, "layer": 5})
    )
    # In the first and the last of 5 ticks, only one stage is busy.
    skips, computes = _computing(config, "1f1b", "v5p")
    assert skips == pytest.approx(first + last + 3 * max(first, last))
    assert computes == pytest.approx(first + last + 3 * both)
