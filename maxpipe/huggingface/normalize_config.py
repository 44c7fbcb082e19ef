"""Resolution of duplicate values in a config.json, with the precedence of transformers 5.

After the resolution, table rows read each value from a single key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxpipe.models.huggingface import HuggingFace, Rotary, Theirs, Twice, Unlike, Whole, an_object
from maxpipe.models.huggingface_tables import Period

_LENGTH, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_TYPES = Twice("dtype", "torch_dtype")
_LENGTH_SCALING_TYPES = ("llama3", "yarn", "longrope", "su")
"""Rotary types that use the original context length."""

_HETEROGENEOUS = "per_layer_config"
"""Key that overrides the config of single layers, for every class of transformers."""


@dataclass
class NormalizedConfig:
    """A config.json without duplicate values."""

    content: dict[str, Any]
    differences: list[str] = field(default_factory=list)
    """Messages about duplicate values that differed."""
    unread: list[str] = field(default_factory=list)
    """Paths of values that neither transformers nor maxpipe reads."""

    def first_stated(self, *statements: tuple[str, Any], default: Any = None) -> Any:
        """Return the first value that is not None, and record other values that differ."""
        said = [(path, value) for path, value in statements if value is not None]
        if not said:
            return default
        (path, used), *others = said
        for other, value in others:
            self._note(path, used, other, value)
        return used

    def note_unread(self, path: str, used: Any, other: str, value: Any) -> None:
        """Record a value that transformers ignores, if it differs from the value that is used."""
        if value is not None and used is not None:
            self._note(path, used, other, value)

    def _note(self, path: str, used: Any, other: str, value: Any) -> None:
        if used != value:
            self.differences.append(
                f"config.json: {path} = {_shown(used)} and {other} = {_shown(value)} differ: "
                f"{path} is used, as in transformers"
            )


def normalize(content: Theirs, table: HuggingFace, whole: Whole | None = None) -> NormalizedConfig:
    """Return the content of a config.json, with each value at the key that table rows read.

    Raises:
        Unlike: a value is not supported by any family.
    """
    found = NormalizedConfig(dict(content))
    if whole is not None:
        _select_language_model(found, content, table, whole)
    if found.content.get(_HETEROGENEOUS):
        raise Unlike(
            _HETEROGENEOUS,
            found.content[_HETEROGENEOUS],
            "must be null: such differences between layers are not supported.",
        )
    for twice in (_TYPES, *table.duplicate_keys):
        _merge_duplicate(found, twice)
    for row in table.keys:
        if isinstance(row, Period) and (other := row.restated(found.content)) is not None:
            found.note_unread("layer_types", found.content["layer_types"], *other)
    rows = [row for row in table.keys if isinstance(row, Rotary)]
    settings = [_rotary(found, row) for row in rows]
    for name in ("rope_scaling", *(row.legacy_theta_key for row in rows)):
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
    """Select the section of the language model. It takes precedence except for weight tying."""
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
    """Return the rotary parameters, including base, type and lengths."""
    content = found.content
    scaling, where = an_object(content, "rope_scaling"), "rope_parameters"
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
        (row.legacy_theta_key, content.get(row.legacy_theta_key)),
    )
    said["rope_theta"] = row.default if theta is None else theta
    share = found.first_stated(
        (f"{where}.{_SHARE}", said.get(_SHARE)),
        (_SHARE, None if row.layers else content.get(_SHARE)),
    )
    if share is not None:
        said[_SHARE] = content[_SHARE] = share
    if isinstance(kind, str) and not row.layers:
        _lengths(found, row, said, where, kind)
    _drop_unread(found, row, said, where, kind)
    return said


_SHARE = "partial_rotary_factor"


def _drop_nulls(said: Theirs) -> dict[str, Any]:
    return {name: value for name, value in said.items() if value is not None}


def _rope_from_scaling(
    found: NormalizedConfig, scaling: dict[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `rope_scaling`, which replaces `rope_parameters`; both may hold the base and the
    type.
    """
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
    """Return the rotary parameters of one layer type; `rope_scaling` takes precedence."""
    parameters = an_object(found.content, "rope_parameters")
    inner = parameters.get(row.layers)
    said = (
        {"rope_type": "default"}
        if inner is None
        else _drop_nulls(an_object(parameters, row.layers))
    )
    where = f"rope_parameters.{row.layers}"
    found.unread += [
        f"rope_parameters.{name}"
        for name, value in parameters.items()
        if value is not None and not isinstance(value, dict)
    ]
    if row.scalings:
        for name, value in _drop_nulls(scaling).items():
            if inner is not None:
                found.first_stated(
                    (f"rope_scaling.{name}", value), (f"{where}.{name}", said.get(name))
                )
            said[name] = value
        where = "rope_scaling" if scaling else where
    return said, where


def _lengths(
    found: NormalizedConfig, row: Rotary, said: dict[str, Any], where: str, kind: str
) -> None:
    """Set the original length, and the factor, which is the ratio of two lengths."""
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
    """Check that YaRN has a factor. transformers computes the factor only if its value is null.

    Raises:
        Unlike: the factor is missing.
    """
    objects = [content.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if kind == "yarn" and any(objects) and not any("factor" in said for said in objects):
        rule = "is required with rope_type = 'yarn'; transformers requires it too."
        action = (
            f"Set {where}.factor to the published factor, or to null if it is "
            f"{_LENGTH} / {_ORIGINAL}."
        )
        raise Unlike(f"{where}.factor", None, rule, action)


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) and value > 0 for value in values)


def _drop_unread(
    found: NormalizedConfig, row: Rotary, said: dict[str, Any], where: str, kind: Any
) -> None:
    """Drop rotary parameters that the type does not use.

    Raises:
        Unlike: an unused partial rotary factor would change the model.
    """
    rows = (
        (*row.scalings.get(kind, ()), *row.top_level_keys.get(kind, ())) if _is_name(kind) else ()
    )
    if _is_name(kind) and kind != "default" and kind not in row.scalings:
        return  # the row raises an error
    known = {name for each in rows for name in each.names} | {"rope_theta", "rope_type"}
    if _SHARE not in known and said.get(_SHARE, 1) != 1:
        rule = f"must be 1 with rope_type = {kind!r}: partial rotation is not supported."
        raise Unlike(f"{where}.{_SHARE}", said[_SHARE], rule)
    for name in said.keys() - known:
        if name != _SHARE and name not in _ALWAYS_SET:
            found.unread.append(f"{where}.{name}")
        del said[name]


_ALWAYS_SET = (_ORIGINAL, "factor")
"""Parameters that are set here for all scaling types, but used by only some of them."""


def _is_name(kind: Any) -> bool:
    return isinstance(kind, str)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def lines(found: Sequence[str], most: int = 8) -> list[str]:
    """Return the first differences, and a line with the number of remaining differences."""
    more = [f"and {len(found) - most} more duplicate values that differ"] * (len(found) > most)
    return [*found[:most], *more]
