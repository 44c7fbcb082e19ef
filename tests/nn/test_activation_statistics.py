"""Statistics of activations compared with numpy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.nn.activation_statistics import (
    NUM_BINS,
    ActivationRecorder,
    count_bins,
    histogram_edges,
    sum_squares,
)
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel.collectives import Maximum

ROWS, TOKENS, HEADS, KV_HEADS, SIZE = 2, 100, 4, 2, 8


def value(statistic: Any) -> np.ndarray:
    return np.asarray(statistic.value if isinstance(statistic, Maximum) else statistic)


def segments() -> np.ndarray:
    """Return two documents and padding in each sequence."""
    ids = np.ones((ROWS, TOKENS), np.int32)
    ids[0, 40:], ids[1, 61:], ids[1, 90:] = 2, 2, 0
    return ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"window": jnp.int32(5), "windows": (0, 5)},
        {"window": jnp.int32(0), "windows": (0, 5)},
        {"soft_cap": 0.5, "scale": 0.7},
        {"sinks": jnp.asarray([0.3, -1.0, 2.0, 0.0])},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_statistics_match_numpy(options: dict[str, Any]) -> None:
    """Entropy and largest logit of 64 evenly spaced queries, in float64."""
    random, ids = np.random.default_rng(0), segments()
    query = random.normal(size=(ROWS, TOKENS, HEADS, SIZE)).astype(np.float32)
    key = random.normal(size=(ROWS, TOKENS, KV_HEADS, SIZE)).astype(np.float32)
    recorder = ActivationRecorder({"segment_ids": jnp.asarray(ids)}, histograms=False)
    mask = Mask(jnp.asarray(ids), **options)
    recorder.record_attention(jnp.asarray(query), jnp.asarray(key), mask)
    window, scale = int(options.get("window", 0)), options.get("scale", SIZE**-0.5)
    cap, sinks = options.get("soft_cap", 0.0), options.get("sinks")
    entropies: list[float] = []
    largest, count = -np.inf, 0
    for row in range(ROWS):
        for place in sorted({(2 * n + 1) * TOKENS // 128 for n in range(64)}):
            if not ids[row, place]:
                continue
            count += 1
            for head in range(HEADS):
                logits = []
                for other in range(place + 1):
                    if ids[row, other] != ids[row, place]:
                        continue
                    if window and place - other >= window:
                        continue
                    keys = key[row, other, head // (HEADS // KV_HEADS)]
                    logit = scale * float(np.float64(query[row, place, head]) @ keys)
                    logits.append(cap * np.tanh(logit / cap) if cap else logit)
                largest = max(largest, *logits)
                if sinks is not None:
                    logits.append(float(sinks[head]))
                likely = np.exp(np.array(logits) - max(logits))
                likely /= likely.sum()
                entropies.append(-(likely * np.log(likely)).sum())
    found = recorder.statistics
    assert value(found["attention_queries"]) == count
    np.testing.assert_allclose(
        value(found["attention_entropy"]), np.sum(entropies) / HEADS, rtol=1e-5
    )
    np.testing.assert_allclose(value(found["attention_logit"]), largest, rtol=1e-5)


def test_padding_is_not_recorded() -> None:
    ids, random = segments(), np.random.default_rng(1)
    x = random.normal(size=(ROWS, TOKENS, 3, 5)).astype(np.float32)
    x[ids == 0] = np.nan
    recorder = ActivationRecorder({"segment_ids": jnp.asarray(ids)}, histograms=True)
    recorder.record("x", jnp.asarray(x))
    recorder.record("x", jnp.zeros_like(x))  # a second activation of this name is ignored
    found, chosen = recorder.statistics, np.float64(x[ids > 0])
    mean_square = value(found["mean_square/x"]) / (ids > 0).sum()
    np.testing.assert_allclose(mean_square, np.square(chosen).mean(), rtol=1e-6)
    np.testing.assert_array_equal(value(found["max/x"]), np.abs(x[ids > 0]).max())
    counts = np.histogram(chosen, histogram_edges())[0]
    np.testing.assert_array_equal(value(found["histogram/x"]), counts)


def test_dead_units_are_zero_for_all_tokens() -> None:
    ids = segments()
    x = np.zeros((ROWS, TOKENS, 4), np.float32)
    x[0, 7, 1], x[1, 95, 2], x[1, 3, 3] = -2.0, 5.0, 1e-30  # unit 2 is used by padding only
    recorder = ActivationRecorder({"segment_ids": jnp.asarray(ids)}, histograms=False)
    recorder.record_hidden("hidden", jnp.asarray(x))
    largest = value(recorder.statistics["unit_max/hidden"])
    np.testing.assert_array_equal(largest, np.array([0.0, 2.0, 0.0, 1e-30], np.float32))


def test_bins_match_numpy_at_powers_of_two_and_extremes() -> None:
    """Bins include their lower edge in magnitude; extreme entries are in the outer bins."""
    exact = [2.0**n for n in (-30, -24, -23, 0, 5, 15)]
    x = np.array([*exact, 0.0, -0.0, 1.5, -1.5, 3e38, -3e38, np.inf, -np.inf, 1e-45], np.float32)
    counts = np.asarray(count_bins(jnp.asarray(x)))
    wanted = np.zeros(NUM_BINS)
    for entry in x.tolist():
        magnitude = abs(entry)
        place = 0
        if magnitude >= 2.0**-24:
            place = int(min(np.floor(np.log2(magnitude)), 15)) + 25 if np.isfinite(entry) else 40
        wanted[40 + (-place if np.signbit(entry) else place)] += 1
    np.testing.assert_array_equal(counts, wanted)
    edges = histogram_edges()
    assert len(edges) == NUM_BINS + 1 and (np.diff(edges) > 0).all()
    assert edges[40] == -(2.0**-24) and edges[41] == 2.0**-24


def test_sums_of_large_arrays_are_exact_to_float32_rounding() -> None:
    """One float32 sum of four million entries would have an error above 1e-5."""
    x = np.random.default_rng(2).uniform(0.5, 1.5, (2, 2048, 1024)).astype(np.float32)
    found = np.asarray(sum_squares(jnp.asarray(x), 1))
    np.testing.assert_allclose(found, np.square(np.float64(x)).sum((1, 2)), rtol=2e-6)
    stacked = np.asarray(count_bins(jnp.asarray(x), stacked=1))
    np.testing.assert_array_equal(stacked.sum(-1), [2048 * 1024] * 2)
    assert np.asarray(sum_squares(jnp.ones(3, jnp.bfloat16))) == 3


def test_attention_entropy_includes_later_tokens_of_an_image() -> None:
    tokens, left = 8, np.array([[0, 0, 3, 2, 1, 0, 0, 0]], np.int32)
    ids = jnp.ones((1, tokens), jnp.int32)
    inputs = {"segment_ids": ids, "positions": jnp.arange(tokens)[None]}
    recorder = ActivationRecorder(inputs, histograms=False)
    heads = jnp.zeros((1, tokens, 2, 4))
    mask = Mask(ids, image_tokens_left=jnp.asarray(left), image_tokens=3)
    recorder.record_attention(heads, heads, mask)
    # Equal scores give the logarithm of the number of visible tokens.
    visible = [1, 2, 5, 5, 5, 6, 7, 8]
    found = float(np.asarray(recorder.statistics["attention_entropy"]))
    assert found == pytest.approx(np.log(visible).sum(), rel=1e-5)
