"""Files of teacher logits, written by `maxpipe distill prepare` and read by student runs.

Each sequence has a fixed position, addressed by source and index, that does not depend on the batch
size or the mixture weights. A shard consists of `shard-00000.bin` with `shard_rows` records of
equal size, and a `.crc` file with a CRC per block. The manifest is written last. In shapes, T is
the number of tokens in a sequence, and K is the number of top tokens stored per position.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

import numpy as np

from maxpipe.data.prepared.manifest import (
    BIN,
    CONTENT_KEY,
    CRC_FILE,
    JOURNAL,
    OUT,
    FileEntry,
    FolderKind,
    append_journal,
    check_sizes,
    differences,
    dtype_for,
    fsync_folder,
    read_checksummed,
    replay_journal,
    shard_name,
    shorten_lines,
    suggest_action,
)
from maxpipe.data.prepared.range_reader import (
    BLOCK_BYTES,
    ChecksummedReader,
    PieceCache,
    damaged_error,
    join_path,
    open_range_reader,
)
from maxpipe.data.prepared.reader import read_verified
from maxpipe.data.prepared.writer import ChecksummedWriter
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io import files
from maxpipe.io.typed_json import dump_checksummed, parse_checksummed

MANIFEST = "logits.json"
_FORMAT = 1
_LOGITS_FOLDER = FolderKind(
    "maxpipe distill prepare", "distill.teacher_logits", MANIFEST, (_FORMAT,)
)
_IDENTITY = ("tokens", "segment_ids")
"""Names of the arrays that identify a sequence."""


class TeacherEntry(TypedDict):
    """Teacher model: the name shown in messages, and a digest of the model's parameters."""

    name: str
    digest: str


class LogitsSpec(TypedDict):
    """Inputs that determine every byte of a logits folder."""

    format: int
    teacher: TeacherEntry
    vocab_size: int
    temperature: float
    top_k: int
    row_tokens: int
    shard_rows: int
    sources: dict[str, dict[str, Any]]
    """Maps source names in the mixture to metadata, including the number of `sequences`."""


class LogitsShardEntry(TypedDict):
    """Shard of consecutive sequences; its files are keyed by suffix."""

    rows: int
    files: dict[str, FileEntry]


class LogitsManifest(LogitsSpec):
    """Contents of a logits manifest."""

    shards: list[LogitsShardEntry]


def spec_of(
    teacher: TeacherEntry,
    sources: Mapping[str, Mapping[str, Any]],
    *,
    vocab_size: int,
    temperature: float,
    top_k: int,
    row_tokens: int,
    shard_bytes: int,
) -> LogitsSpec:
    """Return the spec for the teacher logits of all sequences in these sources."""
    size = record_dtype(row_tokens, top_k, vocab_size).itemsize
    return {
        "format": _FORMAT,
        "teacher": teacher,
        "vocab_size": vocab_size,
        "temperature": temperature,
        "top_k": top_k,
        "row_tokens": row_tokens,
        "shard_rows": max(1, shard_bytes // size),
        "sources": {name: dict(facts) for name, facts in sorted(sources.items())},
    }


def record_dtype(row_tokens: int, top_k: int, vocab_size: int) -> np.dtype:
    """Return the dtype of a record: a sequence digest, and K ids with log-probabilities."""
    shape = (row_tokens, top_k)
    fields = [("digest", "<u8"), ("ids", dtype_for(vocab_size), shape), ("logprobs", "<f4", shape)]
    return np.dtype(fields)  # type: ignore[call-overload]


def _record_dtype_of_spec(spec: LogitsSpec) -> np.dtype:
    return record_dtype(spec["row_tokens"], spec["top_k"], spec["vocab_size"])


def num_sequences(spec: LogitsSpec) -> int:
    """Return the total number of sequences across all sources."""
    return sum(int(facts["sequences"]) for facts in spec["sources"].values())


def sequence_digest(row: Mapping[str, np.ndarray]) -> int:
    """Return a digest of a sequence's tokens and segment ids."""
    total = hashlib.blake2b(digest_size=8)
    for name in _IDENTITY:
        total.update(np.ascontiguousarray(row[name], "<i4").tobytes())
    return int.from_bytes(total.digest(), "little")


class LogitsBatch(NamedTuple):
    """Teacher logits of consecutive sequences."""

    digests: list[int]
    ids: np.ndarray
    """Token ids, integers [sequences, T, K]."""
    logprobs: np.ndarray
    """Log-probabilities, float32 [sequences, T, K]."""


# Writing.


class LogitsWriter:
    """Writer for a logits folder, starting at the first missing sequence."""

    def __init__(self, folder: Path, journal: BinaryIO, spec: LogitsSpec):
        self._folder, self._journal, self._spec = folder, journal, spec
        self._record = _record_dtype_of_spec(spec)
        self._shards: list[LogitsShardEntry] = []
        self._file: ChecksummedWriter | None = None
        self._rows = 0
        begun = replay_journal(
            journal,
            lambda line: check_same(folder, parse_checksummed(line, LogitsSpec), spec),
            self._resume_shard,
        )
        if not begun:
            append_journal(journal, spec)

    @property
    def done(self) -> int:
        """Number of sequences in complete shards on disk."""
        return sum(shard["rows"] for shard in self._shards)

    def _resume_shard(self, line: bytes) -> None:
        shard = parse_checksummed(line, LogitsShardEntry)
        check_sizes(self._folder, len(self._shards), shard["files"])
        self._shards.append(shard)

    def add(self, answers: LogitsBatch) -> None:
        """Append the logits of consecutive sequences."""
        records = np.empty(len(answers.digests), self._record)
        records["digest"], records["ids"] = answers.digests, answers.ids
        records["logprobs"] = answers.logprobs
        while len(records):
            if self._file is None:
                self._file = self._open(BIN)
            room = self._spec["shard_rows"] - self._rows
            self._file.write(records[:room].tobytes())
            self._rows += min(room, len(records))
            records = records[room:]
            if self._rows == self._spec["shard_rows"]:
                self._close()

    def finish(self) -> LogitsManifest:
        """Write the manifest and remove the journal."""
        if self._file is not None:
            self._close()
        manifest: LogitsManifest = {**self._spec, "shards": self._shards}
        files.write(self._folder / MANIFEST, dump_checksummed(manifest))
        fsync_folder(self._folder)
        (self._folder / JOURNAL).unlink(missing_ok=True)
        return manifest

    def abandon(self) -> None:
        """Close the current shard without completing it."""
        if self._file is not None:
            self._file.abandon()

    def _open(self, suffix: str) -> ChecksummedWriter:
        return ChecksummedWriter(self._folder / shard_name(len(self._shards), suffix))

    def _close(self) -> None:
        assert self._file is not None
        crc, entries = self._open(CRC_FILE), {BIN: self._file.close()}
        crc.write(np.array(self._file.crcs, "<u4").tobytes())
        entries[CRC_FILE] = crc.close()
        shard: LogitsShardEntry = {"rows": self._rows, "files": entries}
        append_journal(self._journal, shard)
        self._shards.append(shard)
        self._file, self._rows = None, 0


def check_same(folder: Path, earlier: LogitsSpec, spec: LogitsSpec) -> None:
    """Raise ConfigError if the folder was prepared for a different teacher or other sequences."""
    theirs, ours = (_comparable_spec(spec) for spec in (earlier, spec))
    if lines := differences(theirs, ours):
        rule = f"contains logits prepared with different settings: {shorten_lines(lines)}."
        raise ConfigError.one(Code.DATA_PREPARED, OUT, folder, rule, suggest_action(folder))


def _comparable_spec(spec: LogitsSpec) -> dict[str, Any]:
    """Return the spec without the teacher's name, so the parameters alone identify the teacher."""
    parts = {name: spec.get(name) for name in LogitsSpec.__annotations__}
    return {**parts, "teacher": spec["teacher"]["digest"]}


# Reading.


def has_manifest(folder: str) -> bool:
    """Return whether a folder or `gs://BUCKET/PATH` contains teacher logits."""
    try:
        return bool(open_range_reader(join_path(folder, MANIFEST)).size)
    except StorageError:
        return False


def read_manifest(folder: str) -> LogitsManifest:
    """Return the manifest of a folder. Raises the same errors as `manifest.read_manifest`."""
    return read_checksummed(_LOGITS_FOLDER, folder, LogitsManifest, _check)


def _check(manifest: LogitsManifest) -> None:
    sizes = [manifest[name] for name in ("top_k", "row_tokens", "shard_rows", "vocab_size")]
    if min(sizes) < 1 or manifest["top_k"] > manifest["vocab_size"]:
        raise ValueError(f"the sizes are inconsistent: {sizes}")
    for name, facts in manifest["sources"].items():
        if type(count := facts.get("sequences")) is not int or count < 1:
            raise ValueError(f"source {name!r} has {count} sequences")
    size, left = _record_dtype_of_spec(manifest).itemsize, num_sequences(manifest)
    for number, shard in enumerate(manifest["shards"]):
        if sorted(shard["files"]) != sorted((BIN, CRC_FILE)):
            raise ValueError(f"shard {number} has unexpected files")
        rows = min(manifest["shard_rows"], left)
        if shard["rows"] != rows or shard["files"][BIN]["bytes"] != rows * size:
            raise ValueError(f"shard {number} must have {rows} sequences")
        left -= rows
    if left:
        raise ValueError(f"{left} sequences are missing from the shards")


def open_logits(
    folder: str,
    sources: Mapping[str, Mapping[str, Any]],
    *,
    vocab_size: int,
    temperature: float,
    top_k: int,
    row_tokens: int,
) -> LogitsReader:
    """Open a folder of teacher logits for a student run with these sources and settings.

    Raises:
        ConfigError: the logits were computed for different sequences or with different settings.
        StorageError: the folder is damaged or cannot be read.
    """
    manifest = read_manifest(folder)
    then = f"the value of {folder}, prepared by teacher {manifest['teacher']['name']}"
    for key, before, now in (
        ("model.vocab_size", manifest["vocab_size"], vocab_size),
        ("train.sequence_length", manifest["row_tokens"], row_tokens),
        ("distill.temperature", manifest["temperature"], temperature),
    ):
        if before != now:
            action = f"Set {key}={before}, or prepare a folder for this run."
            raise ConfigError.one(Code.POST_LOGITS, key, now, f"must be {before}, {then}.", action)
    if top_k > (most := manifest["top_k"]):
        rule = f"must be at most {most}, {then}."
        raise ConfigError.one(
            Code.POST_LOGITS, "distill.top_k", top_k, rule, f"Set distill.top_k={most}."
        )
    lines = []
    for name, facts in sources.items():
        before = manifest["sources"].get(name)
        named = f"data.mixture.{name}" if name else "data"
        lines += ["no sequences from " + named] if before is None else []
        if before is not None and CONTENT_KEY not in before:  # an earlier release wrote the folder
            facts = {key: value for key, value in facts.items() if key != CONTENT_KEY}
        lines += [] if before is None else differences(before, dict(facts), named)
    if lines:
        rule = f"must contain logits of this run's sequences: {shorten_lines(lines)}."
        action = (
            "Restore the documents, tokenizer, run.seed and data.*, or prepare the folder again."
        )
        raise ConfigError.one(Code.POST_LOGITS, _LOGITS_FOLDER.key, folder, rule, action)
    return LogitsReader(folder, manifest, top_k)


class LogitsReader:
    """Reader for a folder of teacher logits."""

    def __init__(self, folder: str, manifest: LogitsManifest, top_k: int):
        self._folder, self._manifest, self._top_k = folder, manifest, top_k
        self._record = _record_dtype_of_spec(manifest)
        self._piece_cache = PieceCache() if files.url_scheme(folder) else None
        self._starts: dict[str, int] = {}
        start = 0
        for name, facts in sorted(manifest["sources"].items()):
            self._starts[name] = start
            start += facts["sequences"]

    @property
    def teacher(self) -> TeacherEntry:
        """Teacher model that computed the logits."""
        return self._manifest["teacher"]

    def read(
        self, source: str, sequence: int, row: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (int32) and log-probabilities (float32), both [T, K], for one sequence.
        `row` contains the arrays of the sequence.

        Raises:
            ConfigError: the sequence differs from the sequence that the teacher processed.
            StorageError: the files are damaged or cannot be read.
        """
        shard, place = divmod(self._starts[source] + sequence, self._manifest["shard_rows"])
        size, file = self._record.itemsize, self._file(shard)
        record = np.frombuffer(file.read(place * size, (place + 1) * size), self._record)[0]
        if int(record["digest"]) != sequence_digest(row):
            named = f" of {source}" if source else ""
            rule = f"must contain logits of the run's documents: sequence {sequence}{named} has "
            rule += "different tokens than when the folder was prepared."
            action = "Restore the documents, or prepare the folder again."
            raise ConfigError.one(Code.POST_LOGITS, _LOGITS_FOLDER.key, self._folder, rule, action)
        ids, logprobs = (record[name][:, : self._top_k] for name in ("ids", "logprobs"))
        if int(ids.max()) >= self._manifest["vocab_size"]:
            raise damaged_error(file.path, f"sequence {place} has the invalid id {int(ids.max())}")
        return ids.astype(np.int32), np.ascontiguousarray(logprobs, np.float32)

    @functools.cache  # noqa: B019  the reader is kept until the run ends
    def _file(self, number: int) -> ChecksummedReader:
        entries = self._manifest["shards"][number]["files"]
        path, size = join_path(self._folder, shard_name(number, BIN)), entries[BIN]["bytes"]
        crc = join_path(self._folder, shard_name(number, CRC_FILE))
        crcs = np.frombuffer(read_verified(crc, entries[CRC_FILE]), "<u4")
        if len(crcs) != -(-size // BLOCK_BYTES):
            raise damaged_error(crc, f"the file has {len(crcs)} CRCs for {size} bytes")
        return ChecksummedReader(open_range_reader(path), size, crcs, self._piece_cache)
