"""Blockwise attention compared with a numpy loop in float64, and with `xla`."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.models.count import even_blocks, unrolled_blocks
from maxpipe.nn.attention import blockwise, xla
from maxpipe.nn.attention.interface import Mask

ROWS, SIZE, VALUE_SIZE = 2, 6, 5


class Case(NamedTuple):
    """Queries of the chunks `pieces`, each of `run` tokens, of a sequence of `keys` tokens."""

    keys: int
    groups: int = 2
    shared: int = 2
    block: int = 4
    run: int = 0
    pieces: tuple[int, ...] = ()
    window: int = 0
    traced: bool = False
    cap: float = 0.0
    sinks: bool = False
    causal: bool = True
    scale: float | None = None
    lonely: bool = False
    """Whether some queries see no key."""

    @property
    def places(self) -> np.ndarray:
        if not self.run:
            return np.arange(self.keys)
        return np.concatenate([np.arange(self.run) + self.run * each for each in self.pieces])

    def arrays(self) -> tuple[list[Any], np.ndarray]:
        """Query, key, value, cotangent and sinks; segments of the keys."""
        random = np.random.default_rng(zlib.crc32(repr(self).encode()))
        heads, tokens = self.groups * self.shared, len(self.places)
        shapes = [
            (ROWS, tokens, heads, SIZE),
            (ROWS, self.keys, self.groups, SIZE),
            (ROWS, self.keys, self.groups, VALUE_SIZE),
            (ROWS, tokens, heads, VALUE_SIZE),
            (heads,),
        ]
        found = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        return found, np.cumsum(random.random((ROWS, self.keys)) < 0.15, axis=1).astype(np.int32)

    def mask(self, segments: np.ndarray, sinks: Any) -> Mask:
        queries = segments[:, self.places]
        if self.lonely:
            queries = np.where(np.arange(len(self.places)) % 3 == 1, 1000, queries)
        window: Any = jnp.int32(self.window) if self.traced else self.window
        mask = Mask(
            jnp.asarray(queries),
            key_segments=jnp.asarray(segments),
            causal=self.causal,
            window=window,
            windows=(0, self.window) if self.traced else (),
            scale=self.scale,
            soft_cap=self.cap,
            sinks=sinks if self.sinks else None,
        )
        if self.run:
            mask = replace(mask, places=jnp.asarray(self.places, jnp.int32), run=self.run)
        return mask


def plain(case: Case, mask: Mask, arrays: list[Any]) -> list[np.ndarray]:
    """Return the output and the gradients of query, key, value and sinks in float64."""
    query, key, value, cotangent, sinks = (np.asarray(each, np.float64) for each in arrays)
    segments, key_segments = np.asarray(mask.segments), np.asarray(mask.key_segments)
    scale = SIZE**-0.5 if case.scale is None else case.scale
    mixed, grads = np.zeros_like(cotangent), [np.zeros_like(x) for x in (query, key, value, sinks)]
    d_query, d_key, d_value, d_sinks = grads
    for b, t, n in np.ndindex(*query.shape[:3]):
        g, place = n // case.shared, case.places[t]
        seen = [s for s in range(case.keys) if key_segments[b, s] == segments[b, t]]
        seen = [s for s in seen if not case.causal or s <= place]
        seen = [s for s in seen if not case.window or place - s < case.window]
        if not seen:
            continue
        scores = key[b, seen, g] @ query[b, t, n] * scale
        slope = np.ones_like(scores)
        if case.cap:
            slope = 1 - np.tanh(scores / case.cap) ** 2
            scores = case.cap * np.tanh(scores / case.cap)
        largest = scores.max()
        sink = np.exp(sinks[n] - largest) if case.sinks else 0.0
        total = np.exp(scores - largest).sum() + sink
        shares = np.exp(scores - largest) / total
        mixed[b, t, n] = shares @ value[b, seen, g]
        d_value[b, seen, g] += shares[:, None] * cotangent[b, t, n]
        inner = mixed[b, t, n] @ cotangent[b, t, n]
        d_scores = shares * (value[b, seen, g] @ cotangent[b, t, n] - inner) * slope * scale
        d_query[b, t, n] = d_scores @ key[b, seen, g]
        d_key[b, seen, g] += d_scores[:, None] * query[b, t, n]
        d_sinks[n] -= sink / total * inner
    return [mixed, *grads]


def of_backend(attend: Any, case: Case, segments: np.ndarray, arrays: list[Any]) -> list[Any]:
    """Return the output and gradients of a backend."""
    *given, cotangent, sinks = (jnp.asarray(each) for each in arrays)

    @jax.jit
    def run(given: list[Any], sinks: Any) -> Any:
        def mixed(query: Any, key: Any, value: Any, sinks: Any) -> Any:
            return attend(query, key, value, case.mask(segments, sinks))

        found, pullback = jax.vjp(mixed, *given, sinks)
        return [found, *pullback(cotangent)]

    return run(given, sinks)


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    """The tolerance has a floor: the gradient of a query with one key cancels to 0."""
    for name, a, b in zip(("result", "query", "key", "value", "sinks"), found, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 0.1), name


CASES = st.builds(
    Case,
    keys=st.integers(1, 23),
    groups=st.sampled_from((1, 3)),
    shared=st.sampled_from((1, 2)),
    block=st.integers(1, 25),
    window=st.integers(0, 9),
    traced=st.booleans(),
    cap=st.sampled_from((0.0, 0.8)),
    sinks=st.booleans(),
    causal=st.booleans(),
    scale=st.sampled_from((None, 0.3)),
    run=st.just(0),
    pieces=st.just(()),
    lonely=st.booleans(),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(1),
        Case(19, block=19, window=3),
        Case(17, shared=1, window=5, traced=True, cap=0.8, sinks=True),
        Case(24, run=6, pieces=(0, 3)),
        Case(15, run=5, pieces=(2, 0), window=4, sinks=True),
        Case(14, run=7, pieces=(1,), block=3, lonely=True),
        Case(21, run=1, pieces=(20, 3, 9), causal=False, window=6),
    ],
    ids=str,
)
def test_blockwise_equals_numpy_reference(case: Case) -> None:
    check_blocks(case)


@pytest.mark.long
@settings(max_examples=15)
@given(case=CASES)
def test_blockwise_equals_numpy_reference_for_random_cases(case: Case) -> None:
    check_blocks(case)


def check_blocks(case: Case) -> None:
    """Compare output and gradients; both are zero for a query that sees no key."""
    arrays, segments = case.arrays()
    wanted = plain(case, case.mask(segments, jnp.asarray(arrays[-1])), arrays)

    def attend(*given: Any) -> Any:
        return blockwise.attend(*given, block=case.block)

    assert_same(of_backend(attend, case, segments, arrays), wanted)
    # Without loops, for masks that can be unrolled.
    small = partial(unrolled_blocks, size=case.block)
    with mock.patch.object(blockwise, "unrolled_blocks", small):
        assert_same(of_backend(blockwise.attend, case, segments, arrays), wanted)


@pytest.mark.parametrize(
    "case",
    [
        Case(131, window=40, traced=True, sinks=True, cap=0.8),
        Case(257, shared=1, scale=0.3),
        Case(200, window=70),
        Case(521, window=40, traced=True, sinks=True, cap=0.8),
    ],
    ids=str,
)
def test_default_blocks_equal_xla_attention(case: Case) -> None:
    arrays, segments = case.arrays()
    found = of_backend(blockwise.attend, case, segments, arrays)
    assert_same(found, of_backend(xla.attend, case, segments, arrays))


def test_bfloat16_matmuls_accumulate_in_float32() -> None:
    """Sum ones over a large block: a bfloat16 sum would stop at 256."""
    case = Case(600, groups=1, shared=1, causal=False)
    arrays, _ = case.arrays()
    query, key, value = (jnp.asarray(each, jnp.bfloat16) for each in arrays[:3])
    value = jnp.ones_like(value)
    mask = Mask(jnp.zeros((ROWS, case.keys), jnp.int32), causal=False)

    def total(value: Any) -> Any:
        return blockwise.attend(query * 0, key, value, mask).astype(jnp.float32).sum()

    mixed = jax.jit(partial(blockwise.attend, mask=mask))(query, key, value)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(mixed, np.float32), 1.0)
    # Each query weights all values equally: each value receives 600 times 1/600.
    np.testing.assert_allclose(
        np.asarray(jax.jit(jax.grad(total))(value), np.float32), 1.0, rtol=2**-7
    )


def test_memory_grows_linearly_with_sequence_length() -> None:
    """Twice the tokens need twice the memory, but four times the memory with `xla`."""

    def temporary(attend: Any, tokens: int) -> int:
        shape = jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

        def run(q: Any, k: Any, v: Any, ids: Any) -> Any:
            return jax.grad(lambda *x: attend(*x, Mask(ids)).sum(), (0, 1, 2))(q, k, v)

        program: Any = jax.jit(run).lower(shape, shape, shape, ids).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(blockwise.attend, 4096) < 2.2 * temporary(blockwise.attend, 2048)
    assert temporary(xla.attend, 4096) > 3 * temporary(xla.attend, 2048)
    assert temporary(blockwise.attend, 2048) < 0.2 * temporary(xla.attend, 2048)


@pytest.mark.parametrize("window", [0, 33])
def test_loops_skip_fully_masked_blocks(window: int) -> None:
    """Values that no query of a block can see are never read, so they may be NaN."""
    tokens, block = 64, 16
    query = jnp.ones((1, tokens, 1, 4))
    value = jnp.ones((1, tokens, 1, 4)).at[:, block:].set(jnp.nan)
    mask = Mask(jnp.zeros((1, tokens), jnp.int32), window=jnp.int32(window))
    run = jax.jit(lambda value: blockwise.attend(query, query, value, mask, block))
    found = run(value)
    np.testing.assert_array_equal(found[:, :block], 1.0)
    assert jnp.isnan(found[:, block : 2 * block]).all()
    late = value.at[:, block:].set(1.0).at[:, :block].set(jnp.nan)
    found = run(late)
    sees_all = not window
    assert bool(jnp.isfinite(found[:, -1]).all()) != sees_all


def test_blocks_of_earlier_documents_are_skipped() -> None:
    """A query block starts at the first key block that contains one of its documents."""
    tokens, block = 64, 16
    query = jnp.ones((2, tokens, 1, 4))
    segments = jnp.stack([jnp.arange(tokens) // 32, (jnp.arange(tokens) + 8) // 32])
    value = query.at[:, :block].set(jnp.nan)
    run = jax.jit(lambda value: blockwise.attend(query, query, value, Mask(segments), block))
    found = run(value)
    assert jnp.isnan(found[:, : 2 * block]).all()  # all sequences share the loop of a block
    np.testing.assert_array_equal(found[:, 2 * block :], 1.0)


@pytest.mark.parametrize("tokens", [1, 7, 127, 128, 129, 257, 4096, 5000, 8192, 131072])
def test_even_blocks_have_similar_sizes(tokens: int) -> None:
    size = even_blocks(tokens)
    count = -(-tokens // size)
    assert size <= 512 and size * count - tokens < 8 * count
    assert (count - 1) * size < tokens


def test_saved_context_avoids_forward_recomputation() -> None:
    """If `context` is saved, the backward pass has only its own loops or matmuls."""
    query = jnp.ones((1, 8, 2, 4))
    mask = Mask(jnp.zeros((1, 8), jnp.int32))

    def count(what: str, block: int, *names: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        attend = partial(blockwise.attend, mask=mask, block=block)
        run = jax.checkpoint(lambda q: attend(q, q, q), policy=policy)
        programs: list[str] = []

        def trace(query: Any) -> Any:
            out, pullback = jax.vjp(run, query)
            programs.append(str(jax.make_jaxpr(pullback)(out)))
            return out

        jax.eval_shape(trace, query)
        return programs[0].count(what)

    loops, products = partial(count, " scan[", 4), partial(count, " dot_general[", 0)
    assert loops() == 2
    assert loops("context") == 2
    assert loops("context", "attention_lse") == 1
    assert (products(), products("context", "attention_lse")) == (7, 5)


@pytest.mark.parametrize(
    ("tokens", "windows"), [(1, (0,)), (200, (0, 9)), (512, (70, 3)), (64, (8,))]
)
def test_unrolled_blocks_cover_all_visible_keys(tokens: int, windows: tuple[int, ...]) -> None:
    """They start at block boundaries, on which the sums of the key gradients rely."""
    blocks = unrolled_blocks(tokens, windows)
    assert [start for _, start, _ in blocks] == [0, *(stop for *_, stop in blocks[:-1])]
    assert blocks[-1][2] == tokens
    for first, start, stop in blocks:
        assert first in {begin for _, begin, _ in blocks} and stop - start <= 64
        for window in windows:
            assert first <= (max(0, start - window + 1) if window else 0)
    assert not unrolled_blocks(513)
