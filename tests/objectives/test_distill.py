"""KL divergence over the top-k tokens and one remainder bucket, compared with exact KL."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from maxpipe.objectives import (
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    Direction,
    Distill,
    append_remainder,
    kl_divergence,
    log1mexp,
)
from maxpipe.pipeline.objective import reference_loss
from tests.cases import TOLERANCE

ROWS, TOKENS, VOCABULARY = 3, 7, 11
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


def logits_of(seed: int, scale: float = 2.0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return (scale * draw.standard_normal((ROWS, TOKENS, VOCABULARY))).astype(np.float32)


def batch_of(teacher: np.ndarray, count: int, temperature: float) -> dict[str, Any]:
    """Return a batch with the top-`count` log-probabilities of a teacher with these logits."""
    draw, scores = np.random.default_rng(9), log_softmax(teacher / temperature, axis=-1)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :count].astype(np.int32)
    return {
        "targets": draw.integers(0, VOCABULARY, (ROWS, TOKENS), np.int32),
        "loss_mask": draw.integers(0, 2, (ROWS, TOKENS)).astype(np.float32),
        TEACHER_IDS: ids,
        TEACHER_LOGPROBS: np.take_along_axis(scores, ids, axis=-1).astype(np.float32),
    }


def exact_kl(direction: Direction, student: jax.Array, teacher: np.ndarray, t: float) -> jax.Array:
    """Return the exact KL divergence over the full vocabulary."""
    p, q = (jax.nn.log_softmax(each / t, axis=-1) for each in (jnp.asarray(teacher), student))
    given, other = (p, q) if direction == "forward" else (q, p)
    return (jnp.exp(given) * (given - other)).sum(-1)


@pytest.mark.parametrize(
    ("direction", "temperature"), [*itertools.product(DIRECTIONS, (0.5, 1.0, 3.0))]
)
def test_full_vocabulary_equals_exact_kl(direction: Direction, temperature: float) -> None:
    objective = Distill(direction, temperature, VOCABULARY, 0.7)
    student, teacher = jnp.asarray(logits_of(0)), logits_of(1)
    batch = batch_of(teacher, VOCABULARY, temperature)

    def plain(student: jax.Array) -> jax.Array:
        mask = batch["loss_mask"]
        kl = temperature**2 * exact_kl(direction, student, teacher, temperature)
        nats = -jnp.take_along_axis(
            jax.nn.log_softmax(student), batch["targets"][..., None], axis=-1
        )
        return ((0.7 * kl + 0.3 * nats[..., 0]) * mask).sum() / mask.sum()

    def found(student: jax.Array) -> jax.Array:
        return reference_loss(objective, student, batch)[0]

    (value, slope), (expected, wanted) = jax.jit(
        lambda x: [jax.value_and_grad(each)(x) for each in (found, plain)]
    )(student)
    np.testing.assert_allclose(value, expected, rtol=TOLERANCE)
    np.testing.assert_allclose(slope, wanted, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize(("direction", "count"), [*itertools.product(DIRECTIONS, (1, 4, 10))])
def test_remaining_tokens_form_one_bucket(direction: Direction, count: int) -> None:
    """Compare with float64 numpy code that sums probabilities per bucket."""
    student, teacher = logits_of(2), logits_of(3)
    batch = batch_of(teacher, count, 2.0)
    ids = batch[TEACHER_IDS]

    def buckets(logits: np.ndarray) -> np.ndarray:
        p = np.exp(log_softmax(logits.astype(np.float64) / 2.0, axis=-1))
        chosen = np.take_along_axis(p, ids, axis=-1)
        return np.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)

    p, q = buckets(teacher), buckets(student)
    p, q = (p, q) if direction == "forward" else (q, p)
    expected = (p * np.log(p / q)).sum(-1)
    read = np.take_along_axis(log_softmax(student / 2.0, axis=-1), ids, axis=-1)
    found = kl_divergence(jnp.asarray(read), batch[TEACHER_LOGPROBS], direction)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * expected.max())
    objective = Distill(direction, 2.0, count, 1.0)
    loss, reports = reference_loss(objective, jnp.asarray(student), batch)
    mask = batch["loss_mask"]
    mean = 4.0 * (expected * mask).sum() / mask.sum()
    np.testing.assert_allclose([loss, reports["divergence"]], mean, rtol=TOLERANCE)


def test_log1mexp_is_accurate_near_zero_and_at_large_magnitudes() -> None:
    x = -np.array([1e-6, 1e-3, 0.5, np.log(2.0), 0.7, 5.0, 20.0, 80.0], np.float32)
    exact = np.log(-np.expm1(x.astype(np.float64)))
    exact[-2:] = -np.exp(x[-2:].astype(np.float64))  # log1p(-y) = -y for tiny y
    np.testing.assert_allclose(log1mexp(jnp.asarray(x)), exact, rtol=2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4])
def test_extreme_logits_give_finite_gradients(direction: Direction, scale: float) -> None:
    """Test uniform distributions and distributions concentrated on one token."""
    teacher, student = logits_of(4, scale), jnp.asarray(logits_of(5, scale))
    for count in (1, 3, VOCABULARY):
        batch = batch_of(teacher, count, 1.0)
        batch["loss_mask"] = np.ones((ROWS, TOKENS), np.float32)
        objective = Distill(direction, 1.0, count, 0.5)
        found = jax.jit(
            jax.value_and_grad(lambda x, o=objective, b=batch: reference_loss(o, x, b)[0])
        )(student)
        for each in found:
            assert np.isfinite(each).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_identical_student_has_zero_loss_and_gradient(direction: Direction) -> None:
    teacher = logits_of(6)
    for count in (1, 4, VOCABULARY):
        batch = batch_of(teacher, count, 1.5)
        objective = Distill(direction, 1.5, count, 1.0)

        def loss(x: jax.Array, o: Distill = objective, b: dict[str, Any] = batch):
            return reference_loss(o, x, b)[0]

        value, slope = jax.jit(jax.value_and_grad(loss))(jnp.asarray(teacher))
        assert abs(float(value)) < 1e-6 and np.abs(slope).max() < 1e-6


def test_bucket_probabilities_sum_to_one() -> None:
    scores = log_softmax(logits_of(7), axis=-1)
    for count in range(1, VOCABULARY + 1):
        found = np.asarray(append_remainder(jnp.asarray(scores[..., :count])))
        np.testing.assert_allclose(logsumexp(found, axis=-1), 0, atol=1e-6)
