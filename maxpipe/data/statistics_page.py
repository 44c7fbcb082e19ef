"""Statistics of documents as text, and as a picture: a page of HTML, or PNG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from maxpipe.data.statistics import Statistics
from maxpipe.io import redact
from maxpipe.io.text import counted
from maxpipe.schedule.canvas import Box, Canvas, Label

FORMS = (".html", ".png")
_BAR = 40
"""Characters of the longest bar of the text."""
_INK, _PALE = "#1f2933", "#7b8794"
_DOCUMENTS, _TOKENS = "#4c78a8", "#f58518"
_WIDTH, _ROW, _LEFT, _ROOM = 760, 22, 150, 210


def lines(found: Statistics) -> list[str]:
    """Each with its name."""
    return [f"{name:<12}{text}" for name, text in rows(found)]


def rows(found: Statistics) -> list[tuple[str, str]]:
    """Names and what is said of them."""
    count, tokens = len(found.lengths), found.tokens
    notes = [f"{found.empty} empty"] if found.empty else []
    if found.replaced:
        notes.append(f"{found.replaced} with U+FFFD for bytes that are not UTF-8")
    shown = [("source", found.name), ("documents", _with(f"{count:,}", notes))]
    if found.unreadable:
        first = found.first_unreadable
        words = f"the first one {first.line}" if first else "empty since they were prepared"
        shown.append(("unreadable", f"{found.unreadable:,}, {words}"))
    share = f"{found.trained / tokens:.1%} trained" if tokens else ""
    all_trained = found.trained == tokens
    shown.append(("tokens", _with(f"{tokens:,}", [] if all_trained else [share])))
    per_token = f"{found.num_bytes / tokens:.2f} per token" if tokens else ""
    shown.append(("bytes", _with(f"{found.num_bytes:,}", [per_token])))
    about = f"estimated from one in {found.compared} contents" if found.compared > 1 else ""
    repeated = _counted(found.repeated, "document")
    part = f"{found.repeated_tokens / tokens:.2%} of the tokens" if tokens else ""
    shown.append(("duplicates", _with(repeated, [part, about])))
    quantiles = ", ".join(f"{name} {each:,}" for name, each in found.quantiles().items())
    shown.append(("lengths", f"in tokens: {quantiles}" if quantiles else "none"))
    sequences = f"{found.packing}, {_counted(found.num_sequences, 'sequence')} of "
    sequences += f"{found.sequence_length:,}"
    shown.append(("packing", f"{sequences}, {found.efficiency:.2%} of positions with a target"))
    if found.too_long:
        shown.append(("too long", f"{counted(found.too_long, 'document')} for one sequence"))
    shown += [("note", remark) for remark in found.remarks]
    return shown


def _counted(count: int, noun: str) -> str:
    return counted(count, noun).replace(str(count), f"{count:,}", 1)


def _with(text: str, notes: Sequence[str]) -> str:
    notes = [each for each in notes if each]
    return f"{text} ({', '.join(notes)})" if notes else text


def text(found: Statistics) -> str:
    """A page of text with the histogram of lengths."""
    bars = found.histogram()
    most = max((documents for _, _, documents, _ in bars), default=1)
    shown = lines(found)
    for shortest, longest, documents, _ in bars:
        bar = "#" * -(-documents * _BAR // most)
        shown.append(f"{f'{shortest:,}-{longest:,}':>22}  {bar:<{_BAR}} {documents:,}".rstrip())
    return "\n".join(shown)


def draw(all_of: Sequence[Statistics], path: Path) -> None:
    """Writes a picture in the form that the file's name says, one of `FORMS`."""
    whole = Canvas()
    for found in all_of:
        whole.put(_picture(found), whole.height)
    if path.suffix == ".png":
        whole.png(path)
        return
    table = "".join(_table(found) for found in all_of)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Documents</title>\n'
        "<style>body{font-family:Helvetica,Arial,sans-serif;margin:2em;color:#1f2933}"
        "td{padding:2px 16px 2px 0;vertical-align:top}</style></head><body>\n"
        f"{table}{whole.svg()}</body></html>\n",
        encoding="utf-8",
    )


def _table(found: Statistics) -> str:
    inside = "\n".join(
        f"<tr><td>{escape(name)}</td><td>{escape(redact.shown(each))}</td></tr>"
        for name, each in rows(found)
    )
    return f"<table>\n{inside}\n</table>\n"


def _picture(found: Statistics) -> Canvas:
    """Documents and tokens by the length of the document."""
    canvas, bars = Canvas(width=_WIDTH), found.histogram()
    title = f"{found.name}: {counted(len(found.lengths), 'document')}, {found.tokens:,} tokens"
    canvas.labels.append(Label(16, 26, redact.shown(title), 15, _INK, "l", bold=True))
    for x, head, colour in (
        (_LEFT, "documents by tokens", _DOCUMENTS),
        (_LEFT + _ROOM + 90, "tokens in them", _TOKENS),
    ):
        canvas.labels.append(Label(x, 48, head, 12, colour, "l"))
    most = max((row[2] for row in bars), default=1), max((row[3] for row in bars), default=1)
    y = 56.0
    for shortest, longest, documents, tokens in bars:
        name = f"{shortest:,}-{longest:,}"
        canvas.labels.append(Label(_LEFT - 10, y + 15, name, 11, _PALE, "r"))
        for x, value, top, colour in (
            (_LEFT, documents, most[0], _DOCUMENTS),
            (_LEFT + _ROOM + 90, tokens, most[1], _TOKENS),
        ):
            width = max(1.0, _ROOM * value / max(1, top)) if value else 0.0
            if width:
                canvas.boxes.append(Box(x, y + 3, width, _ROW - 6, colour, title=f"{value:,}"))
            canvas.labels.append(Label(x + width + 6, y + 15, f"{value:,}", 11, _INK, "l"))
        y += _ROW
    for name, each in rows(found)[1:]:
        y += 18
        line = f"{name}: {redact.shown(each)}"
        canvas.labels.append(Label(16, y, _shortened(line), 11, _INK, "l"))
    canvas.height = y + 24
    return canvas


def _shortened(line: str, most: int = 120) -> str:
    return line if len(line) <= most else f"{line[: most - 3]}..."
