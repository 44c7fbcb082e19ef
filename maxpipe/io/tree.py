"""Nested dicts by the paths of their leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]


def flat(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """`{"a": {"b": x}}` as `{("a", "b"): x}`; dicts without leaves are left out."""
    found: dict[Path, Any] = {}
    for name, part in tree.items():
        if isinstance(part, Mapping):
            found |= {(name, *path): leaf for path, leaf in flat(part).items()}
        else:
            found[(name,)] = part
    return found


def nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The way back."""
    tree: dict[str, Any] = {}
    for (*folders, name), leaf in leaves.items():
        below = tree
        for folder in folders:
            below = below.setdefault(folder, {})
        below[name] = leaf
    return tree
