"""Readers for ArrayRecord files with text or JSON records, and for TFDS datasets.

TensorFlow is not required.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxpipe.config.rules import did_you_mean
from maxpipe.data.formats.files import File, common_folder, digest, identities, stat_files
from maxpipe.data.formats.record_text import (
    BadRecord,
    check_length,
    decode_utf8,
    from_json,
    shorten,
)
from maxpipe.data.formats.source import Record, place_of
from maxpipe.errors import Code, ConfigError


class ArrayRecords:
    """Source with one document per record. All records are JSON objects, or all are UTF-8 text."""

    name = "arrayrecord"

    def __init__(self, files: Sequence[File]):
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        for file in files:
            if file.in_bucket:
                rule = "must be in a file system if data.source=arrayrecord."
                action = "Copy the files to a disk, or mount the bucket as a folder."
                raise ConfigError.one(Code.DATA_FORMAT, "data.path", file.path, rule, action)
        self.files = files
        path = files[0].path
        try:
            self._records = ArrayRecordDataSource([file.path for file in files])
            if not len(self._records):
                raise ValueError("the files contain no records")
            first = self._records[0]
        except Exception as error:  # the reader raises various types of exceptions
            raise ConfigError.one(
                Code.DATA_FORMAT,
                "data.path",
                path if len(files) == 1 else f"{path} and {len(files) - 1} more",
                f"must be ArrayRecord files with records: {shorten(str(error))}.",
                "Set data.source=text or data.source=jsonl if the files have that format.",
            ) from error
        self._json = True
        try:
            from_json(first)
        except ValueError:
            self._json = False

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        with wrap_damage_errors(lambda: self.where(index)):
            raw = self._records[index]
        check_length(len(raw))
        if not self._json:
            return decode_utf8(raw)
        try:
            return from_json(raw)
        except ValueError as error:
            rule = f"must be a JSON object like record 0: {error}."
            action = "Write all records as JSON objects, or all as text."
            raise BadRecord(shorten(raw), rule, action) from error

    def where(self, index: int) -> str:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        # A reader opened on several files does not report where each file ends. This code runs
        # rarely.
        try:
            counts = [len(ArrayRecordDataSource([file.path])) for file in self.files]
        except Exception:  # the record itself may be readable
            return f"{common_folder(self.files)}: record {index}"
        which, record = place_of(np.cumsum(counts), index)
        return f"{self.files[which].path}: record {record}"

    def fingerprint(self, chosen: str) -> str:
        kind = chosen if self._json else ""
        return digest([kind, len(self), *identities(self.files)])


@contextlib.contextmanager
def wrap_damage_errors(where: Callable[[], str]) -> Iterator[None]:
    """Convert errors of the ArrayRecord reader, which verifies checksums, to ConfigError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # the reader raises various types of exceptions
        rule = f"must be in a complete ArrayRecord file: {shorten(str(error))}."
        action = "Copy the file again from an intact source, or remove it from data.path."
        raise ConfigError.one(Code.DATA_DAMAGED, where(), None, rule, action) from error


_NAME = re.compile(r"[A-Za-z]\w*(/[\w+.-]+)?(:\d+\.\d+\.\d+)?")


class TfdsExamples:
    """Examples in the `train` split of a TFDS dataset that was prepared as ArrayRecord."""

    name = "tfds"

    def __init__(self, dataset: str, folder: str):
        self._dataset = dataset
        if not dataset:
            action = "Set data.path, e.g. data.path=c4/en:3.1.0."
            raise ConfigError.one(
                Code.DATA_MISSING, "data.path", '""', "must name a dataset.", action
            )
        if not _NAME.fullmatch(dataset):
            rule = "must be name, name:version or name/config:version: a name with a namespace, "
            rule += "such as huggingface:, would load code from the network."
            action = "Set data.path, e.g. data.path=c4/en:3.1.0."
            raise ConfigError.one(Code.DATA_MISSING, "data.path", dataset, rule, action)
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            rule = f"requires the package tensorflow_datasets: {error}."
            action = "Run: pip install tensorflow-datasets"
            raise ConfigError.one(Code.ENV_PACKAGE, "data.source", "tfds", rule, action) from error
        try:
            self._examples: Any = tfds.data_source(
                dataset,
                split="train",
                data_dir=os.path.expanduser(folder) or None,
                download=False,
                try_gcs=False,
            )
        except Exception as error:  # tfds raises various types of exceptions for a missing dataset
            raise _not_prepared(tfds, dataset, folder, error) from error
        paths = map(os.fspath, self._examples.dataset_info.splits["train"].filepaths)
        self.files = stat_files(paths, self._examples.dataset_info.data_dir)
        if not len(self._examples):
            raise ConfigError.one(
                Code.DATA_EMPTY,
                "data.path",
                dataset,
                "must have examples in its train split.",
                "Prepare the dataset again.",
            )

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        with wrap_damage_errors(lambda: self.where(index)):
            return self._examples[index]

    def where(self, index: int) -> str:
        return f"{self._dataset}: example {index}"

    def fingerprint(self, chosen: str) -> str:
        info = self._examples.dataset_info
        split = info.splits["train"]
        return digest([info.full_name, chosen, split.num_bytes, *split.shard_lengths])


def _not_prepared(tfds: Any, dataset: str, folder: str, error: Exception) -> ConfigError:
    place = folder or "the tfds default folder"
    rule = f"must be prepared as ArrayRecord in {place} with a train split: "
    name = re.split("[/:]", dataset)[0]
    known = tfds.list_builders(with_community_datasets=False)
    if name not in known:
        guess = did_you_mean(name, known)
        action = (
            f"Set data.path={guess} if this is the intended dataset."
            if guess
            else "Correct the name, or set data.tfds_dir to the parent folder of the dataset."
        )
        rule += f"no prepared dataset found, and tfds has no builder named {name}."
        return ConfigError.one(Code.DATA_MISSING, "data.path", dataset, rule, action)
    # Reading requires neither package, but most dataset builders require both.
    code = f"import tensorflow_datasets as tfds; tfds.builder({dataset!r}, "
    code += f"data_dir={os.path.expanduser(folder) or None!r}, file_format='array_record')"
    return ConfigError.one(
        Code.ENV_PACKAGE,
        "data.path",
        dataset,
        rule + shorten(str(error)),
        "Run once: pip install tensorflow importlib_resources, then "
        f'python -c "{code}.download_and_prepare()"',
    )
