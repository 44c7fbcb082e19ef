"""The backend that `model.attention=auto` selects on each type of device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maxpipe.models import resolve_auto
from maxpipe.models.config import ModelConfig
from maxpipe.models.deepseek import DeepseekConfig
from maxpipe.models.gemma2 import Gemma2Config
from maxpipe.models.gpt_oss import GptOssConfig
from maxpipe.models.layers.attention import CANNOT
from maxpipe.models.resolve_auto import choose, resolved, words
from maxpipe.parallel.axes import ContextAttention
from tests import cases

MODEL = replace(cases.MODEL, head_dim=64, compute_dtype="bfloat16")
SINKS = replace(MODEL, family="gpt_oss", own=GptOssConfig())
CAPPED = replace(MODEL, family="gemma2", own=Gemma2Config())
LATENT = replace(MODEL, family="deepseek", own=DeepseekConfig(), num_kv_heads=MODEL.num_heads)


@pytest.mark.parametrize(
    ("model", "platform", "tokens", "wanted", "refused"),
    [
        (MODEL, "cpu", 256, "blockwise", []),
        (MODEL, "cpu", 255, "xla", ["blockwise requires 256 tokens"]),
        (LATENT, "cpu", 4096, "blockwise", []),
        (MODEL, "gpu", 2048, "cudnn", []),
        (MODEL, "cuda", 4096, "cudnn", []),
        (
            replace(MODEL, compute_dtype="float32"),
            "gpu",
            4096,
            "blockwise",
            ["cudnn does not support float32"],
        ),
        (SINKS, "gpu", 4096, "blockwise", ["cudnn does not support sinks"]),
        (
            CAPPED,
            "gpu",
            512,
            "xla",
            ["cudnn does not support soft cap", "blockwise requires 4,096"],
        ),
        (LATENT, "gpu", 4096, "blockwise", ["cudnn does not support value size"]),
        (replace(MODEL, head_dim=160), "gpu", 4096, "blockwise", ["cudnn requires head sizes"]),
        (replace(MODEL, head_dim=60), "gpu", 4096, "blockwise", ["cudnn requires head sizes"]),
        (MODEL, "gpu", 4097, "blockwise", ["cudnn requires an even"]),
    ],
)
def test_auto_selects_fastest_supported_backend(
    model: ModelConfig, platform: str, tokens: int, wanted: str, refused: list[str]
) -> None:
    found = choose(model, platform, tokens)
    assert found.backend == wanted
    assert [each.startswith(why) for each, why in zip(found.rejected, refused, strict=True)] == [
        True
    ] * len(refused)
    assert resolved(model, platform, tokens) == replace(model, attention=wanted)
    said = words(model, platform, tokens)
    assert wanted in said and platform in said and all(why in said for why in refused)


def test_auto_prefers_splash_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_auto, "CANNOT", {**CANNOT, "splash": frozenset({"sinks"})})
    assert choose(MODEL, "tpu", 8192) == ("splash", ())
    assert choose(MODEL, "tpu", 128).backend == "splash"
    assert choose(MODEL, "tpu", 8200).backend == "blockwise"
    assert choose(MODEL, "tpu", 200).backend == "xla"
    # A device that holds chunks of 64 tokens has no whole kernel block.
    gathered, exchanged = ContextAttention("all_gather", context=64), ContextAttention(context=2)
    assert choose(MODEL, "tpu", 8192, gathered).backend == "blockwise"
    # If heads are exchanged, each device has whole sequences.
    assert choose(MODEL, "tpu", 128, exchanged).backend == "splash"
    assert choose(MODEL, "tpu", 128, exchanged._replace(method="all_gather")).backend != "splash"
    assert choose(SINKS, "tpu", 8192).backend == "blockwise"
    monkeypatch.setattr(
        resolve_auto, "CANNOT", {name: CANNOT[name] for name in ("xla", "blockwise")}
    )
    found = choose(MODEL, "tpu", 8192)
    assert found == ("blockwise", ("splash is not available",))


def test_ring_attention_always_uses_blockwise() -> None:
    ring = ContextAttention("ring", context=2)
    groups = ContextAttention("ulysses_ring", 2, context=4)
    for platform in ("cpu", "tpu"):
        assert choose(MODEL, platform, 16, ring) == ("blockwise", ())
        assert words(MODEL, platform, 16, ring).startswith("blockwise, because mesh.context")
        assert choose(MODEL, platform, 16, groups) == ("blockwise", ())
        assert "=ulysses_ring" in words(MODEL, platform, 16, groups)
    assert choose(MODEL, "cpu", 16, ring._replace(context=1)).backend == "xla"
    assert choose(MODEL, "cpu", 16, groups._replace(context=2)).backend == "xla"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("backend", sorted(set(CANNOT) - {"auto"}))
def test_explicit_backend_is_kept(platform: str, backend: Any) -> None:
    model = replace(MODEL, attention=backend)
    assert resolved(model, platform, 4096) is not MODEL
    assert resolved(model, platform, 4096) == model
    assert words(model, platform, 4096) == ""
