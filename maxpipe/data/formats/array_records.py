"""ArrayRecord files: records of text, or of JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from maxpipe.data.formats.files import File, common_folder, digest, identities
from maxpipe.data.formats.source import Record
from maxpipe.data.formats.text_of import BadRecord, check_length, decoded, from_json, shortened
from maxpipe.errors import ConfigError


class ArrayRecords:
    """One document per record: JSON objects if the first record is one, else UTF-8 text."""

    name = "arrayrecord"

    def __init__(self, files: Sequence[File]):
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        for file in files:
            if file.in_bucket:
                raise ConfigError.one(
                    "data.path",
                    file.path,
                    "must be in a file system with data.source=arrayrecord.",
                    "Copy the files to a disk, or mount the bucket as a folder.",
                )
        self.files = files
        path = files[0].path
        try:
            self._records = ArrayRecordDataSource([file.path for file in files])
            if not len(self._records):
                raise ValueError("it has no records")
            first = self._records[0]
        except Exception as error:  # its reader has another class for each fault
            raise ConfigError.one(
                "data.path",
                path if len(files) == 1 else f"{path} and {len(files) - 1} more",
                f"must be ArrayRecord files with records: {shortened(str(error))}.",
                "Set data.source=text or data.source=jsonl if the files are of that kind.",
            ) from error
        self._json = _is_json_object(first)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        with undamaged(lambda: self.where(index)):
            raw = self._records[index]
        check_length(len(raw))
        if not self._json:
            return decoded(raw)
        try:
            return from_json(raw)
        except ValueError as error:
            raise BadRecord(
                shortened(raw),
                f"must be a JSON object like record 0: {error}.",
                "Write all records as JSON objects, or all as text.",
            ) from error

    def where(self, index: int) -> str:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        # Asked for seldom: the reader of all files does not say where each of them ends.
        try:
            counts = [len(ArrayRecordDataSource([file.path])) for file in self.files]
        except Exception:  # as above; where it fails is not where the record is
            return f"{common_folder(self.files)}: record {index}"
        ends = np.cumsum(counts)
        which = int(np.searchsorted(ends, index, side="right"))
        return f"{self.files[which].path}: record {index - int(ends[which] - counts[which])}"

    def fingerprint(self, chosen: str) -> str:
        kind = chosen if self._json else ""
        return digest([kind, len(self), *identities(self.files)])


@contextlib.contextmanager
def undamaged(where: Callable[[], str]) -> Iterator[None]:
    """Explains what the reader of ArrayRecord finds: each chunk of a file has a checksum.

    Raises:
        ConfigError: the record that is `where` cannot be read.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # its reader has another class for each fault
        raise ConfigError.one(
            where(),
            None,
            f"must be in a whole ArrayRecord file: {shortened(str(error))}.",
            "Copy the file again from where it is whole, or leave it out of data.path.",
        ) from error


def _is_json_object(raw: bytes) -> bool:
    try:
        from_json(raw)
    except ValueError:
        return False
    return True
