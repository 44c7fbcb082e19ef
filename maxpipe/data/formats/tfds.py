"""Datasets that TFDS prepared, read without TensorFlow."""

from __future__ import annotations

import os
import re
from typing import Any

from maxpipe.config.rules import did_you_mean
from maxpipe.data.formats.array_records import undamaged
from maxpipe.data.formats.files import described, digest
from maxpipe.data.formats.source import Record
from maxpipe.data.formats.text_of import shortened
from maxpipe.errors import ConfigError

_NAME = re.compile(r"[A-Za-z]\w*(/[\w+.-]+)?(:\d+\.\d+\.\d+)?")


class TfdsExamples:
    """The `train` split of a dataset that was prepared as ArrayRecord. Needs no TensorFlow."""

    name = "tfds"

    def __init__(self, dataset: str, folder: str):
        self._dataset = dataset
        if not dataset:
            raise ConfigError.one(
                "data.path",
                '""',
                "must name a dataset.",
                "Set data.path, e.g. data.path=c4/en:3.1.0.",
            )
        if not _NAME.fullmatch(dataset):
            raise ConfigError.one(
                "data.path",
                dataset,
                "must be name, name:version or name/config:version: a name with a namespace, such "
                "as huggingface:, would load code from the network.",
                "Set data.path, e.g. data.path=c4/en:3.1.0.",
            )
        tfds = _import_tfds()
        try:
            self._examples: Any = tfds.data_source(
                dataset,
                split="train",
                data_dir=os.path.expanduser(folder) or None,
                download=False,
                try_gcs=False,
            )
        except Exception as error:  # tfds reports a missing dataset in many ways
            raise _not_prepared(tfds, dataset, folder, error) from error
        paths = map(os.fspath, self._examples.dataset_info.splits["train"].filepaths)
        self.files = described(paths, self._examples.dataset_info.data_dir)
        if not len(self._examples):
            raise ConfigError.one(
                "data.path", dataset, "must have examples in its train split.", "Prepare it again."
            )

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        with undamaged(lambda: self.where(index)):
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
            f"Set data.path={guess}, if that is meant."
            if guess
            else "Correct the name, or data.tfds_dir."
        )
        rule += f"there is none, and tfds has no script that makes a dataset {name}."
        return ConfigError.one("data.path", dataset, rule, action)
    # Reading needs neither package; most scripts that make a dataset need both.
    code = f"import tensorflow_datasets as tfds; tfds.builder({dataset!r}, "
    code += f"data_dir={os.path.expanduser(folder) or None!r}, file_format='array_record')"
    return ConfigError.one(
        "data.path",
        dataset,
        rule + shortened(str(error)),
        "Run once: pip install tensorflow importlib_resources, then "
        f'python -c "{code}.download_and_prepare()"',
    )


def _import_tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ConfigError.one(
            "data.source",
            "tfds",
            f"needs the package tensorflow_datasets: {error}.",
            "Run: pip install tensorflow-datasets",
        ) from error
    return tensorflow_datasets
