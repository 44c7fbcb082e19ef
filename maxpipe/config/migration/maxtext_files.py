"""Resolve a config of MaxText: its base files, its model file, and the published defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxpipe.config.migration.conversion import COMMAND_LINE, Given, Peer
from maxpipe.config.migration.peer_files import (
    published,
    read_overrides,
    read_yaml,
    split_overrides,
    tables,
    typed,
)
from maxpipe.config.rules import did_you_mean
from maxpipe.config.yaml_values import Raw, format_raw, to_raw
from maxpipe.errors import Code, ConfigError, Problem

NAME = "MaxText"
_BASE = "base_config"
_MODEL = "model_name"
_ROOT = "base.yml"
_MAX_FILES = 16

Entries = dict[str, tuple[Raw, str]]


@dataclass(frozen=True, slots=True)
class Source:
    """Effective values of a MaxText config."""

    peer: Peer
    given: dict[str, Given]
    """Values of the file, its base files other than base.yml, its model file and overrides."""
    model_name: str
    shadowed: dict[str, Given]
    """Values of the file that the model file replaces."""
    ours: list[str]
    """Overrides of maxpipe's keys."""


def read_source(file: str, overrides: Sequence[str]) -> Source:
    """Read a MaxText config with its base files and its model file, in MaxText's order.

    Later values replace earlier ones: base files, the file, the model file, overrides.

    Raises:
        ConfigError: a file cannot be read, is missing, or contains an invalid value.
    """
    path = Path(file)
    chain, root = _read_chain(path)
    in_files: Entries = {}
    for entries in chain:
        in_files |= entries
    peer, problems = published(NAME), list[Problem]()
    theirs, ours = split_overrides(overrides, peer.known)
    from_overrides = read_overrides(theirs)
    if _BASE in from_overrides:
        rule = "has no effect on the command line: MaxText reads base files before overrides."
        action = f"Write {_BASE} in {file}, and leave out the override."
        where = f"{COMMAND_LINE}: {_BASE}"
        value = format_raw(from_overrides[_BASE][0])
        raise ConfigError.one(Code.CFG_PEER, where, value, rule, action)
    if root is not None:
        base = typed(read_yaml(root), peer.defaults, problems)
        values = {name: given.value for name, given in base.items() if name in peer.known}
        peer = Peer(NAME, {**peer.defaults, **values}, peer.known, f"{root}")
    model = (from_overrides.get(_MODEL) or in_files.get(_MODEL) or ("default", ""))[0]
    model_name = model if isinstance(model, str) else "default"
    is_model = model_name == "default" and _is_model_file(in_files)
    of_model: Entries = {}
    if is_model:
        model_name = path.stem
    elif model_name != "default":
        name = model_name.replace("-Instruct", "")
        of_model = _read_model(name, path, (from_overrides.get(_MODEL) or in_files[_MODEL])[1])
    shadowed = {
        key: each
        for key, each in in_files.items()
        if key in of_model and each[0] != of_model[key][0]
    }
    merged = {**in_files, **of_model, **from_overrides}
    merged.pop(_BASE, None)
    given = typed(merged, peer.defaults, problems)
    replaced = typed(
        {key: each for key, each in shadowed.items() if key not in from_overrides},
        peer.defaults,
        problems,
    )
    if problems:
        raise ConfigError(problems)
    return Source(peer, given, model_name, replaced, ours)


def _is_model_file(entries: Entries) -> bool:
    """Return whether the entries define only a model, which the file is named after."""
    return "base_emb_dim" in entries and not entries.keys() & {_BASE, "run_name"}


def _read_chain(path: Path) -> tuple[list[Entries], Path | None]:
    """Return the entries of the base files and the file, first to last, and the path of base.yml.

    base.yml is None if its published defaults are used.
    """
    chain, seen = [read_yaml(path)], [os.path.realpath(path)]
    while _BASE in chain[0]:
        raw, place = chain[0][_BASE]
        where = f"{place}: {_BASE}"
        if not isinstance(raw, str) or not raw:
            rule = "must be the path of a YAML file."
            raise ConfigError.one(
                Code.CFG_PEER, where, str(raw)[:80], rule, f"Write {_BASE}: {_ROOT}."
            )
        base = _find(raw, Path(seen[-1]))
        if base is None:
            if os.path.basename(raw) == _ROOT:
                return chain, None
            rule = f"names a file that exists neither next to {path} nor in MaxText's configs."
            action = f"Convert the file in a checkout of MaxText, or copy {raw} next to it."
            raise ConfigError.one(Code.CFG_PEER, where, raw, rule, action)
        if os.path.realpath(base) in seen or len(seen) >= _MAX_FILES:
            rule = f"leads back to {base}." if len(seen) < _MAX_FILES else "is nested too deeply."
            raise ConfigError.one(Code.CFG_PEER, where, raw, rule, f"Write {_BASE}: {_ROOT}.")
        entries = read_yaml(base)
        if _BASE not in entries and base.name == _ROOT:
            return chain, base
        chain.insert(0, entries)
        seen.append(os.path.realpath(base))
    return chain, None


def _find(name: str, file: Path) -> Path | None:
    """Return the file that a config refers to: next to it, or below a folder `configs` above."""
    folders = [file.parent, *(each for each in file.parents if each.name == "configs")]
    paths = [Path(name)] if os.path.isabs(name) else [each / name for each in folders]
    return next((each for each in paths if each.is_file()), None)


def _read_model(name: str, file: Path, place: str) -> Entries:
    """Return the entries of a model file: in the checkout of MaxText, or as published."""
    if not set(name) & {"/", "\\", "\0"}:
        found = _find(f"models/{name}.yml", Path(os.path.realpath(file)))
        if found is not None:
            return read_yaml(found)
    models = tables(NAME)["models"]
    if name not in models:
        guess = did_you_mean(name, models)
        action = f"Did you mean {guess}?" if guess else f"Use one of {', '.join(models)}."
        rule = "is not a model of MaxText."
        raise ConfigError.one(Code.CFG_PEER, f"{place}: {_MODEL}", name, rule, action)
    where = f"models/{name}.yml of MaxText"
    return {key: (to_raw(value), where) for key, value in models[name].items()}


def is_maxtext_file(path: Path) -> bool:
    """Return whether a YAML file has keys of MaxText at its top level.

    Raises:
        ConfigError: the file cannot be read.
    """
    return not {_BASE, "base_emb_dim", "decoder_block"}.isdisjoint(read_yaml(path))
