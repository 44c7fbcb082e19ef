"""Define an orbax checkpoint item for the digests of all arrays, computed from host copies.

During a save, orbax copies every process's array shards to host memory while training waits.
The digests are computed from these copies in the background, while orbax writes the copies to disk.
The digests detect any change between memory and disk without a second copy. Every process writes
the digests of its shards to `digests/<process>.json`. orbax commits a step after all processes have
written their digests.

The module also computes digests, sizes and differences of trees, keyed by dotted leaf names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypedDict

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future
from orbax.checkpoint._src.serialization import replica_slices

from maxpipe.checkpoint import digests
from maxpipe.checkpoint.digests import ArrayDigest, PartEntry
from maxpipe.checkpoint.storage import read
from maxpipe.io.typed_json import dump_checksummed, parse_checksummed


def leaves_by_name(tree: Tree) -> dict[str, Any]:
    """Return a dict from dotted names to leaves, sorted by name."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return dict(
        sorted(
            (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found
        )
    )


def map_named_leaves(change: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Map `change(dotted_name, leaf)` over the leaves of a tree."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
        tree,
    )


def iter_named_arrays(tree: Tree) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the dotted name and array of every leaf, sorted by name."""
    for name, leaf in leaves_by_name(tree).items():
        yield name, np.asarray(leaf)


def tree_digest(tree: Tree) -> str:
    """Return the SHA-256 digest of the names, dtypes, shapes and bytes of all leaves.

    For trees in the saved layout, the digest is independent of mesh, stages and schedule.
    """
    total = hashlib.sha256()
    for name, array in iter_named_arrays(tree):
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def num_bytes(tree: Tree) -> int:
    """Return the total size of all leaves in bytes, summed over all devices."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def diff_shapes(saved: Tree, wanted: Tree) -> list[str]:
    """Return one line for every leaf that is missing in one tree or has different shapes."""
    before, now = leaves_by_name(saved), leaves_by_name(wanted)
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name} is only in the checkpoint")
        elif name not in before:
            lines.append(f"{name} is not in the checkpoint")
        elif tuple(before[name].shape) != tuple(now[name].shape):
            lines.append(
                f"{name} is {_shape(before[name])} in the checkpoint, not {_shape(now[name])}"
            )
    return lines


def diff_trees(first: Tree, second: Tree) -> list[str]:
    """Return one line for every leaf that is not bitwise equal in both trees."""
    lines = []
    left, right = dict(iter_named_arrays(first)), dict(iter_named_arrays(second))
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            lines.append(f"{name}  only in the {'first' if name in left else 'second'}")
            continue
        a, b = left[name], right[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            lines.append(f"{name}  {a.dtype} {_shape(a)}, and {b.dtype} {_shape(b)}")
        elif a.tobytes() != b.tobytes():
            # numpy cannot subtract bfloat16 arrays.
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
            share = np.count_nonzero(apart) / max(apart.size, 1)
            lines.append(
                f"{name}  {_shape(a)}, {100 * share:.4g}% of its values differ, "
                f"by at most {apart.max():.6g}"
            )
    return lines


def _shape(leaf: Any) -> str:
    return " x ".join(map(str, leaf.shape)) or "a scalar"


Tree = Any
HostCopies = dict[str, list[tuple[np.ndarray, tuple[int, ...]]]]
"""The shards of this process, keyed by array name, each with the index of its first element."""

DIGEST_ITEM = "digests"
_MAX_BYTES = 1 << 26

_VERSION = 1


class _DigestFile(TypedDict):
    version: Literal[1]
    step: int
    processes: int
    facts: str
    arrays: dict[str, PartEntry]
    sha256: str


@contextlib.contextmanager
def capture_host_copies(state: Tree) -> Iterator[HostCopies]:
    """Capture the host copies that orbax creates during a save.

    orbax has no interface for these copies, so this function wraps the copy function of orbax.
    """
    arrays = leaves_by_name(state)
    names: dict[int, list[str]] = {}
    for name, leaf in arrays.items():
        names.setdefault(id(leaf), []).append(name)
    copies: HostCopies = {}
    copy = replica_slices.transfer_arrays_to_host

    def copy_and_note(values: Any, *args: Any, **options: Any) -> Any:
        found = copy(values, *args, **options)
        for value, slices in zip(values, found, strict=True):
            parts = [
                (np.asarray(part.data()), tuple(index.start or 0 for index in part.index))
                for part in slices.replica_slices
            ]
            for name in names[id(value)]:
                copies[name] = parts
        return found

    replica_slices.transfer_arrays_to_host = copy_and_note
    try:
        yield copies
    finally:
        replica_slices.transfer_arrays_to_host = copy
    assert copies.keys() == arrays.keys(), "orbax did not copy arrays through the wrapped function"


def digest_host_copies(state: Tree, copies: HostCopies) -> dict[str, ArrayDigest]:
    """Return the digests of this process's shards of all arrays."""
    found = {}
    for name, leaf in leaves_by_name(state).items():
        found[name] = ArrayDigest(str(leaf.dtype), tuple(leaf.shape))
        for part, start in copies[name]:
            found[name].add(part, start)
    return found


def await_digests(state: Tree, copied: Future[HostCopies | None]) -> dict[str, ArrayDigest] | None:
    """Wait for the host copies and return their digests, or None if the save failed earlier."""
    copies = copied.result()
    if copies is None:
        return None
    found = digest_host_copies(state, copies)
    copies.clear()  # orbax may keep a reference to this save until the next save
    return found


def digest_local_shards(state: Tree) -> dict[str, ArrayDigest]:
    """Return the digests of this process's device shards. Replicated shards count only once.

    Every process has all numpy arrays, so only process 0 counts them.
    """
    copies: HostCopies = {}
    for name, leaf in leaves_by_name(state).items():
        if isinstance(leaf, jax.Array):
            copies[name] = [
                (np.asarray(shard.data), tuple(index.start or 0 for index in shard.index))
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            ]
        else:
            whole = [(leaf, (0,) * leaf.ndim)]
            copies[name] = whole if jax.process_index() == 0 else []
    return digest_host_copies(state, copies)


def metadata_digest(facts: Mapping[str, Any]) -> str:
    """Return the digest of config, data position and other metadata, independent of formatting."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class DigestHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler that writes the digests of one process's shards."""

    async def async_save(  # type: ignore[override]
        self, directory: epath.Path, args: DigestSaveArgs
    ) -> list[future.Future]:
        writing = _write(directory, args)
        return [future.CommitFutureAwaitingContractedSignals(writing, name=DIGEST_ITEM)]

    def save(self, directory: epath.Path, args: DigestSaveArgs) -> None:
        raise NotImplementedError("host copies exist only during an asynchronous save")

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError("use `read_digest_item` to read digests")


@ocp.args.register_with_handler(DigestHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class DigestSaveArgs(ocp.args.CheckpointArgs):
    """Save arguments. `sums` waits for the digests, and returns None if the save has failed."""

    step: int
    facts: Mapping[str, Any]
    sums: Callable[[], dict[str, ArrayDigest] | None]


async def _write(directory: epath.Path, args: DigestSaveArgs) -> None:
    found = args.sums()
    if found is None:
        return
    text = dump_checksummed(
        {
            "version": _VERSION,
            "step": args.step,
            "processes": jax.process_count(),
            "facts": metadata_digest(args.facts) if jax.process_index() == 0 else "",
            "arrays": {name: one.part_entry() for name, one in found.items()},
        }
    )
    (directory / f"{jax.process_index()}.json").write_text(text)


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedDigests:
    """Digests of memory recorded at a save. `facts` is empty for steps of older releases."""

    arrays: dict[str, ArrayDigest]
    metadata_digest: str = ""


def read_digest_item(folder: epath.Path, step: int) -> RecordedDigests:
    """Read the digests that all processes wrote for a step.

    Raises:
        ValueError: a digest file is not valid, or some digests are missing.
        OSError: a digest file cannot be read.
    """
    parts: list[dict[str, ArrayDigest]] = []
    number, count, facts = 0, 1, ""
    while number < count:
        name = f"{DIGEST_ITEM}/{number}.json"
        try:
            content = parse_checksummed(
                read(folder / DIGEST_ITEM / f"{number}.json", _MAX_BYTES), _DigestFile
            )
            parts.append(
                {n: ArrayDigest.from_part_entry(one) for n, one in content["arrays"].items()}
            )
        except ValueError as error:
            raise ValueError(f"{name} cannot be used: {error}") from error
        if content["step"] != step:
            raise ValueError(f"{name} belongs to step {content['step']}")
        if number == 0:
            count, facts = content["processes"], content["facts"]
        elif content["processes"] != count:
            raise ValueError(f"{name} belongs to another save")
        number += 1
    return RecordedDigests(digests.merge_digests(parts), facts)
