"""JSON lines, compressed or not: one object a line."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from maxpipe.data.formats.cache import Cache
from maxpipe.data.formats.compressed import SUFFIXES, unpacked
from maxpipe.data.formats.digests import Digests
from maxpipe.data.formats.files import File, digest, identities, read
from maxpipe.data.formats.lines import Lines, find_lines, is_compressed
from maxpipe.data.formats.source import Moved, Record
from maxpipe.data.formats.text_of import BadRecord, check_length, from_json, shortened
from maxpipe.errors import ConfigError
from maxpipe.words import counted


class JsonLines:
    """One document per line. Holds where lines start, not what is in them."""

    name = "jsonl"

    def __init__(
        self,
        files: Sequence[File],
        cache: Cache,
        digests: Digests,
        most_bytes: int,
        moved: Moved | None = None,
    ):
        self.files = files
        self._cache = cache  # what it made may end with it
        self._lines: list[Lines] = []
        digests.load(files)
        packed = [file for file in files if is_compressed(file)]
        for file in packed:
            if not file.in_bucket and digests.known(file) is None:
                # An error in the first bytes is found before the digest reads the whole file.
                with contextlib.closing(unpacked(file)) as content:
                    next(content, None)
        if packed:
            digests.of(files, moved)
        for file in files:
            if file.path.endswith((".zip", ".tar", ".7z", ".rar", ".lz4", ".br", ".Z")):
                raise ConfigError.one(
                    "data.path",
                    file.path,
                    f"must be JSON lines as they are, or compressed as {' or '.join(SUFFIXES)}.",
                    "Unpack it and set data.path to the unpacked file.",
                )
            lines, unpacked_bytes = find_lines(file, cache, digests, most_bytes, moved)
            most_bytes -= unpacked_bytes
            self._lines.append(lines)
        # Document numbers at which each file ends.
        self._ends = np.cumsum([len(lines) for lines in self._lines])
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

    def _place(self, index: int) -> tuple[Lines, int]:
        """The file of a line, and its number among those that are not blank."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        lines = self._lines[which]
        return lines, index - int(self._ends[which]) + len(lines)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        lines, number = self._place(index)
        start, stop = lines.starts.pair(number)
        check_length(stop - start)
        line = read(lines.content, start, stop).partition(b"\n")[0]  # blank lines follow
        try:
            return from_json(line)
        except ValueError as error:
            raise BadRecord(
                shortened(line),
                f"must be a JSON object: {error}.",
                'Write each document as an object such as {"text": "..."}, or remove the line.',
            ) from error

    def where(self, index: int) -> str:
        lines, number = self._place(index)
        return f"{lines.file.path}:{lines.number(number)}"

    def fingerprint(self, chosen: str) -> str:
        return digest([chosen, *identities(self.files)])
