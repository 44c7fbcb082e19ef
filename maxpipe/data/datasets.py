"""Build a run's datasets from its config, without importing jax.

The module also compares digests of complete documents, to find evaluation documents that occur in
the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from maxpipe.checkpoint.storage import runs_folder
from maxpipe.config.image_format import image_format
from maxpipe.config.schema import Config
from maxpipe.config.sections.data import section_of
from maxpipe.config.sections.train import BatchRamp
from maxpipe.data.chat import load_start_date, resolve_chat_template
from maxpipe.data.chat_spec import ChatSpec, apply_chat_spec, build_chat_spec, chat_spec_of_prompts
from maxpipe.data.corpus import Corpus, IndexedSource, Split
from maxpipe.data.documents import digest_of
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.prompts import build_prompts
from maxpipe.data.tokenizer import Tokenizer, fit_tokenizer, open_tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.rewards.process import RewardFunction, RewardSettings, check

Heartbeat = Callable[[], object]

_DigestChunk = tuple[IndexedSource, np.ndarray, np.ndarray]
_EMPTY = np.uint64(digest_of(b""))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of a validation set with the training data."""

    name: str
    """Name of the validation set in `data.validation`; empty for the held-out documents."""
    count: int
    total: int
    """Number of non-empty documents in the validation set."""
    first: str
    """File of the first overlapping document, and the document's position in that file."""
    trained: str
    """File of the training document with the same text, and the document's position in that
    file."""


def find_overlaps(
    train: Corpus, sets: Mapping[str, Corpus], *, large: bool, moved: Heartbeat = lambda: None
) -> list[Overlap]:
    """Return the overlaps of the training data with the held-out documents and the validation sets.

    Memory use grows only with the number of evaluation documents; run time grows with the number of
    all documents. If `large` is true, sources with too many documents for a full shuffle are
    included. `moved` is called after each chunk of data, as a heartbeat.
    """
    candidates: dict[str, tuple[Corpus, Split]] = {"": (train, "validation")}
    candidates |= {name: (corpus, "all") for name, corpus in sets.items()}
    chunks_of = {
        name: list(_digests(*candidate, large, moved)) for name, candidate in candidates.items()
    }
    parts = [digests for chunks in chunks_of.values() for _, _, digests in chunks]
    if not parts:
        return []
    trained = _TrainingDigests(np.unique(np.concatenate(parts)))
    for part in _digests(train, "train", large, moved):
        trained.add(*part)
    return [
        part
        for name in chunks_of
        if (part := _overlap_of_set(name, chunks_of[name], trained)).count
    ]


def uncompared_sources(corpora: Iterable[Corpus], *, large: bool) -> Iterator[tuple[str, str]]:
    """Yield (config section, reason) for each source that is excluded from the comparison."""
    for corpus in corpora:
        for indexed in corpus.indexed:
            if indexed.digests is None:
                yield section_of(indexed.name), "the source has no document digests"
            elif indexed.is_large and not large:
                yield (
                    section_of(indexed.name),
                    "the source has too many documents to compare at startup",
                )


class _TrainingDigests:
    def __init__(self, known: np.ndarray):
        self._known = known
        self._sources: list[IndexedSource] = []
        self._source_of = np.full(len(known), -1, np.int32)
        self._number_of = np.zeros(len(known), np.int64)

    def add(self, indexed: IndexedSource, numbers: np.ndarray, digests: np.ndarray) -> None:
        """Add training documents, given by their indices and digests."""
        if not self._sources or self._sources[-1] is not indexed:
            self._sources.append(indexed)
        places, is_known = self._places(digests)
        places, numbers = places[is_known], numbers[is_known]
        self._source_of[places], self._number_of[places] = len(self._sources) - 1, numbers

    def has(self, digests: np.ndarray) -> np.ndarray:
        """Return bool [digests], true for each digest that occurs in the training data."""
        places, is_known = self._places(digests)
        return is_known & (self._source_of[places] >= 0)

    def where(self, digest: int) -> str:
        """Return the file and position of the training document with this digest."""
        place = int(np.searchsorted(self._known, np.uint64(digest)))
        source = self._sources[self._source_of[place]]
        return source.documents.where(int(self._number_of[place]))

    def _places(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.minimum(np.searchsorted(self._known, digests), len(self._known) - 1)
        return places, self._known[places] == digests


def _overlap_of_set(name: str, parts: Sequence[_DigestChunk], trained: _TrainingDigests) -> Overlap:
    count, total, first, copy = 0, 0, "", ""
    for indexed, numbers, digests in parts:
        total += len(numbers)
        hits = np.flatnonzero(trained.has(digests))
        if len(hits) and not count:
            at = hits[numbers[hits].argmin()]
            first, copy = indexed.documents.where(int(numbers[at])), trained.where(int(digests[at]))
        count += len(hits)
    return Overlap(name, count, total, first, copy)


def _digests(corpus: Corpus, split: Split, large: bool, moved: Heartbeat) -> Iterator[_DigestChunk]:
    """Yield (source, document indices, digests) for chunks of a split, skipping empty documents."""
    for indexed in corpus.indexed:
        if indexed.digests is None or (indexed.is_large and not large):
            continue
        for numbers in indexed.numbers(split, corpus.data.validation_fraction):
            moved()
            if not len(numbers):
                continue
            first = int(numbers.min())
            digests = indexed.digests(first, int(numbers.max()) + 1)[numbers - first]
            with_text = digests != _EMPTY
            if with_text.any():
                yield indexed, numbers[with_text], digests[with_text]


def build_datasets(config: Config, moved: Callable[[], object]) -> Datasets:
    """Build the datasets and the tokenizer of a config. `moved` is called as a heartbeat.

    Raises:
        ConfigError: the data cannot be used, or contains token ids outside the model's vocabulary.
    """
    if config.train.objective == "grpo":
        return _build_prompt_datasets(config)
    datasets = build_loaders(
        config.data,
        config.tokenizer,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        batch_ramp=BatchRamp.from_config(config.train),
        sequence_length=config.train.sequence_length,
        eval_batch_size=config.eval.batch_size,
        cache_dir=_index_folder(config),
        moved=moved,
        fit=partial(_fit_tokenizer, config),
    )
    assert datasets.corpora is not None
    train, _ = datasets.corpora
    chats = [source.documents for source in train.indexed if source.is_chat]
    return _with_chat_spec(datasets, build_chat_spec(config.data, datasets.tokenizer, chats))


def _fit_tokenizer(config: Config, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer for a run's model and the images of its data."""
    return fit_tokenizer(tokenizer, config.model.vocab_size).with_images(image_format(config))


def _with_chat_spec(datasets: Datasets, conversation: ChatSpec | None) -> Datasets:
    tokenizer = apply_chat_spec(datasets.tokenizer, conversation)
    return replace(datasets, tokenizer=tokenizer, conversation=conversation)


def _build_prompt_datasets(config: Config) -> Datasets:
    tokenizer = fit_tokenizer(open_tokenizer(config.tokenizer), config.model.vocab_size)
    template = load_run_chat_template(config, tokenizer)
    rewards = RewardSettings.from_grpo(config.grpo)
    datasets = build_prompts(
        config.grpo,
        config.data,
        tokenizer,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        sequence_length=config.train.sequence_length,
        check=partial(check, rewards),
        reward=RewardFunction(rewards).fingerprint(),
        template=template,
    )
    return _with_chat_spec(datasets, chat_spec_of_prompts(template, tokenizer))


def load_run_chat_template(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template for prompts and samples, with the date on which the run was first
    started.

    Raises:
        ConfigError: the template file cannot be read.
    """
    template = resolve_chat_template(config.data, tokenizer)
    if template is None or not template.reads_date:
        return template
    return template.with_date(
        load_start_date(str(runs_folder(config.run) / config.run.name), _index_folder(config))
    )


def _index_folder(config: Config) -> str:
    return str(runs_folder(config.run) / ".index")


def check_overlap(
    config: Config,
    datasets: Datasets,
    warn: Callable[[str], object],
    moved: Callable[[], object] = lambda: None,
) -> None:
    """Check whether the training data contains evaluation documents; warn or raise as configured.

    With `data.validation_overlap=stop`, sources with too many documents for a full shuffle are also
    compared. This comparison requires reading all digests of these sources. `moved` is called after
    each chunk of data, as a heartbeat.

    Raises:
        ConfigError: documents overlap, and `data.validation_overlap` is `stop`.
    """
    how = config.data.validation_overlap
    if how == "ignore" or not config.eval.batches or not datasets.eval_loaders():
        return
    assert datasets.corpora is not None
    train, sets = datasets.corpora
    large = how == "stop"
    problems = []
    for overlap in find_overlaps(train, sets, large=large, moved=moved):
        key = f"data.validation.{overlap.name}" if overlap.name else "data.validation_fraction"
        rule = (
            f"has {overlap.count} of {overlap.total} documents that also occur in the training "
            f"data: the first is {overlap.first}, which has the same text as {overlap.trained}."
        )
        action = "Remove the overlapping documents, or set data.validation_overlap=ignore."
        problems.append(Problem(Code.DATA_VALIDATION, key, "", rule, action))
    if problems and how == "stop":
        raise ConfigError(problems)
    for problem in problems:
        warn(f"{problem.where}: {problem.rule} {problem.action}")
    for section, why in uncompared_sources([train, *sets.values()], large=large):
        warn(
            f"{section}: validation documents are not compared with this source: {why}. Set "
            f"data.validation_overlap={'' if large else 'stop to compare them, or '}ignore"
            " to disable the comparison."
        )
