"""Restricted YAML reader: no aliases, no tags, limited nesting and a limited number of values."""

from __future__ import annotations

import typing
from typing import Any

import yaml

MAX_DEPTH = 8
MAX_VALUES = 20_000
"""Maximum number of keys and values in a document. PyYAML needs about 50 us to parse each."""
MAX_KEY = 1000
"""Maximum length of a key in characters."""


class _Loader(yaml.SafeLoader):
    """Loader that rejects anything but plain nested YAML."""

    depth = 0
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            self.reject("anchors and aliases are not supported", event)
        if tag := getattr(event, "tag", None):
            self.reject(f"tags such as {tag[:80]} are not supported", event)
        if self.depth > MAX_DEPTH:
            self.reject(f"nested deeper than {MAX_DEPTH}", event)
        self.count += 1
        if self.count > MAX_VALUES:
            rule = f"more than {MAX_VALUES:,} keys and values are not supported"
            self.reject(f"{rule}; use a glob pattern to list many files", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        if is_key and isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_KEY:
            self.reject(f"a key has {len(node.value):,} characters, more than {MAX_KEY:,}", event)
        self.depth -= 1
        return node

    def reject(self, problem: str, event: yaml.Event) -> typing.NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def compose(text: str) -> yaml.Node | None:
    """Parse a YAML text into a node.

    Raises:
        yaml.YAMLError: the text is not valid YAML, or exceeds a limit.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def load(text: str | bytes) -> Any:
    """Parse a YAML text into Python values, with YAML's own scalar types.

    Raises:
        yaml.YAMLError: the text is not valid YAML, or exceeds a limit.
        ValueError: a number or a date cannot be represented.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except OverflowError as error:  # a number in base 60
        raise ValueError(f"a number is too large: {error}") from error
    finally:
        loader.dispose()
