"""Numerical check of the attention backend before the first step on new hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxpipe.models.deepseek import DeepseekConfig
from maxpipe.models.gemma2 import Gemma2Config
from maxpipe.models.gpt_oss import GptOssConfig
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model
from maxpipe.nn.attention import BACKENDS, blockwise, cudnn
from maxpipe.nn.attention.interface import Mask
from maxpipe.train import attention_check
from maxpipe.train.kernel_check import KernelDeviation
from tests.cases import MODEL
from tests.cudnn import forward, put_in_place
from tests.train.runs import Run, Start, ledger, wait_for_outputs, write_module

LATENT = DeepseekConfig(kv_lora_rank=6, qk_rope_head_dim=2, v_head_dim=6, num_experts=4, d_expert=8)
FAMILIES: list[dict[str, Any]] = [
    {},
    {
        "family": "gemma2",
        "own": Gemma2Config(sliding_window=3, attn_logit_softcapping=2.0),
        "tied_embeddings": True,
    },
    {"family": "gpt_oss", "own": GptOssConfig(num_experts=4, d_expert=8, sliding_window=3)},
    {"family": "deepseek", "own": LATENT, "num_kv_heads": 8, "head_dim": 8},
]
TOKENS = 144


def check_attention(model: Model, dtype: str, tokens: int) -> KernelDeviation | None:
    return attention_check.attention_check(model, dtype, tokens).run()


def check_description(model: Model, dtype: str, tokens: int) -> str:
    return attention_check.attention_check(model, dtype, tokens).description(dtype)


def model_of(backend: str, **changes: Any) -> Model:
    return describe(replace(MODEL, **changes, attention=backend))


def test_latent_attention_is_checked_with_shared_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the kernels for TPUs, this backend reads the shared dims of one head only."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask) -> jax.Array:
        shared = mask.shared_dims
        assert shared == LATENT.qk_rope_head_dim
        own = key[..., :-shared]
        first = jnp.broadcast_to(key[:, :, :1, -shared:], (*own.shape[:3], shared))
        return blockwise.attend(query, jnp.concatenate([own, first], -1), value, mask)

    backends = {**BACKENDS, "blockwise": attend}
    monkeypatch.setattr(attention_check, "BACKENDS", backends)
    found = check_attention(model_of("blockwise", **FAMILIES[-1]), "float32", TOKENS)
    assert found is not None and found.ok, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", FAMILIES, ids=lambda each: each.get("family", "llama"))
def test_blockwise_attention_passes(changes: dict[str, Any], dtype: str) -> None:
    found = check_attention(model_of("blockwise", **changes), dtype, TOKENS)
    assert found is not None and found.ok, found
    assert found.backend == "blockwise"
    if dtype == "float32":
        assert 0 < found.result < 1e-5 and 0 < found.gradients < 1e-5


def test_xla_backend_is_not_checked() -> None:
    for backend in ("xla", "auto"):
        assert check_attention(model_of(backend), "float32", TOKENS) is None
        assert not attention_check.attention_check(model_of(backend), "float32", TOKENS).cases


def shifted(*given: Any) -> Any:
    return blockwise.attend(*given) * (1 + 1e-3)


def without_gradient_of_keys(query: Any, key: Any, *rest: Any) -> Any:
    return blockwise.attend(query, jax.lax.stop_gradient(key), *rest)


def not_a_number(*given: Any) -> Any:
    return blockwise.attend(*given).at[0, 5].set(jnp.nan)


def across_documents(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return blockwise.attend(query, key, value, replace(mask, segments=mask.segments * 0))


def without_window(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return blockwise.attend(query, key, value, replace(mask, window=0))


@pytest.mark.parametrize(
    "wrong", [shifted, without_gradient_of_keys, not_a_number, across_documents, without_window]
)
def test_wrong_backend_fails_check(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test errors in results, in gradients alone, in masks, and NaNs."""
    monkeypatch.setitem(BACKENDS, "blockwise", wrong)  # type: ignore[arg-type]
    found = check_attention(model_of("blockwise", **FAMILIES[1]), "float32", TOKENS)
    assert found is not None and not found.ok
    assert "is allowed" in str(found)


def test_error_beyond_bfloat16_rounding_fails_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def coarse(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return blockwise.attend(query, key, value, mask) * 1.25

    monkeypatch.setitem(BACKENDS, "blockwise", coarse)  # type: ignore[arg-type]
    found = check_attention(model_of("blockwise"), "bfloat16", TOKENS)
    assert found is not None and not found.ok


def test_every_cudnn_kernel_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check selects every kernel in turn, so an error in any of them is detected.

    Each kernel has an error of a different factor, so one check shows which kernels ran.
    """
    put_in_place(monkeypatch)
    model = model_of("cudnn")
    factors: dict[str, float] = {}
    deviations: list[KernelDeviation] = []
    compare = attention_check._compare_backend

    def named(kernel: Any, beside: Any) -> str:
        return "numbers" if isinstance(beside, jax.Array) else f"packed {kernel.packed}"

    def spied(kernel: Any, *arrays: Any) -> Any:
        mixed, sums = forward(kernel, *arrays)
        return mixed * factors.get(named(kernel, arrays[-1]), 1.0), sums

    def recorded(*given: Any) -> list[KernelDeviation]:
        found = [*compare(*given)]
        deviations.extend(found)
        return found

    monkeypatch.setattr(cudnn, "forward", spied)
    right = check_attention(model, "float32", 1024)
    assert right is not None and right.ok
    factors |= {"packed 1": 1.25, "packed 2": 1.5, "numbers": 1.75}
    monkeypatch.setattr(attention_check, "_compare_backend", recorded)
    found = check_attention(model, "float32", 1024)
    assert found is not None and not found.ok
    assert not any(each.ok for each in deviations)
    assert [each.result for each in deviations] == pytest.approx([0.25, 0.5, 0.75], rel=1e-3)


def test_check_description_includes_all_dependencies() -> None:
    descriptions = {
        check_description(model_of("blockwise", **changes), dtype, tokens)
        for changes in FAMILIES
        for dtype in ("float32", "bfloat16")
        for tokens in (100, 200)
    }
    assert len(descriptions) == 4 * 2 * 2
    assert all(jax.__version__ in each and "blockwise" in each for each in descriptions)
    # Longer sequences are checked on the same slice.
    first, second = (check_description(model_of("blockwise"), "float32", n) for n in (512, 4096))
    assert first == second


SMALL = (
    *("model.attention=blockwise", "train.steps=4", "eval.every=0", "eval.batches=0"),
    *("mesh.cpu_devices=1", "mesh.ici_stage=1", "pipeline.microbatches=1"),
)


@pytest.mark.long
def test_run_checks_attention_once(tiny: Path, tmp_path: Path, run: Run) -> None:
    """The check is not repeated if the run folder records that this hardware passed."""
    given = (tiny, f"run.dir={tmp_path}", *SMALL)
    line = "blockwise has errors of "
    output = run("train", *given)
    assert line in output and "is allowed" in output
    checked = list(ledger(tmp_path / "run", "kernels_checked"))
    assert len(checked) == 1 and checked[0]["gradients"] < 1e-5
    assert line not in run("train", *given, "train.steps=6")
    # The backend of a finished run may change.
    assert "all 6 steps are done" in run("train", *given, "train.steps=6", "model.attention=auto")


BROKEN = """
from maxpipe.nn import attention
right = attention.BACKENDS["blockwise"]
attention.BACKENDS["blockwise"] = lambda *given: 1.01 * right(*given)
"""


@pytest.mark.long
def test_run_with_wrong_backend_does_not_start(tiny: Path, tmp_path: Path, start: Start) -> None:
    modules = write_module(tmp_path / "modules", BROKEN)
    given = (tiny, f"run.dir={tmp_path}", *SMALL)
    process = start("train", *given, modules=modules)
    (output,) = wait_for_outputs([process])
    assert process.returncode == 2, output
    assert "model.attention" in output and "blockwise has errors of 1.0e-02 in results" in output
    assert "Set model.attention=xla." in output and "Traceback" not in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
