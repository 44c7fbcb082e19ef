"""Data files named in place of a config: the `data.*` keys that read them."""

from __future__ import annotations

import glob
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxpipe.errors import ConfigError
from maxpipe.io import redact
from maxpipe.io.files import scheme

DATA_HELP = "data files, a folder of them, or a prepared folder; "
_OF_TEMPLATES = ("tokenizer.", "data.chat_template")
"""Beginnings of keys that may bring a chat template."""


def with_data_files(inputs: Sequence[str]) -> list[str]:
    """Return the inputs with the keys that read the data files among them in place of their paths.

    The keys are printed to stderr. The source follows from the names of the files. Conversations
    and pairs follow from the fields of the first record, and the tokenizer of a prepared folder
    from its manifest, unless the inputs set them.

    Raises:
        ConfigError: the files are of several kinds, or the inputs name a source too.
    """
    paths = [each for each in inputs if _is_data(each)]
    if not paths:
        return list(inputs)
    others = [each for each in inputs if each not in paths]
    keys = {each.partition("=")[0] for each in others}
    where = f"command line: {paths[0]}"
    for key in ("data.source", "data.path", "data.paths", "data.mixture"):
        if key in keys:
            rule = f"names the documents to read, and {key} names them too."
            raise ConfigError.one(where, None, rule, "Remove one of the two.")
    inferred = _source(paths)
    has_config = any("=" not in each for each in others)
    if inferred["data.source"] == "tokens" and not has_config:
        inferred |= _tokenizer(paths[0])
    elif not keys & {"data.field", "data.template", "data.chat"}:
        with_template = has_config or any(each.startswith(_OF_TEMPLATES) for each in keys)
        inferred |= _conversation(inferred, with_template=with_template, with_defaults=has_config)
    if not has_config and not keys & {"data.validation_fraction", "eval.batches"}:
        # One document is enough to look at.
        inferred |= {"data.validation_fraction": 0, "eval.batches": 0}
    chosen = {key: value for key, value in inferred.items() if key not in keys}
    if any(key.startswith("tokenizer.") for key in keys):
        chosen = {key: chosen[key] for key in chosen if not key.startswith("tokenizer.")}
    shown = " ".join(map(shlex.quote, overrides(chosen)))
    print(redact.shown(f"{', '.join(paths)}: read with {shown}"), file=sys.stderr, flush=True)
    if has_config:
        chosen = _CLEARED | chosen
    return [*others, *overrides(chosen)]


_CLEARED: dict[str, Any] = {
    "data.path": "",
    "data.paths": [],
    "data.mixture": {},
    "data.mixture_stages": [],
    "data.mixture_temperature": 1,
}
"""Keys of a config that would name further documents."""


def overrides(keys: Mapping[str, Any]) -> list[str]:
    """Return `key=value` of each key."""
    from maxpipe.config.documents import one_line

    texts = {key: each if isinstance(each, str) else one_line(each) for key, each in keys.items()}
    return [f"{key}={text}" for key, text in texts.items()]


def is_config(argument: str) -> bool:
    """Return whether an input is an override, the path of a config or the name of one."""
    from maxpipe.config import shipped
    from maxpipe.config.check import is_override
    from maxpipe.config.inputs import SUFFIXES

    if argument.startswith("-") or is_override(argument):
        return True
    return Path(argument).suffix in SUFFIXES or shipped.meant(argument) is not None


def _is_data(argument: str) -> bool:
    """Return whether an input is the path of data: neither a config, a run nor a model."""
    from maxpipe.config.paths import CONFIG_FILE

    if not argument or is_config(argument):
        return False
    if scheme(argument) or _names_data(argument):
        return True
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        others = (CONFIG_FILE, "config.json")
        return not any(os.path.isfile(os.path.join(path, name)) for name in others)
    return os.path.isfile(path) or (any(each in path for each in "*?[") and bool(glob.glob(path)))


def _names_data(path: str) -> bool:
    """Return whether a name alone says that it is data, so that a missing file is named so."""
    from maxpipe.data.sources import ENDINGS

    return any(each in os.path.basename(path) for each in (*ENDINGS, ".txt"))


def _source(paths: Sequence[str]) -> dict[str, Any]:
    from maxpipe.config.data import ONE_PATH
    from maxpipe.data.sources import source_of

    kinds = {path: source_of(path, "command line: FILE") for path in paths}
    kind = kinds[paths[0]]
    other = next((path for path in paths if kinds[path] != kind), None)
    if other is not None:
        rule = f"is read with data.source={kinds[other]}, and {paths[0]} with data.source={kind}."
        action = "Give files of one kind, or set data.mixture.NAME.path of each."
        raise ConfigError.one(f"command line: {other}", None, rule, action)
    if kind in ONE_PATH and len(paths) > 1:
        rule = f"is one of {len(paths)} paths: data.source={kind} reads one path."
        raise ConfigError.one(f"command line: {paths[1]}", None, rule, "Give one of them.")
    named = {"data.path": paths[0]} if len(paths) == 1 else {"data.paths": list(paths)}
    return {"data.source": kind, **named}


def _tokenizer(folder: str) -> dict[str, Any]:
    """Return the keys of the tokenizer that a prepared folder was written with."""
    from maxpipe.data.prepared.manifest import read_manifest

    found = read_manifest(os.path.expanduser(folder))["tokenizer"]
    if found["kind"] == "bytes":
        return {}
    return {"tokenizer.kind": found["kind"], "tokenizer.path": found["path"]}


def _conversation(
    keys: Mapping[str, Any], *, with_template: bool, with_defaults: bool
) -> dict[str, Any]:
    """Return the keys that read the first record, if it has no text: as a conversation or a pair.

    Without a chat template prompt and response are read as text.
    """
    from maxpipe.config.data import COLUMNS, paths_of
    from maxpipe.config.data_schema import SourceConfig
    from maxpipe.data.formats.record_keys import (
        changed,
        chat_keys,
        settings_text,
        text_template,
    )
    from maxpipe.data.sources import open_source

    if keys["data.source"] not in COLUMNS:
        return {}
    config = SourceConfig(**{key.removeprefix("data."): value for key, value in keys.items()})
    source = open_source(config, 0, keep=False)
    record = source.record(0) if len(source) else ""
    if isinstance(record, str) or isinstance(record.get("text"), str):
        return {}
    found = chat_keys(record, with_template=with_template)
    template = "" if with_template else text_template(record)
    if template and found.get("data.chat") == "prompt":
        settings = settings_text(changed(found))
        line = f"with a chat template (tokenizer.* or data.chat_template): {settings}"
        print(redact.shown(f"{paths_of(config)[0]}: {line}"), file=sys.stderr)
        return {"data.template": template}
    if with_defaults or found.get("data.messages_field") == "conversations":
        return found
    return changed(found)
