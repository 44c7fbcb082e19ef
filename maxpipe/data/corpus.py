"""What a run reads for training: its sources opened and indexed, split and cut into sequences.

Owns the facts by which a run knows its documents again. Batches are made in `loader.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.mixture import sources
from maxpipe.config.schema import DataConfig, TokenizerConfig
from maxpipe.data.documents import DocumentIndex, Documents, EncodedDocuments, build_index
from maxpipe.data.packing import PackedSequences, split_documents
from maxpipe.data.sources import Moved, Source, open_source
from maxpipe.data.stream import Part, seed_of
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import ConfigError, Problem
from maxpipe.words import counted

SOURCES = "sources"
"""Name of the entry of a fingerprint with the facts of each source of a mixture."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """Documents of a source that were indexed, before anything is cut from them."""

    name: str
    """In `data.mixture`; empty without one."""
    documents: Documents
    index: DocumentIndex
    seed: int
    facts: Mapping[str, Any]
    """JSON values that say which documents these are."""

    def everything(self) -> np.ndarray:
        """Numbers of all documents, as they are."""
        return np.arange(len(self.index.lengths))

    def split(self, fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the training and of the validation documents."""
        try:
            return split_documents(len(self.index.lengths), fraction, self.seed)
        except ConfigError as error:
            raise _of_section(error, section_of(self.name)) from error


def section_of(name: str) -> str:
    """The section of the config that has a source."""
    return f"data.mixture.{name}" if name else "data"


def open_documents(
    name: str,
    section: str,
    config: SourceConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    cache_dir: str | None,
    moved: Moved | None,
    keep: bool = True,
) -> Indexed:
    """Opens and indexes the source that a section of the config describes.

    Raises:
        ConfigError: it cannot be read, or holds no text.
    """
    seed = seed_of(name, seed)
    source = open_section(section, config, seed, moved)
    index = build_index(source, tokenizer, cache_dir, moved, keep=keep)
    if not index.byte_counts.any():
        raise ConfigError.one(
            f"{section}.path",
            config.path,
            f"must hold text: {counted(len(source), 'document')} with nothing inside.",
            f"Set {section}.path to documents with text, or {section}.field to the field that "
            "holds it.",
        )
    facts = {
        "source": source.name,
        "documents": len(source),
        "tokens": int(index.lengths.sum()),
        "source_digest": source.fingerprint(),
    }
    return Indexed(name, EncodedDocuments(source, tokenizer, index), index, seed, facts)


def open_section(
    section: str, config: SourceConfig, seed: int, moved: Moved | None = None
) -> Source:
    """The source that a section of the config describes; mistakes are told of its keys."""
    try:
        return open_source(config, seed, moved)
    except ConfigError as error:
        raise _of_section(error, section) from error


def _of_section(error: ConfigError, section: str) -> ConfigError:
    """The same of a source that is not `data` itself."""
    names = "|".join(each.name for each in fields(SourceConfig))
    replaced = partial(re.sub, rf"\bdata\.({names})\b", rf"{section}.\1")
    return ConfigError([Problem(*map(replaced, astuple(each))) for each in error.problems])


@dataclass(frozen=True, slots=True)
class Corpus:
    """All sources of the training, and how they are cut."""

    data: DataConfig
    indexed: Sequence[Indexed]
    tokenizer: Tokenizer
    seed: int
    sequence_length: int

    @property
    def byte_counts(self) -> np.ndarray:
        """int64 [256]: of all texts."""
        return np.sum([each.index.byte_counts for each in self.indexed], axis=0)

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that decide which sequences there are."""
        facts, more = self.indexed[0].facts, {}
        if self.data.mixture:
            all_facts = {each.name: each.facts for each in self.indexed}
            digest = hashlib.sha256(json.dumps(all_facts, sort_keys=True).encode()).hexdigest()
            totals = {
                key: sum(each[key] for each in all_facts.values())
                for key in ("documents", "tokens")
            }
            facts = {"source": "mixture", **totals, "source_digest": digest}
            more = {SOURCES: all_facts}
        return {
            **facts,
            "tokenizer": self.tokenizer.fingerprint(),
            "seed": self.seed,
            "validation_fraction": self.data.validation_fraction,
            "sequence_length": self.sequence_length,
            **more,
        }

    def parts(self, orders: Sequence[np.ndarray]) -> list[Part]:
        """Sequences of each source's documents in this order; none of one without documents."""
        return [
            Part(each.name, PackedSequences(each.documents, order, self.sequence_length), each.seed)
            for each, order in zip(self.indexed, orders, strict=True)
            if len(order)
        ]

    def train(self) -> list[Part]:
        """Of the documents that are trained on."""
        return self.parts([each.split(self.data.validation_fraction)[0] for each in self.indexed])

    def held_out(self) -> list[Part]:
        """Of those that are not."""
        return self.parts([each.split(self.data.validation_fraction)[1] for each in self.indexed])

    def everything(self) -> list[Part]:
        """Of all documents as they are."""
        return self.parts([each.everything() for each in self.indexed])


def open_corpus(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    seed: int,
    sequence_length: int,
    cache_dir: str | None,
    moved: Moved | None,
    keep: bool = True,
) -> Corpus:
    """Opens and indexes all sources of the training.

    Raises:
        ConfigError: anything the user has to change in `data` or `tokenizer`.
    """
    encoder = open_tokenizer(tokenizer)
    indexed = [
        open_documents(
            name,
            section_of(name),
            each,
            encoder,
            seed=seed,
            cache_dir=cache_dir,
            moved=moved,
            keep=keep,
        )
        for name, each in sources(data).items()
    ]
    return Corpus(data, indexed, encoder, seed, sequence_length)
