"""Batches of a step, by step number.

Owns the order of sequences over epochs and reading ahead. The position of a run is
one integer, the next step: row r of step s is sequence s * batch_size + r of the
shuffled and repeated stream, whichever process asks for it. Where batches grow, that is
as many sequences as all batches before it have, and r. So data order depends
on seed and data, not on mesh, processes or devices, and resuming seeks. It does
not know how rows are placed on devices.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np

from maxpipe.config.data import paths_of
from maxpipe.config.ramp import FACTS, Ramp
from maxpipe.config.schema import DataConfig, TokenizerConfig
from maxpipe.data.chat import ChatDocuments, Conversations, build_chat_index
from maxpipe.data.documents import DocumentIndex, Documents, EncodedDocuments, build_index
from maxpipe.data.packing import PackedSequences, split_documents
from maxpipe.data.prepared.megatron import MegatronDocuments
from maxpipe.data.prepared.open import IDS, open_documents
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.prepared.windows import WindowedSequences, needs_windows, spans_of
from maxpipe.data.sources import Moved, open_source
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import ConfigError
from maxpipe.words import counted

# Increased whenever the same seed and data give other batches than before.
_ORDER_VERSION = 1
_SEQUENCE_ORDER = 1

Batch = dict[str, np.ndarray]
Rows = Sequence[int] | slice
RowsOf = Callable[[int], Rows | np.ndarray]
"""Of the number of a batch's rows those that are wanted."""
Split = Literal["validation", "train", "all"]
Sequences = PackedSequences | WindowedSequences


class Batches(Iterator[Batch]):
    """Batches of consecutive steps, read ahead by threads until `close`."""

    def __init__(self, loader: Loader, start_step: int, stop_step: int, rows: RowsOf):
        # Not at the top: it imports jax when that is installed, and loading a config must not.
        import grain

        threads, ahead = loader.threads, loader.prefetch_batches
        steps = grain.MapDataset.range(start_step, max(start_step, stop_step))
        options = grain.ReadOptions(
            num_threads=min(threads, ahead), prefetch_buffer_size=ahead if threads else 0
        )
        read = steps.map(lambda step: loader.batch(step, rows(loader.ramp.place(step)[1])))
        dataset = read.to_iter_dataset(options)
        self._iterator = iter(dataset)
        self._iterator.start_prefetch()

    def __next__(self) -> Batch:
        return next(self._iterator)

    def close(self) -> None:
        """Drops batches that were read ahead. Threads end with their current batch."""
        self._iterator.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Row(NamedTuple):
    """Where a row of a batch comes from."""

    source: str
    """Its name in a mixture; empty without one."""
    sequence: int
    documents: list[int]
    """Numbers of the documents of the source that have a token in it, in their order there."""


class Loader:
    """Random access to the batches of one split.

    With `repeat` the stream is endless and each epoch has an order of its own.
    Without it the order is fixed, and rows beyond the last sequence have an all-zero
    `loss_mask`, so that no sequence counts twice.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        ramp: Ramp,
        repeat: bool,
        seed: int,
        threads: int,
        prefetch_batches: int,
        fingerprint: Mapping[str, Any],
    ):
        self.sequences = sequences
        self.ramp = ramp
        self.threads = threads
        self.prefetch_batches = prefetch_batches
        self._repeat = repeat
        self._seed = seed
        self._fingerprint = dict(fingerprint)
        self._open: weakref.WeakSet[Batches] = weakref.WeakSet()

    @property
    def steps_per_epoch(self) -> float:
        """Of the full batch. An epoch may end inside a step; the next one fills its other rows."""
        return len(self.sequences) / self.ramp.rows

    @property
    def num_batches(self) -> int:
        """Steps in which every sequence is seen once."""
        return self.ramp.batches(len(self.sequences))

    def batch(self, step: int, rows: Rows | np.ndarray = slice(None)) -> Batch:
        """The given rows of the global batch of one step.

        Arrays of a sequence, each [rows, T], and `example_ids` int32 [rows]: the rows.
        """
        front, count = self.ramp.place(step)
        rows = np.arange(count, dtype=np.int32)[rows]
        numbers = front + rows.astype(np.int64)
        if self._repeat:
            examples = [self.sequences[i] for i in self._shuffled(numbers)]
        else:
            count = len(self.sequences)
            examples = [
                self.sequences[i] if i < count else self.sequences.padding()
                for i in numbers.tolist()
            ]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        return {**batch, "example_ids": rows}

    def _shuffled(self, numbers: np.ndarray) -> list[int]:
        count = len(self.sequences)
        epochs, within = np.divmod(numbers, count)
        for epoch in np.unique(epochs):
            order = self.sequences.shuffled(self._seed, _SEQUENCE_ORDER, int(epoch))
            within[epochs == epoch] = order(within[epochs == epoch])
        return within.tolist()

    def rows(self, step: int) -> list[Row]:
        """Where each row of one step's batch comes from; without those that are padding."""
        front, count = self.ramp.place(step)
        numbers = front + np.arange(count, dtype=np.int64)
        found = self._shuffled(numbers) if self._repeat else numbers.tolist()
        return [
            Row("", number, self.sequences.documents(number))
            for number in found
            if number < len(self.sequences)
        ]

    def where(self, source: str, document: int) -> str:
        """The file of a document of a row's source and its place in it, for people."""
        return self.sequences.where(document)

    def size(self, source: str, document: int) -> int:
        """Tokens of a document of a row's source."""
        return self.sequences.size(document)

    def ids(self, step: int) -> dict[str, list[int]]:
        """The `sequences` of one step's batch, row by row, and the `documents` that are in them."""
        rows = self.rows(step)
        inside = {name for row in rows for name in row.documents}
        return {"sequences": [row.sequence for row in rows], "documents": sorted(inside)}

    def batches(
        self, start_step: int, rows: Rows | RowsOf = slice(None), *, stop_step: int | None = None
    ) -> Batches:
        """Batches of steps `start_step`, `start_step` + 1, ... made ready ahead of time.

        Ends before `stop_step`; by default never, or after `num_batches` without `repeat`.
        """
        if stop_step is None:
            stop_step = sys.maxsize if self._repeat else self.num_batches
        batches = Batches(self, start_step, stop_step, rows if callable(rows) else lambda _: rows)
        self._open.add(batches)
        return batches

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that decide which tokens a step gets."""
        return dict(self._fingerprint)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps: resuming is `batches(start_step=step)`."""
        return {"step": step, "fingerprint": self.fingerprint()}

    def close(self) -> None:
        """Closes all batches that were handed out and are still open."""
        for batches in list(self._open):
            batches.close()


@dataclass(frozen=True, slots=True)
class Datasets:
    """What a run reads. `unigram_entropy` is in nats per byte of all documents, where it is
    known: Megatron's files do not say it. `unreadable` counts documents that are empty because
    their records could not be read.
    """

    train: Loader
    validation: Loader | None
    tokenizer: Tokenizer
    unigram_entropy: float | None
    unreadable: int = 0

    def close(self) -> None:
        self.train.close()
        if self.validation is not None:
            self.validation.close()


@dataclass(frozen=True, slots=True)
class _Opened:
    """Documents whose lengths are known, before anything is cut from them."""

    documents: Documents
    tokenizer: Tokenizer
    unigram_entropy: float | None
    unreadable: int
    config: DataConfig
    seed: int
    sequence_length: int
    fingerprint: Mapping[str, Any]

    def loader(self, split: Split, ramp: Ramp, *, repeat: bool) -> Loader | None:
        """Of a split; None if it has no documents.

        Raises:
            ConfigError: it has documents, and no tokens in them.
        """
        sequences = self._sequences(split)
        if sequences is None:
            return None
        if not len(sequences):
            raise ConfigError.one(
                "data.validation_fraction",
                self.config.validation_fraction,
                f"leaves documents without tokens for {split}: others of data.path are empty, too.",
                "Leave empty documents out, or draw others with another run.seed.",
            )
        return Loader(
            sequences,
            ramp=ramp,
            repeat=repeat,
            seed=self.seed,
            threads=self.config.threads,
            prefetch_batches=self.config.prefetch_batches,
            fingerprint=self.fingerprint,
        )

    def _sequences(self, split: Split) -> Sequences | None:
        documents, fraction = self.documents, self.config.validation_fraction
        prepared = isinstance(documents, PreparedDocuments | MegatronDocuments)
        if prepared and needs_windows(documents):
            spans = spans_of(documents, split, fraction, self.seed)
            seed = None if split == "all" else self.seed
            windowed = WindowedSequences(documents, spans, self.sequence_length, seed)
            return windowed if len(spans) else None
        count = len(documents.lengths)
        if split == "all":
            order = np.arange(count)
        else:
            order = split_documents(count, fraction, self.seed)[split == "validation"]
        return PackedSequences(documents, order, self.sequence_length) if len(order) else None


def _open(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    seed: int,
    ramp: Ramp,
    sequence_length: int,
    cache_dir: str | None,
    moved: Moved | None,
    keep: bool = True,
) -> _Opened:
    encoder = open_tokenizer(tokenizer)
    if data.source in IDS:
        documents = open_documents(data, encoder)
        unigram_entropy, unreadable = documents.unigram_entropy, documents.unreadable
        facts = documents.facts()
        if needs_windows(documents):
            facts = {**facts, "order": "windows"}
    else:
        documents, index, facts = _encoded(data, encoder, seed, cache_dir, moved, keep)
        unigram_entropy, unreadable = index.unigram_entropy, len(index.unreadable)
    fingerprint = {
        "order_version": _ORDER_VERSION,
        **facts,
        "tokenizer": encoder.fingerprint(),
        "seed": seed,
        "validation_fraction": data.validation_fraction,
        **ramp.facts(),
        "sequence_length": sequence_length,
    }
    return _Opened(
        documents=documents,
        tokenizer=encoder,
        unigram_entropy=unigram_entropy,
        unreadable=unreadable,
        config=data,
        seed=seed,
        sequence_length=sequence_length,
        fingerprint=fingerprint,
    )


def _encoded(
    data: DataConfig,
    encoder: Tokenizer,
    seed: int,
    cache_dir: str | None,
    moved: Moved | None,
    keep: bool,
) -> tuple[Documents, DocumentIndex, Mapping[str, Any]]:
    """Documents of texts or conversations, their index, and what identifies them."""
    source = open_source(data, seed, moved, cache_dir=cache_dir, keep=keep)
    found = None if data.chat == "off" else Conversations(source, encoder, data)
    if found is None:
        index = build_index(source, encoder, cache_dir, moved, keep=keep)
    else:
        index = build_chat_index(found, cache_dir, moved, threads=data.threads, keep=keep)
    if not index.byte_counts.any():
        raise ConfigError.one(
            "data.path",
            ", ".join(paths_of(data)),
            f"must hold text: {counted(len(source), 'document')} with nothing inside.",
            "Set data.path to documents with text, or data.field to the field that holds it.",
        )
    facts = {
        "source": source.name,
        "documents": len(source),
        "tokens": int(index.lengths.sum()),
        "source_digest": source.fingerprint(),
    }
    if found is None:
        return EncodedDocuments(source, encoder, index), index, facts
    facts["chat"] = found.fingerprint()
    return ChatDocuments(found, index), index, facts


def build(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    seed: int,
    batch_size: int,
    sequence_length: int,
    batch_ramp: Ramp | None = None,
    eval_batch_size: int = 0,
    cache_dir: str | None = None,
    moved: Moved | None = None,
) -> Datasets:
    """Opens source and tokenizer, indexes the documents and splits them.

    The first time it reads every document once; `cache_dir` keeps what it found. Validation
    takes batches of `eval_batch_size`, or of `batch_size` when that is 0. `batch_ramp` says which
    batches of training are smaller. `moved` is called for each part of the reading.

    Raises:
        ConfigError: anything the user has to change in `data` or `tokenizer`.
    """
    ramp = Ramp((), batch_size) if batch_ramp is None else batch_ramp
    found = _open(
        data,
        tokenizer,
        seed=seed,
        ramp=ramp,
        sequence_length=sequence_length,
        cache_dir=cache_dir,
        moved=moved,
    )
    train = found.loader("train", ramp, repeat=True)
    assert train is not None, "no split leaves training without documents"
    size = eval_batch_size or batch_size
    return Datasets(
        train=train,
        validation=found.loader("validation", Ramp((), size), repeat=False),
        tokenizer=found.tokenizer,
        unigram_entropy=found.unigram_entropy,
        unreadable=found.unreadable,
    )


def build_once_through(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    split: Split,
    *,
    seed: int,
    batch_size: int,
    sequence_length: int,
    eval_batch_size: int = 0,
    cache_dir: str | None = None,
    moved: Moved | None = None,
) -> tuple[Loader, Tokenizer]:
    """Every sequence of a split once, in a fixed order, in batches as `build` makes for validation.

    What is in `cache_dir` is used, and nothing is written there.

    Raises:
        ConfigError: anything the user has to change in `data` or `tokenizer`, or a split without
            documents.
    """
    found = _open(
        data,
        tokenizer,
        seed=seed,
        ramp=Ramp((), batch_size),
        sequence_length=sequence_length,
        cache_dir=cache_dir,
        moved=moved,
        keep=False,
    )
    size = eval_batch_size or batch_size
    loader = found.loader(split, Ramp((), size), repeat=False)
    if loader is None:
        raise ConfigError.one(
            "data.validation_fraction",
            data.validation_fraction,
            "leaves no documents for validation.",
            "Evaluate on all documents with --split all, or on others with --data FILES.",
        )
    return loader, found.tokenizer


_WORDS = {
    "documents": "the number of documents",
    "tokens": "the number of tokens",
    "order": "the order of documents",
    "source_digest": "the digest of names, sizes and content of the files",
    "tokenizer": "the tokenizer",
    "chat": "the chat template, fields or roles",
    "order_version": "the order of samples",
    "batch_size": "train.batch_size",
    "batch_ramp": "the stages of train.batch_ramp, as rows and steps,",
}


def _short(value: Any) -> Any:
    """Digests shortened to 12 digits."""
    return (
        re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", value)
        if isinstance(value, str)
        else value
    )


def compare(
    saved: Mapping[str, Any], current: Mapping[str, Any], step: int | None = None
) -> list[tuple[str, Any, Any]]:
    """The (name, saved, current) of each entry in which two fingerprints differ, for people.

    Sizes of batches do not, if all before `step` were the same: no row is lost or repeated then.
    """
    names = [*saved, *(name for name in current if name not in saved)]
    if step is not None and Ramp.of_facts(saved).same_until(Ramp.of_facts(current), step):
        names = [name for name in names if name not in FACTS]
    return [
        (_WORDS.get(name, name), _short(saved.get(name)), _short(current.get(name)))
        for name in names
        if saved.get(name) != current.get(name)
    ]
