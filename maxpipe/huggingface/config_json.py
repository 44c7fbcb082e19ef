"""Convert between the `model` config section and a Hugging Face `config.json`, without jax.

A `config.json` may define a value under several keys. Such duplicates are resolved first, with the
precedence of transformers 5, so that each row of a family's conversion table reads a single key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from maxpipe.config.load import load
from maxpipe.config.rules import did_you_mean
from maxpipe.config.schema import KEYS, names_in
from maxpipe.config.sections.model import family_section
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface import quantization
from maxpipe.huggingface.quantization import Quantization
from maxpipe.huggingface.tensor_layouts import composite_name, composite_table
from maxpipe.io.files import read
from maxpipe.io.typed_json import parse_json
from maxpipe.models.config import ModelConfig
from maxpipe.models.huggingface import (
    PER_LAYER,
    WITHOUT_MTP,
    HuggingFace,
    Kept,
    LayerList,
    Ours,
    Rotary,
    Theirs,
    Twice,
    UnsupportedError,
    VisionTable,
    Whole,
    an_object,
    written,
)
from maxpipe.models.registry import FAMILIES, describe

_LENGTH, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_TYPES = Twice("dtype", "torch_dtype")
_LENGTH_SCALING_TYPES = ("llama3", "yarn", "longrope", "su")
"""RoPE types that depend on the original context length."""


@dataclass
class NormalizedConfig:
    """A config.json whose duplicate values have been resolved."""

    content: dict[str, Any]
    differences: list[str] = field(default_factory=list)
    """Messages about duplicate keys with different values."""
    unread: list[str] = field(default_factory=list)
    """Key paths that neither transformers nor maxpipe reads."""

    def first_stated(self, *statements: tuple[str, Any], default: Any = None) -> Any:
        """Return the first value that is not None, and record later values that differ from it."""
        said = [(path, value) for path, value in statements if value is not None]
        if not said:
            return default
        (path, used), *others = said
        for other, value in others:
            self._note(path, used, other, value)
        return used

    def note_unread(self, path: str, used: Any, other: str, value: Any) -> None:
        """Record a value that transformers ignores, if it differs from the value in effect."""
        if value is not None and used is not None:
            self._note(path, used, other, value)

    def _note(self, path: str, used: Any, other: str, value: Any) -> None:
        if used != value:
            self.differences.append(
                f"config.json: {path} = {_shown(used)} and {other} = {_shown(value)} differ: "
                f"{path} is used, as in transformers"
            )


def normalize(content: Theirs, table: HuggingFace, whole: Whole | None = None) -> NormalizedConfig:
    """Resolve the duplicate values of a config.json, so that each table row reads a single key.

    Raises:
        UnsupportedError: no family supports one of the values.
    """
    found = NormalizedConfig(dict(content))
    if whole is not None:
        _select_language_model(found, content, table, whole)
    if found.content.get(PER_LAYER) and PER_LAYER not in table.names():
        raise UnsupportedError(
            PER_LAYER,
            found.content[PER_LAYER],
            "must be null: per-layer overrides are not supported.",
        )
    for twice in (_TYPES, *table.duplicate_keys):
        _merge_duplicate(found, twice)
    for row in table.keys:
        if not isinstance(row, LayerList):
            continue
        if (other := row.restated(found.content)) is not None:
            found.note_unread(row.names[0], found.content[row.names[0]], *other)
    rows = [row for row in table.keys if isinstance(row, Rotary)]
    settings = [_rotary(found, row) for row in rows]
    for row in rows:
        for name in {*row.names} - {"rope_parameters"}:
            found.content.pop(name, None)
    found.content["rope_parameters"] = (
        {row.layers: said for row, said in zip(rows, settings, strict=True)}
        if any(row.layers for row in rows)
        else next(iter(settings), {})
    )
    found.unread = list(dict.fromkeys(found.unread))
    return found


def _select_language_model(
    found: NormalizedConfig, content: Theirs, table: HuggingFace, whole: Whole
) -> None:
    """Select the language model's section, which overrides top-level keys except weight tying."""
    inner = dict(content[whole.section])
    for name in sorted(table.names() & content.keys() & inner.keys() - {_TIED}):
        found.first_stated((f"{whole.section}.{name}", inner[name]), (name, content[name]))
    inner[_TIED] = found.first_stated(
        (_TIED, content.get(_TIED)), (f"{whole.section}.{_TIED}", inner.get(_TIED))
    )
    found.content = inner


_TIED = "tie_word_embeddings"


def _merge_duplicate(found: NormalizedConfig, twice: Twice) -> None:
    used, other = (found.content.get(name) for name in (twice.primary, twice.other))
    if twice.is_read:
        value = found.first_stated((twice.primary, used), (twice.other, other))
    else:
        value = twice.default if used is None else used
        found.note_unread(twice.primary, value, twice.other, other)
    if value is not None:
        found.content[twice.primary] = value
        if twice.other in found.content:
            found.content[twice.other] = value


def _rotary(found: NormalizedConfig, row: Rotary) -> dict[str, Any]:
    """Return the RoPE parameters, including the base, type and context lengths."""
    content = found.content
    if row.enabled and _has_null_base(found):
        return {"rope_theta": None, "rope_type": "default"}
    scaling, where = {}, "rope_parameters"
    if row.has_legacy_keys:
        scaling = an_object(content, "rope_scaling")
    if row.layers:
        said, where = _rope_of_layer_type(found, row, scaling)
    else:
        said = _drop_nulls(an_object(content, "rope_parameters"))
        if content.get("rope_parameters") is None and not scaling:
            said = dict(row.defaults)
        if scaling:
            said, where = _rope_from_scaling(found, _drop_nulls(scaling), said), "rope_scaling"
    kind = found.first_stated(
        (f"{where}.rope_type", said.get("rope_type")),
        (f"{where}.type", said.pop("type", None)),
        default="default",
    )
    said["rope_type"] = kind
    theta = found.first_stated(
        (f"{where}.rope_theta", said.get("rope_theta")),
        (row.legacy_theta_key, content.get(row.legacy_theta_key) if row.has_legacy_keys else None),
    )
    said["rope_theta"] = row.default if theta is None else theta
    share = found.first_stated(
        (f"{where}.{_SHARE}", said.get(_SHARE)),
        (_SHARE, None if row.layers else content.get(_SHARE)),
    )
    if share is not None:
        said[_SHARE] = share
        if not row.layers:
            content[_SHARE] = share
    if isinstance(kind, str) and not row.layers:
        _lengths(found, row, said, where, kind)
    _drop_unread(found, row, said, where, kind)
    return said


_SHARE = "partial_rotary_factor"


def _has_null_base(found: NormalizedConfig) -> bool:
    """Return whether the RoPE base is null, and record the RoPE parameters without effect."""
    content = found.content
    where = "rope_scaling" if an_object(content, "rope_scaling") else "rope_parameters"
    said = an_object(content, where)
    if (said if "rope_theta" in said else content).get("rope_theta", 0) is not None:
        return False
    named = sorted(name for name, value in said.items() if value not in (None, "default"))
    found.unread += [f"{where}.{name}" for name in named]
    return True


def _drop_nulls(said: Theirs) -> dict[str, Any]:
    return {name: value for name, value in said.items() if value is not None}


def _rope_from_scaling(
    found: NormalizedConfig, scaling: dict[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `rope_scaling`, which overrides `rope_parameters`, and record values that differ."""
    mine = {**scaling, "rope_type": scaling.get("rope_type", scaling.get("type"))}
    outside = {"rope_theta": found.content.get("rope_theta")} | _drop_nulls(mine)
    for name, value in parameters.items():
        used = outside.get(name)
        path = f"rope_scaling.{name}" if name in mine else name
        found.note_unread(path, used, f"rope_parameters.{name}", value)
        if used is None:
            found.unread.append(f"rope_parameters.{name}")
    return scaling


def _rope_of_layer_type(
    found: NormalizedConfig, row: Rotary, scaling: Theirs
) -> tuple[dict[str, Any], str]:
    """Return the RoPE parameters of one layer type. Values in `rope_scaling` take precedence."""
    parameters = an_object(found.content, "rope_parameters")
    inner = parameters.get(row.layers)
    if inner is not None:
        said = _drop_nulls(an_object(parameters, row.layers))
    else:
        no_parameters = found.content.get("rope_parameters") is None
        said = {"rope_type": "default", **(row.defaults if no_parameters else {})}
    where = f"rope_parameters.{row.layers}"
    flat = {
        name: value
        for name, value in parameters.items()
        if value is not None and not isinstance(value, dict)
    }
    if row.reads_flat:
        scaling = _flat_scaling(row, flat, scaling, said, nested=inner is not None)
    else:
        found.unread += [f"rope_parameters.{name}" for name in flat]
    if row.scalings:
        for name, value in _drop_nulls(scaling).items():
            if inner is not None and not row.reads_flat:
                found.first_stated(
                    (f"rope_scaling.{name}", value), (f"{where}.{name}", said.get(name))
                )
            said[name] = value
        where = "rope_scaling" if scaling else where
    return said, where


def _flat_scaling(
    row: Rotary, flat: Theirs, scaling: Theirs, said: dict[str, Any], *, nested: bool
) -> Theirs:
    """Return the parameters outside the entries of layer types, if `Rotary.reads_flat` is set."""
    if nested and not scaling:
        said.setdefault(_SHARE, 1.0)
        return {}
    said.clear()
    said["rope_type"] = "default"
    outside = _drop_nulls(scaling or flat)
    kind = outside.pop("rope_type", outside.pop("type", None))
    if kind is None or not row.scalings.keys() - {"default"}:
        return {}
    outside.pop("rope_theta", None)
    del said["rope_type"]
    factor = {"attention_factor": 1.0} if kind == "yarn" else {}
    return {**factor, **outside, "rope_type": kind}


def _lengths(
    found: NormalizedConfig, row: Rotary, said: dict[str, Any], where: str, kind: str
) -> None:
    """Set the original context length, and the ratio of maximum to original length as `factor`."""
    content = found.content
    length = content.get(_LENGTH) or row.default_max_positions or None
    if kind not in _LENGTH_SCALING_TYPES:
        return
    stated = said.get(_ORIGINAL)
    outside = content.get(_ORIGINAL) or row.default_original_positions or None
    original = found.first_stated((_ORIGINAL, outside), (f"{where}.{_ORIGINAL}", stated))
    if original is None:
        original = length
    if original is None:
        return
    said[_ORIGINAL] = original
    _check_yarn_factor(content, kind, where)
    if kind == "llama3" or length is None or not _are_numbers(length, original):
        return
    ratio = length / original
    if said.get("factor") is None:
        said["factor"] = ratio
    elif content.get(_LENGTH) and ratio != 1:
        path = f"{_LENGTH} / {_ORIGINAL}"
        found.note_unread(f"{where}.factor", said["factor"], path, ratio)


def _check_yarn_factor(content: Theirs, kind: str, where: str) -> None:
    """Check that a YaRN config has a `factor`. transformers computes the factor only if the key is
    null.

    Raises:
        UnsupportedError: the `factor` key is missing.
    """
    objects = [content.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if kind == "yarn" and any(objects) and not any("factor" in said for said in objects):
        rule = "is required with rope_type = 'yarn', as in transformers."
        action = (
            f"Set {where}.factor to the published factor, or to null for the ratio "
            f"{_LENGTH} / {_ORIGINAL}."
        )
        raise UnsupportedError(f"{where}.factor", None, rule, action)


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) and value > 0 for value in values)


def _drop_unread(
    found: NormalizedConfig, row: Rotary, said: dict[str, Any], where: str, kind: Any
) -> None:
    """Drop RoPE parameters that the RoPE type does not use.

    Raises:
        UnsupportedError: a partial rotary factor is set, but the RoPE type does not support one.
    """
    rows = row.rows(kind) if isinstance(kind, str) else ()
    if isinstance(kind, str) and kind != "default" and kind not in row.scalings:
        return  # a later check rejects this RoPE type
    known = {name for each in rows for name in each.names} | {"rope_theta", "rope_type"}
    if _SHARE not in known and said.get(_SHARE, 1) != 1:
        rule = f"must be 1 with rope_type = {kind!r}, which does not support partial RoPE."
        raise UnsupportedError(f"{where}.{_SHARE}", said[_SHARE], rule)
    for name in said.keys() - known:
        if name != _SHARE and name not in _ALWAYS_SET:
            found.unread.append(f"{where}.{name}")
        del said[name]


_ALWAYS_SET = (_ORIGINAL, "factor")
"""RoPE parameters that configs set for all scaling types, although only some types use these
parameters.
"""


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def lines(found: Sequence[str], most: int = 8) -> list[str]:
    """Return the first `most` messages, followed by a line that counts the remaining messages."""
    more = [f"and {len(found) - most} more duplicate values that differ"] * (len(found) > most)
    return [*found[:most], *more]


FILE = "config.json"
_MAX_BYTES = 1 << 24
_MAX_LAYERS = 10_000
_DTYPES = ("dtype", "torch_dtype")

# Keys that may appear in any config.json and do not affect the model's logits.
_IGNORED_KEYS = frozenset(
    {"architectures", "model_type", "transformers_version", "_name_or_path", *_DTYPES}
    | {"auto_map", "_attn_implementation_autoset", "attn_implementation", "is_llama_config"}
    | {"return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"}
    | {"id2label", "label2id", "problem_type", "is_encoder_decoder", "torchscript", "is_decoder"}
    | {"original_max_position_embeddings"}  # handled with the rotary parameters
    | {quantization.KEY}  # handled separately
    | {"cache_implementation", "unsloth_fixed", "unsloth_version", "cross_attention_hidden_size"}
)


@dataclass(frozen=True)
class ModelDescription:
    """A model that a `config.json` describes."""

    table: HuggingFace
    section: dict[str, Any]
    """Values of the `model` section, with the family's values in a nested dict."""
    exported_keys: dict[str, Any]
    """Keys and values of config.json that an export copies unchanged."""
    unknown: tuple[str, ...]
    """Unknown keys of config.json, which are ignored."""
    whole: Whole | None = None
    """Composite model that contains this language model, if any."""
    differences: tuple[str, ...] = ()
    """Messages about duplicate keys with different values."""
    quantization: Quantization | None = None
    """Format of quantized weights, or None if all weights are plain."""

    @property
    def config(self) -> ModelConfig:
        """Return the model config, with defaults for all keys that the section does not set."""
        return model_of(self.section, FILE)


def read_description(folder: Path, *, images: bool = False) -> ModelDescription:
    """Read the `config.json` in a folder. `images` includes the vision tower of the model.

    Raises:
        ConfigError: the file cannot be read, or no family supports the model.
    """
    path = folder / FILE
    try:
        content = parse_json(read(path, _MAX_BYTES), dict[str, Any])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError.one(
            Code.HF_FOLDER,
            str(path),
            None,
            f"must be the config of a Hugging Face model: {reason}.",
            "Use a folder written by save_pretrained, or a snapshot from the Hugging Face hub.",
        ) from error
    table, whole, family = _table(path, content)
    outer = content
    if images and (whole is None or whole.vision is None):
        tables = (table for of in FAMILIES.values() for table in of.huggingface)
        wholes = (each for table in tables for each in table.containers if each.vision)
        names = " or ".join(sorted(each.architecture for each in wholes))
        where, value = f"{path}: architectures", json.dumps(content.get("architectures"))[:200]
        rule = "must be a model with a vision tower that maxpipe supports, to use images."
        action = f"Use a folder with {names}, or import the model without images."
        raise ConfigError.one(Code.HF_UNSUPPORTED, where, value, rule, action)
    if whole is not None:
        inner = content.get(whole.section)
        if not isinstance(inner, dict):
            rule = f"must be an object: the language-model config of {whole.architecture}."
            raise ConfigError.one(
                Code.HF_FOLDER, f"{path}: {whole.section}", json.dumps(inner), rule, _COPY
            )
        _check_inner_type(path, whole, inner.get("model_type"))
    try:
        found = normalize(content, table, whole)
        said = {**content, **{key: each for key, each in found.content.items() if each is not None}}
        quantized = quantization.parse_quantization(
            said, said.get("dtype") or said.get("torch_dtype")
        )
    except UnsupportedError as error:
        raise _conversion_error(str(path), table, error) from error
    content = found.content
    ours = _read(path, table, content)
    if images and whole is not None and whole.vision is not None:
        ours |= _read_vision(path, table, whole, outer, content, ours)
        table = composite_table(table, whole, whole.vision)
    section: dict[str, Any] = {"family": family, family: {}}
    for name, value in ours.items():
        *outer, key = name.split(".")
        (section[family] if outer else section)[key] = value
    known = table.names() | _IGNORED_KEYS
    kept = {
        row.theirs: content[row.theirs]
        for row in table.keys
        if isinstance(row, Kept) and row.theirs in content
    }
    unknown = (*(name for name in content if name not in known), *found.unread)
    model_of(section, str(path))  # raises ConfigError if the section violates a rule
    return ModelDescription(
        table, section, kept, unknown, whole, tuple(found.differences), quantized
    )


def _read_vision(
    path: Path, table: HuggingFace, whole: Whole, content: Theirs, text: Theirs, ours: Ours
) -> dict[str, Any]:
    """Return maxpipe's values for a model with a vision tower.

    `content` is the complete config, and `text` is the config of the language model, whose values
    are `ours`. The model has no multi-token prediction heads, because they cannot predict images.
    """
    vision, inner = whole.vision, content.get(_VISION_SECTION)
    assert vision is not None, "the caller checks the model"
    where, value = f"{path}: {_VISION_SECTION}", json.dumps(inner)[:200]
    if not isinstance(inner, dict):
        rule = f"must be an object: the config of the vision tower of {whole.architecture}."
        raise ConfigError.one(Code.HF_FOLDER, where, value, rule, _COPY)
    if inner.get("model_type", vision.model_type) not in (vision.model_type, whole.model_type):
        raise ConfigError.one(
            Code.HF_UNSUPPORTED,
            f"{where}.model_type",
            json.dumps(inner["model_type"])[:200],
            f"must be {vision.model_type!r} in a {whole.architecture}.",
            "Use a model whose vision tower has this type, or import the model without images.",
        )
    named = replace(table, architecture=whole.architecture)
    ours = _read(path, replace(named, keys=vision.keys), inner, ours)
    ours |= _read(path, replace(named, keys=vision.text_keys), text)
    ours |= _read(path, replace(named, keys=vision.outer_keys), content)
    return {**ours, **WITHOUT_MTP}


def _check_inner_type(path: Path, whole: Whole, kind: Any) -> None:
    if whole.inner_type and kind != whole.inner_type:
        raise ConfigError.one(
            Code.HF_UNSUPPORTED,
            f"{path}: {whole.section}.model_type",
            json.dumps(kind)[:200],
            f"must be {whole.inner_type!r} in a {whole.architecture}.",
            "Use a model whose language model has this type, or a folder with the language model "
            "only.",
        )


def model_of(section: Mapping[str, Any], where: str) -> ModelConfig:
    """Build the model config from a `model` section.

    Raises:
        ConfigError: the section violates a rule.
    """
    # The values of all sections other than `model` are arbitrary but must be valid.
    others = {"train": {"steps": 1}, "tokenizer": {"kind": "huggingface", "path": FILE}}
    return load([], {**others, "model": section}, where).config.model


TEXT_SECTION, _VISION_SECTION = "text_config", "vision_config"
_COPY = "Copy config.json again from the model's source."


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
        Code.HF_UNSUPPORTED,
        f"{path}: architectures",
        json.dumps(names)[:200],
        f"must be a list with one of {', '.join(sorted(known))}, or null if model_type identifies "
        "one of them.",
        f"Did you mean {guess}?" if guess else "Use a model with one of these architectures.",
    )


def _is_base(names: Any, found: tuple[HuggingFace, Whole | None, str]) -> bool:
    """Return whether `names` is empty or contains only the base class, as saved by AutoModel."""
    table, whole, _ = found
    last = (whole or table).architecture
    base = last.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") + "Model"
    return names in (None, [], [base], [base.replace("Model", "TextModel")])


def _read(
    path: Path, table: HuggingFace, content: Mapping[str, Any], before: Ours = MappingProxyType({})
) -> dict[str, Any]:
    """Return maxpipe's values. `before` are the values of other tables, which rows can read."""
    ours = dict(before)
    for row in table.keys:
        try:
            for name, value in row.read(content, ours).items():
                ours[name] = _coerce(f"model.{name}", value)
            # The following rows build lists with one entry per layer.
            if (count := ours.get("num_layers", 0)) > _MAX_LAYERS:
                rule = f"must be at most {_MAX_LAYERS}, the maximum number of layers."
                raise UnsupportedError("num_hidden_layers", count, rule, _COPY)
        except UnsupportedError as error:
            raise _conversion_error(str(path), table, error) from error
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            given = {name: content.get(name) for name in row.names}
            rule = f"must be valid for {table.architecture}: {error}."
            raise ConfigError.one(
                Code.HF_FOLDER, str(path), json.dumps(given)[:200], rule, _COPY
            ) from error
    return ours


def _conversion_error(where: str, table: HuggingFace, error: UnsupportedError) -> ConfigError:
    return ConfigError.one(
        Code.HF_UNSUPPORTED,
        f"{where}: {error.key}",
        json.dumps(error.value)[:200],
        error.rule,
        error.action
        or f"maxpipe does not support this variant of {table.architecture}: use a model without "
        "this setting, or train this model with its original code.",
    )


def _coerce(key: str, value: Any) -> Any:
    """Convert a value to the type of a config key. Integers and integral floats are converted."""
    kind = KEYS[key]
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if kind in (int, float, bool) and type(value) is not kind:
        names = {int: "an integer", float: "a number", bool: "true or false"}
        raise UnsupportedError(key, value, f"must be {names[kind]}.")
    return value


# Conversion to config.json.


def values(config: ModelConfig) -> dict[str, Any]:
    """Return all values of a model config, keyed by their name relative to `model`."""
    own = FAMILIES[config.family].section() if config.own is None else config.own
    inner = family_section(config.family)
    return {name: getattr(config, name) for name in names_in("model")} | {
        f"{config.family}.{name}": getattr(own, name) for name in names_in(inner)
    }


def table_for(config: ModelConfig) -> tuple[HuggingFace, dict[str, Any]]:
    """Return the conversion table of the equivalent transformers class, and the config.json values.

    Raises:
        ConfigError: no transformers class is equivalent to the model.
    """
    ours = values(config)
    family = FAMILIES[config.family]
    last: ConfigError | None = None
    has_images = describe(config).ends.vision is not None
    for table in family.huggingface:
        try:
            text = written(table.keys, ours)
            if not has_images:
                return table, text
            for whole in table.containers:
                if (vision := whole.vision) is not None:
                    return _with_vision(table, whole, vision, text, ours)
        except UnsupportedError as error:
            last = ConfigError.one(
                Code.HF_EXPORT,
                error.key,
                error.value,
                f"{error.rule.rstrip('.')} to be exported as {table.architecture}.",
                "A model with this value cannot be converted to the Hugging Face format: keep "
                "the maxpipe checkpoint.",
            )
    if last is not None:
        raise last
    supported = [each.name for each in FAMILIES.values() if each.huggingface]
    raise ConfigError.one(
        Code.HF_EXPORT,
        "model.family",
        config.family,
        "has no Hugging Face format.",
        f"Families with a Hugging Face format: {', '.join(supported)}.",
    )


def _with_vision(
    table: HuggingFace, whole: Whole, vision: VisionTable, text: dict[str, Any], ours: Ours
) -> tuple[HuggingFace, dict[str, Any]]:
    """Return the table and the config.json values of a composite model for an export."""
    composite = composite_table(table, whole, vision)
    tensors = (
        replace(row, theirs=composite_name(row.theirs, is_nested=vision.is_nested))
        for row in composite.tensors
    )
    inner = {"model_type": table.model_type, **text, **written(vision.text_keys, ours)}
    said: dict[str, Any] = {
        whole.section: inner,
        _VISION_SECTION: {"model_type": vision.model_type, **written(vision.keys, ours)},
        **written(vision.outer_keys, ours),
        _TIED: text.get(_TIED, True),
    }
    return replace(composite, tensors=tuple(tensors)), said


def to_json(
    table: HuggingFace, said: Mapping[str, Any], kept: Ours, dtype: str, defaults: Ours
) -> str:
    """Return the text of a config.json with the values in `said` and the keys kept on import.

    If a kept key is missing from `kept`, its value is read from `defaults`.
    """
    others = {
        row.theirs: found[row.theirs]
        for found in ({**defaults, **kept},)
        for row in table.keys
        if isinstance(row, Kept) and row.theirs in found
    }
    about = {"architectures": [table.architecture], "model_type": table.model_type}
    said = {
        name: {**others, **value} if name == TEXT_SECTION else value for name, value in said.items()
    }
    # Which of the dtype keys is read depends on the transformers release.
    types = dict.fromkeys(_DTYPES, dtype)
    return json.dumps({**about, **types, **others, **said}, indent=2) + "\n"
