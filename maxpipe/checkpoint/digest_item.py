"""The host copies of arrays that a save writes, and their digests, as an item of the checkpoint.

orbax copies each process' part of every array to its host while training waits. The digests
are of these very copies, taken in the background while they are being written: there is no
second copy, and a change between memory and disk is detected. Each process writes those of
its own parts, `digests/<process>.json`, and orbax commits a step only when all have.

Trees of arrays by the dotted names of their leaves: digests, sizes and differences.
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
    """Dotted name to leaf, in the order of the names."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return dict(
        sorted(
            (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found
        )
    )


def map_named_leaves(change: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """The tree with what `change(dotted name, leaf)` makes of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
        tree,
    )


def iter_named_arrays(tree: Tree) -> Iterator[tuple[str, np.ndarray]]:
    """Dotted name and array of every leaf, in the order of their names."""
    for name, leaf in leaves_by_name(tree).items():
        yield name, np.asarray(leaf)


def tree_digest(tree: Tree) -> str:
    """SHA-256 over names, types, shapes and bytes of all leaves.

    On trees in their saved form it does not depend on mesh, stages or schedule.
    """
    total = hashlib.sha256()
    for name, array in iter_named_arrays(tree):
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def num_bytes(tree: Tree) -> int:
    """Bytes of all leaves together, over all devices."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def diff_shapes(saved: Tree, wanted: Tree) -> list[str]:
    """One line for each leaf that only one of the trees has, or that has another shape."""
    before, now = leaves_by_name(saved), leaves_by_name(wanted)
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name} is in the checkpoint only")
        elif name not in before:
            lines.append(f"{name} is not in the checkpoint")
        elif tuple(before[name].shape) != tuple(now[name].shape):
            lines.append(
                f"{name} is {_shape(before[name])} in the checkpoint, not {_shape(now[name])}"
            )
    return lines


def diff_trees(first: Tree, second: Tree) -> list[str]:
    """One line for each leaf that is not the same, bit for bit, in both trees."""
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
            # Of bfloat16 numpy knows too little to subtract it.
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
"""By array: this process' parts and the index of the first element of each."""

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
    """The host copies that orbax makes. It has no interface for them, so its copying is wrapped."""
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
    assert copies.keys() == arrays.keys(), "orbax copied arrays in another way"


def digest_host_copies(state: Tree, copies: HostCopies) -> dict[str, ArrayDigest]:
    """Of this process' parts of all arrays."""
    found = {}
    for name, leaf in leaves_by_name(state).items():
        found[name] = ArrayDigest(str(leaf.dtype), tuple(leaf.shape))
        for part, start in copies[name]:
            found[name].add(part, start)
    return found


def await_digests(state: Tree, copied: Future[HostCopies | None]) -> dict[str, ArrayDigest] | None:
    """The same, once the copies are made; None without any."""
    copies = copied.result()
    if copies is None:
        return None
    found = digest_host_copies(state, copies)
    copies.clear()  # orbax may hold on to this save until the next
    return found


def digest_local_shards(state: Tree) -> dict[str, ArrayDigest]:
    """Of the parts that this process holds of arrays on devices, each part in one process only.

    An array of numpy, which every process holds, counts in process 0.
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
    """Of config, data position and the rest, however they are laid out as text."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class DigestHandler(ocp.AsyncCheckpointHandler):
    """Writes the digests of one process' parts."""

    async def async_save(  # type: ignore[override]
        self, directory: epath.Path, args: DigestSaveArgs
    ) -> list[future.Future]:
        writing = _write(directory, args)
        return [future.CommitFutureAwaitingContractedSignals(writing, name=DIGEST_ITEM)]

    def save(self, directory: epath.Path, args: DigestSaveArgs) -> None:
        raise NotImplementedError("the host copies come while orbax saves in the background")

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError("they are read by `recorded`")


@ocp.args.register_with_handler(DigestHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class DigestSaveArgs(ocp.args.CheckpointArgs):
    """`sums` waits for the digests of this process' parts; None: the save has failed before."""

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
    """Digests of memory when a step was saved; older releases lack the facts' digest."""

    arrays: dict[str, ArrayDigest]
    metadata_digest: str = ""


def read_digest_item(folder: epath.Path, step: int) -> RecordedDigests:
    """The digests that all processes have written into a step.

    Raises:
        ValueError: it is not what they wrote, or not all of it.
        OSError: it cannot be read.
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
            raise ValueError(f"{name} is of step {content['step']}")
        if number == 0:
            count, facts = content["processes"], content["facts"]
        elif content["processes"] != count:
            raise ValueError(f"{name} is of another save")
        number += 1
    return RecordedDigests(digests.merge_digests(parts), facts)
