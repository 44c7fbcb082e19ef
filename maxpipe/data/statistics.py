"""Statistics of a source, computed in one pass: lengths, duplicates, bytes and unreadable records.

Memory use does not depend on the size of the text: only the length of each document is stored. The
number of duplicates is estimated if a source has more documents than a `DuplicateCounter` can
store.

The statistics are formatted as text, or plotted in an HTML page or a PNG image.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxpipe.data.chat import first_target
from maxpipe.data.chat_spec import LongConversationPolicy, find_long_documents, limit_lengths
from maxpipe.data.documents import Documents, EncodedDocument, digest_of
from maxpipe.data.packing import Packer, count_targets
from maxpipe.data.sources import Source, UnreadableRecord
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.files import wrap_text_errors
from maxpipe.data.unread_keys import LongConversations, remarks
from maxpipe.errors import Problem
from maxpipe.io import redact
from maxpipe.io.formatting import pluralize
from maxpipe.schedule.canvas import GREY, HUES, INK, Box, Canvas, Label

PICTURE_SUFFIXES = (".html", ".png")
_BAR = 40
"""Length of the longest histogram bar, in characters."""
_DOCUMENTS, _TOKENS = HUES[0][1], HUES[1][1]
_WIDTH, _ROW, _LEFT, _ROOM = 760, 22, 150, 210


def lines(stats: Statistics) -> list[str]:
    """Return one line per statistic, starting with the name of the statistic."""
    return [f"{name:<12}{text}" for name, text in summary_items(stats)]


def summary_items(stats: Statistics) -> list[tuple[str, str]]:
    """Return (name, formatted value) of every statistic."""
    count, tokens = len(stats.lengths), stats.tokens
    notes = [f"{stats.empty} empty"] if stats.empty else []
    if stats.num_with_replacement_character:
        notes.append(
            f"{stats.num_with_replacement_character} with bytes that are not UTF-8, replaced by "
            "U+FFFD"
        )
    shown = [("source", stats.name), ("documents", _append_notes(f"{count:,}", notes))]
    if stats.unreadable:
        first = stats.first_unreadable
        words = f"the first: {first.line}" if first else "written as empty documents by prepare"
        shown.append(("unreadable", f"{stats.unreadable:,}, {words}"))
    share = f"{stats.trained / tokens:.1%} trained" if tokens else ""
    all_trained = stats.trained == tokens
    shown.append(("tokens", _append_notes(f"{tokens:,}", [] if all_trained else [share])))
    per_token = f"{stats.num_bytes / tokens:.2f} per token" if tokens else ""
    shown.append(("bytes", _append_notes(f"{stats.num_bytes:,}", [per_token])))
    about = (
        f"estimated from 1 in {stats.sampling_interval} documents"
        if stats.sampling_interval > 1
        else ""
    )
    repeated = _format_count(stats.duplicates, "document")
    part = f"{stats.duplicate_tokens / tokens:.2%} of the tokens" if tokens else ""
    shown.append(("duplicates", _append_notes(repeated, [part, about])))
    quantiles = ", ".join(f"{name} {quantile:,}" for name, quantile in stats.quantiles().items())
    shown.append(("lengths", f"in tokens: {quantiles}" if quantiles else "none"))
    sequences = f"{stats.packing}, {_format_count(stats.num_sequences, 'sequence')} of "
    sequences += f"{stats.sequence_length:,}"
    shown.append(("packing", f"{sequences}, efficiency {stats.efficiency:.2%}"))
    if stats.too_long:
        shown.append(
            ("too long", f"{pluralize(stats.too_long, 'document')} longer than a sequence")
        )
    shown += [("note", remark) for remark in stats.remarks]
    return shown


def _format_count(count: int, noun: str) -> str:
    return pluralize(count, noun).replace(str(count), f"{count:,}", 1)


def _append_notes(text: str, notes: Sequence[str]) -> str:
    notes = [note for note in notes if note]
    return f"{text} ({', '.join(notes)})" if notes else text


def text(stats: Statistics) -> str:
    """Return the statistics as text, with a histogram of document lengths."""
    bars = stats.histogram()
    most = max((documents for _, _, documents, _ in bars), default=1)
    shown = lines(stats)
    for shortest, longest, documents, _ in bars:
        bar = "#" * -(-documents * _BAR // most)
        shown.append(f"{f'{shortest:,}-{longest:,}':>22}  {bar:<{_BAR}} {documents:,}".rstrip())
    return "\n".join(shown)


def draw(all_of: Sequence[Statistics], path: Path) -> None:
    """Plot the statistics to a file whose suffix determines the format; see `PICTURE_SUFFIXES`."""
    whole = Canvas()
    for part in all_of:
        whole.append_canvas(_picture(part), whole.height)
    if path.suffix == ".png":
        whole.png(path)
        return
    table = "".join(_table(part) for part in all_of)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Documents</title>\n'
        "<style>:root{color-scheme:light dark}"
        "body{font-family:Helvetica,Arial,sans-serif;margin:2em}"
        "td{padding:2px 16px 2px 0;vertical-align:top}</style></head><body>\n"
        f"{table}{whole.svg()}</body></html>\n",
        encoding="utf-8",
    )


def _table(stats: Statistics) -> str:
    inside = "\n".join(
        f"<tr><td>{escape(name)}</td><td>{escape(redact.redact_for_terminal(text))}</td></tr>"
        for name, text in summary_items(stats)
    )
    return f"<table>\n{inside}\n</table>\n"


def _picture(stats: Statistics) -> Canvas:
    """Plot two histograms over document length: number of documents and number of tokens."""
    canvas, bars = Canvas(width=_WIDTH), stats.histogram()
    title = f"{stats.name}: {pluralize(len(stats.lengths), 'document')}, {stats.tokens:,} tokens"
    canvas.labels.append(Label(16, 26, redact.redact_for_terminal(title), 15, INK, "l", bold=True))
    for x, head, colour in (
        (_LEFT, "documents by length", _DOCUMENTS),
        (_LEFT + _ROOM + 90, "tokens by document length", _TOKENS),
    ):
        canvas.labels.append(Label(x, 48, head, 12, colour, "l"))
    most = max((row[2] for row in bars), default=1), max((row[3] for row in bars), default=1)
    y = 56.0
    for shortest, longest, documents, tokens in bars:
        name = f"{shortest:,}-{longest:,}"
        canvas.labels.append(Label(_LEFT - 10, y + 15, name, 11, GREY, "r"))
        for x, value, top, colour in (
            (_LEFT, documents, most[0], _DOCUMENTS),
            (_LEFT + _ROOM + 90, tokens, most[1], _TOKENS),
        ):
            width = max(1.0, _ROOM * value / max(1, top)) if value else 0.0
            if width:
                canvas.boxes.append(Box(x, y + 3, width, _ROW - 6, colour, title=f"{value:,}"))
            canvas.labels.append(Label(x + width + 6, y + 15, f"{value:,}", 11, INK, "l"))
        y += _ROW
    for name, text in summary_items(stats)[1:]:
        y += 18
        line = f"{name}: {redact.redact_for_terminal(text)}"
        line = line if len(line) <= 120 else f"{line[:117]}..."
        canvas.labels.append(Label(16, y, line, 11, INK, "l"))
    canvas.height = y + 24
    return canvas


_PASS_CHARACTERS = 1 << 20
_PASS_DOCUMENTS = 1024
_MAX_DIGESTS = 1 << 23
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

ProgressCallback = Callable[[str, int, int], object]
"""Function that is called with a task name, the number of processed items and the total number of
items."""


class DocumentStatistics(NamedTuple):
    """Statistics of one document."""

    digest: int
    """Digest of the document's content."""
    tokens: int
    trained: int
    num_bytes: int
    is_empty: bool
    has_replacement_character: bool
    """Whether the text contains U+FFFD, which replaces bytes that are not valid UTF-8."""
    unread: tuple[str, ...] = ()
    """See `EncodedDocument.unread`."""
    marks: int = 0
    """See `EncodedDocument.marks`."""
    first_target: int = 0
    """See `DocumentIndex.first_targets`; 0 for plain text."""


class DuplicateCounter:
    """Counts duplicate documents, comparing them by digest.

    If a source has too many documents, only a sample of one in 2**shift documents is compared. The
    sample is selected by digest, so it includes all duplicates of a sampled document.
    """

    def __init__(self, most: int = _MAX_DIGESTS):
        self.shift = 0
        """Base-2 logarithm of the sampling interval."""
        self._most = most
        self._digests, self._tokens = array("Q"), array("Q")

    def add(self, digest: int, tokens: int) -> None:
        """Add a document with this digest and number of tokens."""
        if digest & ((1 << self.shift) - 1):
            return
        self._digests.append(digest)
        self._tokens.append(tokens)
        while len(self._digests) > self._most:
            self.shift += 1
            digests, tokens_of = self._arrays()
            kept = digests & np.uint64((1 << self.shift) - 1) == 0
            self._digests = array("Q", digests[kept].tobytes())
            self._tokens = array("Q", tokens_of[kept].tobytes())

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self._digests, np.uint64), np.array(self._tokens, np.uint64)

    def repeated(self) -> tuple[int, int]:
        """Return the number of duplicate documents, and the number of tokens in them."""
        digests, tokens = self._arrays()
        if not len(digests):
            return 0, 0
        _, first, counts = np.unique(digests, return_index=True, return_counts=True)
        others = counts - 1
        repeated = int((others * tokens[first].astype(np.int64)).sum())
        return int(others.sum()) << self.shift, repeated << self.shift


@dataclass
class Statistics:
    """Statistics over all readable documents of a source."""

    name: str
    lengths: np.ndarray
    """int64 [documents]: number of tokens per document."""
    trained: int = 0
    num_bytes: int = 0
    empty: int = 0
    num_with_replacement_character: int = 0
    unreadable: int = 0
    """Number of unreadable records. In prepared data, these are empty documents; otherwise, all
    other statistics exclude them.
    """
    first_unreadable: Problem | None = None
    duplicates: int = 0
    duplicate_tokens: int = 0
    sampling_interval: int = 1
    """Sampling interval N for counting duplicates: 1 in every N documents was compared."""
    packing: str = "concatenate"
    sequence_length: int = 0
    num_sequences: int = 0
    left_out: int = 0
    """Number of long conversations with no tokens to train on after the policy is applied."""
    targets: int = 0
    """Total number of positions, across all sequences, whose target is in the same document."""
    chat: str = "off"
    """Type of the documents: `conversation`, `pair`, or `off` for plain text."""
    policy: LongConversationPolicy | None = None
    """Value of `data.long_conversations`; None for plain text."""
    unread: Counter[str] = field(default_factory=Counter)
    """Maps unread keys to the number of documents that contain the key."""
    advice: str = ""
    """Suggested settings that use the keys of `unread`."""
    columns: Sequence[str] = ()
    """Notes about unread columns of text sources."""
    marks: Counter[int] = field(default_factory=Counter)
    """Maps marks to the number of documents with the mark; see `EncodedDocument.marks`."""
    _contents: DuplicateCounter = field(default_factory=DuplicateCounter, repr=False)

    @property
    def tokens(self) -> int:
        """Total number of tokens in all documents."""
        return int(self.lengths.sum())

    @property
    def efficiency(self) -> float:
        """Fraction of positions whose target is in the same document."""
        room = self.num_sequences * self.sequence_length
        return self.targets / room if room else 0.0

    @property
    def too_long(self) -> int:
        """Number of documents that do not fit in one sequence."""
        return len(find_long_documents(self.lengths, self.sequence_length))

    @property
    def remarks(self) -> list[str]:
        """Notes about documents that are changed or skipped in training."""
        long = LongConversations(self.policy, self.too_long, self.left_out) if self.policy else None
        what = "document" if self.chat == "off" else self.chat
        count = len(self.lengths)
        found = remarks(what, count, self.unread, self.marks, long, action=self.advice)
        return [*self.columns, *found]

    def quantiles(self) -> dict[str, int]:
        """Return the document length at each quantile of `QUANTILES`, keyed by percentage."""
        if not len(self.lengths):
            return {}
        lengths = np.quantile(self.lengths, QUANTILES, method="inverted_cdf")
        return {f"{100 * q:g}%": int(length) for q, length in zip(QUANTILES, lengths, strict=True)}

    def histogram(self) -> list[tuple[int, int, int, int]]:
        """Return (minimum length, maximum length, documents, tokens) of length bins whose width
        doubles.
        """
        if not len(self.lengths):
            return []
        bins = np.frexp(self.lengths.astype(np.float64))[1].clip(1) - 1  # exact up to 2**53
        documents = np.bincount(bins)
        tokens = np.bincount(bins, weights=self.lengths.astype(np.float64))
        return [
            (1 << i if i else 0, (2 << i) - 1, int(count), int(of))
            for i, (count, of) in enumerate(zip(documents, tokens, strict=True))
        ][int(bins.min()) :]

    def to_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values."""
        count, tokens = len(self.lengths), self.tokens
        names = ("shortest", "longest", "documents", "tokens")
        return {
            "source": self.name,
            "documents": count,
            "empty": self.empty,
            "unreadable": self.unreadable,
            "first_unreadable": self.first_unreadable and self.first_unreadable.line,
            "with_replaced_bytes": self.num_with_replacement_character,
            "tokens": tokens,
            "tokens_trained": self.trained,
            "bytes": self.num_bytes,
            "bytes_per_token": round(self.num_bytes / tokens, 4) if tokens else None,
            "duplicates": self.duplicates,
            "duplicate_tokens": self.duplicate_tokens,
            "duplicates_compared_one_in": self.sampling_interval,
            "lengths": self.quantiles(),
            "mean_length": round(tokens / count, 2) if count else None,
            "histogram": [dict(zip(names, row, strict=True)) for row in self.histogram()],
            "sequence_length": self.sequence_length,
            "longer_than_a_sequence": self.too_long,
            "keys_not_read": dict(sorted(self.unread.items())),
            "remarks": self.remarks,
            "packing": self.packing,
            "sequences": self.num_sequences,
            "packing_efficiency": round(self.efficiency, 6),
        }


def measure_texts(source: Source, tokenizer: Tokenizer) -> Iterator[DocumentStatistics | Problem]:
    """Yield the statistics of each document, or the error if the document cannot be read."""
    held: list[str | Problem] = []
    characters = 0

    def count(stop: int) -> list[DocumentStatistics | Problem]:
        numbers = [i for i, text in enumerate(held, stop - len(held)) if isinstance(text, str)]
        with wrap_text_errors(lambda number: source.where(numbers[number])):
            return _measure_texts(held, tokenizer)

    for i in range(len(source)):
        try:
            text: str | Problem = source[i]
        except UnreadableRecord as error:
            text = error.problems[0]
        else:
            characters += len(text)
        held.append(text)
        if characters >= _PASS_CHARACTERS or len(held) >= _PASS_DOCUMENTS:
            yield from count(i + 1)
            held, characters = [], 0
    yield from count(len(source))


def _measure_texts(
    held: Sequence[str | Problem], tokenizer: Tokenizer
) -> list[DocumentStatistics | Problem]:
    measured: list[DocumentStatistics | Problem] = []
    counts = iter(tokenizer.count([text for text in held if isinstance(text, str)]))
    for text in held:
        if not isinstance(text, str):
            measured.append(text)
            continue
        raw, tokens = text.encode(), next(counts) + 2
        document = DocumentStatistics(
            digest=digest_of(raw),
            tokens=tokens,
            trained=tokens,
            num_bytes=len(raw),
            is_empty=not text.strip(),
            has_replacement_character="\ufffd" in text,
        )
        measured.append(document)
    return measured


def measure_encoded(
    encode: Callable[[int], EncodedDocument], num_documents: int, tokenizer: Tokenizer, threads: int
) -> Iterator[DocumentStatistics | Problem]:
    """Yield the statistics of encoded documents. Byte counts are computed from the tokens."""
    widths = tokenizer.byte_lengths

    def read(i: int) -> DocumentStatistics | Problem:
        try:
            encoded = encode(i)
        except UnreadableRecord as error:
            return error.problems[0]
        ids, mask = encoded.ids.astype(np.int64), encoded.trained
        text = tokenizer.decode(ids.tolist())
        return DocumentStatistics(
            digest=digest_of(ids.tobytes() + encoded.image_digest),
            tokens=len(ids),
            trained=len(ids) if mask is None else int(mask.sum()),
            num_bytes=int(widths[ids].sum()),
            is_empty=not text.strip(),
            has_replacement_character="\ufffd" in text,
            unread=encoded.unread,
            marks=encoded.marks,
            first_target=0 if mask is None else first_target(mask),
        )

    with ThreadPoolExecutor(max(1, threads), "documents") as pool:
        for first in range(0, num_documents, _PASS_DOCUMENTS):
            yield from pool.map(read, range(first, min(first + _PASS_DOCUMENTS, num_documents)))


def compute_statistics(
    name: str,
    documents: Iterable[DocumentStatistics | Problem],
    num_documents: int,
    packer: Packer,
    report: ProgressCallback,
    *,
    chat: str = "off",
    policy: LongConversationPolicy | None = None,
) -> Statistics:
    """Return statistics of a source's documents, and of the sequences into which they are packed.

    See `Statistics` for `chat` and `policy`.
    """
    lengths, firsts = np.zeros(num_documents, np.int64), np.zeros(num_documents, np.int64)
    total, number = Statistics(name, lengths, chat=chat, policy=policy), 0
    for done, document in enumerate(documents, 1):
        report(f"reading {name}", done, num_documents)
        if isinstance(document, Problem):
            total.unreadable += 1
            total.first_unreadable = total.first_unreadable or document
            continue
        lengths[number], firsts[number] = document.tokens, document.first_target
        number += 1
        total.trained += document.trained
        total.num_bytes += document.num_bytes
        total.empty += document.is_empty
        total.num_with_replacement_character += document.has_replacement_character
        total.unread.update(document.unread)
        total.marks.update(1 << bit for bit in range(8) if document.marks >> bit & 1)
        total._contents.add(document.digest, document.tokens)
    total.lengths = lengths[:number]
    total.duplicates, total.duplicate_tokens = total._contents.repeated()
    total.sampling_interval = 1 << total._contents.shift
    total.packing, total.sequence_length = packer.packing, packer.sequence_length
    documents_left: Documents = _DocumentLengths(total.lengths)
    if policy is not None:
        documents_left = limit_lengths(
            documents_left, packer.sequence_length, policy, firsts[:number]
        )
    whole = documents_left.lengths
    total.left_out = int(np.count_nonzero(total.lengths)) - int(np.count_nonzero(whole))
    total.targets, total.num_sequences = count_targets(whole), _sequences(whole, packer)
    return total


class _DocumentLengths:
    pad_id = 0

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def __getitem__(self, document: int) -> EncodedDocument:
        raise NotImplementedError(document)

    def where(self, document: int) -> str:
        return f"document {document}"


def _sequences(lengths: np.ndarray, packer: Packer) -> int:
    return (
        len(packer(_DocumentLengths(lengths), np.arange(len(lengths)))) if lengths.sum() > 1 else 0
    )
