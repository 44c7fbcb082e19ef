"""Conversion between the `model` section and `config.json`, without jax."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxpipe.config.keys import KEYS, family_section, names_in
from maxpipe.config.load import load
from maxpipe.config.rules import did_you_mean
from maxpipe.errors import ConfigError
from maxpipe.huggingface.normalize_config import normalize
from maxpipe.io.files import read
from maxpipe.io.typed_json import parse_json
from maxpipe.models.config import ModelConfig
from maxpipe.models.huggingface import HuggingFace, Kept, Ours, Unlike, Whole, written
from maxpipe.models.registry import FAMILIES

FILE = "config.json"
_MAX_BYTES = 1 << 24
_MAX_LAYERS = 10_000
_DTYPES = ("dtype", "torch_dtype")

# Keys that any config.json may have and that do not affect the model's logits.
_IGNORED_KEYS = frozenset(
    {"architectures", "model_type", "transformers_version", "_name_or_path", *_DTYPES}
    | {"auto_map", "_attn_implementation_autoset", "attn_implementation", "is_llama_config"}
    | {"return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"}
    | {"id2label", "label2id", "problem_type", "is_encoder_decoder", "torchscript", "is_decoder"}
    | {"original_max_position_embeddings"}  # handled with the rotary parameters
    | {"cache_implementation", "unsloth_fixed", "unsloth_version", "cross_attention_hidden_size"}
)


@dataclass(frozen=True)
class ModelDescription:
    """Content of a `config.json`."""

    table: HuggingFace
    section: dict[str, Any]
    """Values of the `model` section, with the family's values in a nested dict."""
    exported_keys: dict[str, Any]
    """Values that an export copies unchanged."""
    unknown: tuple[str, ...]
    """Unknown keys, which are ignored."""
    whole: Whole | None = None
    """The larger model that contains this model."""
    differences: tuple[str, ...] = ()
    """Messages about duplicate values that differ."""

    @property
    def config(self) -> ModelConfig:
        """Return the model config, with defaults for all keys that the section does not set."""
        return model_of(self.section, FILE)


def read_description(folder: Path) -> ModelDescription:
    """Read the `config.json` of a folder.

    Raises:
        ConfigError: the file cannot be read, or no family supports the model.
    """
    path = folder / FILE
    try:
        content = parse_json(read(path, _MAX_BYTES), dict[str, Any])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError.one(
            str(path),
            None,
            f"must be the config of a Hugging Face model: {reason}.",
            "Use a folder written by save_pretrained, or a snapshot of the hub.",
        ) from error
    table, whole, family = _table(path, content)
    if whole is not None:
        inner = content.get(whole.section)
        if not isinstance(inner, dict):
            rule = f"must be an object with the language model's config of {whole.architecture}."
            raise ConfigError.one(f"{path}: {whole.section}", json.dumps(inner), rule, _COPY)
    try:
        found = normalize(content, table, whole)
    except Unlike as unlike:
        raise _conversion_error(str(path), table, unlike) from unlike
    content = found.content
    ours = _read(path, table, content)
    section: dict[str, Any] = {"family": family, family: {}}
    for name, value in ours.items():
        *outer, key = name.split(".")
        (section[family] if outer else section)[key] = value
    if ours["num_layers"] > _MAX_LAYERS:
        rule = f"must be at most {_MAX_LAYERS}, the maximum number of layers."
        raise ConfigError.one(f"{path}: num_hidden_layers", ours["num_layers"], rule, _COPY)
    known = table.names() | _IGNORED_KEYS
    kept = {
        row.theirs: content[row.theirs]
        for row in table.keys
        if isinstance(row, Kept) and row.theirs in content
    }
    unknown = (*(name for name in content if name not in known), *found.unread)
    model_of(section, str(path))  # checks every rule of the model
    return ModelDescription(table, section, kept, unknown, whole, tuple(found.differences))


def model_of(section: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the config of a `model` section.

    Raises:
        ConfigError: the section violates a rule.
    """
    # The other config sections can have any valid values.
    others = {"train": {"steps": 1}, "tokenizer": {"kind": "huggingface", "path": FILE}}
    return load([], {**others, "model": section}, where).config.model


_COPY = "Copy config.json again from the source of the folder."


def _table(path: Path, content: Mapping[str, Any]) -> tuple[HuggingFace, Whole | None, str]:
    known: dict[str, tuple[HuggingFace, Whole | None, str]] = {}
    by_type: dict[str, tuple[HuggingFace, Whole | None, str]] = {}
    for family in FAMILIES.values():
        for table in family.huggingface:
            known[table.architecture] = by_type[table.model_type] = (table, None, family.name)
            for each in table.containers:
                found = (table, each, family.name)
                known[each.architecture] = by_type[each.model_type] = found
    names, kind = content.get("architectures"), content.get("model_type")
    if isinstance(kind, str) and kind in by_type and _is_base(names, by_type[kind]):
        return by_type[kind]
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name in known:
        return known[name]
    guess = did_you_mean(name, known) if isinstance(name, str) else ""
    raise ConfigError.one(
        f"{path}: architectures",
        json.dumps(names)[:200],
        f"must be a list with one of {', '.join(sorted(known))}, or null with the model_type of "
        "one of them.",
        f"Did you mean {guess}?" if guess else "Use the folder of one of these models.",
    )


def _is_base(names: Any, found: tuple[HuggingFace, Whole | None, str]) -> bool:
    """Return whether `names` is empty or names only the base class that AutoModel saves."""
    table, whole, _ = found
    last = (whole or table).architecture
    base = last.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") + "Model"
    return names in (None, [], [base], [base.replace("Model", "TextModel")])


def _read(path: Path, table: HuggingFace, content: Mapping[str, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for row in table.keys:
        try:
            for name, value in row.read(content, ours).items():
                ours[name] = _coerce(f"model.{name}", value)
        except Unlike as unlike:
            raise _conversion_error(str(path), table, unlike) from unlike
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            given = {name: content.get(name) for name in row.names}
            rule = f"must have the format of {table.architecture}: {error}."
            raise ConfigError.one(str(path), json.dumps(given)[:200], rule, _COPY) from error
    return ours


def _conversion_error(where: str, table: HuggingFace, unlike: Unlike) -> ConfigError:
    return ConfigError.one(
        f"{where}: {unlike.key}",
        json.dumps(unlike.value)[:200],
        unlike.rule,
        unlike.action
        or f"maxpipe does not support this variant of {table.architecture}: use a model without "
        "this setting, or train it with its original software.",
    )


def _coerce(key: str, value: Any) -> Any:
    """Convert a value to the type of our key. Integers are accepted as floats."""
    kind = KEYS[key]
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if kind in (int, float, bool) and type(value) is not kind:
        names = {int: "an integer", float: "a number", bool: "true or false"}
        raise Unlike(key, value, f"must be {names[kind]}.")
    return value


# Conversion to config.json.


def values(config: ModelConfig) -> dict[str, Any]:
    """Return a model's values, keyed by name below `model`."""
    own = FAMILIES[config.family].section() if config.own is None else config.own
    inner = family_section(config.family)
    return {name: getattr(config, name) for name in names_in("model")} | {
        f"{config.family}.{name}": getattr(own, name) for name in names_in(inner)
    }


def table_for(config: ModelConfig) -> tuple[HuggingFace, dict[str, Any]]:
    """Return the equivalent class of transformers, and its config.json values for a model.

    Raises:
        ConfigError: no class is equivalent.
    """
    ours = values(config)
    family = FAMILIES[config.family]
    last: ConfigError | None = None
    for table in family.huggingface:
        try:
            return table, written(table.keys, ours)
        except Unlike as unlike:
            last = ConfigError.one(
                unlike.key,
                unlike.value,
                f"{unlike.rule.rstrip('.')} in a folder of {table.architecture}.",
                "A model with this value cannot be converted to the Hugging Face format: keep it "
                "as a checkpoint of maxpipe.",
            )
    if last is not None:
        raise last
    raise ConfigError.one(
        "model.family",
        config.family,
        "has no Hugging Face format.",
        f"Families with a Hugging Face format: {', '.join(_exportable_families())}.",
    )


def _exportable_families() -> Iterator[str]:
    return (each.name for each in FAMILIES.values() if each.huggingface)


def to_json(
    table: HuggingFace, said: Mapping[str, Any], kept: Ours, dtype: str, defaults: Ours
) -> str:
    """Return config.json with the table values, and the kept keys from `kept` or else
    `defaults`.
    """
    others = {
        row.theirs: found[row.theirs]
        for found in ({**defaults, **kept},)
        for row in table.keys
        if isinstance(row, Kept) and row.theirs in found
    }
    about = {"architectures": [table.architecture], "model_type": table.model_type}
    # Different releases of transformers read different keys.
    types = dict.fromkeys(_DTYPES, dtype)
    return json.dumps({**about, **types, **others, **said}, indent=2) + "\n"
