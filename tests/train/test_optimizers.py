"""Every optimizer across layouts, and checkpoints restored under another layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.config.sections.optim import LRMultiplierConfig, OptimConfig, WeightDecayConfig
from maxpipe.huggingface.safetensors import SafetensorsReader
from tests.cases import OPTIM, TOLERANCE, Case, keeping, steps_of
from tests.pipeline.test_families import QWEN3_MOE
from tests.step.states import ROWS, same_bits, trained_on
from tests.train.runs import Run, losses, saved

ONE = Case(layers=5)
HERE = Case(2, 2, 2, fsdp=2, layers=5)
ELSEWHERE = Case(3, 1, 4, schedule="zb_h1", outside=1, data=2, layers=5)
MOE = dataclasses.replace(QWEN3_MOE, num_experts=4)
DECAYS = [
    WeightDecayConfig(pattern="embedding", weight_decay=0),
    WeightDecayConfig(pattern="*norm*", weight_decay=0.5),
]
MULTIPLIERS = [
    LRMultiplierConfig(pattern="layers.attention.*", multiplier=0.5),
    LRMultiplierConfig(pattern="head", multiplier=0.1),
]
KINDS: dict[str, tuple[dict[str, Any], set[str], tuple[Case, Case, Case]]] = {
    "lion": ({}, {"mu"}, (ONE, HERE, ELSEWHERE)),
    "adafactor": ({}, {"nu", "rows", "columns"}, (ONE, HERE, ELSEWHERE)),
    "muon": ({}, {"mu", "nu"}, (ONE, HERE, ELSEWHERE)),
    "adamw": (
        {"ema_decay": 0.9, "weight_decays": DECAYS, "lr_multipliers": MULTIPLIERS},
        {"mu", "nu", "average"},
        (ONE, HERE, ELSEWHERE),
    ),
}
"""Config changes, keys of the optimizer state, and layouts: one device and two others."""


@pytest.mark.layouts
@pytest.mark.parametrize("name", KINDS)
def test_losses_and_optimizer_state_match_across_layouts(name: Any) -> None:
    changes, kept, cases = KINDS[name]
    check_layouts(dataclasses.replace(OPTIM, name=name, learning_rate=3e-4, **changes), kept, cases)


def check_layouts(optim: OptimConfig, kept: set[str], cases: tuple[Case, Case, Case]) -> None:
    one, here = (steps_of(case, ROWS, optim=optim) for case in cases[:2])
    elsewhere = one if cases[2] == cases[0] else steps_of(cases[2], ROWS, optim=optim)
    run, run_one = here.compile_train(), one.compile_train()
    run_elsewhere = run_one if elsewhere is one else elsewhere.compile_train()
    state, losses_here = trained_on(here, run, here.init(), 0, 2)
    saved_here = jax.device_get(here.to_saved(state))
    # Losses and optimizer state equal those of the unsharded run.
    state_one, losses_one = trained_on(one, run_one, one.init(), 0, 2)
    np.testing.assert_allclose(losses_here, losses_one, rtol=TOLERANCE)
    saved_one = leaves_by_name(jax.device_get(one.to_saved(state_one))["optimizer"])
    for key, leaf in leaves_by_name(saved_here["optimizer"]).items():
        scale = np.abs(saved_one[key]).max()
        np.testing.assert_allclose(leaf, saved_one[key], rtol=0, atol=TOLERANCE * scale)
    assert saved_here["optimizer"].keys() == kept
    # Save, then restore under another layout and continue.
    again = here.from_saved(saved_here, state.guard)
    assert all(same_bits(again, state).values())
    there = elsewhere.from_saved(saved_here, jax.device_get(state.guard))
    assert all(same_bits(elsewhere.to_saved(there), saved_here).values())
    _, wanted = trained_on(here, run, state, 2, 5)
    _, found = trained_on(elsewhere, run_elsewhere, there, 2, 5)
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)


@pytest.mark.layouts
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_expert_matrices_with_explicit_sharding(name: Any) -> None:
    """Each expert is a separate matrix; experts are sharded over their own axis."""
    optim = dataclasses.replace(OPTIM, name=name, learning_rate=3e-4)
    here = Case(2, 1, 2, expert=2, tensor=2, layers=4, own=MOE, shard_mode="explicit")
    kept = {"adafactor": {"nu", "rows", "columns"}, "muon": {"mu", "nu"}}[name]
    check_layouts(optim, kept, (Case(layers=4, own=MOE), here, Case(layers=4, own=MOE, fsdp=2)))


ZERO = [
    (Case(2, 1, 2, data=2, fsdp=2, layers=5, outside=1), ONE),
    # Prologue layers; tensor and tied embeddings; explicit experts; multi-token prediction.
    (Case(2, 1, 2, data=2, fsdp=2, layers=5, outside=1), Case(1, 1, 2, data=4, layers=5)),
    (Case(2, 2, 2, data=2, tensor=2, layers=4, tied=True), Case(layers=4, data=2, tied=True)),
    (
        Case(2, 1, 2, data=2, expert=2, layers=4, own=MOE, shard_mode="explicit"),
        Case(1, 1, 2, layers=4, own=MOE, fsdp=2, data=2),
    ),
    (
        Case(2, 1, 2, data=2, layers=4, ahead=2, gather="step", schedule="zb_h1"),
        Case(layers=4, ahead=2, data=2, fsdp=2),
    ),
]


@pytest.mark.parametrize(("here", "elsewhere"), keeping(ZERO, 0), ids=str)
@pytest.mark.parametrize("name", keeping(["adamw", "adafactor", "muon"], 2))
def test_zero1_matches_unsharded_state(name: Any, here: Case, elsewhere: Case) -> None:
    """The first case also has EMA parameters, and learning rates and decays by pattern."""
    more = KINDS["adamw"][0] if elsewhere == ONE else {}
    optim = dataclasses.replace(OPTIM, name=name, learning_rate=3e-4, zero1=True, **more)
    one = Case(layers=here.layers, own=here.own, tied=here.tied, ahead=here.ahead)
    kept = {"adamw": {"mu", "nu"}, "adafactor": {"nu", "rows", "columns"}, "muon": {"mu", "nu"}}
    check_layouts(optim, kept[name] | ({"average"} if more else set()), (one, here, elsewhere))


@pytest.mark.parametrize("name", keeping(["adamw", "lion", "adafactor", "muon"], 2))
def test_state_offload_is_bitwise_equal(name: Any) -> None:
    case = Case(2, 2, 2, fsdp=2, data=2, layers=5)
    found, first = [], None
    for offload in (True, False):
        optim = dataclasses.replace(
            OPTIM, name=name, offload_state=offload, ema_decay=0.9, zero1=True
        )
        steps = steps_of(case, ROWS, optim=optim)
        first = first or jax.device_get(steps.init())
        begun = jax.device_put(first, steps.state_sharding)
        state, losses_of = trained_on(steps, steps.compile_train(), begun, 0, 3)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer.trees)}
        assert kinds == {"pinned_host" if offload else "device"}
        saved_state = jax.device_get(steps.to_saved(state))
        again = steps.from_saved(saved_state, state.guard)
        assert all(same_bits(again, state).values())
        found.append((losses_of, leaves_by_name(saved_state)))
    assert found[0][0] == found[1][0]
    assert all(same_bits(found[0][1], found[1][1]).values())


OFFLOADED = [
    (Case(2, 2, 2, fsdp=2, data=2, layers=5), {"name": "adamw", "ema_decay": 0.9}),
    (Case(2, 2, 2, fsdp=2, layers=5, schedule="zb_v"), {"name": "muon", "zero1": True}),
    (
        Case(2, 1, 2, fsdp=2, tensor=2, layers=4, remat="chunk", stored="bfloat16"),
        {"name": "adafactor", "offload_state": True},
    ),
    (Case(1, 1, 2, own=MOE, layers=3, expert=2), {}),
]


@pytest.mark.parametrize(("case", "more"), keeping(OFFLOADED, 0), ids=str)
def test_weight_offload_is_bitwise_equal(case: Case, more: dict[str, Any]) -> None:
    optim, found, first = dataclasses.replace(OPTIM, **more), [], None
    for offload in (True, False):
        steps = steps_of(dataclasses.replace(case, offload_weights=offload), ROWS, optim=optim)
        first = first or jax.device_get(steps.init())
        begun = jax.device_put(first, steps.state_sharding)
        state, losses_of = trained_on(steps, steps.compile_train(), begun, 0, 3)
        matrices = [leaf for leaf in jax.tree.leaves(state.params["layers"]) if leaf.ndim > 4]
        kinds = {leaf.sharding.memory_kind for leaf in matrices}
        assert kinds == {"pinned_host" if offload else "device"}
        saved_state = jax.device_get(steps.to_saved(state))
        again = steps.from_saved(saved_state, state.guard)
        assert all(same_bits(again, state).values())
        found.append((losses_of, leaves_by_name(saved_state)))
    assert found[0][0] == found[1][0]
    assert all(same_bits(found[0][1], found[1][1]).values())


@pytest.mark.layouts
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_stochastic_rounding_is_equal_across_layouts(name: Any) -> None:
    """Updates of one state are bitwise equal, except for sums in a different order."""
    optim = dataclasses.replace(OPTIM, name=name, rounding="stochastic", clip_norm=0.0)
    results = []
    for case in (ONE, HERE, ELSEWHERE):
        steps = steps_of(dataclasses.replace(case, stored="bfloat16"), ROWS, optim=optim)
        parts = steps.param_layout
        state = steps.init()
        saved = jax.device_get(steps.to_saved(state))
        grown = jax.tree.map(lambda leaf: np.sin(1e3 * np.asarray(leaf, "f4")), saved["params"])
        slopes = parts.select_trainable(jax.jit(parts.from_saved)(grown))

        def update(slopes: Any, state: Any, steps: Any = steps) -> Any:
            params = steps.param_layout.select_trainable(state.params)
            params, optimizer = steps.optimizer.update(slopes, state.optimizer, params)
            return state._replace(params=params, optimizer=optimizer)

        with jax.set_mesh(parts.mesh):
            for _ in range(2):
                state = jax.jit(update)(slopes, state)
        results.append(leaves_by_name(jax.device_get(steps.to_saved(state))))
    for found in results[1:]:
        assert found.keys() == results[0].keys()
        for key, leaf in results[0].items():
            if leaf.dtype == np.float32:  # means of squares
                np.testing.assert_allclose(found[key], leaf, rtol=TOLERANCE)
                continue
            same = np.mean(np.asarray(found[key], "f4") == np.asarray(leaf, "f4"))
            assert same == 1.0 if name == "adamw" else same > 0.999, key


@pytest.mark.long
def test_resume_with_changed_optimizer_is_rejected(tiny: Path, run: Run, tmp_path: Path) -> None:
    arguments = (tiny, f"run.dir={tmp_path}", "eval.batches=0", "log.every=1")
    arguments = (*arguments, "optim.learning_rate=1e-3")
    run("train", *arguments, "train.steps=4", "optim.name=lion")
    assert saved(tmp_path / "run").state["optimizer"].keys() == {"mu"}
    output = run("train", *arguments, "train.steps=6", code=2)
    assert "optim.name = adamw  [MP-" in output
    assert "must be lion, as in the checkpoint of step 4" in output
    assert "Set optim.name=lion, or run.name to a new name, checkpoint.restore_from=run" in output
    kept = ("train.steps=6", "optim.name=lion")
    output = run("train", *arguments, *kept, "optim.state_dtype=bfloat16", code=2)
    assert "must be same, as in the checkpoint of step 4" in output
    # `same` and float32 are the same type here.
    layout = ("mesh.ici_stage=2", "mesh.ici_data=2", "optim.state_dtype=float32")
    output = run("train", *arguments, *kept, *layout)
    assert "after step 4" in output
    assert "optim.state_dtype was same when step 4 was saved and is float32" in output
    start = ("run.name=next", "checkpoint.restore_from=run", "checkpoint.restore=weights")
    output = run("train", *arguments, "train.steps=2", *start)
    assert "with the weights of run, step 6" in output
    assert losses(tmp_path / "next")[1] < losses(tmp_path / "run")[1]


@pytest.mark.long
def test_ema_parameters_are_evaluated_and_exported(tiny: Path, run: Run, tmp_path: Path) -> None:
    arguments = (tiny, f"run.dir={tmp_path}", "eval.batches=1", "train.steps=4", "log.every=1")
    frozen = ("optim.ema_decay=0.5", "model.frozen=[embedding]", "optim.name=muon")
    run("train", *arguments, *frozen)
    state = saved(tmp_path / "run").state
    average = leaves_by_name(state["optimizer"]["average"])
    params = leaves_by_name(state["params"])
    assert params.keys() - average.keys() == {"embedding"}
    text = tmp_path / "text.txt"
    text.write_text("def main():\n    return 1\n" * 200)

    def loss(model: Path, *more: str) -> float:
        output = run("eval", model, "--json", "--data", text, *more)
        return json.loads(output[output.index("{") :])["nats_per_token"]

    out, plain = tmp_path / "averaged", tmp_path / "plain"
    run("export", tmp_path / "run", "--average", out)
    run("export", tmp_path / "run", plain)
    file = SafetensorsReader(out / "model.safetensors")
    norm, embedding = (file.read(f"model.{name}.weight") for name in ("norm", "embed_tokens"))
    np.testing.assert_array_equal(norm, average["final_norm.scale"])
    np.testing.assert_array_equal(embedding, params["embedding"])
    ours = ("tokenizer.kind=bytes", "tokenizer.path=")
    averaged = loss(tmp_path / "run", "--average")
    assert averaged == pytest.approx(loss(out, *ours), rel=1e-5)
    assert loss(tmp_path / "run") == pytest.approx(loss(plain, *ours), rel=1e-5)
    assert abs(averaged - loss(plain, *ours)) > 1e-4
    # Models without EMA parameters are rejected.
    output = run("eval", out, "--average", code=2)
    assert "a Hugging Face folder has no averaged parameters" in output
    output = run("train", *arguments[:3], "train.steps=6", "optim.name=muon", frozen[1], code=2)
    assert (
        "optim.ema_decay = 0.0  [MP-CKPT-007]\n  must be 0.5, as in the checkpoint of step 4"
        in output
    )
    run("train", *arguments[:3], "train.steps=2", "run.name=bare")
    output = run("eval", tmp_path / "bare", "--average", code=2)
    assert "was trained with optim.ema_decay = 0" in output
