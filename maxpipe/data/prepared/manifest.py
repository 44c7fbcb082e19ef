"""Manifest, journal and index format of prepared folders.

A shard consists of these files:

- `shard-00000.bin` and `.idx`: token ids and index in Megatron's format
- `.meta`: a `META` entry per document
- `.mask`: a loss-mask bit per token (conversations only)
- `.crc`: a CRC per block of the other files

The file `spans` contains int64 values: the number of tokens before each `SPAN_DOCUMENTS`-th
document, followed by the total. The manifest is written last.

The command that writes the folder records each complete file in a journal. After an interruption,
the same command resumes after the last journal entry.

Layout of Megatron's index for a file of token ids:

- header (34 bytes): magic, version, id dtype, number of sequences, number of bounds
- lengths int32 [sequences]: number of ids in each sequence
- pointers int64 [sequences]: byte offset of each sequence in the .bin file
- bounds int64 [documents + 1]: first sequence of each document, then the number of sequences
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np

from maxpipe.checkpoint.address import check_outside_checkpoints
from maxpipe.config.sections.source import SourceConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.prepared.range_reader import damaged_error, join_path, open_range_reader
from maxpipe.data.sources import Source
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import Code, ConfigError, Preemption, StorageError, UserInterrupt
from maxpipe.io import files
from maxpipe.io.typed_json import dump_checksummed, parse_checksummed

BIN, IDX = ".bin", ".idx"

_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_OLD_MAGIC = b"TNTIDX\x00\x00"
# Megatron's codes for id dtypes; codes 6 and 7 are floats.
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """Layout of an index. `num_bounds` is the number of documents plus one."""

    dtype: np.dtype
    num_sequences: int
    num_bounds: int

    @property
    def lengths_at(self) -> int:
        return HEADER_BYTES

    @property
    def pointers_at(self) -> int:
        return self.lengths_at + 4 * self.num_sequences

    @property
    def bounds_at(self) -> int:
        return self.pointers_at + 8 * self.num_sequences

    @property
    def end(self) -> int:
        return self.bounds_at + 8 * self.num_bounds


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the smallest Megatron id dtype that fits a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


def parse(raw: bytes, size: int) -> IndexLayout:
    """Parse the header of an index of `size` bytes; raise ValueError if it is unsupported."""
    if raw.startswith(_OLD_MAGIC):
        raise ValueError("the format is TNTIDX, the predecessor of MMIDIDX")
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        raise ValueError(f"the file must begin with an MMIDIDX header of {HEADER_BYTES} bytes")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(raw[:HEADER_BYTES])
    if version != _VERSION:
        raise ValueError(f"the version is {version}, but only {_VERSION} is supported")
    if code in _FLOATS:
        raise ValueError(f"the ids are floats, type {code}")
    if code not in _TYPES:
        raise ValueError(f"the ids have type {code}, which is unknown")
    layout = IndexLayout(np.dtype(_TYPES[code]), num_sequences, num_bounds)
    # Multimodal indexes contain an additional byte per sequence, which is ignored.
    if size not in (layout.end, layout.end + num_sequences):
        raise ValueError(
            f"{num_sequences} sequences and {num_bounds} bounds require {layout.end} "
            f"bytes, but the file has {size}"
        )
    return layout


def encode_index(lengths: np.ndarray, dtype: np.dtype) -> Iterator[bytes]:
    """Yield an index of one sequence per document. `lengths` is int64 [documents]."""
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == dtype)
    yield _HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1)
    yield lengths.astype("<i4").tobytes()
    yield ((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8").tobytes()
    yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()


OUT = "command line: --out"
_MAX_LINE_BYTES = 1 << 24


def check_folder(folder: Path, manifest: str) -> None:
    """Raise ConfigError unless the folder is missing, empty, or has this manifest or a journal."""
    check_outside_checkpoints(folder, OUT)
    if not os.path.lexists(folder):
        return
    action = f"Set another folder, such as --out {suggest_folder(folder)}."
    if not folder.is_dir():
        raise ConfigError.one(
            Code.DATA_PREPARED, OUT, folder, "must be a folder or must not exist.", action
        )
    names = os.listdir(folder)
    if names and manifest not in names and JOURNAL not in names:
        rule = f"must be new, empty or written by this command: it contains {sorted(names)[0]}."
        raise ConfigError.one(Code.DATA_PREPARED, OUT, folder, rule, action)


def suggest_folder(folder: Path) -> str:
    """Return the path of a new folder that a message can suggest."""
    return f"{folder}-2" if folder.name not in ("", "..") else "tokens"


def suggest_action(folder: Path) -> str:
    """Return the suggested action for a folder that already contains other files."""
    return f"Set another folder, such as --out {suggest_folder(folder)}, or remove this one."


@contextlib.contextmanager
def lock_journal(folder: Path) -> Iterator[BinaryIO]:
    """Open the journal and lock it for this process."""
    with open(files.open_regular(folder / JOURNAL, os.O_RDWR | os.O_CREAT), "r+b") as journal:
        if not files.lock(journal):
            rule = "is being prepared by another process."
            action = "Wait for that process, or set --out to another folder."
            raise ConfigError.one(Code.DATA_PREPARED, OUT, folder, rule, action)
        yield journal


def replay_journal(
    journal: BinaryIO, begin: Callable[[bytes], object], add: Callable[[bytes], object]
) -> bool:
    """Replay the journal and return whether it contains an entry.

    `begin` is called with the first line, and `add` with each following line. The journal is
    truncated before the first line for which `begin` or `add` raises OSError or ValueError.
    """
    end = 0
    while line := journal.readline(_MAX_LINE_BYTES):
        # A killed process or a power failure may leave a partial line or truncated files.
        try:
            if not line.endswith(b"\n"):
                break
            add(line) if end else begin(line)
        except (OSError, ValueError):
            break
        end += len(line)
    journal.truncate(end)
    return bool(end)


def append_journal(journal: BinaryIO, line: Mapping[str, Any]) -> None:
    """Append a line to the journal and flush it to disk."""
    journal.seek(0, os.SEEK_END)
    journal.write(dump_checksummed(line, indent=None).encode() + b"\n")
    journal.flush()
    os.fsync(journal.fileno())


class _Terminated(BaseException):
    """Raised on SIGTERM or SIGHUP. Not an Exception subclass, so error handlers do not catch it."""


@contextlib.contextmanager
def convert_signals(folder: Path) -> Iterator[None]:
    """Convert SIGTERM, SIGHUP and Ctrl-C to errors that explain how to resume the command."""
    words = f"{folder}: preparation was interrupted\n  Complete shards are kept.\n"
    words += "  Run the same command again to resume after these shards."

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Signals that are already ignored, such as SIGHUP under `nohup`, remain ignored.
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield
    except _Terminated:
        raise Preemption(words) from None
    except KeyboardInterrupt:
        raise UserInterrupt(words) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fsync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


MANIFEST_FILE = "manifest.json"
JOURNAL = "unfinished"
"""Name of the journal of finished shards, which has one checksummed JSON value per line. The
journal is removed when the manifest is written. The name has no suffix, so no source reads the file
as data.
"""
SPANS = "spans"
META_FILE, MASK_FILE, CRC_FILE = ".meta", ".mask", ".crc"
DTYPES = ("<u2", "<i4")
"""Supported token-id dtypes."""

CONTENT_KEY = "content"
"""Key of the metadata entry that maps a source's file names to digests."""
SPAN_DOCUMENTS = 1024
"""Number of consecutive documents per span. Token totals are stored per span."""
META = np.dtype([("text_bytes", "<u4"), ("digest", "<u8")])
"""Size of a document's text in UTF-8 bytes, and the first 8 bytes of the text's BLAKE2b digest. For
conversations, the size of the text that is trained on, and the digest of the token ids as int64.
"""

_TEXTS, _CONVERSATIONS = 1, 2
"""Format versions. Releases without loss-mask support reject the version for conversations."""
_LARGEST_BYTES = 1 << 28
# Keys that affect how documents are read, but not the content of the documents.
_READER_KEYS = ("bad_records", "max_bad_records", "max_decompressed_bytes", "packing")
_READER_KEYS += ("long_conversations",)  # this key depends on the sequence length


T = TypeVar("T")


class FolderKind(NamedTuple):
    """Type of prepared folder."""

    command: str
    key: str
    """Config key that selects a folder of this type as input."""
    file: str
    """File name of the manifest."""
    formats: tuple[int, ...]
    """Supported format versions."""


_DOCUMENT_FOLDER = FolderKind(
    "maxpipe data prepare", "data.path", MANIFEST_FILE, (_TEXTS, _CONVERSATIONS)
)


class FileEntry(TypedDict):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class ShardEntry(TypedDict):
    """Shard of documents; its files are keyed by suffix. Token counts include BOS and EOS."""

    documents: int
    unreadable: int
    """Number of documents that are empty because their records could not be read."""
    tokens: int
    trained: NotRequired[int]
    """Number of tokens that are trained on; conversations only."""
    unread: NotRequired[dict[str, int]]
    """Maps unread keys to the number of conversations that contain the key."""
    marks: NotRequired[dict[str, int]]
    """Maps combinations of marks to the number of conversations; see `EncodedDocument.marks`."""
    files: dict[str, FileEntry]


class TokenizerEntry(TypedDict):
    """Tokenizer that encoded the documents."""

    kind: str
    path: str
    fingerprint: str
    vocab_size: int


class SourceEntry(TypedDict):
    """Source of the documents, including its config keys."""

    name: str
    fingerprint: str
    content: NotRequired[dict[str, str]]
    """Maps the source's file names to digests; absent in folders written by earlier releases."""
    documents: int
    data: dict[str, Any]
    seed: int
    chat: NotRequired[str]
    """Fingerprint of the conversations; see `ConversationEncoder.fingerprint`."""
    day: NotRequired[str]
    """Date used by the chat template, if the template renders a date."""


class Spec(TypedDict):
    """Inputs that determine every byte of a prepared folder."""

    format: int
    source: SourceEntry
    tokenizer: TokenizerEntry
    shard_tokens: int


class Manifest(Spec):
    """Contents of the manifest. `byte_counts` [256] is the histogram of the text's UTF-8 bytes."""

    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    byte_counts: list[int]
    shards: list[ShardEntry]
    spans: FileEntry


def spec_of(
    data: SourceConfig,
    seed: int,
    source: Source,
    config: TokenizerConfig,
    tokenizer: Tokenizer,
    shard_tokens: int,
    chat: str = "",
    day: str = "",
) -> Spec:
    """Return the spec of the folder that is prepared from this source and tokenizer.

    `chat` is the fingerprint of the conversations; empty for plain text. `day` is the date that the
    chat template renders.
    """
    keys = {key.name: getattr(data, key.name) for key in dataclasses.fields(SourceConfig)}
    entry: SourceEntry = {
        "name": source.name,
        "fingerprint": source.fingerprint(),
        "documents": len(source),
        "data": {key: value for key, value in keys.items() if key not in _READER_KEYS},
        "seed": seed,
    }
    if content := source.content():
        entry["content"] = dict(content)
    if chat:
        entry["chat"] = chat
    if day:
        entry["day"] = day
    return {
        "format": _CONVERSATIONS if chat else _TEXTS,
        "source": entry,
        "tokenizer": {
            "kind": config.kind,
            "path": config.path,
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
        },
        "shard_tokens": shard_tokens,
    }


def content_metadata(content: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata entry that stores file digests; empty if there are no digests."""
    return {CONTENT_KEY: dict(content)} if content else {}


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Return a line such as `source.seed: 0 and 1` for each difference between two specs."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        below = [(key, f"{name}.{key}" if name else key) for key in keys]
        return [
            line for key, full in below for line in differences(one.get(key), other.get(key), full)
        ]
    return [] if one == other else [f"{name}: {_short(one)} and {_short(other)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_NAMED_FILES = 4
"""Maximum number of file names listed when two lists of files differ."""


def changed_files(
    saved: Mapping[str, str] | None, current: Mapping[str, str] | None
) -> list[tuple[str, Any, Any]]:
    """Return (label, saved, current) for each changed file and for a changed list of files. The
    result is empty if either side has no digests.
    """
    if not saved or not current:
        return []
    changes = [
        (f"the content of {name}", short_digests(saved[name]), short_digests(digest))
        for name, digest in current.items()
        if name in saved and _differ(saved[name], digest)
    ]
    if saved.keys() != current.keys():
        before, now = ([*value][:_NAMED_FILES] for value in (saved, current))
        changes.append(("the list of files", ", ".join(before), ", ".join(now)))
    return changes


def _differ(saved: str, current: str) -> bool:
    """Return True if two digests differ. Digests of different types are treated as equal."""
    one, other = (value.rpartition(":")[0] for value in (saved, current))
    return one == other and saved != current


def list_files(shards: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, FileEntry]]:
    """Yield the name and the manifest entry of each file in these shards."""
    for number, shard in enumerate(shards):
        for suffix, entry in sorted(shard["files"].items()):
            yield shard_name(number, suffix), entry


def check_sizes(folder: Path, number: int, files: Mapping[str, FileEntry]) -> None:
    """Raise OSError if a file of a shard is missing, or ValueError if its size is wrong."""
    for suffix, entry in files.items():
        if (folder / shard_name(number, suffix)).stat().st_size != entry["bytes"]:
            raise ValueError("the file is truncated")


def shorten_lines(lines: Sequence[str]) -> str:
    """Join the first lines of a list of differences into one line."""
    more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
    return f"{'; '.join(lines[:4])}{more}"


def short_digests(value: Any) -> Any:
    """Format a value as text, with digests shortened to 12 hex digits."""
    return (
        re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", value)
        if isinstance(value, str)
        else value
    )


def has_masks(spec: Spec) -> bool:
    """Return whether the folder contains conversations."""
    return spec["format"] == _CONVERSATIONS


def checksummed_suffixes(has_mask: bool) -> tuple[str, ...]:
    """Return the suffixes of the files that have CRCs, in the order of the CRC file."""
    return (BIN, IDX, META_FILE, *((MASK_FILE,) if has_mask else ()))


def shard_name(number: int, suffix: str) -> str:
    """Return the file name of a shard with the given number and suffix."""
    return f"shard-{number:05}{suffix}"


def read_manifest(folder: str) -> Manifest:
    """Return the manifest in a folder or at `gs://BUCKET/PATH`.

    Raises:
        ConfigError: the manifest is missing, or was written by a newer version of maxpipe.
        StorageError: the manifest is damaged or cannot be read.
    """
    return read_checksummed(_DOCUMENT_FOLDER, folder, Manifest, _check)


def read_checksummed(kind: FolderKind, folder: str, form: type[T], check: Callable[[T], None]) -> T:
    """Return the manifest in a folder or at `gs://BUCKET/PATH`, parsed as the type `form`.

    `check` raises ValueError for inconsistent values, which the checksum of the manifest cannot
    detect.

    Raises:
        ConfigError: the manifest is missing, or was written by a newer version of maxpipe.
        StorageError: the manifest is damaged or cannot be read.
    """
    path = join_path(folder, kind.file)
    try:
        file = open_range_reader(path)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        raise _no_manifest_error(kind, folder) from error
    if file.size > _LARGEST_BYTES:
        raise damaged_error(
            path, f"the file has {file.size} bytes; at most {_LARGEST_BYTES} are allowed"
        )
    try:
        manifest = parse_checksummed(file.read(0, file.size), form)
        if (number := manifest["format"]) in kind.formats:  # type: ignore[index]
            check(manifest)
    except ValueError as error:
        raise damaged_error(path, str(error)) from error
    if number not in kind.formats:
        known = " or ".join(map(str, kind.formats))
        rule = f"must have format {known}: the folder has format {number}."
        action = f"Use the maxpipe version that wrote the folder, or run `{kind.command}` again."
        raise ConfigError.one(Code.DATA_PREPARED, kind.key, folder, rule, action)
    return manifest


def _no_manifest_error(kind: FolderKind, folder: str) -> ConfigError:
    rule = f"must be a folder written by `{kind.command}`: {kind.file} is missing."
    action = f"Set {kind.key} to such a folder, or run `{kind.command} ... --out DIR`."
    if os.path.exists(join_path(folder, JOURNAL)):
        rule = "must be completely prepared: the manifest is missing."
        action = f"Run the same `{kind.command}` again to resume."
    return ConfigError.one(Code.DATA_PREPARED, kind.key, folder, rule, action)


def _check(manifest: Manifest) -> None:
    shards, masked = manifest["shards"], has_masks(manifest)
    if masked != ("chat" in manifest["source"]):
        raise ValueError("the folder is declared as both conversations and plain text")
    for number, shard in enumerate(shards):
        name = f"shard {number}"
        if (names := sorted(shard["files"])) != sorted((*checksummed_suffixes(masked), CRC_FILE)):
            raise ValueError(f"{name} has the files {', '.join(map(repr, names))[:80]}")
        if not 0 < shard["documents"] <= shard["tokens"]:
            raise ValueError(f"{name} has {shard['documents']} documents but {shard['tokens']} ids")
        if not 0 <= shard["unreadable"] <= shard["documents"]:
            raise ValueError(f"{name} has {shard['unreadable']} unreadable documents")
        entries = shard["files"]
        if min(entry["bytes"] for entry in entries.values()) < 0:
            raise ValueError(f"{name} has a file of negative size")
        itemsize = np.dtype(manifest["dtype"]).itemsize if manifest["dtype"] in DTYPES else 0
        if entries[BIN]["bytes"] != shard["tokens"] * itemsize:
            raise ValueError(
                f"{name} has {shard['tokens']} ids of {manifest['dtype'][:20]}, which do "
                f"not match {entries[BIN]['bytes']} bytes"
            )
        if entries[META_FILE]["bytes"] != shard["documents"] * META.itemsize:
            raise ValueError(
                f"the metadata of {name} has an invalid size: {entries[META_FILE]['bytes']} bytes"
            )
        if masked and entries[MASK_FILE]["bytes"] != -(-shard["tokens"] // 8):
            raise ValueError(
                f"the mask data of {name} has an invalid size: {entries[MASK_FILE]['bytes']} bytes"
            )
        if masked and not 0 <= shard.get("trained", -1) <= shard["tokens"]:
            raise ValueError(f"{name} has {shard.get('trained')} trained tokens")
    for name in ("documents", "tokens"):
        if manifest[name] != sum(shard[name] for shard in shards):
            raise ValueError(
                f"the number of {name} ({manifest[name]}) differs from the sum of the shards"
            )
    counts = manifest["byte_counts"]
    if len(counts) != 256 or min(counts) < 0 or sum(counts) != manifest["text_bytes"] or not shards:
        raise ValueError("the shards or the byte histogram are inconsistent")
