"""Checkpoints that are written slab by slab."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from maxpipe.checkpoint import contents, slabs
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.restore import restore
from maxpipe.errors import NumbersError

ARRAYS = {
    "a": np.random.default_rng(1).normal(size=(5, 7, 9)).astype(ml_dtypes.bfloat16),
    "b": np.random.default_rng(2).normal(size=(11,)).astype(np.float16),
    "c": np.random.default_rng(3).normal(size=(3, 1)).astype(np.float32),
}
SLABS = {"a": (2, 4, 9), "b": (11,), "c": (1, 1)}


def state(arrays: dict[str, np.ndarray] = ARRAYS, **changes: Any) -> dict[str, Any]:
    return {
        "params": {
            name: slabs.Slabs(
                array.shape, array.dtype, SLABS[name], changes.get(name, array.__getitem__)
            )
            for name, array in arrays.items()
        }
    }


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "checkpoints").mkdir()
    return Folder(tmp_path / "checkpoints")


FACTS = Facts(4, {"model": {}}, {"step": 4})


def test_the_arrays_are_those_of_the_slabs(folder: Folder) -> None:
    counts: list[int] = []
    slabs.save(folder, FACTS, state(), counts.append)
    assert folder.steps() == [4]
    assert sum(counts) == sum(array.nbytes for array in ARRAYS.values()) and len(counts) == 10
    found = restore(folder, 4, None)
    assert found.facts.data == {"step": 4}
    for name, array in ARRAYS.items():
        assert found.state["params"][name].dtype == array.dtype
        assert found.state["params"][name].tobytes() == array.tobytes()
    assert not contents.faults(folder / 4, 4, contents.recorded(folder / 4, 4))


def test_they_are_restored_in_the_type_that_is_asked_for(folder: Folder) -> None:
    slabs.save(folder, FACTS, state())
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, np.float32, sharding=place)
        for name, array in ARRAYS.items()
    }
    found = restore(folder, 4, {"params": wanted}).state["params"]
    for name, array in ARRAYS.items():
        assert found[name].dtype == np.float32
        assert (np.asarray(found[name]) == array.astype(np.float32)).all()


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyboardInterrupt])
def test_an_error_of_reading_is_raised_as_it_was(folder: Folder, kind: type) -> None:
    begun = threading.active_count()

    def read(region: slabs.Region) -> np.ndarray:
        if region[0].start:
            raise kind("while it was read")
        return ARRAYS["a"][region]

    with pytest.raises(kind, match="while it was read"):
        slabs.save(folder, FACTS, state(a=read))
    assert not folder.steps()
    assert threading.active_count() <= begun + 1  # nothing writes any more


def test_numbers_that_are_none_are_refused(folder: Folder) -> None:
    bad = {**ARRAYS, "b": ARRAYS["b"] + np.float16(np.inf)}
    with pytest.raises(NumbersError, match=r"params\.b holds 11 values"):
        slabs.save(folder, FACTS, state(bad))


@pytest.mark.parametrize(
    ("shape", "slab", "count"),
    [((5, 7), (2, 7), 3), ((5,), (9,), 1), ((), (), 1), ((4, 3, 2), (3, 2, 2), 4)],
)
def test_regions_cover_all_once(shape: tuple[int, ...], slab: tuple[int, ...], count: int) -> None:
    seen = np.zeros(shape, int)
    found = [*slabs.regions(shape, slab)]
    for region in found:
        seen[region] += 1
    assert (seen == 1).all() and len(found) == count


def test_the_first_error_ends_the_work() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        done.append(number)
        if number == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        slabs.each(work, range(1000))
    assert len(done) < 20
