"""The content of a step, read from its files: decoded arrays, and the digests taken in memory.

A step is intact when its arrays, decoded, have the digests that they had in memory, and
its facts are unchanged. That is checked before a step gets its manifest, by
`maxpipe checkpoints verify`, and by each restore of what it has read.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from maxpipe.checkpoint import copies, digests, manifest
from maxpipe.checkpoint.copies import Recorded, named
from maxpipe.checkpoint.digests import Sum
from maxpipe.checkpoint.storage import (
    Damaged,
    exists,
    first_line,
    in_bucket,
    is_damage,
    outage,
    reaching,
    read,
    reading,
    retried,
)
from maxpipe.errors import MaxpipeError, NumbersError
from maxpipe.io.typed import parse

Tree = Any

STATE, FACTS = "state", "facts"
"""Names of the items inside a step's folder, as they are passed to orbax."""

MOST_FACTS_BYTES = 1 << 24

# In parallel: each may be as large as one process' part of an array.
_NUM_THREADS = 2


class NotSaved(ValueError):
    """What was written is not what was in memory; the text is file or array, and reason."""


def shapes(folder: epath.Path) -> Tree:
    """Shapes and types of a step's arrays.

    Raises:
        Damaged: they cannot be read.
        OSError: they cannot be reached.
    """

    def read() -> Tree:
        check_plain(folder / STATE)
        found = ocp.StandardCheckpointHandler().metadata(folder / STATE)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found.tree)

    return understood(read)


def check_plain(folder: epath.Path) -> None:
    """Checks that orbax will open files and folders only, as a pipe would block, and no huge index.

    Raises:
        Damaged: something else is among them.
    """
    if in_bucket(folder):
        return
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(above, name)
            if os.path.islink(path) or not (os.path.isfile(path) or os.path.isdir(path)):
                raise Damaged(f"{name} is neither a file nor a folder")
            if name == _INDEX:
                _check_index(path)


def understood(read: Any) -> Any:
    """The result of a call that reads arrays.

    Raises:
        Damaged: the content is not that of a checkpoint.
        OSError: the storage failed repeatedly.
        Exception: what has nothing to do with storage, as it is.
    """
    try:
        return retried(read)
    except MaxpipeError:
        raise
    except Exception as error:  # orbax raises this class for damaged arrays, too
        if (failure := outage(error)) is not None:
            raise failure from error
        if not is_damage(error) and type(error) is not Exception:
            raise  # memory that is full, for instance
        raise Damaged(f"{STATE} cannot be read: {first_line(error)}") from error


def recorded(folder: epath.Path, step: int) -> Recorded | None:
    """The digests of memory when the step was saved; None for older releases without them.

    Raises:
        Damaged: it cannot be used.
        OSError: it cannot be reached.
    """
    try:
        if manifest.is_in(folder) and (listed := manifest.arrays(folder, step)) is not None:
            return Recorded({name: Sum.of_entry(one) for name, one in listed.items()})
        if not exists(folder / copies.ITEM):
            return None
        with reading(folder):
            return retried(lambda: copies.recorded(folder, step))
    except (OSError, ValueError) as error:
        if is_damage(error):
            raise Damaged(first_line(error)) from error
        raise


def decoded(folder: epath.Path) -> dict[str, Sum]:
    """Digests of a step's arrays as they are on disk.

    Raises:
        Damaged: they cannot be decoded.
        OSError: they cannot be reached.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return understood(lambda: dict(_decoded(folder, named(shapes(folder)), pool)))


def stored(folder: epath.Path, name: str) -> Any:
    """One array of a step as it is on disk, to be read in parts: `array[...].read().result()`."""
    base: Any = f"{folder / STATE}/"
    if not in_bucket(folder):
        _check_index(f"{folder / STATE / _INDEX}")
        base = {"driver": "file", "path": base}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": kvstore}
    return tensorstore.open(spec, open=True, read=True).result()


_INDEX = "manifest.ocdbt"
_MAX_INDEX_BYTES = 1 << 30


def _check_index(path: str) -> None:
    """Raise Damaged for an index of arrays that tensorstore cannot hold.

    It reads the whole file, and a failed allocation there ends the process.
    """
    size = os.stat(path).st_size if os.path.isfile(path) else 0
    if size > _MAX_INDEX_BYTES:
        raise Damaged(f"{STATE}/{_INDEX} has {size} bytes, more than any index of arrays")


def _decoded(
    folder: epath.Path, leaves: Mapping[str, Any], pool: ThreadPoolExecutor
) -> Iterator[tuple[str, Sum]]:
    for name in leaves:
        array = stored(folder, name)
        found = Sum(str(array.dtype.numpy_dtype), tuple(array.shape))

        chunk: tuple[Any, ...] = array.chunk_layout.read_chunk.shape or ()  # a scalar has none

        def part(start: tuple[int, ...], array: Any = array, chunk: Any = chunk) -> Sum:
            ends = map(min, array.shape, map(operator.add, start, chunk))
            values = array[tuple(map(slice, start, ends))].read().result()
            one = Sum(str(values.dtype), tuple(array.shape))
            one.add(values, start)
            return one

        for one in pool.map(part, _starts(tuple(array.shape), chunk)):
            found.join(one)
        yield name, found


def _starts(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Index of the first element of each chunk: each is decoded as a whole anyway."""
    ranges = [range(0, size, each) for size, each in zip(shape, chunk, strict=True)]
    return itertools.product(*ranges)


def faults(folder: epath.Path, step: int, expected: Recorded | None) -> list[str]:
    """The differences of a step's arrays and facts on disk from what was saved.

    Raises:
        OSError: they cannot be reached.
    """
    try:
        found = decoded(folder)
        if expected is None:
            return digests.non_finite(found)
        wrong = digests.differences(expected.arrays, found) or digests.non_finite(found)
        return wrong + facts_faults(folder, expected)
    except Damaged as damage:
        return [str(damage)]


def facts_faults(folder: epath.Path, expected: Recorded) -> list[str]:
    """What is wrong with the facts, if their digest is known without a manifest."""
    if not expected.facts:
        return []
    path = folder / FACTS / "metadata"
    try:
        content = parse(retried(lambda: read(path, MOST_FACTS_BYTES)), dict[str, Any])
    except (OSError, ValueError) as error:
        if not is_damage(error):
            raise
        return [f"{FACTS}/metadata cannot be read: {first_line(error)}"]
    if copies.facts_digest(content) != expected.facts:
        return [f"{FACTS}/metadata has other content than was saved"]
    return []


def seal(folder: epath.Path, step: int, ahead: Mapping[str, manifest.File] | None = None) -> int:
    """Read a step back, compare it with what was in memory, and write its manifest.

    `ahead` has digests of files that are on the disk, and not in the page cache.

    Returns:
        The bytes of all files.

    Raises:
        NotSaved: it is not what was in memory.
        NumbersError: it holds NaN or infinity, and so is no state to go on from.
        OSError: it cannot be read, or the manifest cannot be written.
    """
    with reaching(folder):
        try:
            expected = recorded(folder, step)
        except Damaged as damage:
            raise NotSaved(str(damage)) from damage
        if expected is None:
            raise NotSaved(f"{copies.ITEM} is missing")
        if bad := digests.non_finite(expected.arrays):
            raise _not_finite(folder, bad)
        files = manifest.listed(folder, ahead)
        with ThreadPoolExecutor(1) as pool:
            # After the files, so that all is read from the disk, not from the page cache.
            again = pool.submit(manifest.changed, folder, files)
            wrong = faults(folder, step, expected)
            wrong += again.result()
        entries = {name: one.entry() for name, one in expected.arrays.items()}
        if wrong := wrong or manifest.write(folder, step, files, entries):
            raise NotSaved("; ".join(wrong[:3]))
        return sum(file["bytes"] for file in files.values())


def adopt(folder: epath.Path, step: int) -> None:
    """Write the manifest of a step that was saved without one, and was read completely.

    Raises:
        NotSaved: it is not what was in memory, as far as that was recorded.
        OSError: it cannot be read, or the manifest cannot be written.
    """
    if exists(folder / copies.ITEM):
        seal(folder, step)
        return
    with reaching(folder):
        files = manifest.listed(folder)
        entries = {name: one.entry() for name, one in decoded(folder).items()}
        wrong = manifest.changed(folder, files)
        if wrong := wrong or manifest.write(folder, step, files, entries):
            raise NotSaved("; ".join(wrong[:3]))


def _not_finite(folder: epath.Path, bad: list[str]) -> NumbersError:
    more = f", and {len(bad) - 3} more arrays" if len(bad) > 3 else ""
    return NumbersError(
        f"{folder}: is not saved\n"
        f"  {'; '.join(bad[:3])}{more}; a run cannot go on from such a state.\n"
        "  Lower optim.learning_rate, or go back further with checkpoint.restore_from; the "
        "checkpoints before this one stay."
    )
