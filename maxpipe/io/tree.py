"""Convert nested dicts to flat dicts with key paths, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KeyPath = tuple[str, ...]


def flatten(tree: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Convert `{"a": {"b": x}}` to `{("a", "b"): x}`. Empty dicts are omitted."""
    leaves: dict[KeyPath, Any] = {}
    for name, part in tree.items():
        if isinstance(part, Mapping):
            leaves |= {(name, *path): leaf for path, leaf in flatten(part).items()}
        else:
            leaves[(name,)] = part
    return leaves


def unflatten(leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Convert a flat dict with key paths to nested dicts, the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for (*folders, name), leaf in leaves.items():
        below = tree
        for folder in folders:
            below = below.setdefault(folder, {})
        below[name] = leaf
    return tree
