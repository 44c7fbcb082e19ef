"""A row of a batch as a person reads it: its documents, their text, and what of it is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxpipe.data.loader import Loader
from maxpipe.data.pairs import HALVES
from maxpipe.data.sequences import PAIRS
from maxpipe.data.tokenizer import Tokenizer, open_text_stream
from maxpipe.errors import ConfigError
from maxpipe.io.formatting import pluralize


class TextSpan(NamedTuple):
    """Tokens in a row that are alike, as text."""

    text: str
    is_trained: bool
    """Whether the model is trained to predict them."""
    is_control: bool = False
    """Whether they are control tokens: the text is their names."""


class Segment(NamedTuple):
    """The part of a row that is of one document."""

    document: int
    where: str
    first: int
    """Its first token's number in the row."""
    num_tokens: int
    document_tokens: int
    """Tokens of the whole document: the others are in other rows."""
    num_trained: int
    pieces: list[TextSpan]
    half: str = ""
    """Which one of a pair: `chosen` or `rejected`."""


class InspectedSequence(NamedTuple):
    """A row of a step's batch."""

    batch: int
    row: int
    source: str
    """Its name in a mixture."""
    sequence: int
    num_padding: int
    segments: list[Segment]


def inspect_sequence(
    loader: Loader, tokenizer: Tokenizer, batch: int, row: int
) -> InspectedSequence:
    """A row of the batch with this number, counted from 0, from the arrays that a step gets.

    The last target is part of it where it is of the last document: the model predicts it.

    Raises:
        ConfigError: the batch has no such row.
    """
    rows = loader.sequence_origins(batch)
    if not rows:
        rule = f"must be a step with text: it takes batch {batch + 1}, and the documents end with "
        rule += f"batch {loader.num_batches}."
        raise ConfigError.one("command line: step", None, rule, "Give a smaller one.")
    if row >= len(rows):
        rule = f"must be below the rows of the batch: {pluralize(len(rows), 'row')} with text."
        raise ConfigError.one("command line: row", row, rule, "Give a smaller one.")
    place = rows[row]
    arrays = {name: each[0] for name, each in loader.batch(batch, [row]).items()}
    segments = list(_segments(loader, tokenizer, place.source, place.documents, arrays))
    padding = int((arrays["segment_ids"] == 0).sum())
    return InspectedSequence(batch, row, place.source, place.sequence, padding, segments)


def _segments(
    loader: Loader,
    tokenizer: Tokenizer,
    source: str,
    documents: Sequence[int],
    arrays: dict[str, np.ndarray],
) -> Iterator[Segment]:
    ids, numbers, mask = arrays["tokens"], arrays["segment_ids"], arrays["loss_mask"] > 0
    halves = HALVES if PAIRS in arrays else ("",)
    for number, (document, half) in enumerate(itertools.product(documents, halves), 1):
        inside = np.flatnonzero(numbers == number)
        first, last = int(inside[0]), int(inside[-1]) + 1
        # Token t is the target at t - 1; the row's first one is predicted nowhere.
        tokens, trained = ids[first:last], np.append(False, mask)[first:last]
        if last == len(ids) and mask[-1]:
            tokens = np.append(tokens, arrays["targets"][-1])
            trained = np.append(trained, True)
        yield Segment(
            document=document,
            where=loader.where(source, document),
            first=first,
            num_tokens=len(tokens),
            document_tokens=len(tokens) if half else loader.size(source, document),
            num_trained=int(trained.sum()),
            pieces=list(iterate_text_spans(tokenizer, tokens, trained)),
            half=half,
        )


def iterate_text_spans(
    tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray
) -> Iterator[TextSpan]:
    """The text of ids [tokens], cut where `trained` bool [tokens] changes."""
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    text = open_text_stream(tokenizer)
    held = TextSpan("", is_trained=False)
    for i, is_trained in zip(ids.tolist(), trained.tolist(), strict=True):
        if is_control := i in tokenizer.special_ids:
            held = held._replace(text=held.text + text.finish())
            added = names.get(i, f"<{i}>")
        else:
            added = text.push(i)
        if held[1:] == (is_trained, is_control):
            held = held._replace(text=held.text + added)
            continue
        if held.text:
            yield held
        held = TextSpan(added, is_trained, is_control)
    held = held._replace(text=held.text + text.finish())
    if held.text:
        yield held
