"""`maxpipe distill prepare`: precompute the teacher's top-k logits for a dataset.

Sequences are processed in batches of `train.batch_size`. Even after an interruption, batches start
at multiples of that size, so that the files are always bitwise equal.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxpipe.config.load import LoadedConfig
from maxpipe.data.datasets import build_datasets
from maxpipe.data.loader import Batch, Loader
from maxpipe.data.prepared.logits import (
    MANIFEST,
    LogitsBatch,
    LogitsManifest,
    LogitsSpec,
    LogitsWriter,
    check_same,
    num_sequences,
    read_manifest,
    sequence_digest,
    spec_of,
)
from maxpipe.data.prepared.manifest import check_folder, convert_signals, lock_journal
from maxpipe.distributed import runtime
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.formatting import pluralize
from maxpipe.objectives.distill import TEACHER_IDS, TEACHER_LOGPROBS
from maxpipe.posttrain.distill import Teacher, TeacherLogits, open_teacher

ProgressCallback = Callable[[str, int, int, str], object]
"""Function that receives a task, the finished amount, the total amount, and a text about the
rate."""


def prepare_teacher_logits(
    loaded: LoadedConfig, folder: Path, report: ProgressCallback, *, shard_bytes: int
) -> str:
    """Write the missing files of the folder, and return a one-line summary.

    Raises:
        ConfigError: the teacher or the documents cannot be used, or the folder contains other
            files.
        StorageError: the folder cannot be written.
        Preemption: the process received a stop request; UserInterrupt after Ctrl-C.
    """
    config = loaded.config
    if config.runtime.num_processes != 1:
        rule = "must be 1: a single process prepares, with all devices of its machine."
        raise ConfigError.one(
            "runtime.num_processes", config.runtime.num_processes, rule, "Leave it out."
        )
    with convert_signals(folder):
        check_folder(folder, MANIFEST)
        report("opening documents and teacher", 0, 0, "")
        runtime.start(config.runtime, config.mesh.cpu_devices)
        datasets = build_datasets(config, lambda: report("", 0, 0, ""))
        with contextlib.closing(datasets):
            teacher = open_teacher(loaded, datasets.tokenizer)
            spec = spec_of(
                teacher.entry,
                datasets.train.sequence_metadata(),
                vocab_size=config.model.vocab_size,
                temperature=config.distill.temperature,
                top_k=config.distill.top_k,
                row_tokens=config.train.sequence_length,
                shard_bytes=shard_bytes,
            )
            try:
                return _describe_if_complete(folder, spec) or _write_missing(
                    folder, spec, teacher, datasets.train, config.train.batch_size, report
                )
            except OSError as error:
                action = "Free space, or name a writable folder with --out."
                raise StorageError.unwritable(error.filename or folder, error, action) from error


def _describe_if_complete(folder: Path, spec: LogitsSpec) -> str:
    """Return a one-line summary if the folder is complete, else an empty string."""
    if not (folder / MANIFEST).exists():
        return ""
    found = read_manifest(str(folder))
    check_same(folder, found, spec)
    return f"{folder} is complete: {_describe_counts(found)}"


def _describe_counts(found: LogitsManifest) -> str:
    size = sum(file["bytes"] for shard in found["shards"] for file in shard["files"].values())
    rows, tokens = pluralize(num_sequences(found), "sequence"), found["row_tokens"]
    shards = pluralize(len(found["shards"]), "shard")
    return f"{rows} of {tokens} tokens, with the top {found['top_k']} logits of each token, " + (
        f"{shards} of {size / 1e6:.1f} MB"
    )


def _write_missing(
    folder: Path,
    spec: LogitsSpec,
    teacher: Teacher,
    loader: Loader,
    batch_size: int,
    report: ProgressCallback,
) -> str:
    """Write the missing files; see `prepare_teacher_logits`."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock_journal(folder) as journal:
        if found := _describe_if_complete(folder, spec):  # completed by the previous lock holder
            return found
        writer, start = LogitsWriter(folder, journal, spec), time.monotonic()
        teacher.compile(batch_size)
        begun, total = writer.done, num_sequences(spec)
        try:
            with _deferred_signals() as asked:
                for answers, done in _compute_logits(spec, teacher, loader, batch_size, begun):
                    writer.add(answers)
                    rate = (done - begun) / max(time.monotonic() - start, 1e-9)
                    words = f"{rate * spec['row_tokens'] / 1e3:.2f} k tokens/s"
                    report("computing teacher logits", done, total, words)
                    if asked():
                        break
            if number := asked():
                signal.raise_signal(number)
            manifest = writer.finish()
        finally:
            writer.abandon()
    seconds = time.monotonic() - start
    return f"wrote {folder}: {_describe_counts(manifest)}, in {seconds:.1f} s"


class _SequenceIndex(NamedTuple):
    source: int
    sequence: int


def _compute_logits(
    spec: LogitsSpec, teacher: Teacher, loader: Loader, size: int, begun: int
) -> Iterator[tuple[LogitsBatch, int]]:
    """Yield teacher logits of the sequences from index `begun`, and the number of finished
    sequences.

    The teacher computes while the next batch is read. Closing the generator waits for the devices,
    because Python may crash on exit while devices are computing.
    """
    parts = {part.name: number for number, part in enumerate(loader.stream.parts)}
    counts = [(parts[name], facts["sequences"]) for name, facts in spec["sources"].items()]
    ends = np.cumsum([count for _, count in counts])

    def place(row: int) -> _SequenceIndex:
        at = int(np.searchsorted(ends, row, side="right"))
        number, count = counts[at]
        return _SequenceIndex(number, row - int(ends[at]) + count)

    total = int(ends[-1])
    asked: tuple[range, list[int], TeacherLogits] | None = None
    try:
        for first in range(begun - begun % size, total, size):
            rows = range(first, min(first + size, total))
            digests, batch = _read_batch(loader, [place(row) for row in rows], size)
            answer = teacher.compute_logits(teacher.place_batch(batch, np.arange(size), size))
            before, asked = asked, (rows, digests, answer)
            if before is not None:
                yield _select_missing(*before, begun)
        if asked is not None:
            yield _select_missing(*asked, begun)
    finally:
        jax.block_until_ready(asked and asked[-1])


def _read_batch(loader: Loader, places: list[_SequenceIndex], size: int) -> tuple[list[int], Batch]:
    """Return sequence checksums, and a batch padded with copies of the last sequence."""
    rows = [loader.stream.read(*place) for place in places]
    digests = [sequence_digest(row) for row in rows]
    rows += rows[-1:] * (size - len(rows))
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return digests, {**batch, "example_ids": np.arange(size, dtype=np.int32)}


def _select_missing(
    rows: range, digests: list[int], answer: TeacherLogits, begun: int
) -> tuple[LogitsBatch, int]:
    """Return the logits of the unfinished sequences of a batch, and the new number of finished
    ones.
    """
    mine = slice(max(begun - rows.start, 0), len(rows))
    ids, logprobs = (np.asarray(answer[name])[mine] for name in (TEACHER_IDS, TEACHER_LOGPROBS))
    return LogitsBatch(digests[mine], ids, logprobs), rows.stop


@contextlib.contextmanager
def _deferred_signals() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of a received stop signal, or 0. Inside the context,
    the signal does not interrupt the process.
    """
    found = 0

    def note(number: int, frame: Any) -> None:
        nonlocal found
        found = number

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield lambda: found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
