"""Per-source losses of a data mixture match the unpipelined model on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.schedule.catalog import SCHEDULES
from maxpipe.step.step import BY_SOURCE
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of
from tests.pipeline.test_engine import check_gradients, plain_gradients
from tests.pipeline.test_families import GROUPED

CASES = [
    *(
        Case(2, schedule.repeats or 2, 4, schedule=name, sources=3, layers=4)
        for name, schedule in SCHEDULES.items()
    ),
    Case(1, 1, 2, sources=4, fsdp=2, data=2),
    Case(2, 2, 3, sources=3, tensor=2, fsdp=2, gather="step", tied=True),
    Case(2, 1, 3, sources=5, context=2, data=2, schedule="1f1b", dropout=0.3),
    Case(2, 1, 3, sources=3, loss_block=5, schedule="zb_h1", remat="names", fsdp=2),
    Case(2, 2, 4, sources=3, ahead=2, outside=1, gather="window", idle="compute"),
    Case(2, 1, 4, sources=2, own=replace(GROUPED, num_experts=6), expert=2, fsdp=2),
    Case(2, 1, 3, sources=3, loss_block=5, shard_mode="explicit", data=2),
    Case(2, 1, 3, sources=3, loss_block=4, split="sequence", tensor=4, delayed=False),
    Case(2, 1, 3, sources=3, frozen=("head", "final_norm*"), dtype="bfloat16", data=2),
]


def plain_sums(steps: Any, batch: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return parameters, and loss sum and target count of each source, summed by sequence."""
    params: Any = None
    nats, targets = np.zeros(steps.num_sources), np.zeros(steps.num_sources)
    decoder = replace(
        steps.param_layout.decoder, config=replace(steps.param_layout.decoder.config, frozen=[])
    )
    for number, source in enumerate(batch["source_ids"].tolist()):
        row = {name: each[number : number + 1] for name, each in batch.items()}
        if source >= 0:
            params, (loss, _, _), _ = plain_gradients(decoder, row, None)
            targets[source] += row["loss_mask"].sum()
            nats[source] += float(loss) * row["loss_mask"].sum()
    return params, nats, targets


@pytest.mark.parametrize("case", keeping(CASES, 18), ids=str)
def test_per_source_losses_match_unpipelined_model(case: Case) -> None:
    exact = replace(case, dropout=0.0, dtype="float32")
    lengths = np.arange(exact.model.vocab_size, dtype=np.int32) % 5
    steps = replace(steps_of(exact, case.rows), byte_lengths=lengths)
    batch = batch_of(case.rows, case=case)
    assert -1 in batch["source_ids"] and case.sources - 1 not in batch["source_ids"]
    params, nats, targets = plain_sums(steps, batch)
    stacked = jax.jit(steps.param_layout.stack)(params)
    params = jax.device_put(stacked, steps.state_sharding.params)
    state, placed = (
        steps.init()._replace(params=params),
        jax.device_put(batch, steps.batch_sharding),
    )
    evaluated = steps.compile_eval()(state.params, placed)
    _, metrics = steps.compile_train()(state, placed)
    for found in (metrics[BY_SOURCE[0]], evaluated["loss"]):
        np.testing.assert_allclose(found, nats, rtol=TOLERANCE)
    for found in (metrics[BY_SOURCE[1]], evaluated["targets"]):
        np.testing.assert_array_equal(found, targets)
    lengths = lengths[batch["targets"]] * batch["loss_mask"]
    wanted = [lengths[batch["source_ids"] == each].sum() for each in range(case.sources)]
    np.testing.assert_array_equal(evaluated["bytes"], wanted)
    # Sources add up to the total, and a source without sequences has zero loss and targets.
    whole = nats.sum() / targets.sum()
    np.testing.assert_allclose(metrics["train/loss"], whole, rtol=TOLERANCE)
    assert metrics[BY_SOURCE[0]][-1] == metrics[BY_SOURCE[1]][-1] == 0


GRADIENTS = [case for case in CASES if case.shard_mode == "auto" and case.dtype == "float32"]


@pytest.mark.parametrize("case", keeping(GRADIENTS, 17), ids=str)
def test_gradients_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


def test_steps_without_mixture_have_no_source_arrays() -> None:
    case = Case(2, 1, 2)
    steps = steps_of(case, case.rows)
    assert "source_ids" not in steps.abstract_batch()
    mixed = steps_of(replace(case, sources=3), case.rows)
    assert mixed.abstract_batch()["source_ids"].shape == (case.rows,)
    assert BY_SOURCE[0] not in steps.lower_train().out_info[1]


@pytest.mark.layouts
def test_per_source_losses_add_little_compute_and_memory() -> None:
    """Compares the compiler's FLOP count and memory."""
    case = Case(2, 2, 4, data=2)
    found = []
    for sources in (0, 4):
        each = replace(case, sources=sources)
        compiled = steps_of(each, each.rows).compile_train()
        memory = compiled.memory_analysis()
        found.append((compiled.cost_analysis()["flops"], memory.temp_size_in_bytes))
    (before, room), (after, more) = found
    assert after < 1.02 * before and more < 1.02 * room + 4096
