"""Runs with frozen parameters."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.models.param_names import declared, trained
from maxpipe.models.registry import describe
from tests.cases import TOLERANCE, Case, steps_of
from tests.step.states import ROWS, same_bits, trained_on
from tests.train.runs import Run, losses, saved

FROZEN = ("embedding", "layers.attention.*", "layers.mlp_norm.scale")
HERE = Case(2, 2, 2, fsdp=2, layers=5, frozen=FROZEN)
ELSEWHERE = Case(3, 1, 4, schedule="zb_h1", outside=1, data=2, layers=5, frozen=FROZEN)


@pytest.mark.layouts
def test_frozen_parameters_are_unchanged_and_have_no_optimizer_state() -> None:
    steps = steps_of(HERE, ROWS)
    run, names = steps.compile_train(), trained(steps.param_layout.decoder.model)
    begun = steps.to_saved(steps.init())
    state, wanted = trained_on(steps, run, steps.init(), 0, 2)
    saved = steps.to_saved(state)
    kept = same_bits(saved["params"], begun["params"])
    assert kept == {name: name not in names for name in kept}
    assert not names.isdisjoint(kept) and any(kept.values())
    for tree in (
        *saved["optimizer"].values(),
        *steps.abstract_saved["optimizer"].values(),
    ):
        assert leaves_by_name(tree).keys() == names
    # Weight decay does not change frozen parameters, either.
    assert steps.replica_check.differences(state) == []
    # The saved state is complete: resuming is bitwise equal here and close in another layout.
    again = steps.from_saved(jax.device_get(saved), state.guard)
    assert all(same_bits(again, state).values())
    others = steps_of(ELSEWHERE, ROWS)
    there = others.from_saved(jax.device_get(saved), jax.device_get(state.guard))
    assert all(same_bits(others.to_saved(there), saved).values())
    (end, wanted), (ended, found) = (
        trained_on(steps, run, state, 2, 4),
        trained_on(others, others.compile_train(), there, 2, 4),
    )
    assert all(same_bits(trained_on(steps, run, again, 2, 4)[0], end).values())
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)
    kept = same_bits(others.to_saved(ended)["params"], begun["params"])
    assert kept == {name: name not in names for name in kept}


@pytest.mark.long
def test_resume_with_other_frozen_parameters_is_rejected(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    frozen = "model.frozen=[layers.*,head]"
    arguments = (tiny, f"run.dir={tmp_path}", "eval.batches=0", "log.every=1")
    output = run("train", *arguments, "train.steps=4", frozen)
    assert "(4,160 trained)" in output, output
    state = saved(tmp_path / "run").state
    assert "layers" in state["params"]
    for tree in state["optimizer"].values():
        assert leaves_by_name(tree).keys() == {"embedding", "final_norm.scale"}
    # Other patterns for the same parameters, in another layout.
    same = "model.frozen=[head,layers.mlp*,layers.attention*]"
    output = run("train", *arguments, "train.steps=6", same, "mesh.ici_stage=2", "mesh.ici_data=2")
    assert "after step 4" in output
    output = run("train", *arguments, "train.steps=8", "model.frozen=[embedding,head]", code=2)
    assert "command line: model.frozen = [embedding, head]  [MP-CKPT-007]\n" in output
    assert "then: embedding now frozen; layers.attention.key, " in output
    assert "Set model.frozen=[head,layers.mlp*,layers.attention*], or run.name" in output
    action = ("run.name=next", "checkpoint.restore_from=run", "checkpoint.restore=weights")
    output = run("train", *arguments, "train.steps=2", *action, "model.frozen=[]")
    assert "with the weights of run, step 6" in output
    assert losses(tmp_path / "next")[1] < losses(tmp_path / "run")[1]


def test_frozen_patterns_match_checkpoint_names() -> None:
    model = HERE.model
    names = set(declared(describe(model)))
    assert {"embedding", "final_norm.scale", "head", "layers.attention.query"} < names
    frozen = names - trained(describe(model))
    assert frozen == {
        "embedding",
        "layers.mlp_norm.scale",
        *(f"layers.attention.{name}" for name in ("query", "key", "value", "out")),
    }
