"""The manifest of a prepared folder: what it was made of, its files and their digests.

A shard is `shard-00000.bin` and `.idx` in Megatron's format, `.meta` with `META` of each document,
of conversations `.mask` with a bit for each token, whether it is trained, and `.crc` with a CRC of
each block of these. `spans` holds, as int64, the number of tokens before each `SPAN`-th document,
and after the last one. The manifest is written last.

A folder that a command fills file by file; after a stop the same command goes on.

A file that is on the disk is entered in a journal; what is behind the last entry is done again.

Megatron's index of a file of token ids: what it holds, and where.

magic, version, type of an id, number of sequences and of bounds       34 bytes
lengths    int32 [sequences]    ids of each
pointers   int64 [sequences]    byte of the .bin at which each begins
bounds     int64 [documents + 1]   the sequence at which each document begins, and the end
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np

from maxpipe.checkpoint.address import check_outside_checkpoints
from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.schema import TokenizerConfig
from maxpipe.data.prepared.range_reader import damaged_error, join_path, open_range_reader
from maxpipe.data.sources import Source
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import ConfigError, Preemption, StorageError, UserInterrupt
from maxpipe.io import files
from maxpipe.io.typed_json import dump_checksummed, parse_checksummed

BIN, IDX = ".bin", ".idx"

_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_OLD_MAGIC = b"TNTIDX\x00\x00"
# Their number of a type of ids; 6 and 7 are floats.
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The type of the ids, and the tables of an index. `num_bounds` is documents + 1."""

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
    """The smallest type of Megatron's that holds the ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


def parse(raw: bytes, size: int) -> IndexLayout:
    """The layout that the first bytes of an index of `size` bytes describe.

    Raises:
        ValueError: it is no index, is cut, or is of a kind that is not read; the text says what.
    """
    if raw.startswith(_OLD_MAGIC):
        raise ValueError("it is of the kind before MMIDIDX, TNTIDX")
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        raise ValueError(f"it has no header of {HEADER_BYTES} bytes that begins with MMIDIDX")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(raw[:HEADER_BYTES])
    if version != _VERSION:
        raise ValueError(f"it is of version {version}, and {_VERSION} is read")
    if code in _FLOATS:
        raise ValueError(f"its ids are floats, type {code}")
    if code not in _TYPES:
        raise ValueError(f"its ids are of the unknown type {code}")
    found = IndexLayout(np.dtype(_TYPES[code]), num_sequences, num_bounds)
    # Indexes of several kinds of text have a byte more for each sequence, which is not read.
    if size not in (found.end, found.end + num_sequences):
        raise ValueError(
            f"it says {num_sequences} sequences and {num_bounds} bounds, which take {found.end} "
            f"bytes, and has {size}"
        )
    return found


def encode_index(lengths: np.ndarray, dtype: np.dtype) -> Iterator[bytes]:
    """The parts of an index of documents of one sequence each; `lengths` int64 [documents]."""
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == dtype)
    yield _HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1)
    yield lengths.astype("<i4").tobytes()
    yield ((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8").tobytes()
    yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()


OUT = "command line: --out"
_MAX_LINE_BYTES = 1 << 24


def check_folder(folder: Path, manifest: str) -> None:
    """Raises ConfigError if something else is there than what has, or will have, this manifest."""
    check_outside_checkpoints(folder, OUT)
    if not os.path.lexists(folder):
        return
    action = f"Name another folder, such as --out {suggest_folder(folder)}."
    if not folder.is_dir():
        raise ConfigError.one(OUT, folder, "is there already, and is no folder.", action)
    names = os.listdir(folder)
    if names and manifest not in names and JOURNAL not in names:
        rule = f"must be new or empty, or prepared by this command: it has {sorted(names)[0]}."
        raise ConfigError.one(OUT, folder, rule, action)


def suggest_folder(folder: Path) -> str:
    """The name of another folder, for advice."""
    return f"{folder}-2" if folder.name not in ("", "..") else "tokens"


def suggest_action(folder: Path) -> str:
    """What to do about a folder that holds something else."""
    return f"Name another folder, such as --out {suggest_folder(folder)}, or remove this one."


@contextlib.contextmanager
def lock_journal(folder: Path) -> Iterator[BinaryIO]:
    """The journal, for one process at a time."""
    with open(files.open_regular(folder / JOURNAL, os.O_RDWR | os.O_CREAT), "r+b") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            rule = "is being prepared by another process."
            action = "Wait for it, or name another folder with --out."
            raise ConfigError.one(OUT, folder, rule, action) from error
        yield journal


def replay_journal(
    journal: BinaryIO, begin: Callable[[bytes], object], add: Callable[[bytes], object]
) -> bool:
    """Whether the journal has begun; `begin` takes its first line, and `add` each other one.

    Ends it in front of a line for which they raise OSError or ValueError.
    """
    end = 0
    while line := journal.readline(_MAX_LINE_BYTES):
        # A kill or a power failure leaves half a line, or files that have lost their end.
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
    """Appends a line, and brings it to the disk."""
    journal.seek(0, os.SEEK_END)
    journal.write(dump_checksummed(line, indent=None).encode() + b"\n")
    journal.flush()
    os.fsync(journal.fileno())


class _Terminated(BaseException):
    """SIGTERM or SIGHUP. Nothing takes it for a failure of what it interrupts."""


@contextlib.contextmanager
def convert_signals(folder: Path) -> Iterator[None]:
    """Turns SIGTERM, SIGHUP and Ctrl-C into errors that say how to go on."""
    words = f"{folder}: preparing was stopped\n  Shards that are complete are kept.\n"
    words += "  Run the same command again: it goes on behind them."

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # An ignored signal stays ignored: that of a closed terminal, by `nohup`.
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
    """The names of its files."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


MANIFEST_FILE = "manifest.json"
JOURNAL = "unfinished"
"""What is done while documents are prepared, a signed JSON value a line; removed when the manifest
is there. By its name no source takes it for documents."""
SPANS = "spans"
META_FILE, MASK_FILE, CRC_FILE = ".meta", ".mask", ".crc"
DTYPES = ("<u2", "<i4")
"""Those of ids."""

CONTENT_KEY = "content"
"""Name of the entry of facts with the digests of a source's files by name."""
SPAN_DOCUMENTS = 1024
"""Consecutive documents whose tokens are counted together."""
META = np.dtype([("text_bytes", "<u4"), ("digest", "<u8")])
"""UTF-8 bytes of a document's text, and the first 8 bytes of their BLAKE2b digest. Of a
conversation bytes of what is trained, and the digest of its ids as int64.
"""

_TEXTS, _CONVERSATIONS = 1, 2
"""Formats. Releases that know no masks refuse the second."""
_LARGEST_BYTES = 1 << 28
# How documents are read, not what they are.
_READER_KEYS = ("bad_records", "max_bad_records", "max_decompressed_bytes", "packing")
_READER_KEYS += ("long_conversations",)  # goes by the length of a sequence


T = TypeVar("T")


class FolderKind(NamedTuple):
    """Folders that a command prepares."""

    command: str
    key: str
    """The config key that names one to be read."""
    file: str
    """Of the manifest."""
    formats: tuple[int, ...]
    """That are read."""


_DOCUMENT_FOLDER = FolderKind(
    "maxpipe data prepare", "data.path", MANIFEST_FILE, (_TEXTS, _CONVERSATIONS)
)


class FileEntry(TypedDict):
    """A file's size and SHA-256."""

    bytes: int
    sha256: str


class ShardEntry(TypedDict):
    """Documents that follow each other, and their files by suffix. Tokens count begin and end."""

    documents: int
    unreadable: int
    """Of these, empty because their records could not be read."""
    tokens: int
    trained: NotRequired[int]
    """Tokens of conversations that are trained on."""
    unread: NotRequired[dict[str, int]]
    """How many conversations have each key that nothing reads."""
    marks: NotRequired[dict[str, int]]
    """How many conversations have each combination of marks, see `Encoded.marks`."""
    files: dict[str, FileEntry]


class TokenizerEntry(TypedDict):
    """What made the ids."""

    kind: str
    path: str
    fingerprint: str
    vocab_size: int


class SourceEntry(TypedDict):
    """The documents, and the keys of `data` that named them."""

    name: str
    fingerprint: str
    content: NotRequired[dict[str, str]]
    """Digests of all that is in its files, by name; earlier releases wrote none."""
    documents: int
    data: dict[str, Any]
    seed: int
    chat: NotRequired[str]
    """Of conversations what decides ids and masks, `Conversations.fingerprint`."""
    day: NotRequired[str]
    """The date that their template was given, if it reads one."""


class Spec(TypedDict):
    """What decides each byte of a prepared folder."""

    format: int
    source: SourceEntry
    tokenizer: TokenizerEntry
    shard_tokens: int


class Manifest(Spec):
    """The whole. `byte_counts` [256] is the histogram of the text's UTF-8 bytes."""

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
    """What `source` and `tokenizer`, opened from their sections, will give.

    `chat` is the fingerprint of conversations, if it is of these, and `day` the date that their
    template reads.
    """
    keys = {each.name: getattr(data, each.name) for each in dataclasses.fields(SourceConfig)}
    found: SourceEntry = {
        "name": source.name,
        "fingerprint": source.fingerprint(),
        "documents": len(source),
        "data": {key: value for key, value in keys.items() if key not in _READER_KEYS},
        "seed": seed,
    }
    if content := source.content():
        found["content"] = dict(content)
    if chat:
        found["chat"] = chat
    if day:
        found["day"] = day
    return {
        "format": _CONVERSATIONS if chat else _TEXTS,
        "source": found,
        "tokenizer": {
            "kind": config.kind,
            "path": config.path,
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
        },
        "shard_tokens": shard_tokens,
    }


def content_metadata(content: Mapping[str, str]) -> dict[str, Any]:
    """The entry of facts for digests of files; none where there are no files."""
    return {CONTENT_KEY: dict(content)} if content else {}


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """`source.seed: 0 and 1` for each value in which two specs differ."""
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
"""Names of files that a difference prints."""


def changed_files(
    saved: Mapping[str, str] | None, current: Mapping[str, str] | None
) -> list[tuple[str, Any, Any]]:
    """Files whose digests differ; none where one fingerprint has no digests of the same kind."""
    if not saved or not current:
        return []
    found = [
        (f"the content of {name}", short_digests(saved[name]), short_digests(digest))
        for name, digest in current.items()
        if name in saved and _differ(saved[name], digest)
    ]
    if saved.keys() != current.keys():
        before, now = ([*each][:_NAMED_FILES] for each in (saved, current))
        found.append(("the list of files", ", ".join(before), ", ".join(now)))
    return found


def _differ(saved: str, current: str) -> bool:
    """Whether digests of one kind differ: a bucket's are of another kind than those of a disk."""
    kinds = [each.partition(":")[0] if ":" in each else "" for each in (saved, current)]
    return kinds[0] == kinds[1] and saved != current


def short_digests(value: Any) -> Any:
    """Digests shortened to 12 digits."""
    return (
        re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", value)
        if isinstance(value, str)
        else value
    )


def has_masks(spec: Spec) -> bool:
    """Whether it is of conversations."""
    return spec["format"] == _CONVERSATIONS


def checksummed_suffixes(has_mask: bool) -> tuple[str, ...]:
    """Files of a shard with CRCs, in the order of these."""
    return (BIN, IDX, META_FILE, *((MASK_FILE,) if has_mask else ()))


def shard_name(number: int, suffix: str) -> str:
    """The name of a file of a shard."""
    return f"shard-{number:05}{suffix}"


def read_manifest(folder: str) -> Manifest:
    """The manifest of a folder or `gs://BUCKET/PATH`.

    Raises:
        ConfigError: there is none, or it is of a later version of maxpipe.
        StorageError: it is damaged, or cannot be read.
    """
    return read_checksummed(_DOCUMENT_FOLDER, folder, Manifest, _check)


def read_checksummed(kind: FolderKind, folder: str, form: type[T], check: Callable[[T], None]) -> T:
    """The manifest, of this form, of a folder or `gs://BUCKET/PATH`.

    `check` raises ValueError for numbers that no folder has: the digest of a manifest says only
    that it was written as a whole.

    Raises:
        ConfigError: there is none, or it is of a later version of maxpipe.
        StorageError: it is damaged, or cannot be read.
    """
    path = join_path(folder, kind.file)
    try:
        file = open_range_reader(path)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        raise _no_manifest_error(kind, folder) from error
    if file.size > _LARGEST_BYTES:
        raise damaged_error(path, f"it has {file.size} bytes, at most {_LARGEST_BYTES} are read")
    try:
        found = parse_checksummed(file.read(0, file.size), form)
        if (number := found["format"]) in kind.formats:  # type: ignore[index]
            check(found)
    except ValueError as error:
        raise damaged_error(path, str(error)) from error
    if number not in kind.formats:
        known = " or ".join(map(str, kind.formats))
        raise ConfigError.one(
            kind.key,
            folder,
            f"must be of format {known}: it was written as format {number}.",
            f"Read it with the maxpipe that wrote it, or run `{kind.command}` again.",
        )
    return found


def _no_manifest_error(kind: FolderKind, folder: str) -> ConfigError:
    rule = f"must be a folder that `{kind.command}` wrote: it has no {kind.file}."
    action = f"Set {kind.key} to one, or write it with `{kind.command} ... --out DIR`."
    if os.path.exists(join_path(folder, JOURNAL)):
        rule = "must be prepared to the end, and is not: it has no manifest yet."
        action = f"Run the same `{kind.command}` again: it goes on where it was stopped."
    return ConfigError.one(kind.key, folder, rule, action)


def _check(found: Manifest) -> None:
    """Raises ValueError for numbers that no folder has."""
    shards, masked = found["shards"], has_masks(found)
    if masked != ("chat" in found["source"]):
        raise ValueError("it is of conversations and of texts")
    for number, shard in enumerate(shards):
        name = f"shard {number}"
        if (names := sorted(shard["files"])) != sorted((*checksummed_suffixes(masked), CRC_FILE)):
            raise ValueError(f"{name} has the files {', '.join(map(repr, names))[:80]}")
        if not 0 < shard["documents"] <= shard["tokens"]:
            raise ValueError(f"{name} has {shard['documents']} documents and {shard['tokens']} ids")
        if not 0 <= shard["unreadable"] <= shard["documents"]:
            raise ValueError(f"{name} has {shard['unreadable']} unreadable documents")
        entries = shard["files"]
        if min(each["bytes"] for each in entries.values()) < 0:
            raise ValueError(f"{name} has a file of fewer than 0 bytes")
        itemsize = np.dtype(found["dtype"]).itemsize if found["dtype"] in DTYPES else 0
        if entries[BIN]["bytes"] != shard["tokens"] * itemsize:
            raise ValueError(
                f"{name} has {shard['tokens']} ids of {found['dtype'][:20]}, which do "
                f"not take {entries[BIN]['bytes']} bytes"
            )
        if entries[META_FILE]["bytes"] != shard["documents"] * META.itemsize:
            raise ValueError(f"{name} has {entries[META_FILE]['bytes']} bytes of metadata")
        if masked and entries[MASK_FILE]["bytes"] != -(-shard["tokens"] // 8):
            raise ValueError(f"{name} has {entries[MASK_FILE]['bytes']} bytes of masks")
        if masked and not 0 <= shard.get("trained", -1) <= shard["tokens"]:
            raise ValueError(f"{name} has {shard.get('trained')} trained tokens")
    for name in ("documents", "tokens"):
        if found[name] != sum(shard[name] for shard in shards):
            raise ValueError(f"it has {found[name]} {name}, and its shards have others")
    counts = found["byte_counts"]
    if len(counts) != 256 or min(counts) < 0 or sum(counts) != found["text_bytes"] or not shards:
        raise ValueError("it has shards or a histogram of bytes that cannot be")
