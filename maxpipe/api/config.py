"""Load configs from names, files, dicts, `Config` objects and overrides."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from maxpipe.api.arguments import argument_error, locate_errors
from maxpipe.config.check import is_override
from maxpipe.config.load import LoadedConfig, load, to_dict
from maxpipe.config.schema import Config
from maxpipe.errors import Code, ConfigError

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | LoadedConfig
"""Source of config values: the name of a bundled config, the path of a YAML file, an override
`section.key=value`, a dict, or a config."""

_MAX_DEPTH = 32


@locate_errors
def load_config(*sources: ConfigSource, to_train: bool = False) -> LoadedConfig:
    """Load a config from one or several sources.

    Files, dicts and configs are merged from left to right. Overrides apply after all of them,
    regardless of their position. Relative paths start at the current folder. No jax device is used.

    Args:
        sources: names of bundled configs, paths of YAML files, overrides such as `train.steps=10`,
            nested dicts or dicts with full keys such as `{"train.steps": 10}`, and configs.
        to_train: whether to apply also the checks of `maxpipe train`, for example that the length
            of the run is set.

    Returns:
        The config with the origin of each value. `.config` holds the sections, such as
        `.config.train.steps`.

    Raises:
        ConfigError: lists all errors in the files, dicts, overrides and values.
    """
    if len(sources) == 1 and isinstance(sources[0], LoadedConfig) and not to_train:
        return sources[0]
    return load(config_inputs(sources), to_train=to_train)


def config_inputs(sources: Iterable[ConfigSource]) -> list[str | Mapping[str, Any]]:
    """Return the sources as names, paths, overrides and dicts.

    Raises:
        ConfigError: a source has another type.
    """
    if isinstance(sources, str | bytes | Mapping) or not isinstance(sources, Iterable):
        action = "Pass a list, such as ['eval.batches=4']."
        raise argument_error("overrides", sources, "must be a list of overrides.", action)
    return [_to_input(source) for source in sources]


def _to_input(source: ConfigSource) -> str | Mapping[str, Any]:
    if isinstance(source, LoadedConfig):
        return to_dict(source.config)
    if isinstance(source, Config):
        return to_dict(source)
    if isinstance(source, os.PathLike):
        path = os.fspath(source)
        if isinstance(path, str):
            return f"./{path}" if is_override(path) else path
    if isinstance(source, Mapping):
        _check_depth(source)
        return source
    if isinstance(source, str):
        return source
    rule = "must be a name, a path, an override, a dict or a config."
    raise argument_error("config", source, rule, "Pass each source as a separate argument.")


def _check_depth(content: Mapping[str, Any]) -> None:
    """Check that a dict is not nested too deeply, for example because it contains itself.

    Raises:
        ConfigError: the dict is nested too deeply.
    """
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        # A cyclic dict may contain an object several times.
        inner = {
            id(item): item
            for each in level
            for item in (each.values() if isinstance(each, Mapping) else each)
            if isinstance(item, Mapping | list | tuple)
        }
        level = list(inner.values())
        if not level:
            return
    rule = f"must be nested at most {_MAX_DEPTH} levels deep, and must not contain itself."
    raise ConfigError.one(Code.API_ARGUMENT, "dict", None, rule, "Correct the dict.")
