"""Parameters that are not trained, chosen by patterns over their names. No jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from maxpipe.model.spec import Model, Param

_LAYERS = "layers"


def freeze(model: Model, patterns: Sequence[str]) -> Model:
    """The model with each parameter frozen whose name one of the patterns matches.

    In a pattern `*` stands for any text, dots included.
    """
    if not patterns:
        return model
    kinds = {
        name: replace(
            kind,
            frozen=kind.frozen
            | {key for key in kind.params if _matches(patterns, *_names_in_layer(name, key))},
        )
        for name, kind in model.kinds.items()
    }
    ends = {name for name in model.ends.params if _matches(patterns, ".".join(name))}
    return replace(model, kinds=kinds, ends=replace(model.ends, frozen=model.ends.frozen | ends))


def declared(model: Model) -> Mapping[str, Param]:
    """Every parameter by its name in checkpoints; layers of one kind are one parameter."""
    return {names[0]: param for names, param in _declared(model)}


def trained(model: Model) -> frozenset[str]:
    """Names of the parameters that are trained."""
    return frozenset(name for name, param in declared(model).items() if param.trainable)


def without_match(model: Model, patterns: Sequence[str]) -> list[str]:
    """The patterns that no parameter's name matches."""
    known = [names for names, _ in _declared(model)]
    return [
        pattern for pattern in patterns if not any(_matches([pattern], *names) for names in known)
    ]


def suggestions(model: Model) -> list[str]:
    """Patterns for all parameters, parts and kinds."""
    found: dict[str, None] = {}
    for names, _ in _declared(model):
        for name in names:
            parts = name.split(".")
            found |= dict.fromkeys(
                ".".join([*parts[:count], "*"]) for count in range(1, len(parts))
            )
            found[name] = None
    return list(found)


def _declared(model: Model) -> Iterator[tuple[tuple[str, ...], Param]]:
    """(names, parameter), the name in checkpoints first."""
    for name, param in model.ends.params.items():
        yield (".".join(name),), param
    several = len(set(model.layers)) > 1
    for kind, each in model.kinds.items():
        for key, param in each.params.items():
            short, long = _names_in_layer(kind, key)
            yield (long, short) if several else (short, long), param


def _names_in_layer(kind: str, key: tuple[str, str]) -> tuple[str, str]:
    """Without the kind's name, as where it is the only one, and with it."""
    return ".".join((_LAYERS, *key)), ".".join((_LAYERS, kind, *key))


def _matches(patterns: Sequence[str], *names: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)
