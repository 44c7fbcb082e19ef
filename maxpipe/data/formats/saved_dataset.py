"""Hugging Face datasets that `save_to_disk` wrote, memory-mapped; the package is not needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from maxpipe.boundary import files as boundary
from maxpipe.boundary.files import scheme
from maxpipe.boundary.typed import parse
from maxpipe.data.formats.arrow import import_pyarrow, row_of, wanted
from maxpipe.data.formats.files import File, check_size, digest, identities, reaching, read
from maxpipe.data.formats.source import Record
from maxpipe.data.formats.text_of import BadRecord, shortened
from maxpipe.errors import ConfigError

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SPLIT = "train"
_MOST_STATE_BYTES = 1 << 22
_SLACK_BYTES = 1 << 20
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of a stream of Arrow batches."""


class _DataFile(TypedDict):
    filename: str


class _State(TypedDict):
    _data_files: list[_DataFile]
    _indices_data_files: NotRequired[list[_DataFile] | None]


class _Splits(TypedDict):
    splits: list[str]


class SavedDataset:
    """One document per row; of a dataset with splits those of `train`."""

    name = "huggingface"

    def __init__(self, paths: Sequence[str]):
        import_pyarrow(self.name)
        self._paths = list(paths)
        self._files = [file for path in paths for file in _data_files(path)]
        self._batches: list[Any] = []
        batch_files: list[int] = []
        for number, file in enumerate(self._files):
            found = _batches(file)
            self._batches += found
            batch_files += [number] * len(found)
        rows = [batch.num_rows for batch in self._batches]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._batch_files = np.array(batch_files, dtype=np.int64)
        if not sum(rows):
            raise ConfigError.one(
                "data.path", paths[0], "must hold rows; it has none.", "Save the dataset again."
            )

    def __reduce__(self) -> tuple[type[SavedDataset], tuple[list[str]]]:
        """Other processes map the files themselves: views would be sent as all that they show."""
        return SavedDataset, (self._paths,)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """The number of a row's batch, and its own in it."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        return which, index - (int(self._ends[which - 1]) if which else 0)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        import pyarrow

        which, row = self._place(index)
        file, batch = self._files[self._batch_files[which]], self._batches[which]
        with reaching(file.path):  # beyond the end of a file that was cut memory cannot be read
            check_size(file, os.stat(file.path).st_size)
        if some := wanted(columns, batch.schema.names):
            batch = batch.select(some)
        try:
            batch.slice(row, 1).validate(full=True)
        except pyarrow.ArrowInvalid as error:
            raise BadRecord(
                "", f"must be a row of its columns: {shortened(str(error))}.", "Save it again."
            ) from error
        return row_of(batch, row)

    def where(self, index: int) -> str:
        which, row = self._place(index)
        number = int(self._batch_files[which])
        first = int(np.searchsorted(self._batch_files, number))
        before = int(self._ends[which - 1] if which else 0)
        begin = int(self._ends[first - 1] if first else 0)
        return f"{self._files[number].path}: row {before - begin + row}"

    def fingerprint(self, chosen: str) -> str:
        return digest([chosen, len(self), *identities(self._files)])


def is_saved_dataset(path: str) -> bool:
    """Whether a folder is what `save_to_disk` writes."""
    folder = os.path.expanduser(path)
    return any(os.path.isfile(os.path.join(folder, name)) for name in (_STATE, _SPLITS))


def _data_files(path: str) -> list[File]:
    """The Arrow files of a saved dataset, in the order in which it lists them."""
    if scheme(path):
        raise ConfigError.one(
            "data.path",
            path,
            "must be in a file system with data.source=huggingface: it is mapped into memory.",
            "Copy the folder to a disk, or mount the bucket as one.",
        )
    folder = os.path.expanduser(path)
    if os.path.isfile(os.path.join(folder, _SPLITS)):
        splits = _read(folder, _SPLITS, _Splits)["splits"]
        if _SPLIT not in splits:
            there = f" (there are {', '.join(splits[:8])})" if splits else ""
            raise ConfigError.one(
                "data.path",
                path,
                f"must have a split {_SPLIT}{there}.",
                f"Name the folder of a split, such as {os.path.join(path, *splits[:1])}.",
            )
        folder = os.path.join(folder, _SPLIT)
    if not os.path.isfile(os.path.join(folder, _STATE)):
        raise ConfigError.one(
            "data.path",
            path,
            f"must be a folder that save_to_disk of `datasets` wrote, with {_STATE}: the Hugging "
            "Face hub is not read.",
            "Save it once: python -c \"import datasets; datasets.load_dataset('NAME')"
            ".save_to_disk('DIR')\", then set data.path=DIR.",
        )
    state = _read(folder, _STATE, _State)
    if state.get("_indices_data_files"):
        raise ConfigError.one(
            "data.path",
            path,
            "must hold its rows themselves, not a choice of them by number.",
            "Save it again: dataset.flatten_indices().save_to_disk('DIR').",
        )
    names = [each["filename"] for each in state["_data_files"]]
    for name in names:
        if name != os.path.basename(name) or not name.endswith(".arrow"):
            raise ConfigError.one(
                os.path.join(folder, _STATE),
                shortened(name),
                "must name Arrow files in this folder.",
                "Save the dataset again.",
            )
    found = []
    for name in names:
        file = os.path.join(folder, name)
        with reaching(file):
            found.append(File(name, file, os.path.getsize(file)))
    return found


def _read(folder: str, name: str, kind: Any) -> Any:
    path = os.path.join(folder, name)
    try:
        with reaching(path):
            return parse(boundary.read(path, _MOST_STATE_BYTES), kind)
    except ValueError as error:
        raise ConfigError.one(
            "data.path", path, f"must be what save_to_disk wrote: {error}.", "Save it again."
        ) from error


def _batches(file: File) -> list[Any]:
    """The record batches of a file: views of it, which take memory as they are read."""
    import pyarrow

    batches, size = [], 0
    try:
        with reaching(file.path), open(boundary.opened(file.path), "rb"):
            mapped = pyarrow.memory_map(file.path)
        if read(file, max(0, file.size_bytes - len(_END))) != _END:
            raise ValueError("it ends in the middle")
        with pyarrow.ipc.open_stream(mapped) as reader:
            for batch in reader:
                size += batch.get_total_buffer_size()  # not by offsets, which may be wrong
                if size > file.size_bytes + _SLACK_BYTES:
                    raise ValueError("its batches are compressed, and cannot be read at a position")
                batches.append(batch)
    except ConfigError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise ConfigError.one(
            "data.path",
            file.path,
            f"must be a whole file of a saved dataset: {shortened(str(error))}.",
            "Copy it again from where it is whole, or save the dataset again.",
        ) from error
    return batches
