"""Multi-token prediction heads, layer norms and capped logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.gemma3 import Gemma3Config
from maxpipe.models.registry import describe
from maxpipe.nn import decoder
from maxpipe.pipeline.mtp import shift_targets
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of, with_layer_norms
from tests.pipeline import test_engine
from tests.pipeline.test_engine import check_gradients

GEMMA = Gemma3Config(
    sliding_window=3, sliding_window_pattern=3, rope_factor=2.0, query_pre_attn_scalar=7.0
)
CASES = [
    Case(1, 2, 3, ahead=1, fsdp=2, data=2),
    Case(2, 1, 5, ahead=2, schedule="zb_h1", fsdp=2, tied=True, remat="none"),
    Case(2, 2, 4, ahead=3, outside=1, gather="step", tensor=2, fsdp=2, dropout=0.3),
    Case(3, 3, 4, ahead=2, gather="window", fsdp=2, layers=9, idle="compute"),
    Case(4, 1, 5, ahead=7, schedule="gpipe", data=2, own=GEMMA, tied=True),
]


@pytest.mark.parametrize("case", keeping(CASES, 0), ids=str)
def test_mtp_heads_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


@pytest.mark.parametrize("distance", [1, 3, 6])
def test_shifted_targets_stay_within_segment_and_sequence(distance: int) -> None:
    random = np.random.default_rng(2)
    rows, tokens = 5, 7
    inputs = {
        "targets": random.integers(0, 50, (rows, tokens)),
        "segment_ids": np.sort(random.integers(1, 4, (rows, tokens)), axis=1),
        "loss_mask": random.integers(0, 2, (rows, tokens)).astype(np.float32),
    }
    targets, mask = shift_targets(jax.tree.map(jnp.asarray, inputs), jnp.int32(distance))
    for row in range(rows):
        for place in range(tokens):
            later = place + distance
            counts = later < tokens and (
                inputs["segment_ids"][row, place] == inputs["segment_ids"][row, later]
            )
            assert mask[row, place] == (inputs["loss_mask"][row, later] if counts else 0)
            if counts:
                assert targets[row, place] == inputs["targets"][row, later]


def test_evaluation_ignores_mtp_heads() -> None:
    case = Case(2, 1, 2, ahead=2)
    steps = steps_of(case, case.rows)
    batch = batch_of(case.rows)
    params = steps.init().params
    params["ahead"] = jax.tree.map(jnp.ones_like, params["ahead"])
    placed = jax.device_put(params, steps.state_sharding.params)
    found = steps.compile_eval()(placed, jax.device_put(batch, steps.batch_sharding))
    parts = steps.param_layout
    wanted = jax.jit(parts.decoder.loss)(jax.device_get(jax.jit(parts.unstack)(params)), batch)
    np.testing.assert_allclose(found["loss"] / found["targets"], wanted, rtol=TOLERANCE)


@pytest.fixture
def other_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give models layer norms and capped logits, a combination that no family has."""

    def changed(config: decoder.ModelConfig) -> decoder.Model:
        return with_layer_norms(describe(config), final_logit_softcapping=0.7, embed_scale=3.0)

    monkeypatch.setattr(decoder, "describe", changed)
    test_engine._plain.cache_clear()  # decoders with equal configs share a cache entry
    yield
    test_engine._plain.cache_clear()


@pytest.mark.usefixtures("other_ends")
@pytest.mark.parametrize(
    "case",
    keeping(
        [
            Case(2, 2, 5, fsdp=2, tensor=2, ahead=2),
            Case(3, 1, 4, schedule="zb_h1", remat="names", tied=True, data=2),
        ],
        1,
    ),
    ids=str,
)
def test_layer_norms_and_logit_softcap_match_unpipelined_model(case: Case) -> None:
    check_gradients(replace(case, layers=4))


@pytest.mark.usefixtures("other_ends")
def test_norm_parameters_have_no_weight_decay() -> None:
    parts = steps_of(Case(ahead=1), 2).param_layout
    targets = parts.trainable_params(OptimConfig()).items()
    names = {".".join(path): target.decay for path, target in targets}
    assert not names["final_norm.bias"] and not names["final_norm.scale"]
    assert (
        not names["layers.layer.mlp_norm.bias"] and not names["layers.layer.mlp_after_norm.scale"]
    )
    assert names["ahead.transform"] and names["layers.layer.mlp.up"]
