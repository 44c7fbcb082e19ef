"""From a whole config to the documents that a run reads. No jax: data is looked at without it.

Documents for evaluation whose text is also trained on, found by digests of whole texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from maxpipe.config.data_sources import section_of
from maxpipe.config.schema import Config
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.data.chat import load_start_date, resolve_chat_template
from maxpipe.data.chat_spec import (
    ChatSpec,
    apply_chat_spec,
    build_chat_spec,
    chat_spec_of_prompts,
)
from maxpipe.data.corpus import Corpus, IndexedSource, Split
from maxpipe.data.documents import digest_of
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.prompts import build_prompts
from maxpipe.data.tokenizer import Tokenizer, fit_tokenizer, open_tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.errors import ConfigError, Problem
from maxpipe.io.files import expand_path
from maxpipe.rewards.process import RewardFunction, check

Heartbeat = Callable[[], object]

_DigestChunk = tuple[IndexedSource, np.ndarray, np.ndarray]
_EMPTY = np.uint64(digest_of(b""))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one set, the documents that are also trained on."""

    name: str
    """In `data.validation`; empty for the documents that are held out of the training's own."""
    count: int
    total: int
    """Documents of the set, without empty ones."""
    first: str
    """The file of the first of them and its place in it, for people."""
    trained: str
    """That of the same text in the training."""


def find_overlaps(
    train: Corpus, sets: Mapping[str, Corpus], *, large: bool, moved: Heartbeat = lambda: None
) -> list[Overlap]:
    """Of the held-out documents of a corpus, and of other sets by name.

    Memory grows with the documents for evaluation, not with those of the training; time with all of
    them. `large` says whether sources with too many to be shuffled as a whole are compared, too.
    `moved` is called for each part.
    """
    candidates: dict[str, tuple[Corpus, Split]] = {"": (train, "validation")}
    candidates |= {name: (each, "all") for name, each in sets.items()}
    found = {name: list(_digests(*each, large, moved)) for name, each in candidates.items()}
    parts = [digests for each in found.values() for _, _, digests in each]
    if not parts:
        return []
    trained = _TrainingDigests(np.unique(np.concatenate(parts)))
    for part in _digests(train, "train", large, moved):
        trained.add(*part)
    return [each for name in found if (each := _overlap_of_set(name, found[name], trained)).count]


def uncompared_sources(corpora: Iterable[Corpus], *, large: bool) -> Iterator[tuple[str, str]]:
    """(section, why) of each source that is not compared."""
    for corpus in corpora:
        for indexed in corpus.indexed:
            if indexed.digests is None:
                yield section_of(indexed.name), "its files have no digests of texts"
            elif indexed.is_large and not large:
                yield section_of(indexed.name), "it has too many documents to read all at the start"


class _TrainingDigests:
    """Which of some digests the training has, and where."""

    def __init__(self, known: np.ndarray):
        """`known` uint64, sorted."""
        self._known = known
        self._sources: list[IndexedSource] = []
        self._source_of = np.full(len(known), -1, np.int32)
        self._number_of = np.zeros(len(known), np.int64)

    def add(self, indexed: IndexedSource, numbers: np.ndarray, digests: np.ndarray) -> None:
        """Documents that are trained on."""
        if not self._sources or self._sources[-1] is not indexed:
            self._sources.append(indexed)
        places, is_known = self._places(digests)
        places, numbers = places[is_known], numbers[is_known]
        self._source_of[places], self._number_of[places] = len(self._sources) - 1, numbers

    def has(self, digests: np.ndarray) -> np.ndarray:
        """Whether each is trained on: bool [digests]."""
        places, is_known = self._places(digests)
        return is_known & (self._source_of[places] >= 0)

    def where(self, digest: int) -> str:
        """The file of a document with it and its place there."""
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
    """(source, numbers, digests) of parts of a split; documents without text are left out."""
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
    """The documents that a config names, and its tokenizer; `moved` is called during reading.

    Raises:
        ConfigError: they cannot be used, or have ids that the model does not know.
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
        fit=partial(fit_tokenizer, rows=config.model.vocab_size),
    )
    assert datasets.corpora is not None
    train, _ = datasets.corpora
    chats = [each.documents for each in train.indexed if each.is_chat]
    return _with_chat_spec(datasets, build_chat_spec(config.data, datasets.tokenizer, chats))


def _with_chat_spec(datasets: Datasets, conversation: ChatSpec | None) -> Datasets:
    tokenizer = apply_chat_spec(datasets.tokenizer, conversation)
    return replace(datasets, tokenizer=tokenizer, conversation=conversation)


def _build_prompt_datasets(config: Config) -> Datasets:
    tokenizer = fit_tokenizer(open_tokenizer(config.tokenizer), config.model.vocab_size)
    template = load_run_chat_template(config, tokenizer)
    found = build_prompts(
        config.grpo,
        config.data,
        tokenizer,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        sequence_length=config.train.sequence_length,
        check=partial(check, config.grpo),
        reward=RewardFunction(config.grpo).fingerprint(),
        template=template,
    )
    return _with_chat_spec(found, chat_spec_of_prompts(template, tokenizer))


def load_run_chat_template(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of prompts, samples and questions; its date is that of the first start.

    Raises:
        ConfigError: its file cannot be read.
    """
    template = resolve_chat_template(config.data, tokenizer)
    if template is None or not template.reads_date:
        return template
    return template.with_date(
        load_start_date(
            str(expand_path(config.run.dir, "run.dir") / config.run.name), _index_folder(config)
        )
    )


def _index_folder(config: Config) -> str:
    return str(expand_path(config.run.dir, "run.dir") / ".index")


def check_overlap(
    config: Config,
    datasets: Datasets,
    warn: Callable[[str], object],
    moved: Callable[[], object] = lambda: None,
) -> None:
    """Warns of documents for evaluation that are also trained on, as the config says.

    Sources of more documents than are shuffled as a whole are compared if there must be no copies:
    all their digests have to be read for that. `moved` is called meanwhile.

    Raises:
        ConfigError: there are some, and the config says that there must be none.
    """
    how = config.data.validation_overlap
    if how == "ignore" or not config.eval.batches or not datasets.eval_loaders():
        return
    assert datasets.corpora is not None
    train, sets = datasets.corpora
    large = how == "stop"
    problems = []
    for each in find_overlaps(train, sets, large=large, moved=moved):
        key = f"data.validation.{each.name}" if each.name else "data.validation_fraction"
        rule = (
            f"has documents that are also trained on, {each.count} of {each.total}: the first is "
            f"{each.first}, which is trained on as {each.trained}."
        )
        action = "Remove such documents, or set data.validation_overlap=ignore."
        problems.append(Problem(key, "", rule, action))
    if problems and how == "stop":
        raise ConfigError(problems)
    for each in problems:
        warn(f"{each.where}: {each.rule} {each.action}")
    for section, why in uncompared_sources([train, *sets.values()], large=large):
        warn(
            f"{section}: documents for evaluation are not compared with these: {why}. Set "
            f"data.validation_overlap={'ignore' if large else 'stop to compare them, or ignore'}."
        )
