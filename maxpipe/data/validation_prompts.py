"""Validation prompts with a known response, built from conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from maxpipe.data.documents import EncodedDocument
from maxpipe.data.loader import Datasets
from maxpipe.data.tokenizer import Tokenizer


class ValidationPrompt(NamedTuple):
    """Conversation up to its last trained message."""

    ids: list[int]
    """Token ids of the prompt, identical to the ids used in training."""
    text: str
    """Text of the prompt without control tokens."""
    answer: str
    """Text of the last trained message, which is the known response."""


def last_turn(document: EncodedDocument, tokenizer: Tokenizer) -> ValidationPrompt | None:
    """Return the prompt of the last trained message; None if the document has no trained message or
    no prompt.
    """
    if document.trained is None:
        return None
    edges = np.flatnonzero(np.diff(document.trained.astype(np.int8), append=0))
    begins = edges[~document.trained[edges]] + 1
    if document.trained[0]:
        begins = np.append(0, begins)
    if not len(begins) or not (begin := int(begins[-1])):
        return None
    ids = document.ids.astype(int)
    end = begin + int(np.argmin(np.append(document.trained[begin:], False)))
    before, said = ids[:begin].tolist(), ids[begin:end].tolist()
    return ValidationPrompt(before, tokenizer.decode(before), tokenizer.decode(said))


def load_validation_prompts(
    datasets: Datasets, fraction: float, count: int, room: int
) -> list[ValidationPrompt]:
    """Return prompts from the first validation conversations that leave space for a response.

    Held-out documents come first, followed by the documents of the validation sets.
    """
    found = []
    for document in _documents(datasets, fraction):
        if len(found) == count:
            break
        turn = last_turn(document, datasets.tokenizer)
        if turn is not None and len(turn.ids) < room:
            found.append(turn)
    return found


def _documents(datasets: Datasets, fraction: float) -> Iterator[EncodedDocument]:
    if datasets.corpora is None:
        return
    train, sets = datasets.corpora
    for corpus in (train, *sets.values()):
        split, share = ("validation", fraction) if corpus is train else ("all", 0.0)
        for indexed in corpus.indexed:
            for numbers in indexed.numbers(split, share):
                yield from (indexed.documents[number] for number in numbers.tolist())
