"""Show one sequence of a batch in readable form, and map each step to its batch.

The view shows the documents, the text and the trained-on tokens of the sequence. The map is
computed from `events.jsonl` alone. Steps are numbered from 1 and batches from 0: without rollbacks,
step s uses batch s - 1. Every rollback skips batches, and every start restores the mapping that was
in effect when the restored checkpoint was saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.data.loader import Loader
from maxpipe.data.packing import PAIRS
from maxpipe.data.pairs import HALVES
from maxpipe.data.tokenizer import Tokenizer, open_text_stream
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import expand_path, read_json_lines
from maxpipe.io.formatting import pluralize


class TextSpan(NamedTuple):
    """Text of consecutive tokens, which are either all trained on or all masked."""

    text: str
    is_trained: bool
    """Whether the loss includes the tokens as targets."""
    is_control: bool = False
    """Whether the tokens are control tokens, whose names are shown instead of text."""


class Segment(NamedTuple):
    """Part of a sequence that comes from one document."""

    document: int
    where: str
    first: int
    """Index of the segment's first token within the sequence."""
    num_tokens: int
    document_tokens: int
    """Number of tokens in the full document; tokens outside this segment are in other sequences."""
    num_trained: int
    pieces: list[TextSpan]
    half: str = ""
    """Half of a preference pair: `chosen` or `rejected`; empty for other documents."""


class InspectedSequence(NamedTuple):
    """A sequence in the batch of a step, split into segments."""

    batch: int
    row: int
    source: str
    """Name of the source in the mixture."""
    sequence: int
    num_padding: int
    segments: list[Segment]


def inspect_sequence(
    loader: Loader, tokenizer: Tokenizer, batch: int, row: int
) -> InspectedSequence:
    """Return row `row` of batch `batch` (both zero-based), read from the arrays that the training
    step uses.

    The last target is included if it belongs to the last document, because the model is trained to
    predict it.

    Raises:
        ConfigError: the batch does not contain this row.
    """
    rows = loader.sequence_origins(batch)
    if not rows:
        last = loader.num_batches
        rule = (
            "must be a step for which data exists: it would read batch "
            f"{batch + 1}, but the last batch is {last}."
        )
        raise ConfigError.one(
            Code.CLI_VALUE, "command line: step", None, rule, "Set a smaller step."
        )
    if row >= len(rows):
        rule = f"must be a zero-based row index in a batch with {pluralize(len(rows), 'sequence')}."
        raise ConfigError.one(Code.CLI_VALUE, "command line: row", row, rule, "Set a smaller row.")
    place = rows[row]
    arrays = {name: array[0] for name, array in loader.batch(batch, [row]).items()}
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
        # Token t is the target at position t - 1; the first token of the sequence is not a target.
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
    """Yield the text of `ids`, split wherever the bool [tokens] mask `trained` changes.

    The tokens of an image are shown as one placeholder.
    """
    image, previous = tokenizer.images, -1
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    text = open_text_stream(tokenizer)
    held = TextSpan("", is_trained=False)
    for place, (i, is_trained) in enumerate(zip(ids.tolist(), trained.tolist(), strict=True)):
        if is_control := i in tokenizer.special_ids:
            held = held._replace(text=held.text + text.finish())
            added = names.get(i, f"<{i}>")
            if image is not None and i == image.token_id:
                others = np.flatnonzero(ids[place:] != i)
                count = int(others[0]) if len(others) else len(ids) - place
                added = "" if i == previous else f"[image of {count} tokens]"
        else:
            added = text.push(i)
        previous = i
        if held[1:] == (is_trained, is_control):
            held = held._replace(text=held.text + added)
            continue
        if held.text:
            yield held
        held = TextSpan(added, is_trained, is_control)
    held = held._replace(text=held.text + text.finish())
    if held.text:
        yield held


class _BatchEvent(TypedDict):
    event: str
    step: NotRequired[int]
    to: NotRequired[int]
    sources: NotRequired[list[str]]
    mixture: NotRequired[list[list[Any]]]


def batch_of(run_dir: str | Path, step: int) -> int:
    """Return the batch index of a past or future step, according to the events."""
    return step - 1 + offset(_events(run_dir), step)


def mixture_of(run_dir: str | Path) -> tuple[list[str], list[list[Any]]] | None:
    """Return the source names and the schedule of a run's mixture, as of the latest start."""
    starts = [
        event for event in _events(run_dir) if event["event"] == "start" and "mixture" in event
    ]
    return (starts[-1].get("sources", []), starts[-1].get("mixture", [])) if starts else None


def _events(run_dir: str | Path) -> list[_BatchEvent]:
    path = expand_path(run_dir) / EVENTS_FILE
    try:
        return list(read_json_lines(path, _BatchEvent))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            Code.RUN_RECORDS,
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Specify an unmodified run folder (default: runs/<run.name>).",
        ) from error


def offset(events: Iterable[_BatchEvent], step: int) -> int:
    """Return the number of batches that rollbacks skipped before a step."""
    # Pairs (step, batch offset of the following steps), sorted by step.
    offsets = [(0, 0)]
    for event in events:
        at = event.get("step", 0)
        if event["event"] == "start":
            offsets = [(begin, left) for begin, left in offsets if begin < at] or [(0, 0)]
        elif event["event"] in ("rollback", "roll_back"):
            to, left = event.get("to", 0), offsets[-1][1]
            offsets = [(begin, left) for begin, left in offsets if begin < to]
            offsets.append((to, left + at - to))
    return next(left for begin, left in reversed(offsets) if begin < max(1, step))
