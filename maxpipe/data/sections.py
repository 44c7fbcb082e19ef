"""Sections of the config that sources come from, in messages about them.

A source knows its keys as those of `data`; of a source of a mixture they are those of
`data.mixture.NAME`, and of one for evaluation those of `data.validation.NAME`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import astuple, fields

from maxpipe.config.data import section_of
from maxpipe.config.data_schema import SourceConfig
from maxpipe.errors import ConfigError, Problem, StorageError

_KEYS = re.compile(rf"\bdata\.({'|'.join(each.name for each in fields(SourceConfig))})\b")


@contextlib.contextmanager
def in_section(name: str) -> Iterator[None]:
    """Errors of what is done with a source name the keys of its section."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        problems = [Problem(*(_of(name, text) for text in astuple(p))) for p in error.problems]
        raise ConfigError(problems) from error
    except StorageError as error:
        if not name:
            raise
        raise StorageError(_of(name, str(error))) from error


def _of(name: str, text: str) -> str:
    return _KEYS.sub(rf"{section_of(name)}.\1", text)
