"""Array digests are independent of how arrays are partitioned, and detect any change in them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from maxpipe.checkpoint import digests
from maxpipe.checkpoint.digests import (
    ArrayDigest,
    diff_digests,
    digest_array,
    digest_local_shards,
    merge_digests,
)

CASES = [
    ((), "int32"),
    ((1,), "float32"),
    ((1000,), "bfloat16"),
    ((300_001,), "float32"),
    ((3, 290_000), "bfloat16"),
    ((5, 7), "int64"),
    ((600, 700), "float32"),
    ((4, 3, 2, 50), "float64"),
    ((30_000, 3), "int8"),
    ((2, 0, 3), "float32"),
]


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    bits = np.random.default_rng(seed).bytes(math.prod(shape) * kind.itemsize)
    return np.frombuffer(bits, kind).reshape(shape)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_digest_of_parts_equals_digest_of_array(shape: tuple[int, ...], dtype: str):
    array, chance = values(shape, dtype), np.random.default_rng(1)
    whole = digest_array(array)
    for _ in range(3):
        parts = ArrayDigest(whole.dtype, whole.shape)
        cuts = [sorted({0, size, *chance.integers(0, size + 1, 2)}) for size in shape]
        boxes = itertools.product(*(list(itertools.pairwise(places)) for places in cuts))
        for box in boxes:
            part = array[tuple(slice(*ends) for ends in box)]
            parts.add(part, [begin for begin, _ in box])
        assert parts == whole and parts.is_complete == (math.prod(shape) == parts.elements)


def test_digest_is_independent_of_block_size(monkeypatch: pytest.MonkeyPatch):
    arrays = [values(shape, dtype) for shape, dtype in CASES]
    before = [digest_array(array) for array in arrays]
    for block in (1, 7, 1000):
        monkeypatch.setattr(digests, "_BLOCK", block)
        arrays = [array for array in arrays if array.size < 3000]
        after = [digest_array(array) for array in arrays]
        assert [one for one in before if one in after] == after


def test_digest_values_are_stable_across_releases():
    """Saved manifests contain these values."""
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert f"{digest_array(array).value:016x}" == "d077fd947d000000"
    assert f"{digest_array(np.array([2**40 + 1])).value:016x}" == "7363a95f44a83a8f"


@pytest.mark.fault("K1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_every_flipped_bit_changes_digest(dtype: str):
    array = values((13, 17), dtype)
    before, size = digest_array(array).value, array.dtype.itemsize * 8
    found = {before}
    places = set(np.random.default_rng(2).integers(0, array.size, 40).tolist())
    for place in places:
        for bit in range(size):
            words = array.reshape(-1).view(np.uint8).copy()
            words[place * size // 8 + bit // 8] ^= 1 << bit % 8
            found.add(digest_array(words.view(array.dtype).reshape(array.shape)).value)
    assert len(found) == 1 + size * len(places)


@pytest.mark.fault("K1")
def test_permuted_zeroed_or_sign_flipped_elements_change_digest():
    array = values((64, 48), "float32")
    before = digest_array(array).value
    changed: list[np.ndarray] = []
    for i, j in itertools.combinations(range(0, 48, 5), 2):
        for axis in (0, 1):
            order = np.arange(array.shape[axis])
            order[[i, j]] = order[[j, i]]
            changed.append(np.take(array, order, axis))
    changed += [np.roll(array, shift, axis) for shift in (1, 7, 32) for axis in (0, 1)]
    changed += [array.reshape(48, 64).T.copy(), array[::-1].copy(), array[:, ::-1].copy()]
    for begin in range(0, 64, 9):
        cut = array.copy()
        cut[begin:] = 0
        changed.append(cut)
    for i, j in itertools.combinations(range(0, 64 * 48, 300), 2):  # two sign bits
        words = array.reshape(-1).view(np.uint32).copy()
        words[[i, j]] ^= 1 << 31
        changed.append(words.view(np.float32).reshape(array.shape))
    wide = values((8, 8), "float64")
    signs = wide.copy()
    signs[0, 1], signs[3, 2] = -signs[0, 1], -signs[3, 2]
    assert digest_array(signs) != digest_array(wide), (
        "two flipped signs cancel out in the digest of a float64 array"
    )
    assert before not in [digest_array(each).value for each in changed]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.fault("K3", "K4")
def test_digest_counts_non_finite_elements(dtype: str):
    array = (
        np.arange(-60, 60)
        .reshape(3, 40)
        .astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    )
    array[0, 0] = ml_dtypes.finfo(array.dtype).max
    assert digest_array(array).non_finite == 0
    array[1, 3], array[2, 39], array[0, 7] = np.nan, np.inf, -np.inf
    assert digest_array(array).non_finite == 3
    assert digest_array(np.full(3, np.inf, "float32").view("int32")).non_finite == 0


def test_merge_digests_rejects_incomplete_or_mismatched_arrays():
    array = values((6, 4), "float32")
    parts = [{"a": ArrayDigest("float32", (6, 4))} for _ in range(2)]
    parts[0]["a"].add(array[:2], (0, 0))
    with pytest.raises(ValueError, match="8 of 24 elements of a"):
        merge_digests(parts)
    parts[1]["a"].add(array[2:], (2, 0))
    assert merge_digests(parts)["a"] == digest_array(array)
    with pytest.raises(ValueError, match="types or shapes for a"):
        merge_digests([{"a": digest_array(array)}, {"a": digest_array(array[:2])}])


def test_diff_digests_names_the_array():
    one = {
        "a": digest_array(np.zeros(3, np.float32)),
        "b": digest_array(np.ones((2, 2), np.float32)),
    }
    other = {"b": digest_array(np.ones((2, 2), np.float32)), "c": digest_array(np.zeros(1))}
    assert diff_digests(one, one) == []
    assert diff_digests(one, other) == ["array a is missing", "array c was not saved"]
    other = one | {
        "a": digest_array(np.ones(3, np.float32)),
        "b": digest_array(np.ones(4, np.float32)),
    }
    assert diff_digests(one, other) == [
        "array a differs from the saved content",
        "array b is float32 4, not the float32 2 x 2 that was saved",
    ]


def test_digest_is_independent_of_mesh(devices: list[Any]):
    array = values((24, 16), "int32")
    expected = digest_array(array)
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=devices[:8])
    spec = jax.sharding.PartitionSpec
    for parts in (spec(), spec("x"), spec("y", "x"), spec(("x", "y")), spec(None, "y")):
        placed = jax.device_put(array, jax.sharding.NamedSharding(mesh, parts))
        assert digest_local_shards({"a": placed}) == {"a": expected}
    assert digest_local_shards({"a": array}) == {"a": expected}
