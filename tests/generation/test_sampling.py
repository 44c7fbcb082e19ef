"""Each sampling option compared with plain numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.generation.decoding import (
    Sampling,
    apply_repetition_penalty,
    filter_logits,
    row_keys,
    sample,
)

ROWS, VOCABULARY = 5, 23
LOGITS = np.random.default_rng(3).normal(0, 2, (ROWS, VOCABULARY)).astype(np.float32)
SEEN = np.random.default_rng(4).random((ROWS, VOCABULARY)) < 0.4
KEYS = row_keys(0, jnp.arange(ROWS), jnp.zeros(ROWS, jnp.int32))


def softmax(row: Any) -> Any:
    shares = np.exp(np.asarray(row, np.float64) - np.max(row))
    return shares / shares.sum()


def kept_tokens(**options: Any) -> np.ndarray:
    """Return which tokens the filters keep; their logits must be unchanged."""
    found = np.asarray(filter_logits(jnp.asarray(LOGITS), Sampling(**options)))
    stay = np.isfinite(found)
    np.testing.assert_array_equal(found[stay], LOGITS[stay])
    return stay


def by_rank(row: Any) -> list[int]:
    """Return token IDs, most likely first."""
    return sorted(range(len(row)), key=lambda token: -row[token])


def nucleus(row: Any, top_p: float) -> set[int]:
    total, found, shares = 0.0, set(), softmax(row)
    for token in by_rank(row):
        if total >= top_p:
            break
        found.add(token)
        total += shares[token]
    return found


@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY, VOCABULARY + 3])
def test_top_k(top_k: int) -> None:
    for row, stay in zip(LOGITS, kept_tokens(top_k=top_k), strict=True):
        assert set(np.flatnonzero(stay)) == set(by_rank(row)[:top_k])


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
def test_top_p(top_p: float) -> None:
    for row, stay in zip(LOGITS, kept_tokens(top_p=top_p), strict=True):
        assert set(np.flatnonzero(stay)) == nucleus(row, top_p)


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p(min_p: float) -> None:
    for row, stay in zip(LOGITS, kept_tokens(min_p=min_p), strict=True):
        shares = softmax(row)
        assert set(np.flatnonzero(stay)) == set(np.flatnonzero(shares >= min_p * shares.max()))


def test_filters_apply_in_sequence() -> None:
    for row, stay in zip(LOGITS, kept_tokens(top_k=5, top_p=0.8, min_p=0.1), strict=True):
        best = by_rank(row)[:5]
        inside = {best[place] for place in nucleus(row[best], 0.8)}
        least = 0.1 * softmax(row).max()
        wanted = {token for token in inside if softmax(row)[token] >= least}
        assert set(np.flatnonzero(stay)) == wanted


def test_top_k_keeps_ties() -> None:
    row = jnp.asarray([[0.0, 2.0, 1.0, 1.0, -1.0]])
    assert np.isfinite(filter_logits(row, Sampling(top_k=2)))[0].tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_repetition_penalty() -> None:
    found = np.asarray(apply_repetition_penalty(jnp.asarray(LOGITS), jnp.asarray(SEEN), 1.7))
    for row in range(ROWS):
        for token in range(VOCABULARY):
            wanted = LOGITS[row, token]
            if SEEN[row, token]:
                wanted = wanted / np.float32(1.7) if wanted > 0 else wanted * np.float32(1.7)
            assert found[row, token] == pytest.approx(wanted, rel=1e-6)


def test_temperature_zero_takes_argmax_after_penalty() -> None:
    greedy = sample(jnp.asarray(LOGITS), None, KEYS, Sampling(temperature=0.0))
    assert greedy.tokens.tolist() == LOGITS.argmax(-1).tolist()
    wanted = [np.log(softmax(row).max()) for row in LOGITS]
    np.testing.assert_allclose(greedy.logprobs, wanted, rtol=1e-5)
    options = Sampling(temperature=0.0, repetition_penalty=100.0)
    other = sample(jnp.asarray(LOGITS), jnp.asarray(SEEN), KEYS, options)
    assert not SEEN[np.arange(ROWS), other.tokens].any()


@pytest.mark.parametrize("temperature", [1e-9, 1e-30, 1e-38, 1e-40, 1e-45, 1e-300])
def test_tiny_temperature_takes_argmax(temperature: float) -> None:
    drawn = jax.jit(sample, static_argnums=3)
    found = drawn(jnp.asarray(LOGITS), None, KEYS, Sampling(temperature=temperature))
    assert found.tokens.tolist() == LOGITS.argmax(-1).tolist()
    found = drawn(jnp.asarray(LOGITS), None, KEYS, Sampling(temperature=temperature, top_p=0.5))
    assert found.tokens.tolist() == LOGITS.argmax(-1).tolist()


def test_logprobs_are_unfiltered_model_logprobs() -> None:
    options = Sampling(temperature=0.3, top_k=3, repetition_penalty=1.4)
    found = sample(jnp.asarray(LOGITS), jnp.asarray(SEEN), KEYS, options)
    wanted = [np.log(softmax(row)[token]) for row, token in zip(LOGITS, found.tokens, strict=True)]
    np.testing.assert_allclose(found.logprobs, wanted, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_frequencies_match_probabilities(temperature: float) -> None:
    count, few = 20_000, 6
    logits = jnp.broadcast_to(LOGITS[0, :few], (count, few))
    keys = row_keys(7, jnp.arange(count), jnp.full(count, 3))
    found = jax.jit(sample, static_argnums=3)(logits, None, keys, Sampling(temperature=temperature))
    often = np.bincount(np.asarray(found.tokens), minlength=few) / count
    wanted = softmax(LOGITS[0, :few] / temperature)
    # Six standard deviations.
    assert (np.abs(often - wanted) < 6 * np.sqrt(wanted * (1 - wanted) / count)).all()


def test_sample_depends_only_on_seed_row_number_and_position() -> None:
    def tokens(seed: int, rows: list[int], positions: list[int]) -> list[int]:
        keys = row_keys(seed, jnp.asarray(rows), jnp.asarray(positions))
        flat = jnp.zeros((len(rows), 1009))
        return drawn(flat, None, keys, Sampling()).tokens.tolist()

    drawn = jax.jit(sample, static_argnums=3)

    whole = tokens(5, [0, 1, 2, 3], [8, 8, 2, 8])
    assert tokens(5, [3], [8]) == whole[3:] and tokens(5, [2, 0], [2, 8]) == [whole[2], whole[0]]
    assert len({*whole, *tokens(6, [0], [8]), *tokens(5, [0], [9])}) == 6
