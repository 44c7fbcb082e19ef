"""Every optimizer under several layouts, and from one to another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.trees import named
from maxpipe.train.optim import moments
from maxpipe.train.optimizers import OPTIMIZERS
from tests.cases import OPTIM, TOLERANCE, Case, steps_of
from tests.train.runs import Run, losses, saved
from tests.train.states import ROWS, same_bits, trained_on

ONE = Case(layers=5)
HERE = Case(2, 2, 2, fsdp=2, layers=5)
ELSEWHERE = Case(3, 1, 4, schedule="zb_h1", outside=1, data=2, layers=5)
OTHERS = sorted(set(OPTIMIZERS) - {"adamw"})
"""AdamW is what all other tests train with."""


@pytest.mark.parametrize("name", OTHERS)
def test_curves_and_state_are_the_same_under_every_layout(name: Any) -> None:
    optim = dataclasses.replace(OPTIM, name=name, learning_rate=3e-4)
    one, here, elsewhere = (steps_of(case, ROWS, optim=optim) for case in (ONE, HERE, ELSEWHERE))
    run = here.compile_train()
    state, losses_here = trained_on(here, run, here.init(), 0, 2)
    saved_here = jax.device_get(here.to_saved(state))
    # Sharded equals unsharded: losses, and what the optimizer keeps.
    state_one, losses_one = trained_on(one, one.compile_train(), one.init(), 0, 2)
    np.testing.assert_allclose(losses_here, losses_one, rtol=TOLERANCE)
    saved_one = named(jax.device_get(one.to_saved(state_one))["optimizer"])
    for key, leaf in named(saved_here["optimizer"]).items():
        scale = np.abs(saved_one[key]).max()
        np.testing.assert_allclose(leaf, saved_one[key], rtol=0, atol=TOLERANCE * scale)
    assert saved_here["optimizer"].keys() == set(OPTIMIZERS[name].trees)
    # Saved, and restored under another layout, it goes on.
    again = here.from_saved(saved_here, state.guard)
    assert all(same_bits(again, state).values())
    there = elsewhere.from_saved(saved_here, jax.device_get(state.guard))
    assert all(same_bits(elsewhere.to_saved(there), saved_here).values())
    _, wanted = trained_on(here, run, state, 2, 5)
    _, found = trained_on(elsewhere, elsewhere.compile_train(), there, 2, 5)
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)
    assert moments(optim, again.optimizer).keys() == set(OPTIMIZERS[name].trees)


@pytest.mark.slow
def test_a_run_keeps_its_optimizer(tiny: Path, run: Run, tmp_path: Path) -> None:
    arguments = (tiny, f"run.dir={tmp_path}", "eval.batches=0", "log.every=1")
    arguments = (*arguments, "optim.learning_rate=1e-3")
    run("train", *arguments, "train.steps=4", "optim.name=lion")
    assert saved(tmp_path / "run").state["optimizer"].keys() == {"mu"}
    output = run("train", *arguments, "train.steps=6", code=2)
    assert "optim.name = adamw\n" in output
    assert "must be lion, which step 4 was saved with" in output
    assert "Set optim.name=lion, or run.name to a new name, checkpoint.restore_from=run" in output
    layout = ("mesh.ici_stage=2", "mesh.ici_data=2")
    output = run("train", *arguments, "train.steps=6", "optim.name=lion", *layout)
    assert "after step 4" in output
    start = ("run.name=next", "checkpoint.restore_from=run", "checkpoint.restore=weights")
    output = run("train", *arguments, "train.steps=2", *start)
    assert "with the weights of run, step 6" in output
    assert losses(tmp_path / "next")[1] < losses(tmp_path / "run")[1]
