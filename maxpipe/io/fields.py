"""Metadata of config fields: former names, and what runs did before there was a key."""

from __future__ import annotations

from typing import Any


def was(key: str) -> dict[str, str]:
    """Metadata of a field: the full key that it had before."""
    return {"was": key}


def before(value: Any) -> dict[str, Any]:
    """Metadata of a field: what runs did before there was the key, if not what its default says."""
    return {"before": value}
