"""Adapter training leaves the base weights unchanged, and resumes on other layouts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.models.config import AdapterConfig
from maxpipe.models.param_names import trained
from tests.cases import TOLERANCE, Case, steps_of
from tests.conftest import FAST_COMPILE
from tests.pages import DOCS, run_page
from tests.step.states import ROWS, same_bits, trained_on
from tests.train.runs import losses

ADAPTER = AdapterConfig(rank=2, kind="dora", base_quantization="int8", dropout=0.2)
HERE = Case(2, 2, 2, fsdp=2, layers=5, adapter=ADAPTER)
ELSEWHERE = Case(3, 1, 4, schedule="zb_h1", outside=1, data=2, layers=5, adapter=ADAPTER)
STEPS = 100


@pytest.mark.layouts
def test_base_is_unchanged_and_run_resumes_on_other_layout() -> None:
    steps = steps_of(HERE, ROWS, STEPS + 4)
    run, names = steps.compile_train(), trained(steps.param_layout.decoder.model)
    plain = steps_of(Case(2, 2, 2, fsdp=2, layers=5), ROWS)
    base = jax.device_get(plain.to_saved(plain.init())["params"])
    assert leaves_by_name(steps.abstract_base).keys() == leaves_by_name(base).keys()
    begun = steps.init_from_params(base)
    before = leaves_by_name(jax.device_get(begun.params))
    state, _ = trained_on(steps, run, steps.init_from_params(base), 0, STEPS)
    after = leaves_by_name(jax.device_get(state.params))
    mine = {each for each in after if "_lora_" in each}
    assert {each for each in after if not np.array_equal(before[each], after[each])} == mine
    saved = steps.to_saved(state)
    for tree in (saved["params"], *saved["optimizer"].values(), steps.abstract_saved["params"]):
        assert leaves_by_name(tree).keys() == names
    # The saved state and the base restore the run: bitwise on this layout, closely on another.
    saved = jax.device_get(saved)
    again = steps.from_saved(saved, state.guard, base)
    assert not [name for name, same in same_bits(again, state).items() if not same]
    others = steps_of(ELSEWHERE, ROWS, STEPS + 4)
    there = others.from_saved(saved, jax.device_get(state.guard), base)
    assert all(same_bits(others.to_saved(there), saved).values())
    (end, wanted), (_, found) = (
        trained_on(steps, run, state, STEPS, STEPS + 2),
        trained_on(others, others.compile_train(), there, STEPS, STEPS + 2),
    )
    assert all(same_bits(trained_on(steps, run, again, STEPS, STEPS + 2)[0], end).values())
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)


NF4 = AdapterConfig(rank=2, base_quantization="nf4")


@pytest.mark.parametrize(
    "adapter",
    [
        AdapterConfig(rank=2, base_quantization="int8"),
        NF4,
        replace(NF4, double_quantization=True),
    ],
    ids=["int8", "nf4", "nf4 with quantized scales"],
)
def test_base_from_checkpoint_is_quantized_like_a_new_base(adapter: AdapterConfig) -> None:
    plain = steps_of(Case(layers=2), ROWS)
    steps = steps_of(Case(layers=2, adapter=adapter), ROWS)
    base = jax.device_get(plain.to_saved(plain.init())["params"])
    same = same_bits(steps.init_from_params(base), steps.init())
    assert not [name for name in same if not same[name]]


def test_initial_adapter_model_equals_base() -> None:
    """Equality is bitwise: LoRA factors add zero, and DoRA lengths equal the norms of the base."""
    plain, *adapted = (
        steps_of(Case(layers=2, adapter=each), ROWS).param_layout.decoder
        for each in (None, AdapterConfig(rank=2), AdapterConfig(rank=2, kind="dora"))
    )
    key = jax.random.key(0)
    base = jax.jit(plain.init)(key)
    place = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))
    tokens = np.random.default_rng(0).integers(0, 30, (2, 8), np.int32)
    batch = {"tokens": tokens, "positions": place, "segment_ids": np.ones_like(tokens)}
    wanted = jax.jit(plain.apply)(base, batch)
    for steps in adapted:
        whole = jax.jit(steps.init)(key)
        assert leaves_by_name(base).keys() <= leaves_by_name(whole).keys()
        assert all(
            np.array_equal(leaves_by_name(whole)[name], leaf)
            for name, leaf in leaves_by_name(base).items()
        )
        np.testing.assert_array_equal(jax.jit(steps.apply)(whole, batch), wanted)


@pytest.mark.long
def test_adapters_page_commands_run(tmp_path: Path) -> None:
    """The commands in docs/tutorials/adapters.md train an adapter that lowers its base's loss."""
    outputs = run_page(DOCS / "tutorials" / "adapters.md", tmp_path, FAST_COMPILE)
    found = losses(tmp_path / "runs" / "hills")
    assert found[100] < found[10] - 1.0
    assert "with the weights of base@newest, step 100" in outputs[1]
    generated = re.findall(r"^(?:sea|hills) .*$", outputs[2], re.MULTILINE)
    assert generated[0].startswith("sea was cold and grey when we sailed out")
    assert generated[1].startswith("hills are green and warm as we climb")
    assert {each.name for each in (tmp_path / "alone").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    size = lambda run: sum(  # noqa: E731
        each.stat().st_size for each in (tmp_path / "runs" / run / "checkpoints" / "100").rglob("*")
    )
    assert size("hills") < size("base")
