"""JSON lines: one object a line."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence

import numpy as np

from maxpipe.boundary.files import opened
from maxpipe.data.formats.files import File, digest, identities, read, unreadable
from maxpipe.data.formats.source import Moved, Progress, Record
from maxpipe.data.formats.text_of import BadRecord, from_json, shortened
from maxpipe.errors import ConfigError
from maxpipe.words import counted

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class JsonLines:
    """One document per line. Holds where lines start, not what is in them."""

    name = "jsonl"

    def __init__(self, files: Sequence[File], moved: Moved | None = None):
        self._files = files
        for file in files:
            if file.path.endswith(_COMPRESSED):
                raise ConfigError.one(
                    "data.path",
                    file.path,
                    "must not be compressed: a compressed file cannot be read from the middle.",
                    "Unpack it and set data.path to the unpacked file.",
                )
        self._starts = [_line_starts(file, moved) for file in files]
        # Document numbers at which each file ends.
        self._ends = np.cumsum([len(starts) for starts in self._starts])
        if not len(self):
            raise ConfigError.one(
                "data.path",
                files[0].path,
                "must hold JSON objects, one per line: "
                f"{counted(len(files), 'file')} without lines.",
                "Set data.path to a file with lines, or data.source=corpus.",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[File, int, int]:
        """The file of a line, and where it starts and ends."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        file, starts = self._files[which], self._starts[which]
        number = index - int(self._ends[which]) + len(starts)
        stop = starts[number + 1] if number + 1 < len(starts) else file.size_bytes
        return file, int(starts[number]), int(stop)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        line = read(*self._place(index)).partition(b"\n")[0]  # blank lines follow
        try:
            return from_json(line)
        except ValueError as error:
            raise BadRecord(
                shortened(line),
                f"must be a JSON object: {error}.",
                "Correct or remove the line.",
            ) from error

    def where(self, index: int) -> str:
        file, start, _ = self._place(index)
        return f"{file.path}:{_line_number(file.path, start)}"

    def fingerprint(self, chosen: str) -> str:
        return digest([chosen, *identities(self._files)])


def _line_starts(file: File, moved: Moved | None) -> np.ndarray:
    """Byte offsets of the lines that are not blank; a byte-order mark is part of none."""
    progress = Progress(f"finding lines of {file.name} (bytes)", file.size_bytes, moved)
    starts = array("q")
    offset = 0
    try:
        with open(opened(file.path), "rb") as stream:
            for line in stream:
                text = line if offset else line.removeprefix(codecs.BOM_UTF8)
                offset += len(line)
                if text and not text.isspace():
                    starts.append(offset - len(text))
                if len(starts) % 4096 == 0:
                    progress.update(offset)
        progress.update(offset)
    except OSError as error:
        raise unreadable(file.path, error) from error
    return np.array(starts, dtype=np.int64)


def _line_number(path: str, offset: int) -> int:
    """Counted only for people: the index does not keep blank lines."""
    number = 1
    with open(opened(path), "rb") as stream:
        for line in stream:
            offset -= len(line)
            if offset < 0:
                break
            number += 1
    return number
