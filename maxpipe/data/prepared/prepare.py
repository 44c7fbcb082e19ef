"""Implementation of `maxpipe data prepare` and `maxpipe data verify`.

`prepare` encodes batches of consecutive documents in parallel processes, and one process writes the
results in order. The documents, the tokenizer and the shard size determine every byte of the
output. Each complete shard is recorded in a journal. After an interruption, the same command
resumes after the last recorded shard.

`verify` compares every byte of a prepared folder with the digests in its manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxpipe.config.sections.source import SOURCES, SourceConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.chat import (
    empty_documents_error,
    expand_trained_messages,
    no_trained_tokens_error,
)
from maxpipe.data.prepared import logits, writer
from maxpipe.data.prepared.manifest import (
    CONTENT_KEY,
    HEADER_BYTES,
    IDX,
    JOURNAL,
    MANIFEST_FILE,
    OUT,
    SPAN_DOCUMENTS,
    SPANS,
    FileEntry,
    Manifest,
    ShardEntry,
    Spec,
    append_journal,
    changed_files,
    check_folder,
    check_sizes,
    convert_signals,
    differences,
    dtype_for,
    fsync_folder,
    has_masks,
    list_files,
    lock_journal,
    parse,
    read_manifest,
    replay_journal,
    shard_name,
    shorten_lines,
    spec_of,
    suggest_action,
    suggest_folder,
)
from maxpipe.data.prepared.range_reader import join_path, open_range_reader
from maxpipe.data.prepared.reader import Shard, sum_shard_notes
from maxpipe.data.prepared.writer import (
    ChecksummedWriter,
    DocumentBatch,
    FinishedShard,
    ShardWriter,
)
from maxpipe.data.sources import Source, open_source
from maxpipe.data.tokenizer import open_tokenizer
from maxpipe.data.unread_keys import columns_not_read, remarks, suggest_settings
from maxpipe.errors import Code, ConfigError, StorageError, UnreachableError
from maxpipe.io import files
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import dump_checksummed, parse_checksummed

_DOCUMENTS = ("name", "fingerprint", CONTENT_KEY, "documents", "chat")
"""Keys of a manifest's source entry that identify the documents."""
_PIECE = 64
"""Maximum number of documents per encoded batch."""
_COMPARED = 256
"""Number of documents that are compared with the source when an interrupted command resumes."""
_BATCHES_PER_WORKER = 3
"""Maximum number of batches per process that are being encoded or are waiting to be written."""

ProgressCallback = Callable[[str, int, int, str], object]
"""Function that is called with a task name, the number of processed items, the total, and the
formatted rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareJob:
    """Parameters of the function `prepare`. If `workers` is None, one process per core is used.

    Compressed files are unpacked into `cache_dir`, or into a temporary folder if `cache_dir` is
    None.
    """

    data: SourceConfig
    tokenizer: TokenizerConfig
    seed: int
    folder: Path
    cache_dir: str | None = None
    workers: int | None
    shard_tokens: int


class _FinishedShards:
    def __init__(self) -> None:
        self.shards: list[ShardEntry] = []
        self.documents = self.unreadable = self.tokens = self.text_bytes = 0
        self.byte_counts = np.zeros(256, np.int64)
        self.has_digests = True
        """Whether the journal contains digests of the source files."""
        self.day = ""
        """Date used by the chat template; empty if the template does not render a date."""

    def add(self, finished: FinishedShard) -> None:
        shard = finished["shard"]
        self.shards.append(shard)
        self.documents += shard["documents"]
        self.unreadable += shard["unreadable"]
        self.tokens += shard["tokens"]
        self.text_bytes += finished["text_bytes"]
        self.byte_counts += np.array(finished["byte_counts"], np.int64)


def prepare(plan: PrepareJob, report: ProgressCallback) -> str:
    """Write the folder, or only its missing shards, and return a summary.

    Raises:
        ConfigError: the source or the tokenizer cannot be used, or the folder contains other files.
        StorageError: the output folder cannot be written.
        Preemption: the process received SIGTERM or SIGHUP.
        UnreachableError: a worker process was killed.
    """
    if plan.data.chat == "pairs":
        rule = "must be off, messages or prompt: preference pairs cannot be prepared."
        action = "Train from the records with train.objective=preference data.chat=pairs."
        raise ConfigError.one(Code.CFG_CONFLICT, "data.chat", "pairs", rule, action)
    if plan.data.source in SOURCES:
        rule = "must not come from a plug-in: other processes, which do not load it, read the data."
        action = "Train from the source directly, or write its documents to a JSON Lines file."
        raise ConfigError.one(Code.DATA_FORMAT, "data.source", plan.data.source, rule, action)
    with convert_signals(plan.folder):
        report("opening the documents", 0, 0, "")
        source = open_source(
            plan.data,
            plan.seed,
            lambda: report("opening the documents", 0, 0, ""),
            cache_dir=plan.cache_dir,
        )
        source = expand_trained_messages(
            source, plan.data, plan.cache_dir, keep=plan.cache_dir is not None
        )
        tokenizer = open_tokenizer(plan.tokenizer)
        talks = writer.build_conversation_encoder(plan.data, source, tokenizer)
        chat, day = ("", "") if talks is None else (talks.fingerprint(), talks.day)
        shard_tokens = plan.shard_tokens
        spec = spec_of(
            plan.data, plan.seed, source, plan.tokenizer, tokenizer, shard_tokens, chat, day
        )
        encoder = writer.build_shard_encoder(source, tokenizer, talks)
        try:
            check_folder(plan.folder, MANIFEST_FILE)
            return _summary_if_complete(plan, spec) or _prepare_missing(
                plan, source, encoder, spec, report
            )
        except OSError as error:
            action = "Free disk space, or set --out to a writable folder."
            where = error.filename or plan.folder
            raise StorageError.unwritable(where, error, action) from error


def _summary_if_complete(plan: PrepareJob, spec: Spec) -> str:
    if not (plan.folder / MANIFEST_FILE).exists():
        return ""
    manifest = read_manifest(str(plan.folder))
    _check_same(plan.folder, manifest, spec)
    skipped = sum(shard["unreadable"] for shard in manifest["shards"])
    _check_skipped(plan.data, skipped, manifest["documents"])
    (plan.folder / JOURNAL).unlink(missing_ok=True)
    return f"{plan.folder} is complete: {_counts(manifest)}"


def _prepare_missing(
    plan: PrepareJob,
    source: Source,
    encoder: writer.ShardEncoder,
    spec: Spec,
    report: ProgressCallback,
) -> str:
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock_journal(plan.folder) as journal:
        # another process may have completed the folder before this process acquired the lock
        if summary := _summary_if_complete(plan, spec):
            return summary
        finished = _load_finished(plan.folder, journal, spec)
        if finished.day:  # a resumed command uses the date of the first start
            spec = {**spec, "source": {**spec["source"], "day": finished.day}}
        _check_skipped(plan.data, finished.unreadable, finished.documents)
        if not finished.has_digests:
            _check_unchanged(plan.folder, source, encoder, finished)
        start, begun = time.monotonic(), finished.tokens
        sent, day = writer.source_if_picklable(source), spec["source"].get("day", "")
        pieces = _encode_in_processes(plan, sent, finished.documents, len(source), day)
        with contextlib.closing(pieces):
            _write(plan, source, pieces, finished, journal, report)
        manifest = _finish(plan.folder, spec, finished)
    seconds = max(time.monotonic() - start, 1e-9)
    rate = f"{(finished.tokens - begun) / seconds / 1e6:.2f} M tokens/s"
    unread, _ = sum_shard_notes(manifest["shards"])
    action = suggest_settings(unread, source, plan.data)
    line, *noted = [*_counts(manifest, action).splitlines(), *columns_not_read(source, plan.data)]
    return "\n".join([f"wrote {plan.folder}: {line}, in {seconds:.1f} s, {rate}", *noted])


def _counts(manifest: Manifest, action: str = "") -> str:
    size = sum(file["bytes"] for shard in manifest["shards"] for file in shard["files"].values())
    shards = pluralize(len(manifest["shards"]), "shard")
    documents = pluralize(manifest["documents"], "document")
    if unreadable := sum(shard["unreadable"] for shard in manifest["shards"]):
        documents += f" ({unreadable} unreadable, written as empty)"
    notes = sum_shard_notes(manifest["shards"])
    noted = remarks("conversation", manifest["documents"], *notes, action=action)
    line = f"{documents}, {pluralize(manifest['tokens'], 'token')}, {shards} of {size / 1e6:.1f} MB"
    return "\n".join([line, *noted])


# Checks of the folder.


def _check_same(folder: Path, earlier: Spec, spec: Spec) -> None:
    changed = changed_files(earlier["source"].get(CONTENT_KEY), spec["source"].get(CONTENT_KEY))
    if changed:
        lines = [f"{words} was {before} and is {now}" for words, before, now in changed]
        rule = f"contains documents from different files: {shorten_lines(lines)}."
        raise ConfigError.one(
            Code.DATA_PREPARED, OUT, folder, rule, f"Restore the files. {suggest_action(folder)}"
        )
    known = tuple(
        key for key in _DOCUMENTS if key != CONTENT_KEY or CONTENT_KEY in earlier["source"]
    )  # earlier releases did not store digests of files
    theirs, ours = (
        {
            "format": part["format"],
            # Documents and tokenizers are compared by content, not by path.
            "source": {key: part["source"].get(key) for key in known},
            "tokenizer": part["tokenizer"]["fingerprint"],
            "shard_tokens": part["shard_tokens"],
        }
        for part in (earlier, spec)
    )
    if lines := differences(theirs, ours):
        lines += differences(earlier["source"]["data"], spec["source"]["data"], "data")
        rule = f"contains documents prepared with different settings: {shorten_lines(lines)}."
        raise ConfigError.one(Code.DATA_PREPARED, OUT, folder, rule, suggest_action(folder))


def _load_finished(folder: Path, journal: BinaryIO, spec: Spec) -> _FinishedShards:
    finished = _FinishedShards()

    def check(line: bytes) -> None:
        found = parse_checksummed(line, Spec)
        _check_same(folder, found, spec)
        finished.has_digests = CONTENT_KEY in found["source"]
        finished.day = found["source"].get("day", "")

    def resume(line: bytes) -> None:
        shard = parse_checksummed(line, FinishedShard)
        check_sizes(folder, len(finished.shards), shard["shard"]["files"])
        finished.add(shard)

    begun = replay_journal(
        journal,
        check,
        resume,
    )
    if not begun:
        append_journal(journal, spec)
    return finished


def _check_unchanged(
    folder: Path, source: Source, encoder: writer.ShardEncoder, finished: _FinishedShards
) -> None:
    """Compare a sample of the documents in finished shards with the source.

    The check is needed for journals of earlier releases, which contain no digests of source files.

    Raises:
        ConfigError: a document has changed.
    """
    if not finished.documents:
        return
    ends = np.cumsum([shard["documents"] for shard in finished.shards])
    numbers = np.unique(np.linspace(0, finished.documents - 1, _COMPARED).astype(np.int64))
    for shard, first in enumerate([0, *ends[:-1].tolist()]):
        entry = finished.shards[shard]
        here = numbers[(numbers >= first) & (numbers < ends[shard])].tolist()
        documents = Shard(str(folder), shard, entry, None)
        for number in here:
            meta = documents.meta(number - first, number - first + 1)[0]
            if encoder.identity(number) != (meta["text_bytes"], meta["digest"]):
                rule = f"must not change while {folder} is being prepared: the text has changed."
                action = f"Restore the files, or remove {folder} and restart."
                raise ConfigError.one(Code.DATA_CHANGED, source.where(number), None, rule, action)


# Encoding and writing.


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _encode_in_processes(
    plan: PrepareJob, source: Source | None, first: int, total: int, day: str
) -> Generator[DocumentBatch, None, None]:
    """Yield batches of encoded documents in order, starting with the document `first`.

    Chat templates use the date `day`.
    """
    workers = plan.workers or len(os.sched_getaffinity(0))
    # Creating the pool starts Python's semaphore tracker, which SIGHUP would terminate.
    with _block_signals():
        pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=writer.start,
            initargs=(plan.data, plan.tokenizer, plan.seed, source, day),
        )
    waiting: deque[tuple[range, Future[Any]]] = deque()
    size = _PIECE

    def submit(begin: int, end: int) -> tuple[range, Future[Any]]:
        # the first call starts processes, which do not ignore signals until they are initialized
        with _block_signals():
            return range(begin, end), pool.submit(writer.encode, begin, end)

    try:
        while True:
            while first < total and len(waiting) < _BATCHES_PER_WORKER * workers:
                end = min(first + size, total)
                waiting.append(submit(first, end))
                first = end
            if not waiting:
                return
            numbers, future = waiting.popleft()
            batch = future.result()
            if not isinstance(batch, DocumentBatch):
                raise ConfigError(batch)
            count = len(batch.lengths)
            if count < len(numbers):
                waiting.appendleft(submit(numbers.start + count, numbers.stop))
            # If documents are large, the batch size is reduced to the number of documents that a
            # process returned.
            size = min(_PIECE, count if count < len(numbers) else 2 * size)
            yield batch
    except BrokenProcessPool as error:
        raise UnreachableError(
            Code.MEM_HOST,
            f"{plan.folder}: a tokenizer process was killed\n"
            "  It may have run out of memory. Complete shards are kept.\n"
            "  Run the same command again, with fewer --workers if needed, to resume after them.",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _write(
    plan: PrepareJob,
    source: Source,
    pieces: Iterator[DocumentBatch],
    finished: _FinishedShards,
    journal: BinaryIO,
    report: ProgressCallback,
) -> None:
    """Write shards. A shard ends with the document that reaches `shard_tokens`."""
    start, documents, tokens, text_bytes = time.monotonic(), finished.documents, 0, 0
    unreadable, total = finished.unreadable, len(source)
    writer: ShardWriter | None = None
    try:
        for piece in pieces:
            documents += len(piece.lengths)
            unreadable += int(piece.unreadable.sum())
            _check_skipped(plan.data, unreadable, documents)
            tokens += len(piece.ids)
            text_bytes += int(piece.meta["text_bytes"].sum(dtype=np.int64))
            while len(piece.lengths):
                if writer is None:
                    number, has_mask = len(finished.shards), piece.trained is not None
                    writer = ShardWriter(plan.folder, number, piece.ids.dtype, has_mask=has_mask)
                ends = writer.tokens + np.cumsum(piece.lengths)
                count = min(int(np.searchsorted(ends, plan.shard_tokens)) + 1, len(ends))
                writer.add(piece.part(0, count))
                piece = piece.part(count, len(piece.lengths))
                if writer.tokens >= plan.shard_tokens or (
                    documents == total and not len(piece.lengths)
                ):
                    shard = writer.close()
                    writer = None
                    _check_files_unchanged(plan.folder, source, report)
                    append_journal(journal, shard)
                    finished.add(shard)
            rate = 1e-6 / max(time.monotonic() - start, 1e-9)
            words = f"{tokens * rate:.2f} M tokens/s, {text_bytes * rate:.2f} MB/s"
            report("tokenizing documents", documents, total, words)
    finally:
        if writer is not None:
            writer.abandon()


def _check_files_unchanged(folder: Path, source: Source, report: ProgressCallback) -> None:
    try:
        source.check_unchanged(lambda: report("checking modified files", 0, 0, ""))
    except ConfigError as error:
        action = "Restore the file and run the same command again, or prepare the changed file "
        action += f"into another folder, such as --out {suggest_folder(folder)}."
        problems = [replace(problem, action=action) for problem in error.problems]
        raise ConfigError(problems) from error


def _check_skipped(data: SourceConfig, unreadable: int, documents: int) -> None:
    if data.bad_records == "stop" and unreadable:
        rule = f"must be skip for this folder: {pluralize(unreadable, 'record')} could not be read "
        rule += "when the folder was prepared."
        action = "Set data.bad_records=skip, or set --out to another folder."
        raise ConfigError.one(
            Code.DATA_PREPARED, "data.bad_records", data.bad_records, rule, action
        )
    if unreadable > data.max_bad_records:
        rule = f"must be at least the number of unreadable records: {unreadable} of the first "
        rule += f"{documents}."
        action = "Correct these records, which are named in the log, or set a larger limit."
        raise ConfigError.one(
            Code.DATA_PREPARED, "data.max_bad_records", data.max_bad_records, rule, action
        )


def _finish(folder: Path, spec: Spec, finished: _FinishedShards) -> Manifest:
    if has_masks(spec) and not sum(shard.get("trained", 0) for shard in finished.shards):
        template = spec["source"]["data"]["chat_template"] or spec["tokenizer"]["path"]
        raise no_trained_tokens_error(template, finished.documents)
    if not finished.text_bytes:
        of = spec["source"]["data"]
        raise empty_documents_error(of.get("path"), finished.documents, of.get("chat", "off"))
    spans = ChecksummedWriter(folder / SPANS)
    spans.write(_span_starts(folder, finished).astype("<i8").tobytes())
    manifest: Manifest = {
        **spec,
        "dtype": dtype_for(spec["tokenizer"]["vocab_size"]).str,
        "documents": finished.documents,
        "tokens": finished.tokens,
        "text_bytes": finished.text_bytes,
        "byte_counts": finished.byte_counts.tolist(),
        "shards": finished.shards,
        "spans": spans.close(),
    }
    files.write(folder / MANIFEST_FILE, dump_checksummed(manifest))
    fsync_folder(folder)
    # another process may already have seen the manifest and removed the journal
    (folder / JOURNAL).unlink(missing_ok=True)
    return manifest


def _span_starts(folder: Path, finished: _FinishedShards) -> np.ndarray:
    """Return int64 [spans + 1]: the number of tokens before each span, followed by the total."""
    starts: list[np.ndarray] = []
    first = tokens = 0
    for number, shard in enumerate(finished.shards):
        with open(files.open_regular(folder / shard_name(number, IDX)), "rb") as file:
            layout = parse(file.read(HEADER_BYTES), shard["files"][IDX]["bytes"])
            file.seek(layout.pointers_at)
            raw = file.read(8 * layout.num_sequences)
        pointers = np.frombuffer(raw, "<i8")
        starts.append(
            tokens + pointers[-first % SPAN_DOCUMENTS :: SPAN_DOCUMENTS] // layout.dtype.itemsize
        )
        first += shard["documents"]
        tokens += shard["tokens"]
    return np.concatenate([*starts, [tokens]])


_PART_BYTES = 1 << 22

VerifyReport = Callable[[str, int, int], object]
"""Function that is called with a task name, the number of processed MiB, and the total in MiB."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of `verify`: one line for each damaged file, and a summary."""

    damage: tuple[str, ...]
    summary: str


def verify(folder: str, report: VerifyReport) -> VerifyResult:
    """Verify all files in a folder or at `gs://BUCKET/PATH`.

    Raises:
        ConfigError: the folder is not a prepared folder.
        StorageError: the manifest is damaged, so the files cannot be verified.
    """
    if logits.has_manifest(folder):
        own, entries = logits.MANIFEST, dict(list_files(logits.read_manifest(folder)["shards"]))
    else:
        own, manifest = MANIFEST_FILE, read_manifest(folder)
        entries = {**dict(list_files(manifest["shards"])), SPANS: manifest["spans"]}
    total = sum(entry["bytes"] for entry in entries.values())
    done, damage = 0, []

    def report_bytes(before: int, read: int) -> None:
        report("reading", (before + read) >> 20, total >> 20)

    present = None if url_scheme(folder) else set(os.listdir(os.path.expanduser(folder)))
    for name, entry in entries.items():
        path = join_path(folder, name)
        if present is not None and name not in present:
            damage.append(f"{path}: the file is missing")
            done += entry["bytes"]
            continue
        try:
            if words := _find_damage(path, entry, partial(report_bytes, done)):
                damage.append(f"{path}: {words}")
        except StorageError as error:
            damage.append(str(error))
        done += entry["bytes"]
    whole = f"{pluralize(len(entries), 'file')}, {total / 1e6:.1f} MB"
    if damage:
        summary = f"{folder}: {len(damage)} of {whole} damaged: copy or prepare them again"
    else:
        summary = f"{folder}: {whole}, all checksums match"
    if others := sorted((present or set()) - {own, *entries}):
        summary += f"\n{pluralize(len(others), 'other file')} ignored: {', '.join(others[:4])}"
    return VerifyResult(tuple(damage), summary)


def _find_damage(path: str, entry: FileEntry, report: Callable[[int], object]) -> str:
    """Return a description of the damage to a file; empty if the file is intact."""
    file = open_range_reader(path)
    if file.size != entry["bytes"]:
        return f"the file has {file.size} bytes instead of {entry['bytes']}"
    total = hashlib.sha256()
    for start in range(0, file.size, _PART_BYTES):
        total.update(file.read(start, min(start + _PART_BYTES, file.size)))
        report(start)
    return "" if total.hexdigest() == entry["sha256"] else "the checksum does not match"
