"""Memory of a train step by kind."""

from __future__ import annotations

import jax
import pytest

from maxpipe.profiles.memory import memory_by_kind, memory_lines
from tests.profiles.planted import MODEL, planted_step


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_memory_of_a_step_is_divided_by_kind(schedule: str, monkeypatch: pytest.MonkeyPatch):
    step = planted_step(monkeypatch, schedule=schedule, stages=4, repeats=1, remat="full")
    stats = step.program.memory_analysis()
    state = step.steps.abstract_state
    arguments = {
        "parameters": jax.tree.leaves(state.params),
        "optimizer state": jax.tree.leaves((state.optimizer, state.guard, state.step)),
        "batch": jax.tree.leaves(step.steps.abstract_batch()),
    }
    sizes = memory_by_kind(arguments, step.program)
    given = sum(sizes[kind] for kind in arguments)
    assert given == pytest.approx(stats.argument_size_in_bytes, rel=0.02)
    temporary = sum(
        size for kind, size in sizes.items() if kind not in (*arguments, "outputs", "program")
    )
    assert temporary == pytest.approx(stats.temp_size_in_bytes)
    # each stage saves the inputs of its chunks' layers, [slots, layers, 1, 128, 128] in float32
    depth = step.steps.train_schedule.num_stash * 2
    saved = depth * 128 * MODEL.d_model * 4
    assert sizes["saved activations"] == pytest.approx(saved, rel=0.02)
    # float32 gradients of the parameters on one of four stages
    gradients = sum(leaf.size for leaf in jax.tree.leaves(state.params["layers"])) * 4 / 4
    assert sizes["gradients"] == pytest.approx(gradients, rel=0.1)
    if schedule == "zb_h1":
        assert sizes["deferred weight gradients"] > 0
    assert memory_lines(sizes)[0].startswith("memory of one device: ")
