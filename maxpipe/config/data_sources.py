"""What the section `data` says, in a form that is easier to read: its sources, paths, templates.

Weights of a mixture by stages of the run: `data.mixture_stages`, one text for each. No jax.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from maxpipe.config.data_schema import DataConfig, SourceConfig
from maxpipe.config.rules import did_you_mean
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.config.yaml_values import NAME_FORM
from maxpipe.errors import ConfigError

FORM = "NAME WEIGHT NAME WEIGHT ... for N steps, or ... for N tokens"
_TEXT = re.compile(r"(.+?)\s+for\s+(\d(?:_?\d){0,17})\s+(steps|tokens)", re.ASCII)


class MixtureStage(NamedTuple):
    """A part of the run with weights of its own."""

    weights: dict[str, float]
    """By the name of a source; those that are missing are 0."""
    length: int
    unit: Literal["steps", "tokens"]


def parse_mixture_stages(texts: Sequence[str]) -> list[MixtureStage]:
    """The stages of a config.

    Raises:
        ValueError: one cannot be read; the message is the rule.
    """
    return [_stage(text) for text in texts]


def _stage(text: str) -> MixtureStage:
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise ValueError(f"must be stages, and {text!r} is not {FORM}.")
    words = match[1].split()
    weights: dict[str, float] = {}
    for name, weight in zip(words[::2], words[1::2], strict=False):
        if name in weights:
            raise ValueError(f"must name a source once in a stage, and {text!r} has {name} twice.")
        weights[name] = _weight(weight, text)
    if len(words) % 2 or not all(map(NAME_FORM.fullmatch, weights)):
        raise ValueError(f"must be stages, and {text!r} is not {FORM}.")
    count = int(match[2].replace("_", ""))
    if not count or not any(weights.values()):
        raise ValueError(f"must be stages of some length with a weight above 0; {text!r} is not.")
    return MixtureStage(weights, count, match[3])  # type: ignore[arg-type]


def _weight(text: str, stage: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"must have weights of at least 0, and {stage!r} has {text}.")
    return value


def stage_ends(found: Sequence[MixtureStage], ramp: BatchRamp, sequence_length: int) -> list[int]:
    """The rows in front of the first batch behind each stage; a stage ends with a whole batch."""
    batch, edges = 0, []
    for stage in found:
        if stage.unit == "steps":
            batch += stage.length
        else:
            batch = ramp.num_batches(
                ramp.sequences_before(batch) - (-stage.length // sequence_length)
            )
        edges.append(ramp.sequences_before(batch))
    return edges


def train_sources(data: DataConfig) -> Mapping[str, SourceConfig]:
    """What training reads, by name, in an order that does not depend on the config's.

    Without a mixture it is `data` itself, under no name.
    """
    return {name: data.mixture[name] for name in sorted(data.mixture)} or {"": data}


def mixture_shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """The part of the sequences that each source has; weights are raised to 1 / temperature."""
    largest = max(weights.values())
    flat = {
        name: (weight / largest) ** (1 / temperature) if weight else 0.0
        for name, weight in weights.items()
    }
    total = sum(flat.values())
    return {name: each / total for name, each in flat.items()}


COLUMNS = ("jsonl", "parquet", "arrayrecord", "tfds", "huggingface")
"""Sources whose records have columns, or may."""
FILES = ("text", "jsonl", "parquet", "arrayrecord", "huggingface")
"""Sources that read files, by their paths."""

ONE_PATH = ("tfds", "tokens", "megatron")
"""Sources of one path, or name."""

SPLITS = ("validation", "train", "all")
"""Parts of the training's own documents, where a part can be named."""

_VALIDATION = "validation."
_TEMPLATE = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]|\\[nt\\]")
_ESCAPES = {"{{": "{", "}}": "}", r"\n": "\n", r"\t": "\t", "\\\\": "\\"}


def validation_sets(data: DataConfig) -> dict[str, SourceConfig]:
    """The sources of `data.validation`, by `validation.NAME`: no name in a mixture has a dot."""
    return {validation_key(name): data.validation[name] for name in sorted(data.validation)}


def validation_key(name: str) -> str:
    """The name of a set of `data.validation` among all sources."""
    return f"{_VALIDATION}{name}"


def all_sources(data: DataConfig) -> dict[str, SourceConfig]:
    """What is read for training or for evaluation, by name."""
    return {**train_sources(data), **validation_sets(data)}


def check_split(name: str, known: Sequence[str]) -> None:
    """Raises ConfigError if the command line names documents that are not known."""
    if name not in known:
        action = f"Give {did_you_mean(name, known) or known[0]}."
        rule = f"must be one of {', '.join(known)}."
        raise ConfigError.one("command line: --split", name, rule, action)


def is_synthetic(data: DataConfig) -> bool:
    """Whether no text is trained on."""
    return all(each.source == "synthetic" for each in train_sources(data).values())


def section_of(name: str) -> str:
    """The section that has the source of this name."""
    if not name:
        return "data"
    return f"data.{name}" if name.startswith(_VALIDATION) else f"data.mixture.{name}"


def paths_of(config: SourceConfig) -> list[str]:
    """All paths of a source, in the order in which they are read."""
    return [config.path] if config.path else list(config.paths)


def parse_template_kwargs(given: Mapping[str, str]) -> dict[str, Any]:
    """The values of `data.chat_template_kwargs`: JSON where it is such, else texts."""
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
    """Whether the name of a field is a template over several."""
    return "{" in field


def split_template(template: str) -> list[tuple[str, str]]:
    r"""A template in pieces: fixed text, and the column that follows; the last piece has none.

    `{name}` stands for a column, `{{` and `}}` for braces, `\n` and `\t` for a line break and a
    tab.

    Raises:
        ValueError: a brace without counterpart, or a column without a name.
    """
    pieces, fixed, end = [], "", 0
    for found in _TEMPLATE.finditer(template):
        fixed += template[end : found.start()]
        end = found.end()
        if (name := found["name"]) is not None:
            if not name or name != name.strip():
                raise ValueError(f"{found[0]} names no column")
            pieces.append((fixed, name))
            fixed = ""
        elif found[0] in _ESCAPES:
            fixed += _ESCAPES[found[0]]
        else:
            raise ValueError(f"the {found[0]} at character {found.start() + 1} has no counterpart")
    return [*pieces, (fixed + template[end:], "")]
