"""Training batches, with random access by step number.

The data position of a run is one integer: the next step. In every process, row r in the batch of
step s is sample `s * batch_size + r` of the stream. With a batch ramp, the first sample of a step
follows the last sample of the previous step. The data order therefore depends only on the seed and
the data, not on the mesh, the processes or the devices. A resumed run seeks directly to its step.

The loader also prefetches batches, but does not transfer them to devices.
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

from maxpipe.config.image_format import ImageFormat
from maxpipe.config.sections.data import DataConfig, section_of
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.train import METADATA_KEYS, BatchRamp
from maxpipe.data import mixture
from maxpipe.data.chat_spec import ChatSpec
from maxpipe.data.corpus import SOURCES, Corpus, Split, open_corpus
from maxpipe.data.images import IMAGE_GRIDS, IMAGE_TOKENS_LEFT, IMAGES, ROTARY_POSITIONS
from maxpipe.data.mixture import Mixture, Stream
from maxpipe.data.packing import Sequences
from maxpipe.data.pairs import PairDocuments
from maxpipe.data.sources import Heartbeat
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import Code, ConfigError

# The version is incremented if a release changes the batches for the same seed and data.
_ORDER, _ORDER_VERSION = "order_version", 1

Batch = dict[str, np.ndarray]
BatchIndices = Sequence[int] | slice
SelectIndices = Callable[[int], BatchIndices | np.ndarray]
"""Function that maps the number of sequences in a batch to the row indices to load."""
TransformBatch = Callable[[Batch, int], Any]
"""Function that maps (loaded rows of a batch, number of sequences in the full batch) to the
prefetched object."""
FitTokenizer = Callable[[Tokenizer], Tokenizer]
"""Function that adapts a tokenizer to the model, or raises ConfigError if the model cannot use
it."""


class Batches(Iterator[Any]):
    """Iterator over the batches of consecutive steps, prefetched by threads until closed."""

    def __init__(
        self,
        loader: Loader,
        start_step: int,
        stop_step: int,
        rows: SelectIndices,
        made: TransformBatch,
    ):
        # Imported here because grain imports jax if jax is installed, and loading a config must not
        # import jax.
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
        """Discard prefetched batches. The threads stop after their current batch."""
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
    """Origin of one sequence in a batch."""

    source: str
    """Name of the source in `data.mixture`; empty without a mixture."""
    sequence: int
    documents: list[int]
    """Indices of the documents that have tokens in the sequence, in source order."""


class StreamEnd(NamedTuple):
    """Limits at which a stream ends, and the policy for sources that reach their limit."""

    policy: Literal["repeat", "stop", "fail"]
    limits: dict[str, int]
    """Maps source names to the maximum number of samples."""
    mixture: Mixture | None
    """Mixture with the configured weights, to which the sample limits are applied."""


class Loader:
    """Random access to the batches of a stream.

    If the stream does not repeat, batch rows after the last sequence are padding. The `loss_mask`
    of padding rows is zero, so no sequence contributes twice.
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
        images: ImageFormat | None = None,
    ):
        """Create a loader for a stream.

        `mixed` lists the names of all sources in the run's mixture. `ending` defines how a
        repeating stream ends. `pairs` maps source names to documents with preference pairs.
        `images` is the format of images, if batches have images.
        """
        self.stream = stream
        self.ending = ending
        self.pairs = dict(pairs or {})
        self.images = images
        self.ramp = ramp
        self.threads = threads
        self.prefetch_batches = prefetch_batches
        self._fingerprint = dict(fingerprint)
        self._mixture_names = mixed
        ids = [mixed.index(part.name) if part.name in mixed else 0 for part in stream.parts]
        self._source_ids = np.array([*ids, -1], np.int32)  # -1 marks padding
        self._open: weakref.WeakSet[Batches] = weakref.WeakSet()

    @property
    def sequences(self) -> Sequences:
        """Sequences of the first source, which is the only source unless the run has a mixture."""
        return self.stream.parts[0].sequences

    @property
    def sources(self) -> list[str]:
        """Names of the sources in the mixture; empty if the stream does not read from a mixture."""
        named = {part.name for part in self.stream.parts}
        return list(self._mixture_names) if named & set(self._mixture_names) else []

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps per epoch at the full batch size, possibly fractional."""
        return len(self.stream) / self.ramp.batch_size

    @property
    def num_batches(self) -> int:
        """Number of batches in the stream, or in one epoch if the stream repeats endlessly."""
        return self.ramp.num_batches(
            len(self.stream) if self.stream.end is None else self.stream.end
        )

    @property
    def last_batch(self) -> float:
        """Number of batches until the stream ends; infinity for an endless stream."""
        return math.inf if self.stream.end is None else self.num_batches

    def first_exhausted(self) -> tuple[int, str]:
        """Return the first sample that would repeat a sequence, and the name of the sample's
        source.
        """
        assert self.ending is not None
        ends = []
        for number, (name, limit) in enumerate(self.ending.limits.items()):
            mixed = self.stream.mixture
            after = limit + 1 if mixed is None else mixed.samples_to_reach(number, limit + 1)
            ends += [(after - 1, name)] if after is not None else []
        return min(ends)

    def batch(self, step: int, rows: BatchIndices | np.ndarray = slice(None)) -> Batch:
        """Return the selected rows of the global batch of one step.

        The batch contains the arrays of the sequences, stacked to [rows, T], and the row indices as
        `example_ids` int32 [rows]. With a mixture, `source_ids` int32 [rows] contains indices into
        `sources`: 0 for a source outside the mixture, and -1 for padding.
        """
        front, count = self.ramp.position_of(step)
        rows = np.arange(count, dtype=np.int32)[rows]
        sources, sequences = self.stream.locate(front + rows.astype(np.int64))
        places = zip(sources.tolist(), sequences.tolist(), strict=True)
        examples = [self._with_images(self.stream.read(*place)) for place in places]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
        if self._mixture_names:
            batch["source_ids"] = self._source_ids[sources]
        return {**batch, "example_ids": rows}

    def _with_images(self, example: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the arrays of a sequence, with unused images set to 0, if batches have images."""
        if (image := self.images) is None:
            return example
        arrays: dict[str, np.ndarray] = {}
        arrays[IMAGES] = np.zeros((image.max_images, *image.shape), np.uint8)
        if image.patches is not None:
            arrays[IMAGE_GRIDS] = np.zeros((image.max_images, 2), np.int32)
        for name, array in arrays.items():
            own = example.get(name, array[:0])
            array[: len(own)] = own
        arrays[IMAGE_TOKENS_LEFT] = np.zeros_like(example["tokens"])
        if image.patches is not None and image.patches.has_rotary_positions:
            arrays[ROTARY_POSITIONS] = np.repeat(example["positions"][:, None], 3, axis=1)
        by_token = (IMAGE_TOKENS_LEFT, ROTARY_POSITIONS)
        arrays |= {name: example[name] for name in by_token if name in example}
        return {**example, **arrays}

    def sequence_origins(self, step: int) -> list[SequenceOrigin]:
        """Return the origin of every sequence in one step's batch. Padding is skipped."""
        front, count = self.ramp.position_of(step)
        sources, sequences = self.stream.locate(front + np.arange(count, dtype=np.int64))
        origins = []
        for source, sequence in zip(sources.tolist(), sequences.tolist(), strict=True):
            if sequence >= 0:
                part = self.stream.parts[source]
                origins.append(
                    SequenceOrigin(part.name, sequence, part.sequences.documents(sequence))
                )
        return origins

    def where(self, source: str, document: int) -> str:
        """Return a document's file and its position in that file, for use in messages."""
        return self.stream.part(source).sequences.where(document)

    def size(self, source: str, document: int) -> int:
        """Return the number of tokens in a document."""
        return self.stream.part(source).sequences.size(document)

    def batch_contents(self, step: int) -> dict[str, Any]:
        """Return the sequence indices in one step's batch, in row order, and the indices of the
        documents in these sequences.

        The keys of the result are `sequences` and `documents`. With several sources, `sources`
        lists the source of each row, and `documents` is grouped by source.
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
        """Resume the mixture of a saved fingerprint, and return whether the weights change at
        `step`.

        Before `step`, samples are assigned as in the saved mixture; from `step` on, this loader's
        weights apply. Each source continues after its last sample.
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

    def apply_mixture(self, mixed: Mixture, since: int = 0) -> None:
        """Set the mixture. With `data.end=stop`, sample limits apply from sample `since` on."""
        assert self.ending is not None
        if self.ending.policy == "stop":
            mixed = mixed.with_limits(list(self.ending.limits.values()), since)
        self.set_mixture(mixed)

    def set_mixture(self, mixed: Mixture) -> None:
        """Set the mixture without applying sample limits."""
        self.stream.mixture, self.stream.end = mixed, mixed.end
        self._fingerprint[mixture.MIXTURE_KEY] = mixed.metadata()

    def mixture_metadata(self) -> dict[str, Any]:
        """Return the mixture and its sources as JSON values; empty without a mixture."""
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
        """Return a prefetching iterator over the batches of steps `start_step`, `start_step` + 1,
        ...

        The prefetch threads apply `made` to each batch. Iteration ends before `stop_step`, which
        defaults to the end of the stream, if any.
        """
        if stop_step is None:
            stop_step = sys.maxsize if self.stream.end is None else self.num_batches
        rows_of = rows if callable(rows) else lambda _: rows
        batches = Batches(self, start_step, stop_step, rows_of, made)
        self._open.add(batches)
        return batches

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the tokens of every step."""
        return dict(self._fingerprint)

    def sequence_metadata(self) -> dict[str, dict[str, Any]]:
        """Return, for each source, the number of sequences and the metadata that defines them.

        Metadata that affects only the order of the sequences or the batch size is excluded.
        """
        facts, common = self.fingerprint(), {}
        for name in (_ORDER, *METADATA_KEYS, mixture.MIXTURE_KEY):
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
        """Return the data state for a checkpoint. Resume with `batches(start_step=step)`."""
        return {"step": step, "fingerprint": self.fingerprint()}

    def close(self) -> None:
        """Close all open batch iterators of this loader."""
        for batches in list(self._open):
            batches.close()


@dataclass(frozen=True, slots=True)
class Datasets:
    """Loaders, tokenizer and statistics of a run's data."""

    train: Loader
    validation: Loader | None
    """Loader of the held-out documents."""
    tokenizer: Tokenizer
    unigram_entropy: float | None
    """Entropy of all documents in nats per byte; None if byte counts are unknown, as for Megatron
    files.
    """
    unreadable: int
    """Number of documents that are empty because their records could not be read."""
    validation_sets: Mapping[str, Loader]
    """Maps the names of the sets in `data.validation` to their loaders."""
    corpora: tuple[Corpus, Mapping[str, Corpus]] | None
    """Training corpus, and validation corpora keyed by name; None if the run reads prompts."""
    conversation: ChatSpec | None = None
    """Chat format of the run's conversations; None if the run has no conversations."""

    @property
    def _all_corpora(self) -> list[Corpus]:
        if self.corpora is None:
            return []
        train, sets = self.corpora
        return [train, *sets.values()]

    def eval_loaders(self) -> dict[str, Loader]:
        """Return the evaluation loaders, keyed by name ("" for the held-out documents)."""
        held_out = {} if self.validation is None else {"": self.validation}
        return {**held_out, **self.validation_sets}

    def single_pass_loaders(self, rows: int) -> list[Loader]:
        """Return single-pass loaders over all documents, with `rows` sequences per batch."""
        loaders = [_build_single_pass_loader(corpus, "all", rows) for corpus in self._all_corpora]
        return [loader for loader in loaders if loader is not None]

    @property
    def remarks(self) -> list[str]:
        """Notes about documents that are changed or skipped when they are read, for all sources."""
        return [
            f"{section_of(source.name)}: {remark}"
            for corpus in self._all_corpora
            for source in corpus.indexed
            for remark in source.remarks
        ]

    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that are equal in all processes that read the same data."""
        sets = {name: loader.fingerprint() for name, loader in self.validation_sets.items()}
        return {**self.train.fingerprint(), "validation": sets}

    def close(self) -> None:
        for loader in (self.train, *self.eval_loaders().values()):
            loader.close()


def _train(corpus: Corpus, ramp: BatchRamp) -> Loader:
    data, parts, mixed = corpus.data, corpus.parts("train"), None
    sizes = {part.name: len(part.sequences) for part in parts}
    ends = sizes
    if data.mixture:
        mixed = mixture.build_mixture(data, sizes, ramp, corpus.sequence_length, corpus.seed)
        ends = mixture.sample_limits(data.mixture, sizes)
    end = ends[""] if data.end == "stop" and mixed is None else None
    stream = Stream(parts, repeat=True, mixture=mixed, end=end)
    loader = _loader(corpus, stream, ramp, StreamEnd(data.end, ends, mixed))
    if mixed is not None:
        loader.apply_mixture(mixed)
    return loader


def _build_single_pass_loader(corpus: Corpus, split: Split, rows: int) -> Loader | None:
    """Return a loader that reads each sequence of a split once; None if the split has no sequences.

    A validation set has no held-out documents. The set's `train` split contains all documents in
    shuffled order, so the first batches are a random sample.
    """
    if not (parts := corpus.parts(split)):
        return None
    sizes, ramp = [len(part.sequences) for part in parts], BatchRamp((), rows)
    mixed = mixture.single_pass_mixture(sizes, corpus.seed) if len(parts) > 1 else None
    stream = Stream(parts, repeat=False, mixture=mixed)
    return _loader(corpus, stream, ramp)


def _loader(
    corpus: Corpus, stream: Stream, ramp: BatchRamp, ending: StreamEnd | None = None
) -> Loader:
    return Loader(
        stream,
        ramp=ramp,
        threads=corpus.data.threads,
        prefetch_batches=corpus.data.prefetch_batches,
        fingerprint={_ORDER: _ORDER_VERSION, **corpus.fingerprint(), **ramp.metadata()},
        mixed=corpus.mixture_names,
        ending=ending,
        pairs=corpus.pairs,
        images=corpus.tokenizer.images,
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
    """Open the sources and the tokenizer, index and split the documents, and return their loaders.

    The first call reads every document once, and caches the index in `cache_dir`. Validation
    batches have `eval_batch_size` sequences, or `batch_size` sequences if `eval_batch_size` is 0.
    `batch_ramp` defines smaller batches at the start of training. `moved` is called after each
    chunk of data, as a heartbeat. `fit` fits the tokenizer to the model.

    Raises:
        ConfigError: a value in `data` or `tokenizer` is invalid.
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
    loaders = {
        name: _build_single_pass_loader(corpus, "train", rows) for name, corpus in sets.items()
    }
    return Datasets(
        train=_train(corpus, ramp),
        validation=_build_single_pass_loader(corpus, "validation", rows),
        tokenizer=corpus.tokenizer,
        unigram_entropy=corpus.unigram_entropy,
        unreadable=corpus.unreadable,
        validation_sets={name: loader for name, loader in loaders.items() if loader is not None},
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
    """Return a loader that reads every sequence of a split once in a fixed order.

    A split is `train`, `validation`, `all`, or the name of a set in `data.validation`. Batches have
    the same size as validation batches; see `build_loaders`. `cache_dir` is read but not written.
    `fit` fits the tokenizer to the model.

    Raises:
        ConfigError: a value in `data` or `tokenizer` is invalid, or the split has no documents.
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
        rule = "leaves no documents for validation."
        action = "Evaluate on all documents with --split all, or on other files with --data FILES."
        raise ConfigError.one(
            Code.DATA_VALIDATION, "data.validation_fraction", data.validation_fraction, rule, action
        )
    return loader, corpus.tokenizer
