"""Read config files of other trainers: YAML with line numbers, TOML, and overrides."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from maxpipe.config.config_files import ConfigFile
from maxpipe.config.migration.conversion import COMMAND_LINE, Given, Peer, config_key
from maxpipe.config.yaml_values import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_VALUES,
    READERS,
    Raw,
    compose,
    entries,
    format_raw,
    raw_of,
    read_file,
    to_raw,
)
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io.files import read

_UNTYPED = ("_for_vit", "_for_audio", "_image_column")
"""Ends of keys whose values are never used."""
_TYPES = {bool: "true or false", int: "an integer", float: "a number", list: "a list"}


@functools.cache
def tables(name: str) -> dict[str, Any]:
    """Return the data file of a trainer: the defaults of its keys, and its models."""
    path = Path(__file__).with_name(f"{name.lower()}.yml")
    text = path.read_text(encoding="utf-8")
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


def published(name: str) -> Peer:
    """Return a trainer with the published defaults of its keys."""
    data = tables(name)
    known = frozenset(data["defaults"]) | frozenset(data["other_keys"].split())
    where = f"{data['defaults_file']} of {data['date']} (commit {data['commit'][:12]})"
    return Peer(name, data["defaults"], known, f"{data['source']}, {where}")


def read_yaml(path: Path) -> dict[str, tuple[Raw, str]]:
    """Return the unparsed value and the place of each top-level key of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or sets a key twice.
    """
    _check_exists(path)
    problems: list[Problem] = []
    root = read_file(ConfigFile(path, str(path)), problems)
    found: dict[str, tuple[Raw, str]] = {}
    if root is not None:
        for key, line, node in entries(root, str(path), "", problems):
            found[key] = (raw_of(node), f"{path}:{line}")
    if problems:
        raise ConfigError(problems)
    _check_not_empty(path, found)
    return found


def _check_exists(path: Path) -> None:
    """Reject a missing file that has the name of a bundled config."""
    from maxpipe.config.config_files import bundled_configs

    if path.stem in bundled_configs() and not os.path.lexists(path):
        name = path.stem
        rule = f"does not exist. {name} is a bundled config of maxpipe, which needs no conversion."
        action = f"Use it with `maxpipe plan {name}`, or specify the path of the other trainer's "
        action += f"file, such as configs/models/{name}.yml in a checkout of MaxText."
        raise ConfigError.one(Code.CFG_FILE, str(path), None, rule, action)


def _check_not_empty(path: Path, found: Mapping[str, Any]) -> None:
    if not found:
        rule = "sets no keys."
        raise ConfigError.one(Code.CFG_PEER, str(path), None, rule, "Specify another file.")


def read_toml(path: Path) -> dict[str, tuple[Raw, str]]:
    """Return the unparsed value and the place of each key of a TOML file, by dotted name.

    Raises:
        ConfigError: the file cannot be read, or exceeds the limits of a config file.
    """
    _check_exists(path)
    action = "Use a job config of torchtitan in TOML, such as llama3_8b.toml."
    try:
        values = to_raw(tomllib.loads(read(path, MAX_FILE_BYTES).decode("utf-8-sig")), MAX_DEPTH)
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}."
        raise ConfigError.one(Code.CFG_PEER, str(path), None, rule, action) from error
    except (ValueError, RecursionError) as error:
        rule = f"is not supported TOML: {str(error) or 'nested too deeply'}."
        raise ConfigError.one(Code.CFG_PEER, str(path), None, rule, action) from error
    found: dict[str, tuple[Raw, str]] = {}
    for name, raw in _leaves("", values):
        found[name] = (raw, str(path))
        if len(found) > MAX_VALUES:
            rule = f"has more than {MAX_VALUES:,} keys."
            raise ConfigError.one(Code.CFG_PEER, str(path), None, rule, action)
    _check_not_empty(path, found)
    return found


def _leaves(prefix: str, raw: Raw) -> Iterable[tuple[str, Raw]]:
    if isinstance(raw, dict):
        for name, each in raw.items():
            yield from _leaves(f"{prefix}{name}.", each)
    else:
        yield prefix.removesuffix("."), raw


def split_overrides(
    overrides: Iterable[str], known: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the overrides of the peer, whose keys are `known`, and those of maxpipe.

    A key that both trainers have belongs to the peer.
    """
    theirs: list[str] = []
    ours: list[str] = []
    for argument in overrides:
        name, equals, _ = argument.partition("=")
        is_ours = equals and name not in known and config_key(name)
        (ours if is_ours else theirs).append(argument)
    return theirs, ours


def read_overrides(overrides: Iterable[str]) -> dict[str, tuple[Raw, str]]:
    """Return the values of `key=value` arguments.

    Raises:
        ConfigError: an argument has another form, or its value is not YAML.
    """
    found: dict[str, tuple[Raw, str]] = {}
    for argument in overrides:
        name, equals, text = argument.partition("=")
        where = f"command line: {argument}"
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            rule = "must have the form key=value, with a key of the other trainer or of maxpipe."
            raise ConfigError.one(
                Code.CLI_VALUE, where, None, rule, "Write, for example, steps=1000."
            )
        try:
            node = compose(text)
        except yaml.YAMLError as error:
            rule = f"has a value that is not YAML: {getattr(error, 'problem', error)}."
            raise ConfigError.one(Code.CLI_VALUE, where, None, rule, "Quote the value.") from error
        found[name] = ("" if node is None else raw_of(node), COMMAND_LINE)
    return found


def typed(
    values: Mapping[str, tuple[Raw, str]], defaults: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Given]:
    """Convert unparsed values to the types of the peer's defaults, and record errors."""
    found: dict[str, Given] = {}
    for key, (raw, place) in values.items():
        default = None if key.endswith(_UNTYPED) else defaults.get(key)
        try:
            found[key] = Given(_convert(raw, default), place)
        except (ValueError, OverflowError):
            rule = f"must be {_TYPES.get(type(default), 'text')}."
            action = f"Set {key}={str(default).lower() if default != [] else '[]'}, its default."
            problems.append(
                Problem(Code.CFG_TYPE, f"{place}: {key}", format_raw(raw), rule, action)
            )
    return found


def _convert(raw: Raw, default: Any) -> Any:
    if raw is None or (isinstance(raw, str) and raw.lower() == "none"):
        if isinstance(default, int | float | list):
            raise ValueError(raw)
        return "" if isinstance(default, str) else None
    if isinstance(default, bool | int | float):
        return READERS[type(default)](raw)
    if isinstance(default, list):
        return _plain(raw) if isinstance(raw, list) else [_plain(raw)] if raw != "" else []
    if isinstance(default, str):
        if not isinstance(raw, str):
            raise ValueError(raw)
        return raw
    return _plain(raw)


def _plain(raw: Raw) -> Any:
    """Convert scalars that look like numbers or booleans, in keys whose type is not known."""
    if isinstance(raw, list):
        return [_plain(each) for each in raw]
    if isinstance(raw, dict):
        return {name: _plain(each) for name, each in raw.items()}
    if isinstance(raw, str):
        if raw.lower() in ("true", "false"):
            return raw.lower() == "true"
        for kind in (int, float):
            try:
                return READERS[kind](raw)
            except (ValueError, OverflowError):
                continue
    return raw
