"""Helpers for the section `data`: sources, paths, templates and mixture weights.

This module does not import jax.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxpipe.config.data_schema import DataConfig, SourceConfig
from maxpipe.config.items import MixtureStageConfig
from maxpipe.config.rules import did_you_mean
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.errors import ConfigError


def stage_ends(
    stages: Sequence[MixtureStageConfig], ramp: BatchRamp, sequence_length: int
) -> list[int]:
    """Return the number of sequences before the end of each stage. Each stage ends with a complete
    batch.
    """
    batch, edges = 0, []
    for stage in stages:
        if stage.steps is not None:
            batch += stage.steps
        else:
            sequences = -(-(stage.tokens or 0) // sequence_length)
            batch = ramp.num_batches(ramp.sequences_before(batch) + sequences)
        edges.append(ramp.sequences_before(batch))
    return edges


def train_sources(data: DataConfig) -> Mapping[str, SourceConfig]:
    """Return the training sources, keyed by name, in an order that does not depend on the config.

    Without a mixture, `data` is the only source, and its name is empty.
    """
    return {name: data.mixture[name] for name in sorted(data.mixture)} or {"": data}


def mixture_shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return the fraction of the sequences that each source provides. Weights are raised to the
    power of 1 / temperature.
    """
    largest = max(weights.values())
    flat = {
        name: (weight / largest) ** (1 / temperature) if weight else 0.0
        for name, weight in weights.items()
    }
    total = sum(flat.values())
    return {name: each / total for name, each in flat.items()}


COLUMNS = ("jsonl", "parquet", "arrayrecord", "tfds", "huggingface")
"""Source formats whose records can have columns."""
FILES = ("text", "jsonl", "parquet", "arrayrecord", "huggingface")
"""Source formats that read files."""

ONE_PATH = ("tfds", "tokens", "megatron")
"""Source formats with a single path or dataset name."""

SPLITS = ("validation", "train", "all")
"""Splits of the documents that a command can select."""

_VALIDATION = "validation."
_TEMPLATE = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]|\\[nt\\]")
_ESCAPES = {"{{": "{", "}}": "}", r"\n": "\n", r"\t": "\t", "\\\\": "\\"}


def validation_sets(data: DataConfig) -> dict[str, SourceConfig]:
    """Return the sources in `data.validation`, keyed by `validation.NAME`. These keys are unique,
    because names in a mixture have no dots.
    """
    return {validation_key(name): data.validation[name] for name in sorted(data.validation)}


def validation_key(name: str) -> str:
    """Return the key of a validation set in the mapping of all sources."""
    return f"{_VALIDATION}{name}"


def all_sources(data: DataConfig) -> dict[str, SourceConfig]:
    """Return all sources for training and evaluation, keyed by name."""
    return {**train_sources(data), **validation_sets(data)}


def check_split(name: str, known: Sequence[str]) -> None:
    """Raise ConfigError if the split given on the command line does not exist."""
    if name not in known:
        action = f"Write --split {did_you_mean(name, known) or known[0]}."
        rule = f"must be one of {', '.join(known)}."
        raise ConfigError.one("command line: --split", name, rule, action)


def is_synthetic(data: DataConfig) -> bool:
    """Whether all training sources are synthetic."""
    return all(each.source == "synthetic" for each in train_sources(data).values())


def section_of(name: str) -> str:
    """Return the config section of the source with this name."""
    if not name:
        return "data"
    return f"data.{name}" if name.startswith(_VALIDATION) else f"data.mixture.{name}"


def paths_of(config: SourceConfig) -> list[str]:
    """Return all paths of a source, in reading order."""
    return [config.path] if config.path else list(config.paths)


def parse_template_kwargs(given: Mapping[str, str]) -> dict[str, Any]:
    """Parse the values of `data.chat_template_kwargs`, which are JSON or plain text."""
    return {name: _parse_template_kwarg(text) for name, text in given.items()}


def _parse_template_kwarg(text: str) -> Any:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(found, float)
    return text if is_number and not math.isfinite(found) else found


def is_template(field: str) -> bool:
    """Whether a field name is a template over several fields."""
    return "{" in field


def split_template(template: str) -> list[tuple[str, str]]:
    r"""Split a template into pairs of fixed text and the column that follows the text.

    The column of the last pair is empty. `{name}` denotes a column, `{{` and `}}` denote braces,
    and `\n` and `\t` denote a line break and a tab.

    Raises:
        ValueError: a brace is unmatched, or a column has no name.
    """
    pieces, fixed, end = [], "", 0
    for found in _TEMPLATE.finditer(template):
        fixed += template[end : found.start()]
        end = found.end()
        if (name := found["name"]) is not None:
            if not name or name != name.strip():
                raise ValueError(f"{found[0]} is not a column name")
            pieces.append((fixed, name))
            fixed = ""
        elif found[0] in _ESCAPES:
            fixed += _ESCAPES[found[0]]
        else:
            raise ValueError(f"the {found[0]} at character {found.start() + 1} is unmatched")
    return [*pieces, (fixed + template[end:], "")]
