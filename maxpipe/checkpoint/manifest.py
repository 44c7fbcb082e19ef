"""Verify a checkpoint's content: files, arrays, recorded digests and manifest.

The manifest lists the size and SHA-256 of every file, to detect and locate changes on disk. Neither
the file system nor orbax detects a flipped bit in an array, so array digests are computed in memory
during the save. The manifest is written last, by atomic replacement, after the arrays have been
read back and compared. The manifest contains its own checksum. Version 1 of the manifest listed
files but no arrays.

A checkpoint is intact if its decoded arrays match the digests that were computed in memory during
the save, and its metadata is unchanged. Both conditions are checked before the manifest is written
and by `maxpipe checkpoints verify`. Every restore checks both conditions for the arrays that it
reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from maxpipe.checkpoint import digests
from maxpipe.checkpoint.digests import ArrayDigest, ArrayEntry, RecordedDigests, leaves_by_name
from maxpipe.checkpoint.storage import (
    DamagedError,
    call_with_retries,
    exists,
    files,
    in_bucket,
    is_damage,
    open_file,
    outage,
    read,
    root_cause_text,
    translate_bucket_errors,
    translate_read_errors,
)
from maxpipe.errors import Code, DivergenceError, MaxpipeError, StorageError
from maxpipe.io.array_store import array_context, array_store
from maxpipe.io.typed_json import check_type, dump_checksummed, parse_checksummed, parse_json

Tree = Any

STATE_ITEM, METADATA_ITEM = "state", "facts"
"""Names of orbax items in a step's folder."""

MAX_METADATA_BYTES = 1 << 24

FILE = "manifest.json"

_VERSION = 2
_PARTIAL = f"{FILE}.partial"
_MAX_BYTES = 1 << 26
_INDEX = "manifest.ocdbt"
_MAX_INDEX_BYTES = 1 << 30
# Number of chunks that are read in parallel. A chunk can be as large as one process's shard of an
# array.
_NUM_CHUNK_THREADS = 2
# Most of the time for computing digests is spent on reads, especially on network file systems.
_NUM_THREADS = 16
# Files that must be listed in every manifest.
_REQUIRED_FILES = ("facts/metadata", "state/_METADATA")


class ManifestFile(TypedDict):
    """Manifest entry of one file."""

    bytes: int
    sha256: str


class VerifiedFiles(NamedTuple):
    """Content of a step that was flushed, read back from disk and compared with memory."""

    files: Mapping[str, ManifestFile]
    """Manifest entries, keyed by path relative to the step's folder."""
    arrays: Mapping[str, ArrayDigest]
    """Digests of the arrays that these files store completely."""


class _ManifestContent(TypedDict):
    version: Literal[1, 2]
    step: int
    files: dict[str, ManifestFile]
    arrays: NotRequired[dict[str, ArrayEntry]]


def digest_files(
    folder: epath.Path, verified: Mapping[str, ManifestFile] | None = None
) -> dict[str, ManifestFile]:
    """Flush all files of a folder to disk, and return their sizes and digests.

    `verified` contains the entries of files that have already been flushed and are not read again.

    Raises:
        OSError: a file cannot be read.
    """
    names, known = sorted(files(folder).keys() - {FILE, _PARTIAL}), verified or {}
    entries = {name: known[name] for name in names if name in known}
    unread = [name for name in names if name not in entries]
    for name, file in zip(unread, _digests(folder, unread, flush=True), strict=True):
        if isinstance(file, OSError):
            raise file
        entries[name] = file
    return entries


def find_changed_files(folder: epath.Path, files: Mapping[str, ManifestFile]) -> list[str]:
    """Read the listed files again, and return one line for each file that differs from its digest.

    Without this second read, a bit flip while a file is being hashed would permanently mark an
    intact checkpoint as damaged.

    Raises:
        OSError: a file cannot be read.
    """
    return _changed(folder, list(files), files)


def write(
    folder: epath.Path,
    step: int,
    files: Mapping[str, ManifestFile],
    arrays: Mapping[str, ArrayEntry],
) -> list[str]:
    """Write a manifest, read it back, and return its faults.

    Raises:
        OSError: the manifest cannot be written.
    """
    text = dump_checksummed(
        {"version": _VERSION, "step": step, "files": dict(files), "arrays": dict(arrays)}
    )
    partial = folder / _PARTIAL
    partial.write_text(text)
    _flush(partial)
    if partial.read_text() != text:
        return [f"{FILE} differs from the written content"]
    partial.replace(folder / FILE)
    return []


def has_manifest(folder: epath.Path) -> bool:
    """Return whether `folder` contains a manifest."""
    return exists(folder / FILE)


def read_arrays(folder: epath.Path, step: int) -> dict[str, ArrayEntry] | None:
    """Return the array entries of a manifest, or None for version 1.

    Raises:
        ValueError: the manifest is invalid.
        OSError: the manifest cannot be read.
        StorageError: a newer release wrote the manifest.
    """
    return _read(folder, step).get("arrays")


def verify_files(
    folder: epath.Path,
    step: int,
    share: tuple[int, int] = (0, 1),
    stopped: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Compare the files of `folder` with its manifest; return one line per fault: file and reason.

    `share` (i, n) restricts the check to every n-th file, starting at file i, so that n processes
    can divide the work. Other processes may read the files at the same time.

    Raises:
        InterruptedError: `stopped` returned true.
        OSError: the storage is unreachable; the files may be intact.
        StorageError: a newer release wrote the manifest.
    """
    try:
        expected = _read(folder, step)["files"]
        present = files(folder)
    except OSError as error:
        if not is_damage(error):
            raise
        return [f"{FILE} cannot be read: {error.strerror or error}"]
    except ValueError as error:
        return [f"{FILE} is invalid: {error}"]
    wrong = [f"{name} is missing" for name in expected if name not in present]
    for name in sorted(present.keys() - expected.keys() - {FILE, _PARTIAL}):
        # Unknown files are harmless, unless they are in a folder that orbax reads.
        if "/" in name and not os.path.basename(name).startswith("."):
            wrong.append(f"{name} is not in {FILE}")
    index, count = share
    names = [name for name in expected if name in present][index::count]
    for name in [name for name in names if present[name] > expected[name]["bytes"]]:
        names.remove(name)  # do not read the file, which may be very large
        size = expected[name]["bytes"]
        wrong.append(f"{name} has {present[name]} bytes instead of {size}")
    # Drop all files from the page cache first, so that processes reading the same files share one
    # read from disk.
    for name in names:
        with contextlib.suppress(OSError):  # an unreadable file is reported below
            _drop(folder / name)
    return wrong + _changed(folder, names, expected, stopped)


def _read(folder: epath.Path, step: int) -> _ManifestContent:
    text = call_with_retries(lambda: read(folder / FILE, _MAX_BYTES))
    values = parse_checksummed(text, dict[str, Any])
    if isinstance(version := values.get("version"), int) and version > _VERSION:
        raise StorageError(
            Code.CKPT_FORMAT,
            f"{folder}: cannot be read\n"
            f"  {FILE} has version {version}; this release reads versions 1 to {_VERSION}.\n"
            "  Use the release of maxpipe that saved the checkpoint, or a newer one.",
        )
    content = check_type(values, _ManifestContent)
    if content["step"] != step:
        raise ValueError(f"the manifest belongs to step {content['step']}")
    if lacking := [name for name in _REQUIRED_FILES if name not in content["files"]]:
        raise ValueError(f"the manifest does not list {lacking[0]}")
    if content["version"] > 1 and not content.get("arrays"):
        raise ValueError("the manifest lists no arrays")
    return content


def _changed(
    folder: epath.Path,
    names: list[str],
    expected: Mapping[str, ManifestFile],
    stopped: Callable[[], bool] = lambda: False,
) -> list[str]:
    wrong = []
    for name, file in zip(names, _digests(folder, names, stopped), strict=True):
        size = expected[name]["bytes"]
        if isinstance(file, OSError):
            if not is_damage(file):
                raise file
            wrong.append(f"{name} cannot be read: {file.strerror or file}")
        elif file["bytes"] != size:
            wrong.append(f"{name} has {file['bytes']} bytes instead of {size}")
        elif file != expected[name]:
            wrong.append(f"{name} differs from the saved content")
    return wrong


def _digests(
    folder: epath.Path,
    names: Sequence[str],
    stopped: Callable[[], bool] = lambda: False,
    *,
    flush: bool = False,
) -> list[ManifestFile | OSError]:
    """Return the size and SHA-256 of every file, or the error that occurred.

    If `flush` is set, every file is first flushed to disk and then read back from disk.
    """

    def digest(name: str) -> ManifestFile | OSError:
        if stopped():
            return InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        try:
            if flush:
                _flush(folder / name)
            return call_with_retries(lambda: _digest(folder / name, flush))
        except OSError as error:
            return error

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(digest, names))


def _digest(path: epath.Path, drop: bool) -> ManifestFile:
    """Return the size and SHA-256 of a file. If `drop` is set, bypass the page cache."""
    with translate_read_errors(path):
        if drop:
            _drop(path)
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256")
            return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _drop(path: epath.Path) -> None:
    if not in_bucket(path) and hasattr(os, "posix_fadvise"):
        with open_file(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _flush(path: epath.Path) -> None:
    """Flush a local file to disk, so that the file survives a power failure.

    A failed flush is not retried, because the kernel may drop pages that it could not write.
    """
    if not in_bucket(path):
        with open_file(path) as file:
            os.fsync(file.fileno())


def _flush_folder(path: epath.Path) -> None:
    """Flush the directory entries of a folder to disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class SaveVerificationError(ValueError):
    """Raised if saved content differs from that in memory; the message names the file or array."""


def read_shapes(folder: epath.Path) -> Tree:
    """Return the shapes and dtypes of a step's arrays.

    Raises:
        DamagedError: the array metadata cannot be read.
        OSError: the storage is unreachable.
    """

    def read() -> Tree:
        check_regular_files(folder / STATE_ITEM)
        tree = ocp.StandardCheckpointHandler().metadata(folder / STATE_ITEM).tree
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

    return call_detecting_damage(read)


def check_regular_files(folder: epath.Path) -> None:
    """Check that a folder contains only regular files and folders, and no oversized index.

    Opening a pipe would block orbax.

    Raises:
        DamagedError: an entry is neither a regular file nor a folder, or the index is too large.
    """
    if in_bucket(folder):
        return
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(above, name)
            if os.path.islink(path) or not (os.path.isfile(path) or os.path.isdir(path)):
                raise DamagedError(f"{name} is neither a file nor a folder")
            if name == _INDEX:
                _check_index(path)


def call_detecting_damage(read: Any) -> Any:
    """Call a function that reads arrays, retry after storage failures, and return its result.

    Raises:
        DamagedError: the content is not a valid checkpoint.
        OSError: the storage failed at every attempt.
        Exception: an error unrelated to storage.
    """
    try:
        return call_with_retries(read)
    except MaxpipeError:
        raise
    except Exception as error:  # orbax also raises plain Exception for damaged arrays
        if (failure := outage(error)) is not None:
            raise failure from error
        if not is_damage(error) and type(error) is not Exception:
            raise  # for example, the process may be out of memory
        raise DamagedError(f"{STATE_ITEM} cannot be read: {root_cause_text(error)}") from error


def read_expected_digests(folder: epath.Path, step: int) -> RecordedDigests | None:
    """Return the digests recorded during the save, or None for checkpoints from older releases.

    Raises:
        DamagedError: the recorded digests are invalid.
        OSError: the storage is unreachable.
    """
    try:
        if has_manifest(folder) and (listed := read_arrays(folder, step)) is not None:
            return RecordedDigests(
                {name: ArrayDigest.from_entry(one) for name, one in listed.items()}
            )
        if not exists(folder / digests.DIGEST_ITEM):
            return None
        with translate_read_errors(folder):
            return call_with_retries(lambda: digests.read_digest_item(folder, step))
    except (OSError, ValueError) as error:
        if is_damage(error):
            raise DamagedError(root_cause_text(error)) from error
        raise


def compute_stored_digests(
    folder: epath.Path, known: Mapping[str, ArrayDigest] | None = None
) -> dict[str, ArrayDigest]:
    """Compute the digests of a step's arrays as stored on disk, unless they are already known.

    Raises:
        DamagedError: an array cannot be decoded.
        OSError: the storage is unreachable.
    """
    with ThreadPoolExecutor(_NUM_CHUNK_THREADS) as pool:
        return call_detecting_damage(
            lambda: dict(
                _iter_stored_digests(folder, leaves_by_name(read_shapes(folder)), pool, known or {})
            )
        )


def open_array(folder: epath.Path, name: str) -> Any:
    """Open one array on disk for partial reads: `array[...].read().result()`.

    Runs store all arrays in one OCDBT database; `slab_writer` stores one folder per array.
    """
    state = folder / STATE_ITEM
    is_database = exists(state / _INDEX)
    base: Any = f"{state}/" if is_database else f"{state / name}/"
    if in_bucket(folder):
        base = array_store(base)
    else:
        if is_database:
            _check_index(f"{state / _INDEX}")
        base = {"driver": "file", "path": base}
    if is_database:
        base = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": base}
    context = tensorstore.Context(array_context(folder))
    return tensorstore.open(spec, open=True, read=True, context=context).result()


def _check_index(path: str) -> None:
    """Raise DamagedError if the array index is too large for tensorstore.

    tensorstore reads the complete file, and a failed allocation would end the process.
    """
    size = os.stat(path).st_size if os.path.isfile(path) else 0
    if size > _MAX_INDEX_BYTES:
        raise DamagedError(
            f"{STATE_ITEM}/{_INDEX} has {size} bytes; an array index has at most {_MAX_INDEX_BYTES}"
        )


def _iter_stored_digests(
    folder: epath.Path,
    leaves: Mapping[str, Any],
    pool: ThreadPoolExecutor,
    known: Mapping[str, ArrayDigest],
) -> Iterator[tuple[str, ArrayDigest]]:
    for name, leaf in leaves.items():
        if name in known and known[name].shape == tuple(leaf.shape):
            yield name, known[name]
            continue
        array = open_array(folder, name)
        total = ArrayDigest(str(array.dtype.numpy_dtype), tuple(array.shape))
        chunk: tuple[Any, ...] = array.chunk_layout.read_chunk.shape or ()  # a scalar has no chunks

        def digest_chunk(start: tuple[int, ...], array: Any = array, chunk: Any = chunk) -> Any:
            ends = map(min, array.shape, map(operator.add, start, chunk))
            values = array[tuple(map(slice, start, ends))].read().result()
            digest = ArrayDigest(str(values.dtype), tuple(array.shape))
            digest.add(values, start)
            return digest

        starts = itertools.product(*map(range, itertools.repeat(0), array.shape, chunk))
        for digest in pool.map(digest_chunk, starts):
            total.merge(digest)
        yield name, total


def verify_arrays(
    folder: epath.Path,
    step: int,
    expected: RecordedDigests | None,
    known: Mapping[str, ArrayDigest] | None = None,
) -> list[str]:
    """Compare a step's arrays and metadata with the recorded digests; return the differences.

    `known` contains digests of stored arrays that are not computed again.

    Raises:
        OSError: the storage is unreachable.
    """
    try:
        stored = compute_stored_digests(folder, known)
        wrong = digests.diff_digests(expected.arrays, stored) if expected else []
        wrong = wrong or digests.describe_non_finite(stored)
        return wrong + verify_metadata(folder, expected) if expected else wrong
    except DamagedError as damage:
        return [str(damage)]


def verify_metadata(folder: epath.Path, expected: RecordedDigests) -> list[str]:
    """Return the problems found in the metadata; an empty list if no metadata digest was
    recorded.
    """
    if not expected.metadata_digest:
        return []
    path = folder / METADATA_ITEM / "metadata"
    try:
        content = parse_json(
            call_with_retries(lambda: read(path, MAX_METADATA_BYTES)), dict[str, Any]
        )
    except (OSError, ValueError) as error:
        if not is_damage(error):
            raise
        return [f"{METADATA_ITEM}/metadata cannot be read: {root_cause_text(error)}"]
    if digests.metadata_digest(content) != expected.metadata_digest:
        return [f"{METADATA_ITEM}/metadata differs from the saved content"]
    return []


def verify_and_write_manifest(
    folder: epath.Path, step: int, verified: VerifiedFiles | None = None
) -> int:
    """Read a step back, compare it with the in-memory digests, and write its manifest.

    The files and arrays in `verified` have already been read back, and are not read again.

    Returns:
        The total size of the files in bytes.

    Raises:
        SaveVerificationError: the files differ from the arrays in memory.
        DivergenceError: an array contains NaN or infinity, so a run cannot resume from the step.
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    with translate_bucket_errors(folder):
        try:
            expected = read_expected_digests(folder, step)
        except DamagedError as damage:
            raise SaveVerificationError(str(damage)) from damage
        if expected is None:
            raise SaveVerificationError(f"{digests.DIGEST_ITEM} is missing")
        if bad := digests.describe_non_finite(expected.arrays):
            more = f", and {len(bad) - 3} more arrays" if len(bad) > 3 else ""
            raise DivergenceError(
                Code.RUN_DIVERGED,
                f"{folder}: was not saved\n"
                f"  {'; '.join(bad[:3])}{more}; a run cannot resume from such a state.\n"
                "  Lower optim.learning_rate, or restore an earlier checkpoint with "
                "checkpoint.restore_from; earlier checkpoints are kept.",
            )
        verified = verified or VerifiedFiles({}, {})
        wrong = _lost_files(folder, verified.files)
        files = digest_files(folder, verified.files)
        unverified = {name: file for name, file in files.items() if name not in verified.files}
        with ThreadPoolExecutor(1) as pool:
            # Start the second read after the first one has dropped all files from the page cache,
            # so that the second one reads from disk.
            again = pool.submit(find_changed_files, folder, unverified)
            wrong += verify_arrays(folder, step, expected, verified.arrays)
            wrong += again.result()
        entries = {name: one.entry() for name, one in expected.arrays.items()}
        if wrong := wrong or write(folder, step, files, entries):
            raise SaveVerificationError("; ".join(wrong[:3]))
        return sum(file["bytes"] for file in files.values())


def _lost_files(folder: epath.Path, expected: Mapping[str, ManifestFile]) -> list[str]:
    """Return a line for each file that is missing or has another size."""
    sizes = files(folder)
    lost = sorted(name for name in expected if sizes.get(name) != expected[name]["bytes"])
    return [f"{name} is missing or has another size than when it was saved" for name in lost]


def write_missing_manifest(folder: epath.Path, step: int) -> None:
    """Read all content of a step that has no manifest, and write the manifest.

    Raises:
        SaveVerificationError: the files differ from the recorded in-memory digests.
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    if exists(folder / digests.DIGEST_ITEM):
        verify_and_write_manifest(folder, step)
        return
    with translate_bucket_errors(folder):
        files = digest_files(folder)
        entries = {name: one.entry() for name, one in compute_stored_digests(folder).items()}
        wrong = find_changed_files(folder, files)
        if wrong := wrong or write(folder, step, files, entries):
            raise SaveVerificationError("; ".join(wrong[:3]))
