"""The declaration of the keys that say what a run reads, as `schema.py` has the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Documents for validation, under a name of their own: their loss is `eval/NAME/loss`."""

    source: Literal["corpus", "text", "jsonl", "arrayrecord", "tfds", "synthetic"] = "corpus"
    """`corpus`: the source files of Python's standard library, on every machine. `text`: files,
    one document each. `jsonl`: one JSON object per line. `arrayrecord`: files of UTF-8 or JSON
    records. `tfds`: a dataset prepared as ArrayRecord. `synthetic`: random tokens."""
    path: str = ""
    """File, folder or glob pattern; for `tfds` the name of the dataset, e.g. `c4/en:3.1.0`."""
    tfds_dir: str = ""
    """Folder in which `tfds` datasets were prepared. Empty means the tfds default."""
    field: str = "text"
    """Name of the text field in `jsonl`, JSON `arrayrecord` and `tfds` records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSourceConfig(SourceConfig):
    """A source of `data.mixture`: its documents, and how much of each batch comes from them."""

    weight: float = 0.0
    """Its share of the sequences is its weight divided by the sum of all. Where no source has a
    weight or epochs, each is read in proportion to its size."""
    epochs: float = 0.0
    """In place of weights, for all sources or none: how often it is read while the others are read
    as often as theirs say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(SourceConfig):
    """Where text comes from."""

    mixture: dict[str, MixedSourceConfig] = field(default_factory=dict)
    """Several sources in place of `data.source`, by name: `data.mixture.web.path=web/*.txt`. Each
    sequence is of one source. Weights may change when a run goes on; sources may not."""
    mixture_temperature: float = 1.0
    """Weights are raised to the power of 1 / this: more than 1 makes shares more alike, and what
    is near infinity makes them equal."""
    mixture_stages: list[str] = field(default_factory=list)
    """Other weights for the start of the run, one text for each stage, in their order: `NAME WEIGHT
    NAME WEIGHT ... for N steps`, or `... for N tokens`, such as `web 0.9 code 0.1 for 1000 steps`.
    A source that is not named is not read then. Behind the last stage come the weights of
    `data.mixture`."""
    validation_fraction: float = 0.05
    """Share of the documents, drawn by the seed, that is only used for evaluation."""
    allow_change: bool = False
    """Go on from the run's checkpoint although documents, seed, packing or tokenizer are others
    than when it was saved. Samples may be repeated or left out then."""
    prefetch_batches: int = 4
    """Batches made ready ahead of the step that needs them."""
    threads: int = 2
    """Threads that read and pack."""
