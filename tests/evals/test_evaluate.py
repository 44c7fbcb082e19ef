"""Validation loss: every target token counts once, under every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.config.schema import Config
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.evals.evaluate import _single_axis_config, evaluate
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.step.build import build_steps
from maxpipe.step.step import Steps
from tests.cases import keeping

SAME = 1e-5  # float32, relative
ROWS, TOKENS = 8, 16
MODEL = ModelConfig(
    num_layers=4,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_mlp=32,
    vocab_size=259,
    compute_dtype="float32",
)


def steps_of(mesh: MeshConfig, pipeline: PipelineConfig, datasets: Datasets) -> Steps:
    size = mesh.ici_stage * mesh.ici_data * mesh.ici_fsdp
    return build_steps(
        build_mesh(mesh, jax.devices()[:size]),
        model=MODEL,
        pipeline=pipeline,
        optim=OptimConfig(),
        train=TrainConfig(batch_size=ROWS, sequence_length=TOKENS),
        total_steps=1,
        rules=AxisRules.from_config(mesh),
        seed=0,
        byte_lengths=datasets.tokenizer.byte_lengths,
    )


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    """Documents of different lengths, so that sequences have padding and masked targets."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number}.txt").write_text("Zwölf Boxkämpfer "[: 3 + number % 15])
    source = DataConfig(source="text", path=str(folder), validation_fraction=0.5)
    return build_loaders(source, TokenizerConfig(), seed=0, batch_size=ROWS, sequence_length=TOKENS)


@pytest.fixture(scope="module")
def expected(datasets: Datasets) -> dict[str, float]:
    """Validation metrics of an unpipelined loop over layers."""
    decoder = Decoder(MODEL, AxisRules.from_config(MeshConfig()))
    steps = steps_of(MeshConfig(), PipelineConfig(), datasets)
    params: Any = steps.param_layout.unstack(steps.init().params)
    loss = jax.jit(decoder.loss)
    assert datasets.validation is not None
    nats = targets = size = 0.0
    for number in range(datasets.validation.num_batches):
        batch = datasets.validation.batch(number)
        count = float(batch["loss_mask"].sum())
        lengths = datasets.tokenizer.byte_lengths[batch["targets"]]
        nats += float(loss(params, batch)) * count
        targets += count
        size += float((lengths * batch["loss_mask"]).sum())
    return {"eval/loss": nats / targets, "eval/nats_per_byte": nats / size}


def test_batches_have_padding_rows_and_varying_target_counts(datasets: Datasets):
    assert datasets.validation is not None
    masks = [
        datasets.validation.batch(number)["loss_mask"]
        for number in range(datasets.validation.num_batches)
    ]
    assert len(masks) > 1 and len({float(mask.sum()) for mask in masks}) > 1
    assert (masks[-1].sum(axis=1) == 0).any(), "no sequence consists only of padding"


LAYOUTS = {
    "one device": (MeshConfig(), PipelineConfig()),
    "padded layers": (
        MeshConfig(ici_stage=3),
        PipelineConfig(schedule="circular", microbatches=4, repeats=2),
    ),
    "stage-data-repeats": (
        MeshConfig(ici_stage=2, ici_data=2),
        PipelineConfig(microbatches=2, repeats=2),
    ),
    "stage-fsdp": (
        MeshConfig(ici_stage=4, ici_fsdp=2),
        PipelineConfig(schedule="1f1b", microbatches=4),
    ),
    "V": (
        MeshConfig(ici_stage=2),
        PipelineConfig(schedule="zb_v", repeats=2, microbatches=4),
    ),
    "fsdp": (MeshConfig(ici_fsdp=4), PipelineConfig(schedule="gpipe", weight_gather="step")),
    "visits": (
        MeshConfig(ici_fsdp=2),
        PipelineConfig(repeats=3, microbatches=2, weight_gather="window", idle="compute"),
    ),
    "a layer outside": (
        MeshConfig(ici_stage=3),
        PipelineConfig(microbatches=4, prologue_layers=1),
    ),
    "layers outside-fsdp": (
        MeshConfig(ici_stage=2, ici_fsdp=2),
        PipelineConfig(schedule="zb_h1", microbatches=4, prologue_layers=2),
    ),
}


@pytest.mark.parametrize("layout", keeping(LAYOUTS, 1, 4, 8))
def test_loss_equals_unpipelined_loop(layout: str, datasets: Datasets, expected: dict[str, float]):
    steps = steps_of(*LAYOUTS[layout], datasets)
    loader = datasets.validation
    assert loader is not None
    batches = [
        jax.device_put(loader.batch(number), steps.batch_sharding)
        for number in range(loader.num_batches)
    ]
    found = evaluate(steps.compile_eval(), steps.init().params, batches)
    assert found is not None and found.metrics == pytest.approx(expected, rel=SAME)


@pytest.mark.parametrize("rows", keeping([4, 12, 28], 2))
def test_batch_size_can_be_any_multiple_of_device_count(
    rows: int, datasets: Datasets, expected: dict[str, float]
) -> None:
    """28 sequences on 4 devices are 7 per device, which 2 microbatches do not divide."""
    mesh = MeshConfig(ici_stage=2, ici_fsdp=4)
    steps = steps_of(mesh, PipelineConfig(schedule="1f1b", microbatches=2), datasets)
    loader = datasets.validation
    assert loader is not None
    sequences = loader.sequences
    numbers = range(-(-len(sequences) // rows) * rows)
    examples = [sequences[i] if i < len(sequences) else sequences.padding() for i in numbers]
    batches = []
    for start in range(0, len(examples), rows):
        part = examples[start : start + rows]
        batch = {name: np.stack([example[name] for example in part]) for name in part[0]}
        batch["example_ids"] = np.arange(rows, dtype=np.int32)
        batches.append(jax.device_put(batch, steps.batch_sharding))
    found = evaluate(steps.compile_eval(rows), steps.init().params, batches)
    assert found is not None and found.metrics == pytest.approx(expected, rel=SAME)


def sums(loss: float, targets: float, size: float) -> Mapping[str, jax.Array]:
    values = {"loss": loss, "targets": targets, "bytes": size}
    return {name: jax.numpy.float32(value) for name, value in values.items()}


def test_batches_are_weighted_by_target_count():
    found = evaluate(lambda params, batch: sums(*batch), None, [(6.0, 2.0, 4.0), (2.0, 6.0, 6.0)])
    assert found is not None and found.metrics == {"eval/loss": 1.0, "eval/nats_per_byte": 0.8}
    assert (found.loss, found.targets, found.bytes) == (8.0, 8.0, 10.0)


def test_loss_is_nan_without_targets():
    found = evaluate(lambda params, batch: sums(*batch), None, [(0.0, 0.0, 0.0)])
    assert found is not None and found.metrics.keys() == {"eval/loss", "eval/nats_per_byte"}
    assert all(np.isnan(value) for value in found.metrics.values())  # 0 would be the best loss
    assert evaluate(lambda params, batch: sums(*batch), None, []) == found


@pytest.mark.fault("F8")
def test_stop_request_aborts_evaluation():
    asked = iter([False, False, True])
    taken = []

    def step(params: object, batch: tuple[float, float, float]):
        taken.append(batch)
        return sums(*batch)

    batches = [(1.0, 1.0, 1.0)] * 10
    assert evaluate(step, None, batches, lambda: next(asked)) is None
    assert len(taken) == 3


def test_sum_over_many_batches_is_exact():
    count = 50
    batches = [(float(np.float32(0.1)), 1.0, 1.0)] * count
    found = evaluate(lambda params, batch: sums(*batch), None, batches)
    assert found is not None and found.metrics["eval/loss"] == float(np.float32(0.1))


def test_single_axis_config_keeps_per_device_microbatch_size() -> None:
    """8 sequences in 2 microbatches on 2 expert x 2 data devices are 1 each per device."""
    config = Config(
        model=MODEL,
        mesh=MeshConfig(ici_expert=2, ici_data=2),
        pipeline=PipelineConfig(microbatches=2),
        train=TrainConfig(batch_size=ROWS, sequence_length=TOKENS),
    )
    assert _single_axis_config(config, "fsdp", 1).pipeline.microbatches == ROWS
    assert _single_axis_config(config, "data", 2).pipeline.microbatches == ROWS // 2
