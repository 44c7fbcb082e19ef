"""Batches of a step, by step number.

Owns reading ahead. The position of a run is
one integer, the next step: row r of step s is sample s * batch_size + r of the
stream, whichever process asks for it. Where batches grow, that is
as many sequences as all batches before it have, and r. So data order depends
on seed and data, not on mesh, processes or devices, and resuming seeks. It does
not know how rows are placed on devices.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from maxpipe.config import training_schedule as config_ramp
from maxpipe.config.data_sources import section_of
from maxpipe.config.schema import DataConfig, TokenizerConfig
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.data import mixture
from maxpipe.data.chat_spec import ChatSpec
from maxpipe.data.corpus import SOURCES, Corpus, Split, open_corpus
from maxpipe.data.mixture import Mixture, Stream
from maxpipe.data.packing import Sequences
from maxpipe.data.pairs import PairDocuments
from maxpipe.data.sources import Heartbeat
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import ConfigError

# Increased whenever the same seed and data give other batches than before.
_ORDER, _ORDER_VERSION = "order_version", 1

Batch = dict[str, np.ndarray]
BatchIndices = Sequence[int] | slice
SelectIndices = Callable[[int], BatchIndices | np.ndarray]
"""Of the number of a batch's rows those that are wanted."""
TransformBatch = Callable[[Batch, int], Any]
"""(a batch's wanted rows, the number of all) -> what is made of them."""
FitTokenizer = Callable[[Tokenizer], Tokenizer]
"""Returns a tokenizer as the model needs it; raises ConfigError where none does."""


class Batches(Iterator[Any]):
    """Batches of consecutive steps, read ahead by threads until `close`."""

    def __init__(
        self,
        loader: Loader,
        start_step: int,
        stop_step: int,
        rows: SelectIndices,
        made: TransformBatch,
    ):
        # Not at the top: it imports jax when that is installed, and loading a config must not.
        import grain

        threads, ahead = loader.threads, loader.prefetch_batches
        steps = grain.MapDataset.range(start_step, max(start_step, stop_step))
        options = grain.ReadOptions(
            num_threads=min(threads, ahead), prefetch_buffer_size=ahead if threads else 0
        )

        def read(step: int) -> Any:
            _, count = loader.ramp.position_of(step)
            return made(loader.batch(step, rows(count)), count)

        dataset = steps.map(read).to_iter_dataset(options)
        self._iterator = iter(dataset)
        self._iterator.start_prefetch()

    def __next__(self) -> Any:
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


class SequenceOrigin(NamedTuple):
    """Where a row of a batch comes from."""

    source: str
    """Its name in `data.mixture`; empty without one."""
    sequence: int
    documents: list[int]
    """Numbers of the documents of the source that have a token in it, in their order there."""


class StreamEnd(NamedTuple):
    """What is read of a stream that repeats before it has ended, and what happens then."""

    policy: Literal["repeat", "stop", "fail"]
    limits: dict[str, int]
    """Samples of each source, by name."""
    mixture: Mixture | None
    """Shares as the config has them, of a run that does not end."""


class Loader:
    """Random access to the batches of a stream.

    Of one that does not repeat, rows beyond the last sequence have an all-zero `loss_mask`, so that
    no sequence counts twice.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        ramp: BatchRamp,
        threads: int,
        prefetch_batches: int,
        fingerprint: Mapping[str, Any],
        mixed: Sequence[str] = (),
        ending: StreamEnd | None = None,
        pairs: Mapping[str, PairDocuments] | None = None,
    ):
        """`mixed` are the names of all sources of the run's mixture; `ending` says how what a
        stream repeats ends; `pairs` are the documents of sources that have some.
        """
        self.stream = stream
        self.ending = ending
        self.pairs = dict(pairs or {})
        self.ramp = ramp
        self.threads = threads
        self.prefetch_batches = prefetch_batches
        self._fingerprint = dict(fingerprint)
        self._mixture_names = mixed
        ids = [mixed.index(part.name) if part.name in mixed else 0 for part in stream.parts]
        self._source_ids = np.array([*ids, -1], np.int32)  # -1 is the number of no source
        self._open: weakref.WeakSet[Batches] = weakref.WeakSet()

    @property
    def sequences(self) -> Sequences:
        """Those of the only source, or of the first one."""
        return self.stream.parts[0].sequences

    @property
    def sources(self) -> list[str]:
        """Names of the sources of a mixture; none without one, and of documents beside it."""
        named = {part.name for part in self.stream.parts}
        return list(self._mixture_names) if named & set(self._mixture_names) else []

    @property
    def steps_per_epoch(self) -> float:
        """Of the full batch. An epoch may end inside a step; the next one fills its other rows."""
        return len(self.stream) / self.ramp.batch_size

    @property
    def num_batches(self) -> int:
        """Steps in which there is a row for each sample, of a stream that repeats for each sequence
        once.
        """
        return self.ramp.num_batches(
            len(self.stream) if self.stream.end is None else self.stream.end
        )

    @property
    def last_batch(self) -> float:
        """Batches that there are: infinity of a stream that does not end."""
        return math.inf if self.stream.end is None else self.num_batches

    def first_exhausted(self) -> tuple[int, str]:
        """The number of the first sample that no source has any more, and the source's name."""
        assert self.ending is not None
        found = []
        for number, (name, limit) in enumerate(self.ending.limits.items()):
            mixed = self.stream.mixture
            after = limit + 1 if mixed is None else mixed.samples_to_reach(number, limit + 1)
            found += [(after - 1, name)] if after is not None else []
        return min(found)

    def batch(self, step: int, rows: BatchIndices | np.ndarray = slice(None)) -> Batch:
        """The given rows of the global batch of one step.

        Arrays of a sequence, each [rows, T], and `example_ids` int32 [rows]: the rows. With a
        mixture also `source_ids` int32 [rows]: numbers in `sources`, or 0; -1 for padding.
        """
        front, count = self.ramp.position_of(step)
        rows = np.arange(count, dtype=np.int32)[rows]
        sources, sequences = self.stream.locate(front + rows.astype(np.int64))
        places = zip(sources.tolist(), sequences.tolist(), strict=True)
        examples = [self.stream.read(*place) for place in places]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        if self._mixture_names:
            batch["source_ids"] = self._source_ids[sources]
        return {**batch, "example_ids": rows}

    def sequence_origins(self, step: int) -> list[SequenceOrigin]:
        """Where each row of one step's batch comes from; without those that are padding."""
        front, count = self.ramp.position_of(step)
        sources, sequences = self.stream.locate(front + np.arange(count, dtype=np.int64))
        found = []
        for source, sequence in zip(sources.tolist(), sequences.tolist(), strict=True):
            if sequence >= 0:
                part = self.stream.parts[source]
                found.append(
                    SequenceOrigin(part.name, sequence, part.sequences.documents(sequence))
                )
        return found

    def where(self, source: str, document: int) -> str:
        """The file of a document of a row's source and its place in it, for people."""
        return self.stream.part(source).sequences.where(document)

    def size(self, source: str, document: int) -> int:
        """Tokens of a document of a row's source."""
        return self.stream.part(source).sequences.size(document)

    def batch_contents(self, step: int) -> dict[str, Any]:
        """The `sequences` of one step's batch, row by row, and the `documents` that are in them.

        Of a mixture also the `sources`, row by row, and documents by source.
        """
        rows = self.sequence_origins(step)
        inside: dict[str, set[int]] = {}
        for row in rows:
            inside.setdefault(row.source, set()).update(row.documents)
        documents = {name: sorted(numbers) for name, numbers in sorted(inside.items())}
        sequences = {"sequences": [row.sequence for row in rows]}
        if len(self.stream.parts) == 1:
            return {**sequences, "documents": documents.get(self.stream.parts[0].name, [])}
        return {"sources": [row.source for row in rows], **sequences, "documents": documents}

    def resume_mixture(self, saved: Mapping[str, Any], step: int) -> bool:
        """Keep what a fingerprint says of the mixture before a step; whether weights change there.

        From there on it is the loader's own. Each source goes on with the sample behind its last.
        """
        planned, before = self.ending and self.ending.mixture, saved.get(mixture.MIXTURE_KEY)
        if planned is None or before is None or saved.get(SOURCES) != self._fingerprint[SOURCES]:
            return False
        was, position = (
            Mixture.from_metadata(before, planned.seed),
            self.ramp.sequences_before(step),
        )
        self.apply_mixture(was.switched_to(planned, position), position)
        return self._fingerprint[mixture.MIXTURE_KEY] != was.metadata()

    def apply_mixture(self, found: Mixture, since: int = 0) -> None:
        """Deal samples out so; sources end, if they do, from sample `since` on."""
        assert self.ending is not None
        if self.ending.policy == "stop":
            found = found.with_limits(list(self.ending.limits.values()), since)
        self.set_mixture(found)

    def set_mixture(self, found: Mixture) -> None:
        """Deal samples out exactly so."""
        self.stream.mixture, self.stream.end = found, found.end
        self._fingerprint[mixture.MIXTURE_KEY] = found.metadata()

    def mixture_metadata(self) -> dict[str, Any]:
        """JSON values that say how samples are dealt out to the sources of a mixture, if any."""
        if self.stream.mixture is None:
            return {}
        return {"sources": self.sources, mixture.MIXTURE_KEY: self.stream.mixture.metadata()}

    def batches(
        self,
        start_step: int,
        rows: BatchIndices | SelectIndices = slice(None),
        *,
        stop_step: int | None = None,
        made: TransformBatch = lambda batch, _: batch,
    ) -> Batches:
        """Batches of steps `start_step`, `start_step` + 1, ..., and what threads make of them,
        ready ahead of time.

        Ends before `stop_step`; by default where the stream ends, if it does.
        """
        if stop_step is None:
            stop_step = sys.maxsize if self.stream.end is None else self.num_batches
        rows_of = rows if callable(rows) else lambda _: rows
        batches = Batches(self, start_step, stop_step, rows_of, made)
        self._open.add(batches)
        return batches

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that decide which tokens a step gets."""
        return dict(self._fingerprint)

    def sequence_metadata(self) -> dict[str, dict[str, Any]]:
        """By name of a source what decides each of its sequences, and how many `sequences` it has.

        Not what decides their order, or how many are in a batch.
        """
        facts, common = self.fingerprint(), {}
        for name in (_ORDER, *config_ramp.METADATA_KEYS, mixture.MIXTURE_KEY):
            facts.pop(name, None)
        for name in ("tokenizer", "seed", "validation_fraction", "sequence_length"):
            common[name] = facts.pop(name)
        return {
            part.name: {
                **facts.get(SOURCES, {"": facts})[part.name],
                **common,
                "sequences": len(part.sequences),
            }
            for part in self.stream.parts
        }

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
    """Of the documents that are held out."""
    tokenizer: Tokenizer
    unigram_entropy: float | None
    unreadable: int
    validation_sets: Mapping[str, Loader]
    """Those of `data.validation` by name."""
    corpora: tuple[Corpus, Mapping[str, Corpus]] | None
    """The documents themselves, of the training and of each set; None if it reads prompts."""
    conversation: ChatSpec | None = None
    """How its conversations are written, if it reads any."""

    @property
    def _all_corpora(self) -> list[Corpus]:
        """The documents of the training and of all sets."""
        if self.corpora is None:
            return []
        train, sets = self.corpora
        return [train, *sets.values()]

    def eval_loaders(self) -> dict[str, Loader]:
        """What is evaluated: under no name what is held out, and each set."""
        held_out = {} if self.validation is None else {"": self.validation}
        return {**held_out, **self.validation_sets}

    def single_pass_loaders(self, rows: int) -> list[Loader]:
        """All documents of the training and those of each set, each once, in batches of `rows`."""
        loaders = [_build_single_pass_loader(corpus, "all", rows) for corpus in self._all_corpora]
        return [loader for loader in loaders if loader is not None]

    @property
    def remarks(self) -> list[str]:
        """Lines about documents that are not read as they are, of all sources."""
        return [
            f"{section_of(each.name)}: {remark}"
            for corpus in self._all_corpora
            for each in corpus.indexed
            for remark in each.remarks
        ]

    def fingerprint(self) -> dict[str, Any]:
        """JSON values by which processes know whether all have the same documents."""
        sets = {name: each.fingerprint() for name, each in self.validation_sets.items()}
        return {**self.train.fingerprint(), "validation": sets}

    def close(self) -> None:
        for each in (self.train, *self.eval_loaders().values()):
            each.close()


def _train(corpus: Corpus, ramp: BatchRamp) -> Loader:
    """With the shares that the config gives its sources, up to the end that it gives them."""
    data, parts, mixed = corpus.data, corpus.parts("train"), None
    sizes = {part.name: len(part.sequences) for part in parts}
    ends = sizes
    if data.mixture:
        mixed = mixture.build_mixture(data, sizes, ramp, corpus.sequence_length, corpus.seed)
        ends = mixture.sample_limits(data.mixture, sizes)
    end = ends[""] if data.end == "stop" and mixed is None else None
    stream = Stream(parts, repeat=True, mixture=mixed, end=end)
    loader = _loader(
        corpus, stream, ramp, _loader_fingerprint(corpus, ramp), StreamEnd(data.end, ends, mixed)
    )
    if mixed is not None:
        loader.apply_mixture(mixed)
    return loader


def _build_single_pass_loader(corpus: Corpus, split: Split, rows: int) -> Loader | None:
    """Each sequence of a split once; None without sequences. Of a set, which holds nothing out,
    `train` is all of it in a shuffled order, so that its first batches are a sample of the rest.
    """
    if not (parts := corpus.parts(split)):
        return None
    sizes, ramp = [len(part.sequences) for part in parts], BatchRamp((), rows)
    mixed = mixture.single_pass_mixture(sizes, corpus.seed) if len(parts) > 1 else None
    stream = Stream(parts, repeat=False, mixture=mixed)
    return _loader(corpus, stream, ramp, _loader_fingerprint(corpus, ramp))


def _loader_fingerprint(corpus: Corpus, ramp: BatchRamp) -> dict[str, Any]:
    return {_ORDER: _ORDER_VERSION, **corpus.fingerprint(), **ramp.metadata()}


def _loader(
    corpus: Corpus,
    stream: Stream,
    ramp: BatchRamp,
    facts: Mapping[str, Any],
    ending: StreamEnd | None = None,
) -> Loader:
    return Loader(
        stream,
        ramp=ramp,
        threads=corpus.data.threads,
        prefetch_batches=corpus.data.prefetch_batches,
        fingerprint=facts,
        mixed=corpus.mixture_names,
        ending=ending,
        pairs=corpus.pairs,
    )


def build_loaders(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    seed: int,
    batch_size: int,
    sequence_length: int,
    batch_ramp: BatchRamp | None = None,
    eval_batch_size: int = 0,
    cache_dir: str | None = None,
    moved: Heartbeat | None = None,
    fit: FitTokenizer = lambda tokenizer: tokenizer,
) -> Datasets:
    """Opens sources and tokenizer, indexes the documents and splits them.

    The first time it reads every document once; `cache_dir` keeps what it found. Validation
    takes batches of `eval_batch_size`, or of `batch_size` when that is 0. `batch_ramp` says which
    batches of training are smaller. `moved` is called for each part of the reading, and `fit`
    returns the tokenizer as the model needs it.

    Raises:
        ConfigError: anything the user has to change in `data` or `tokenizer`.
    """
    ramp, rows = batch_ramp or BatchRamp((), batch_size), eval_batch_size or batch_size
    opened = partial(
        open_corpus,
        data,
        fit(open_tokenizer(tokenizer)),
        seed=seed,
        sequence_length=sequence_length,
        cache_dir=cache_dir,
        moved=moved,
    )
    corpus, sets = opened(), {name: opened(name=name) for name in sorted(data.validation)}
    loaders = {name: _build_single_pass_loader(each, "train", rows) for name, each in sets.items()}
    return Datasets(
        train=_train(corpus, ramp),
        validation=_build_single_pass_loader(corpus, "validation", rows),
        tokenizer=corpus.tokenizer,
        unigram_entropy=corpus.unigram_entropy,
        unreadable=corpus.unreadable,
        validation_sets={name: each for name, each in loaders.items() if each is not None},
        corpora=(corpus, sets),
    )


def build_single_pass(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    split: str,
    *,
    seed: int,
    batch_size: int,
    sequence_length: int,
    eval_batch_size: int = 0,
    cache_dir: str | None = None,
    moved: Heartbeat | None = None,
    fit: FitTokenizer = lambda tokenizer: tokenizer,
) -> tuple[Loader, Tokenizer]:
    """Every sequence of a split once, in a fixed order, in batches as `build` makes for validation.

    A split is `train`, `validation`, `all`, or a set of `data.validation` by its name.

    What is in `cache_dir` is used, and nothing is written there. `fit` returns the tokenizer as the
    model needs it.

    Raises:
        ConfigError: anything the user has to change in `data` or `tokenizer`, or a split without
            documents.
    """
    is_set = split in data.validation
    corpus = open_corpus(
        data,
        fit(open_tokenizer(tokenizer)),
        name=split if is_set else None,
        seed=seed,
        sequence_length=sequence_length,
        cache_dir=cache_dir,
        moved=moved,
        keep=False,
    )
    rows = eval_batch_size or batch_size
    loader = _build_single_pass_loader(corpus, "train" if is_set else cast(Split, split), rows)
    if loader is None:
        raise ConfigError.one(
            "data.validation_fraction",
            data.validation_fraction,
            "leaves no documents for validation.",
            "Evaluate on all documents with --split all, or on others with --data FILES.",
        )
    return loader, corpus.tokenizer
