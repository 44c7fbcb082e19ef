"""Rules on what documents a run reads, and in which shares."""

from __future__ import annotations

import math
from collections.abc import Iterator

from maxpipe.config import mixture
from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.names import list_meant
from maxpipe.config.rules import did_you_mean, rule
from maxpipe.config.schema import Config
from maxpipe.errors import Finding

_SOURCES = ("data.source", "data.path", "data.mixture")


def named_sources(config: Config) -> Iterator[tuple[str, SourceConfig]]:
    """All sources that are read, with the section of each: `data`, or `data.mixture.NAME`."""
    for name, each in mixture.sources(config.data).items():
        yield (f"data.mixture.{name}" if name else "data"), each


@rule(*_SOURCES)
def _source_has_a_path(config: Config) -> Iterator[Finding]:
    for section, each in named_sources(config):
        source = each.source
        if source in ("text", "jsonl", "arrayrecord", "tfds") and not each.path:
            example = {"tfds": "c4/en:3.1.0", "text": "data/*.txt"}.get(source, f"data/*.{source}")
            yield Finding(
                f"{section}.path",
                f"must not be empty with {section}.source={source}.",
                f"Set {section}.path={example} (your own), or {section}.source=corpus.",
            )


@rule(*_SOURCES)
def _path_is_no_list(config: Config) -> Iterator[Finding]:
    for section, each in named_sources(config):
        path = each.path
        if path.startswith("[") and path.endswith("]") and "," in path:
            yield Finding(
                f"{section}.path",
                "must be one path, not a list.",
                list_meant("data.path").replace("data.path", f"{section}.path"),
            )


@rule(*_SOURCES)
def _one_source_or_a_mixture(config: Config) -> Iterator[Finding]:
    if config.data.mixture and config.data.path:
        yield Finding(
            "data.path",
            f"is not read with data.mixture, which has {', '.join(sorted(config.data.mixture))}.",
            "Leave it out, or give it a name of its own there: data.mixture.mine.path=...",
        )


@rule("data.mixture", is_first=True)
def _weights_or_epochs(config: Config) -> Iterator[Finding]:
    found = config.data.mixture
    for name, each in found.items():
        for key, value in (("weight", each.weight), ("epochs", each.epochs)):
            if not 0 <= value < math.inf:
                full = f"data.mixture.{name}.{key}"
                yield Finding(full, "must be a number from 0 on.", f"Set {full}=1.")
    with_weight = [name for name, each in found.items() if each.weight]
    with_epochs = [name for name, each in found.items() if each.epochs]
    if with_weight and with_epochs:
        yield Finding(
            f"data.mixture.{with_epochs[0]}.epochs",
            f"cannot stand beside data.mixture.{with_weight[0]}.weight: shares follow from weights "
            "or from epochs.",
            "Give all sources a weight, or all of them epochs.",
        )
    elif with_epochs and (without := [name for name in found if name not in with_epochs]):
        yield Finding(
            f"data.mixture.{without[0]}.epochs",
            "must be more than 0 where other sources have epochs.",
            f"Set data.mixture.{without[0]}.epochs=1, or leave the source out.",
        )


@rule("data.mixture", "data.mixture_stages", "data.mixture_temperature")
def _stages_are_of_the_mixture(config: Config) -> Iterator[Finding]:
    data, key = config.data, "data.mixture_stages"
    if not data.mixture:
        if data.mixture_stages:
            yield Finding(key, "is read with data.mixture only.", f"Set {key}=[].")
        if data.mixture_temperature != 1:
            key = "data.mixture_temperature"
            yield Finding(key, "is read with data.mixture only.", f"Set {key}=1.")
        return
    name = sorted(data.mixture)[0]
    example = f"Set \"{key}=['{name} 1 for 1000 steps']\"."
    try:
        stages = mixture.stages(data.mixture_stages)
    except ValueError as error:
        yield Finding(key, str(error), example)
        return
    for other in dict.fromkeys(name for stage in stages for name in stage.weights):
        if other not in data.mixture:
            guess = did_you_mean(other, data.mixture)
            action = f"Did you mean {guess}?" if guess else example
            known = ", ".join(sorted(data.mixture))
            yield Finding(key, f"names {other}, and data.mixture has {known}.", action)


@rule(*_SOURCES, "data.validation_fraction", "eval.batches")
def _validation_has_documents(config: Config) -> Iterator[Finding]:
    synthetic = all(each.source == "synthetic" for _, each in named_sources(config))
    if config.eval.batches and not config.data.validation_fraction and not synthetic:
        yield Finding(
            "data.validation_fraction",
            f"must be more than 0 when eval.batches is {config.eval.batches}: evaluation reads "
            "documents that training never sees.",
            "Set data.validation_fraction=0.05, or eval.batches=0.",
        )
