"""Compute sharding-independent array digests, and store them as an orbax item.

The digest of an array is a sum over all elements, modulo 2**64. Every element contributes its bits
as an unsigned integer, multiplied by one key per dimension. The key depends on the element's index
in that dimension. All keys are odd, so a change to one element always changes the digest. Other
changes, such as swapped rows or blocks, go undetected with a probability of about 2**-60, or at
worst 2**-32 (two flipped signs). The digests of disjoint shards add up to the digest of the full
array. The digest does not protect against tampering. Computing it with numpy is two to three times
faster than SHA-256 and releases the GIL.

During a save, the shards of every process are copied to host memory while training waits. The
digests are computed from these copies in the background, while orbax writes the copies to disk.
The digests thus detect any change between memory and disk without a second copy. Every process
writes the digests of its shards to `digests/<process>.json`. orbax commits a step after all
processes have written their digests.

This module also computes digests, sizes and differences of pytrees whose leaves have dotted names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypedDict

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import future

from maxpipe.checkpoint.storage import read
from maxpipe.io.typed_json import dump_checksummed, parse_checksummed

Tree = Any
HostCopies = dict[str, list[tuple[np.ndarray, tuple[int, ...]]]]
"""Shards of this process, keyed by array name, each with the index of its first element."""

DIGEST_ITEM = "digests"
_VERSION = 1
_MAX_BYTES = 1 << 26

_MODULO = 2**64
_BLOCK = 1 << 17
"""Number of elements per block. Larger blocks do not fit in the CPU cache; smaller blocks make
threads wait for the GIL more often."""
_SHORT = 64
"""Rows with fewer elements than this are merged, to limit the number of numpy calls."""
# In NaN and infinity, all of these exponent bits are set.
_EXPONENTS = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
}


class ArrayEntry(TypedDict):
    """JSON entry of a full array. The digest has 16 hexadecimal digits."""

    dtype: str
    shape: list[int]
    digest: str


class PartEntry(ArrayEntry):
    """JSON entry of a shard, including its number of elements and of non-finite elements."""

    elements: int
    non_finite: int


@dataclasses.dataclass(slots=True)
class ArrayDigest:
    """Running digest of one array, over the shards added so far."""

    dtype: str
    shape: tuple[int, ...]
    value: int = 0
    elements: int = 0
    non_finite: int = 0

    def add(self, part: np.ndarray, start: Sequence[int] = (), *, is_finite: bool = False) -> None:
        """Add a shard whose first element is at index `start` (default: all zeros).

        If `is_finite` is set, non-finite elements are not counted, because there are none.
        """
        first = tuple(start) or (0,) * part.ndim
        assert str(part.dtype) == self.dtype and part.ndim == len(self.shape) == len(first)
        self.elements += part.size
        self.non_finite += 0 if is_finite else num_non_finite(part)
        self.value = (self.value + _sum(*_words(part, first))) % _MODULO

    def merge(self, other: ArrayDigest) -> None:
        """Add the shards covered by another digest of the same array."""
        assert (self.dtype, self.shape) == (other.dtype, other.shape)
        self.value = (self.value + other.value) % _MODULO
        self.elements += other.elements
        self.non_finite += other.non_finite

    @property
    def is_complete(self) -> bool:
        """Return whether the added shards cover the array, assuming that they do not overlap."""
        return self.elements == math.prod(self.shape)

    def entry(self) -> ArrayEntry:
        """Return the JSON entry of a full array."""
        return {"dtype": self.dtype, "shape": list(self.shape), "digest": f"{self.value:016x}"}

    def part_entry(self) -> PartEntry:
        """Return the JSON entry of a shard."""
        return {**self.entry(), "elements": self.elements, "non_finite": self.non_finite}

    @classmethod
    def from_entry(cls, entry: ArrayEntry) -> ArrayDigest:
        """Create the digest of a full array from its JSON entry.

        Raises:
            ValueError: the digest is not a hexadecimal number.
        """
        shape = tuple(entry["shape"])
        return cls(entry["dtype"], shape, int(entry["digest"], 16), math.prod(shape))

    @classmethod
    def from_part_entry(cls, entry: PartEntry) -> ArrayDigest:
        """Create the digest of a shard from its JSON entry; raises the same errors as
        `from_entry`.
        """
        digest = cls.from_entry(entry)
        digest.elements, digest.non_finite = entry["elements"], entry["non_finite"]
        return digest


def num_non_finite(array: np.ndarray) -> int:
    """Return the number of NaN or infinite elements, or 0 for dtypes without NaN and infinity."""
    if array.dtype == np.float64:
        return array.size - int(np.count_nonzero(np.isfinite(array)))
    if (exponent := _EXPONENTS.get(str(array.dtype))) is None:
        return 0
    words, count = np.ascontiguousarray(array).reshape(-1).view(exponent.dtype), 0
    sign = exponent.dtype.type(1 << (8 * exponent.itemsize - 1))
    for begin in range(0, words.size, _BLOCK):
        block = words[begin : begin + _BLOCK]
        # As integers, finite numbers are smaller than infinity and NaN of the same sign.
        signed = block.view(f"i{exponent.itemsize}")
        if signed.max() >= exponent or block.max() >= exponent | sign:
            count += int(np.count_nonzero(block & exponent == exponent))
    return count


def digest_array(array: np.ndarray) -> ArrayDigest:
    """Return the digest of a full array."""
    digest = ArrayDigest(str(array.dtype), array.shape)
    digest.add(array)
    return digest


def diff_digests(
    expected: Mapping[str, ArrayDigest], actual: Mapping[str, ArrayDigest]
) -> list[str]:
    """Return one line for every array that was changed, removed or added, sorted by name."""
    lines = []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            lines.append(f"array {name} is missing")
        elif name not in expected:
            lines.append(f"array {name} was not saved")
        else:
            before, now = expected[name], actual[name]
            if (before.dtype, before.shape) != (now.dtype, now.shape):
                lines.append(
                    f"array {name} is {now.dtype} {_shape(now, 'scalar')}, not the {before.dtype} "
                    f"{_shape(before, 'scalar')} that was saved"
                )
            elif before.value != now.value or before.elements != now.elements:
                lines.append(f"array {name} differs from the saved content")
    return lines


def describe_non_finite(sums: Mapping[str, ArrayDigest]) -> list[str]:
    """Return one line for every array that contains NaN or infinity, sorted by name."""
    return [
        f"array {name} contains {one.non_finite:,} values that are NaN or infinite"
        for name, one in sorted(sums.items())
        if one.non_finite
    ]


def merge_digests(parts: Iterable[Mapping[str, ArrayDigest]]) -> dict[str, ArrayDigest]:
    """Merge the digests of several processes.

    Raises:
        ValueError: processes recorded different dtypes or shapes for an array, or the shards do not
            cover the array.
    """
    total: dict[str, ArrayDigest] = {}
    for part in parts:
        for name, digest in part.items():
            merged = total.setdefault(name, ArrayDigest(digest.dtype, digest.shape))
            if (merged.dtype, merged.shape) != (digest.dtype, digest.shape):
                raise ValueError(f"processes recorded different dtypes or shapes for {name}")
            merged.merge(digest)
    for name, one in total.items():
        if not one.is_complete:
            count = math.prod(one.shape)
            raise ValueError(f"digests cover {one.elements:,} of {count:,} elements of {name}")
    return total


def _words(part: np.ndarray, start: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the elements as unsigned integers of at most 32 bits, and the index of the first one.

    Larger elements are split along an additional last dimension, because two flipped signs would go
    undetected in 64-bit integers.
    """
    part = np.ascontiguousarray(part).reshape(part.shape)
    size = part.dtype.itemsize
    if size <= 4:
        return part.view(f"u{size}"), start
    words = part.reshape(-1).view(np.uint32).reshape(*part.shape, size // 4)
    return words, (*start, 0)


def _sum(words: np.ndarray, start: tuple[int, ...]) -> int:
    if not words.size:
        return 0
    shape = words.shape
    # `row` contains one product of keys for each element of the trailing dimensions. The trailing
    # dimensions are the last dimensions that together fit in one block.
    split, inner = len(shape), 1
    while split and inner * shape[split - 1] <= _BLOCK:
        split -= 1
        inner *= shape[split]
    row = _keys(split, shape[split:], start[split:])
    wide = np.empty(min(_BLOCK, words.size), np.uint64)
    if not split:
        return _dot(words.reshape(1, -1), np.ones(1, np.uint64), row, wide)
    axis, size = split - 1, shape[split - 1]
    outer = _keys(0, shape[:axis], start[:axis])
    lines = words.reshape(outer.size, size * inner)
    step, total, first = max(1, _BLOCK // inner), 0, start[axis]
    whole = _axis_keys(axis, first, first + min(size, _BLOCK))
    for begin in range(0, size, step):
        end, keys = min(begin + step, size), row
        along = whole[begin:end] if size <= _BLOCK else _axis_keys(axis, first + begin, first + end)
        if inner < _SHORT:
            along, keys = np.ones(1, np.uint64), np.multiply.outer(along, row).reshape(-1)
        for line, key in zip(lines, outer, strict=True):
            part = line[begin * inner : end * inner].reshape(along.size, -1)
            total += _dot(part, along, keys, wide) * int(key)
    return total


def _dot(words: np.ndarray, along: np.ndarray, row: np.ndarray, wide: np.ndarray) -> int:
    """Return the sum of a matrix's elements, each multiplied by the keys of its row and column.

    `wide` is scratch memory. For 64-bit integers, einsum uses vector instructions but dot does not.
    """
    wide = wide[: words.size].reshape(words.shape)
    np.copyto(wide, words)
    return int(np.einsum("i,i->", np.einsum("ij,j->i", wide, row), along))


def _keys(axis: int, sizes: Sequence[int], start: Sequence[int]) -> np.ndarray:
    """Return the flat outer product of the keys of consecutive dimensions, starting at `axis`."""
    keys = np.ones(1, np.uint64)
    for number, (size, first) in enumerate(zip(sizes, start, strict=True)):
        along = _axis_keys(axis + number, first, first + size)
        keys = np.multiply.outer(keys, along).reshape(-1)
    return keys


@functools.lru_cache(maxsize=64)
def _axis_keys(axis: int, begin: int, end: int) -> np.ndarray:
    """Return the keys for indices [begin, end) of one dimension: odd splitmix64 values."""
    bits = np.arange(begin, end, dtype=np.uint64) + np.uint64(((axis + 1) << 48) + 1)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits | np.uint64(1)


def leaves_by_name(tree: Tree) -> dict[str, Any]:
    """Return a dict of leaves, keyed and sorted by dotted name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return dict(sorted(zip(names, (leaf for _, leaf in leaves), strict=True)))


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
    """Return one line for each leaf that is missing from one tree or whose shape differs in the
    two.
    """
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
    """Return one line for every leaf that is not bitwise identical in both trees."""
    lines = []
    left, right = dict(iter_named_arrays(first)), dict(iter_named_arrays(second))
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            lines.append(
                f"{name}  is only in the {'first' if name in left else 'second'} checkpoint"
            )
            continue
        a, b = left[name], right[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            lines.append(
                f"{name}  {a.dtype} {_shape(a)} in the first checkpoint, "
                f"{b.dtype} {_shape(b)} in the second"
            )
        elif a.tobytes() != b.tobytes():
            # numpy cannot subtract bfloat16 arrays.
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
            share = np.count_nonzero(apart) / max(apart.size, 1)
            lines.append(
                f"{name}  {_shape(a)}, {100 * share:.4g}% of the elements differ, "
                f"by at most {apart.max():.6g}"
            )
    return lines


def _shape(array: Any, scalar: str = "a scalar") -> str:
    return " x ".join(map(str, array.shape)) or scalar


class _DigestFile(TypedDict):
    version: Literal[1]
    step: int
    processes: int
    facts: str
    arrays: dict[str, PartEntry]
    sha256: str


@contextlib.contextmanager
def distribute_replicas(state: Tree) -> Iterator[Tree]:
    """Yield the state with each replicated array sharded over the devices that hold its replicas.

    Every device then copies only one shard of such an array to the host. orbax selects the same
    shards, so it makes no further copies. The shards' device memory is released on exit.
    """
    parts = jax.tree.map(_divide, state)
    try:
        yield parts
    finally:
        for leaf, part in zip(jax.tree.leaves(state), jax.tree.leaves(parts), strict=True):
            if part is not leaf:
                part.delete()


def _divide(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return leaf
    sharding = leaf.sharding
    spec = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
    used = {axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,))}
    unused = tuple(axis for axis in sharding.mesh.axis_names if axis not in used)
    replicas = math.prod(sharding.mesh.shape[axis] for axis in unused)
    local = sharding.shard_shape(leaf.shape)
    dim = next((dim for dim, size in enumerate(local) if size % replicas == 0), None)
    if replicas == 1 or dim is None or not leaf.size:
        return leaf
    # orbax shards replicated arrays in pinned host memory only if the dims meet these conditions.
    is_divisible = leaf.ndim >= 2 and math.prod(local) % 1024 == 0 and local[-1] % 128 == 0
    if sharding.memory_kind == "pinned_host" and not is_divisible:
        return leaf
    axes = spec[dim] if isinstance(spec[dim], tuple) else (spec[dim],)
    spec[dim] = (*(axis for axis in axes if axis is not None), *unused)
    return jax.device_put(
        leaf, NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
    )


def copy_to_host(state: Tree) -> HostCopies:
    """Copy this process's device shards to the host. Replicated shards are copied only once.

    jax caches the copies, so a save of the same arrays does not copy them again. Every process has
    complete copies of all numpy arrays, so only process 0 includes numpy arrays.
    """
    shards = {
        name: [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        for name, leaf in leaves_by_name(state).items()
        if isinstance(leaf, jax.Array)
    }
    for shard in itertools.chain(*shards.values()):
        shard.data.copy_to_host_async()
    copies: HostCopies = {}
    for name, leaf in leaves_by_name(state).items():
        if name in shards:
            copies[name] = [
                (np.asarray(shard.data), tuple(index.start or 0 for index in shard.index))
                for shard in shards[name]
            ]
        else:
            copies[name] = [(leaf, (0,) * leaf.ndim)] if jax.process_index() == 0 else []
    return copies


def digest_host_copies(state: Tree, copies: HostCopies) -> dict[str, ArrayDigest]:
    """Return the digests of this process's shards of all arrays."""
    digests = {}
    for name, leaf in leaves_by_name(state).items():
        digests[name] = ArrayDigest(str(leaf.dtype), tuple(leaf.shape))
        for part, start in copies[name]:
            digests[name].add(part, start)
    return digests


def await_digests(state: Tree, copied: Future[HostCopies | None]) -> dict[str, ArrayDigest] | None:
    """Wait for the host copies, and return their digests; return None if the save failed
    earlier.
    """
    copies = copied.result()
    if copies is None:
        return None
    digests = digest_host_copies(state, copies)
    copies.clear()  # orbax may keep a reference to this save until the next one
    return digests


def digest_local_shards(state: Tree) -> dict[str, ArrayDigest]:
    """Return the digests of this process's shards. Replicated shards are included only once."""
    return digest_host_copies(state, copy_to_host(state))


def metadata_digest(facts: Mapping[str, Any]) -> str:
    """Return a digest of a checkpoint's metadata that does not depend on the JSON formatting."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class DigestHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler that writes the digests of one process's shards."""

    async def async_save(  # type: ignore[override]
        self, directory: epath.Path, args: DigestSaveArgs
    ) -> list[future.Future]:
        writing = _write_item(directory, args)
        return [future.CommitFutureAwaitingContractedSignals(writing, name=DIGEST_ITEM)]

    def save(self, directory: epath.Path, args: DigestSaveArgs) -> None:
        raise NotImplementedError("host copies are used only by asynchronous saves")

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError("use `read_digest_item` to read digests")


@ocp.args.register_with_handler(DigestHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class DigestSaveArgs(ocp.args.CheckpointArgs):
    """Save arguments. `sums` waits for the digests and returns None if the save failed."""

    step: int
    facts: Mapping[str, Any]
    sums: Callable[[], dict[str, ArrayDigest] | None]


async def _write_item(directory: epath.Path, args: DigestSaveArgs) -> None:
    sums = args.sums()
    if sums is None:
        return
    text = dump_checksummed(
        {
            "version": _VERSION,
            "step": args.step,
            "processes": jax.process_count(),
            "facts": metadata_digest(args.facts) if jax.process_index() == 0 else "",
            "arrays": {name: one.part_entry() for name, one in sums.items()},
        }
    )
    (directory / f"{jax.process_index()}.json").write_text(text)


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedDigests:
    """Digests of the in-memory arrays and of the metadata, recorded during a save.

    `metadata_digest` is empty in checkpoints from older releases.
    """

    arrays: dict[str, ArrayDigest]
    metadata_digest: str = ""


def read_digest_item(folder: epath.Path, step: int) -> RecordedDigests:
    """Read the digests that all processes wrote for a step.

    Raises:
        ValueError: a digest file is invalid, or some digests are missing.
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
            raise ValueError(f"{name} is invalid: {error}") from error
        if content["step"] != step:
            raise ValueError(f"{name} belongs to step {content['step']}")
        if number == 0:
            count, facts = content["processes"], content["facts"]
        elif content["processes"] != count:
            raise ValueError(f"{name} belongs to another save")
        number += 1
    return RecordedDigests(merge_digests(parts), facts)
