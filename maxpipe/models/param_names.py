"""Parameter names: selection by name patterns, and key paths in nested dicts, without jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from maxpipe.models.spec import Model, Param

_LAYERS = "layers"


def freeze(model: Model, patterns: Sequence[str]) -> Model:
    """Return the model with all parameters that match a pattern marked as frozen.

    `*` in a pattern matches any characters, including dots. A pattern is first matched against
    checkpoint names. If no name matches, the pattern is matched against the names of layer
    parameters, with and without the layer type.
    """
    if not patterns:
        return model
    chosen = picked(model, patterns)
    several = _has_several_kinds(model)
    layer_types = {
        name: replace(
            layer_type,
            frozen=layer_type.frozen
            | {
                key for key in layer_type.params if _names_in_layer(name, key, several)[0] in chosen
            },
        )
        for name, layer_type in model.layer_types.items()
    }
    ends = {name for name in model.ends.params if ".".join(name) in chosen}
    return replace(
        model, layer_types=layer_types, ends=replace(model.ends, frozen=model.ends.frozen | ends)
    )


def declared(model: Model) -> Mapping[str, Param]:
    """Return all parameters, keyed by checkpoint name. All layers of a type share one entry."""
    return {names[0]: param for names, param in _declared(model)}


def trained(model: Model) -> frozenset[str]:
    """Return the checkpoint names of the trained parameters."""
    return frozenset(name for name, param in declared(model).items() if param.trainable)


def without_match(model: Model, patterns: Sequence[str]) -> list[str]:
    """Return the patterns that match no parameter name."""
    known = list(_declared(model))
    return [pattern for pattern in patterns if not _matched(pattern, known)]


def picked(model: Model, patterns: Sequence[str]) -> set[str]:
    """Return the checkpoint names of the parameters that match a pattern."""
    known = list(_declared(model))
    return {name for pattern in patterns for name in _matched(pattern, known)}


def chosen(model: Model, values: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the value of the pattern that matches each parameter, keyed by checkpoint name.

    If several patterns match, the last one applies.
    """
    known = list(_declared(model))
    return {name: value for pattern, value in values for name in _matched(pattern, known)}


def names_in_layers(model: Model, layer_type: str) -> Mapping[tuple[str, str], str]:
    """Return the checkpoint names of a layer type's parameters, keyed by (sublayer, parameter)."""
    several = _has_several_kinds(model)
    return {
        key: _names_in_layer(layer_type, key, several)[0]
        for key in model.layer_types[layer_type].params
    }


def suggestions(model: Model) -> list[str]:
    """Return suggested patterns for all parameters, sublayers and layer types."""
    selected: dict[str, None] = {}
    for names, _ in _declared(model):
        for name in names:
            parts = name.split(".")
            selected |= dict.fromkeys(
                ".".join([*parts[:count], "*"]) for count in range(1, len(parts))
            )
            selected[name] = None
    return list(selected)


def _declared(model: Model) -> Iterator[tuple[tuple[str, ...], Param]]:
    """Yield (names, parameter) pairs, with the checkpoint name as the first name."""
    for name, param in model.ends.params.items():
        yield (".".join(name),), param
    several = _has_several_kinds(model)
    for layer_type, each in model.layer_types.items():
        for key, param in each.params.items():
            yield _names_in_layer(layer_type, key, several), param


def _has_several_kinds(model: Model) -> bool:
    return len(set(model.layers)) > 1


def _names_in_layer(layer_type: str, key: tuple[str, str], several: bool) -> tuple[str, str]:
    """Return the checkpoint name and the alternative name of a parameter.

    Checkpoint names include the layer type if the model has several layer types.
    """
    short, long = ".".join((_LAYERS, *key)), ".".join((_LAYERS, layer_type, *key))
    return (long, short) if several else (short, long)


def _matched(pattern: str, known: Sequence[tuple[tuple[str, ...], Param]]) -> set[str]:
    """Return the checkpoint names of the parameters that a pattern selects."""
    in_checkpoints = {names[0] for names, _ in known if fnmatchcase(names[0], pattern)}
    otherwise = (names[0] for names, _ in known if any(fnmatchcase(n, pattern) for n in names))
    return in_checkpoints or set(otherwise)


KeyPath = tuple[str, ...]


def flatten(tree: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Convert `{"a": {"b": x}}` to `{("a", "b"): x}`. Empty dicts are dropped."""
    leaves: dict[KeyPath, Any] = {}
    for name, part in tree.items():
        if isinstance(part, Mapping):
            leaves |= {(name, *path): leaf for path, leaf in flatten(part).items()}
        else:
            leaves[(name,)] = part
    return leaves


def unflatten(leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Convert a flat dict keyed by path to nested dicts; the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for (*folders, name), leaf in leaves.items():
        below = tree
        for folder in folders:
            below = below.setdefault(folder, {})
        below[name] = leaf
    return tree
