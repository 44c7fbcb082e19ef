"""Open, index, split and pack a run's data sources.

The fingerprint of a corpus identifies its documents. This module also describes the differences
between two fingerprints. `loader.py` builds batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from maxpipe.config.sections.data import (
    DataConfig,
    section_of,
    train_sources,
    validation_key,
    validation_sets,
)
from maxpipe.config.sections.source import Packing, SourceConfig, paths_of
from maxpipe.config.sections.train import METADATA_KEYS, BatchRamp
from maxpipe.data import mixture
from maxpipe.data.chat import (
    ChatDocuments,
    ConversationEncoder,
    TrainedMessageSource,
    build_chat_index,
    empty_documents_error,
    expand_trained_messages,
)
from maxpipe.data.chat_spec import (
    LengthLimitedDocuments,
    LengthLimitedTokenFiles,
    RemainingCounts,
    check_remaining,
    count_long_documents,
    find_long_documents,
    limit_lengths,
    long_conversation_error,
)
from maxpipe.data.documents import DocumentIndex, Documents, EncodedDocuments, build_index, entropy
from maxpipe.data.formats.digests import Digests
from maxpipe.data.formats.source import track_read
from maxpipe.data.mixture import SourceSequences, seed_of
from maxpipe.data.packing import Packer, Sequences, split_documents
from maxpipe.data.pairs import PairDocuments, PairEncoder
from maxpipe.data.prepared.manifest import (
    CONTENT_KEY,
    SPAN_DOCUMENTS,
    changed_files,
    content_metadata,
    short_digests,
)
from maxpipe.data.prepared.megatron import IDS, MegatronDocuments, open_documents
from maxpipe.data.prepared.reader import (
    PreparedDocuments,
    WindowedSequences,
    needs_windows,
    split_spans,
)
from maxpipe.data.sources import Heartbeat, Source, open_source, wrap_section_errors
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.unread_keys import (
    LongConversations,
    columns_not_read,
    marks_of,
    remarks,
    suggest_settings,
)
from maxpipe.errors import Code, ConfigError

SOURCES = "sources"
"""Name of the fingerprint entry that contains the metadata of each source in a mixture."""

Split = Literal["validation", "train", "all"]

_PART = 2**20
"""Maximum number of document indices yielded at a time."""


@dataclass(frozen=True, slots=True)
class IndexedSource:
    """Documents of one source, whose lengths are known, before packing."""

    name: str
    """Name of the source in `data.mixture`; empty without a mixture."""
    documents: Documents
    seed: int
    metadata: Mapping[str, Any]
    """Metadata that identifies the documents, as JSON values."""
    byte_counts: np.ndarray | None
    """int64 [256]: histogram of the UTF-8 bytes in the text; None if unknown."""
    digests: Callable[[int, int], np.ndarray] | None
    """Function of (first, stop) that returns the uint64 digests of documents first to stop - 1;
    None if unknown.
    """
    unreadable: int
    """Number of documents that are empty because their records could not be read."""
    packing: Packing
    remarks: Sequence[str] = ()
    """Notes about documents that are changed or skipped when they are read."""
    ends: np.ndarray | None = None
    """int64 [records]: exclusive end index of each record's documents; None if every record is one
    document. All documents of a record are in the same split.
    """
    is_chat: bool = False
    """Whether the documents are conversations or preference pairs, which have loss masks."""
    images: np.ndarray | None = None
    """int64 [documents]: number of images of each document; None if documents have no images."""

    def sequences(self, split: Split, fraction: float, packer: Packer) -> Sequences | None:
        """Return the sequences of a split, or None if the split is empty.

        Raises:
            ConfigError: no document of the split has two or more tokens.
        """
        with wrap_section_errors(self.name):
            sequences = self._packed(split, fraction, packer)
            if sequences is not None and not len(sequences):
                rule = f"must have a document of at least two tokens: the split {split} has none."
                action = "Set data.path to documents with text."
                raise ConfigError.one(Code.DATA_EMPTY, "data.path", None, rule, action)
        return sequences

    def _packed(self, split: Split, fraction: float, packer: Packer) -> Sequences | None:
        documents = self.documents
        if (windowed := _windowed_documents(documents)) is not None:
            spans = split_spans(windowed, split, fraction, self.seed)
            seed = None if split == "all" else self.seed
            return WindowedSequences(windowed, spans, packer, seed) if len(spans) else None
        order = self._order(split, fraction)
        return packer(documents, order) if len(order) else None

    @property
    def is_large(self) -> bool:
        """Whether the source has too many documents for a full shuffle."""
        return _windowed_documents(self.documents) is not None

    def numbers(self, split: Split, fraction: float) -> Iterator[np.ndarray]:
        """Yield the document indices of a split in sorted arrays of bounded size."""
        if (windowed := _windowed_documents(self.documents)) is None:
            order = np.sort(self._order(split, fraction))
            yield from np.split(order, range(_PART, len(order), _PART))
            return
        spans = np.sort(split_spans(windowed, split, fraction, self.seed))
        edges = np.arange(0, len(windowed.span_tokens), _PART // SPAN_DOCUMENTS)[1:]
        for part in np.split(spans, np.searchsorted(spans, edges)):
            numbers = (part[:, None] * SPAN_DOCUMENTS + np.arange(SPAN_DOCUMENTS)).ravel()
            yield numbers[numbers < windowed.num_documents]

    def _order(self, split: Split, fraction: float) -> np.ndarray:
        count = len(self.documents.lengths)
        if split == "all":
            return np.arange(count)
        with wrap_section_errors(self.name):
            if self.ends is None:
                return split_documents(count, fraction, self.seed)[split == "validation"]
            # All documents of a record are in the same split, so that training documents do not
            # contain text of held-out documents.
            records = split_documents(len(self.ends), fraction, self.seed)[split == "validation"]
            starts = np.concatenate([[0], self.ends[:-1]])
            edges = np.stack([starts, self.ends], 1)[records].tolist()
            return np.concatenate([np.zeros(0, np.int64), *(np.arange(*edge) for edge in edges)])


def _windowed_documents(
    documents: Documents,
) -> PreparedDocuments | MegatronDocuments | LengthLimitedTokenFiles | None:
    prepared = isinstance(
        documents, PreparedDocuments | MegatronDocuments | LengthLimitedTokenFiles
    )
    return documents if prepared and needs_windows(documents) else None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Opened and indexed sources for training or for one validation set."""

    data: DataConfig
    mixture_names: Sequence[str]
    """Names of the sources in the run's mixture; a validation corpus has different sources."""
    indexed: Sequence[IndexedSource]
    tokenizer: Tokenizer
    seed: int
    sequence_length: int
    cache_dir: str | None
    moved: Heartbeat | None
    keep: bool
    """Whether new packing plans are written to `cache_dir`."""

    @property
    def unigram_entropy(self) -> float | None:
        """Unigram entropy of the text in nats per byte."""
        counts = [source.byte_counts for source in self.indexed]
        known = [count for count in counts if count is not None]
        return entropy(np.sum(known, axis=0)) if len(known) == len(counts) else None

    @property
    def unreadable(self) -> int:
        """Number of documents that are empty because their records could not be read."""
        return sum(source.unreadable for source in self.indexed)

    @property
    def pairs(self) -> dict[str, PairDocuments]:
        """Maps source names to documents with preference pairs."""
        named = {source.name: source.documents for source in self.indexed}
        return {name: part for name, part in named.items() if isinstance(part, PairDocuments)}

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the sequences of the corpus."""
        facts = self.indexed[0].metadata
        more: dict[str, Any] = {}
        if self.data.mixture:
            all_facts = {source.name: source.metadata for source in self.indexed}
            # Content digests are compared file by file. Fingerprints of earlier releases do not
            # contain digests.
            bare = {
                name: {key: value for key, value in part.items() if key != CONTENT_KEY}
                for name, part in all_facts.items()
            }
            digest = hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()
            parts = all_facts.values()
            totals = {key: sum(part[key] for part in parts) for key in ("documents", "tokens")}
            facts = {"source": "mixture", **totals, "source_digest": digest}
            more = {SOURCES: all_facts}
        if self.pairs:
            more["pairs_per_row"] = self.data.max_pairs_per_sequence
        if self.tokenizer.images is not None:
            more["images_per_row"] = self.data.max_images_per_sequence
        return {
            **facts,
            "tokenizer": self.tokenizer.fingerprint(),
            "seed": self.seed,
            "validation_fraction": self.data.validation_fraction,
            "sequence_length": self.sequence_length,
            **more,
        }

    def parts(self, split: Split) -> list[SourceSequences]:
        """Return the sequences of every source that has documents in the split."""
        fraction = self.data.validation_fraction
        return [
            SourceSequences(source.name, sequences, source.seed, source.packing)
            for source in self.indexed
            if (sequences := source.sequences(split, fraction, self._packer(source))) is not None
        ]

    def _packer(self, of: IndexedSource) -> Packer:
        return Packer(
            of.packing,
            self.sequence_length,
            cache_dir=self.cache_dir,
            keep=self.keep,
            key=json.dumps([of.metadata, self.tokenizer.fingerprint()]),
            moved=self.moved,
            max_pairs=self.data.max_pairs_per_sequence if of.name in self.pairs else 0,
            images=of.images,
            max_images=self.data.max_images_per_sequence,
        )


def open_corpus(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    seed: int,
    sequence_length: int,
    cache_dir: str | None,
    moved: Heartbeat | None,
    keep: bool = True,
) -> Corpus:
    """Open and index all training sources, or the sources of the validation set `name`.

    Raises:
        ConfigError: a value in `data` is invalid, or the tokenizer cannot be used.
    """
    chosen, mixed = train_sources(data), tuple(sorted(data.mixture))
    if name is not None:
        key = validation_key(name)
        chosen = {key: validation_sets(data)[key]}
        data = dataclasses.replace(data, mixture={}, validation_fraction=0.0)
    indexed: list[IndexedSource] = []
    corpus = Corpus(data, mixed, indexed, tokenizer, seed, sequence_length, cache_dir, moved, keep)
    for source, config in chosen.items():
        with wrap_section_errors(source), track_read(section_of(source)):
            index = _index_token_source if config.source in IDS else _index_text_source
            indexed.append(index(corpus, source, config))
    return corpus


def packing_of(config: SourceConfig, *, has_conversations: bool) -> Packing:
    """Return the packing strategy of a source, with `auto` resolved."""
    if config.packing != "auto":
        return config.packing
    return "best_fit" if has_conversations else "concatenate"


def _index_token_source(corpus: Corpus, name: str, config: SourceConfig) -> IndexedSource:
    cache_dir, moved, keep = corpus.cache_dir, corpus.moved, corpus.keep
    encoder, row_tokens = corpus.tokenizer, corpus.sequence_length
    documents = open_documents(config, encoder, Digests(cache_dir, keep=keep), moved)
    packing = packing_of(config, has_conversations=documents.has_conversations)
    is_prepared = isinstance(documents, PreparedDocuments)
    facts = {**documents.metadata(), **_omit_default("packing", packing)}
    if needs_windows(documents):
        facts["order"] = "windows"
    indexed = IndexedSource(
        name,
        documents,
        seed_of(name, corpus.seed),
        facts,
        byte_counts=documents.byte_counts,
        digests=documents.digests if is_prepared else None,
        unreadable=documents.unreadable,
        packing=packing,
    )
    if not (is_prepared and documents.has_conversations):
        return indexed
    policy = config.long_conversations
    facts.update(_omit_default("long_conversations", config.long_conversations))
    count, first = count_long_documents(documents, row_tokens)
    if count and policy == "error":
        raise long_conversation_error(count, documents.where(first), row_tokens)
    limited: Documents | LengthLimitedTokenFiles = documents
    long = LongConversations(policy, count)
    if count and policy != "split":
        is_large = needs_windows(documents)
        limited = (LengthLimitedTokenFiles if is_large else LengthLimitedDocuments)(
            documents, row_tokens, policy
        )
        key = json.dumps([facts, encoder.fingerprint()])
        packer = Packer(packing, row_tokens, cache_dir, keep if is_large else False, key, moved)
        left = packer.load_or_compute(
            "left", [policy], _remaining_counts_of, limited.count_remaining
        )
        check_remaining(left, documents.num_documents, row_tokens, policy)
        long = long._replace(left_out=int(left.left_out))
    count = documents.num_documents
    lines = remarks("conversation", count, documents.unread, documents.marks, long, packing)
    return dataclasses.replace(indexed, documents=limited, remarks=lines, is_chat=True)


def _remaining_counts_of(arrays: Mapping[str, np.ndarray]) -> RemainingCounts:
    left = RemainingCounts(**{name: arrays[name] for name in RemainingCounts._fields})
    if any(array.shape for array in left):
        raise ValueError("an array has an unexpected shape")
    return left


def _index_text_source(corpus: Corpus, name: str, config: SourceConfig) -> IndexedSource:
    cache_dir, moved, keep = corpus.cache_dir, corpus.moved, corpus.keep
    encoder, row_tokens = corpus.tokenizer, corpus.sequence_length
    seed = seed_of(name, corpus.seed)
    source = open_source(config, seed, moved, cache_dir=cache_dir, keep=keep)
    source = expand_trained_messages(source, config, cache_dir, moved, keep=keep)
    chats = build_chat_encoder(source, encoder, config, row_tokens)
    if chats is None:
        index = build_index(source, encoder, cache_dir, moved, keep=keep)
    else:
        index = build_chat_index(chats, cache_dir, moved, threads=corpus.data.threads, keep=keep)
    if not index.byte_counts.any():
        raise empty_documents_error(", ".join(paths_of(config)), len(source), config.chat)
    packing = packing_of(config, has_conversations=chats is not None)
    facts = {
        "source": source.name,
        "documents": len(source),
        "tokens": int(index.lengths.sum()),
        "source_digest": source.fingerprint(),
        **content_metadata(source.content(moved)),
        **_omit_default("packing", packing),
    }
    if chats is not None:
        facts["chat"] = chats.fingerprint()
    long = None
    if chats is None:
        documents: Documents = EncodedDocuments(source, encoder, index)
    elif isinstance(chats, PairEncoder):
        documents = PairDocuments(chats, index)
    else:
        facts.update(_omit_default("long_conversations", config.long_conversations))
        documents, long = _apply_long_policy(ChatDocuments(chats, index), index, config, row_tokens)
    notes = remarks(
        "pair" if config.chat == "pairs" else "conversation",
        len(source),
        index.unread,
        marks_of(index.marks),
        long,
        packing=packing if chats else "",
        action=suggest_settings(index.unread, source, config),
    )
    return IndexedSource(
        name,
        documents,
        seed,
        facts,
        byte_counts=index.byte_counts,
        digests=lambda first, stop: index.digests[first:stop],
        unreadable=len(index.unreadable),
        packing=packing,
        remarks=[*columns_not_read(source, config), *notes],
        ends=source.ends if isinstance(source, TrainedMessageSource) else None,
        is_chat=chats is not None,
        images=index.images,
    )


def _apply_long_policy(
    documents: ChatDocuments, index: DocumentIndex, config: SourceConfig, sequence_length: int
) -> tuple[Documents, LongConversations]:
    policy = config.long_conversations
    numbers, has_images = (
        find_long_documents(index.lengths, sequence_length),
        index.images is not None,
    )
    if not len(numbers) or policy == "split":
        return documents, LongConversations(policy, len(numbers))
    if policy == "error":
        where = documents.where(int(numbers[0]))
        raise long_conversation_error(len(numbers), where, sequence_length, has_images=has_images)
    limited = limit_lengths(documents, sequence_length, policy, index.first_targets)
    assert isinstance(limited, LengthLimitedDocuments)
    left = limited.count_remaining()
    check_remaining(left, len(index.lengths), sequence_length, policy, has_images=has_images)
    return limited, LongConversations(policy, len(numbers), int(left.left_out))


def build_chat_encoder(
    source: Source, encoder: Tokenizer, config: SourceConfig, row_tokens: int
) -> ConversationEncoder | PairEncoder | None:
    """Return the encoder for a source of conversations or pairs; None for plain text."""
    if config.chat == "off":
        return None
    if config.chat == "pairs":
        return PairEncoder(source, encoder, config, row_tokens)
    return ConversationEncoder(source, encoder, config)


_FINGERPRINT_LABELS = {
    "documents": "the number of documents",
    "tokens": "the number of tokens",
    "order": "the order of documents",
    "source_digest": "the digest of file names, sizes and contents",
    "tokenizer": "the tokenizer",
    "chat": "the chat template, fields or roles",
    "packing": "the packing strategy",
    "long_conversations": "data.long_conversations",
    "pairs_per_row": "data.max_pairs_per_sequence",
    "images_per_row": "data.max_images_per_sequence",
    "order_version": "the order of samples",
    "group_size": "grpo.group_size",
    "updates_per_rollout": "grpo.updates_per_rollout",
    "reward": "the reward function",
    "batch_size": "train.batch_size",
    "batch_ramp": "the stages of train.batch_ramp (sequences, steps)",
}


_FINGERPRINT_DEFAULTS = {"packing": "concatenate", "long_conversations": "split"}
"""Default values that are omitted, so that fingerprints match those from earlier releases."""


def _omit_default(name: str, value: str) -> dict[str, str]:
    return {} if value == _FINGERPRINT_DEFAULTS[name] else {name: value}


def compare_fingerprints(
    saved: Mapping[str, Any], current: Mapping[str, Any], step: int | None = None
) -> list[tuple[str, Any, Any]]:
    """Return (label, saved value, current value) for each entry in which two fingerprints differ.

    Batch sizes are ignored if they are equal in all steps before `step`, because no sequence is
    then lost or repeated. Mixture weights are ignored; see `Loader.resume_mixture`.
    """
    names = [*saved, *(name for name in current if name not in saved)]
    if step is not None and BatchRamp.from_metadata(saved).equals_until(
        BatchRamp.from_metadata(current), step
    ):
        names = [name for name in names if name not in METADATA_KEYS]
    of_sources = saved.get(SOURCES, {}), current.get(SOURCES, {})
    if of_sources[0].keys() != of_sources[1].keys():
        # The differences in all other entries result from this difference.
        before, now = (", ".join(names) or None for names in of_sources)
        return [("the sources of data.mixture", before, now)]
    changes = []
    for name in of_sources[0]:
        inner = compare_fingerprints(*(part[name] for part in of_sources))
        changes += [(f"{name}: {words}", before, now) for words, before, now in inner]
    if changes:
        # Differences in these totals are caused by the differences above.
        names = [name for name in names if name not in ("documents", "tokens", "source_digest")]
    names = [name for name in names if name not in (SOURCES, mixture.MIXTURE_KEY, CONTENT_KEY)]
    changes += [
        (_FINGERPRINT_LABELS.get(name, name), short_digests(before), short_digests(now))
        for name in names
        if (before := saved.get(name, _FINGERPRINT_DEFAULTS.get(name)))
        != (now := current.get(name, _FINGERPRINT_DEFAULTS.get(name)))
    ]
    return changes + changed_files(saved.get(CONTENT_KEY), current.get(CONTENT_KEY))
