"""Register and load plug-ins: code from outside the package that adds values to config keys.

A plug-in is Python code that calls the `register_*` functions below when it is imported.
`plugins.modules` names plug-ins, and `plugins.allow_code` permits their code to run. Registered
names become values of `model.family`, `train.objective`, `data.source`, `pipeline.schedule` and
`log.trackers`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from maxpipe.config import schema
from maxpipe.config.check import error_location
from maxpipe.config.rules import BOUNDS, RULES, Rule
from maxpipe.config.sections.log import TRACKERS, known_trackers
from maxpipe.config.sections.model import FAMILY, add_family_rules, family_section
from maxpipe.config.sections.source import SOURCES
from maxpipe.config.sections.train import OBJECTIVES
from maxpipe.errors import Code, ConfigError, MaxpipeError, Problem, exception_chain
from maxpipe.io import files
from maxpipe.models import registry
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family
from maxpipe.models.spec import Part
from maxpipe.schedule.catalog import FILE_PREFIX, SCHEDULES, ScheduleSpec
from maxpipe.schedule.table import Orders, Ring

KEY, ALLOW, CHANGE = "plugins.modules", "plugins.allow_code", "plugins.allow_change"
GROUP = "maxpipe.plugins"
"""Group of the entry points that name plug-ins of installed distributions."""
PLUGINS = "plugins"
"""Key of the digests of plug-ins in the metadata of a checkpoint."""
DEBUG = "MAXPIPE_DEBUG"
"""Environment variable that adds tracebacks to errors raised by plug-ins."""
_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MAX_TEXT = 300


@dataclass(eq=False)
class Plugin:
    """A loaded plug-in."""

    item: str
    """Entry of `plugins.modules`."""
    path: Path
    """File of the plug-in, or the folder of its package."""
    digest: str
    """SHA-256 of the file, or of all Python files of the package."""
    undo: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Functions that remove the registered objects, keyed by setting, such as
    `model.family=mine`."""

    @property
    def name(self) -> str:
        """Name of the plug-in, which does not depend on the folder of its file."""
        return self.path.name if self.item.endswith(".py") else self.item

    @property
    def note(self) -> str:
        """Description of the plug-in for the console."""
        return f"plug-in {self.item} (sha256 {self.digest[:12]}): {', '.join(self.undo)}"

    def has_file(self, file: str) -> bool:
        """Return True if a source file belongs to the plug-in."""
        return self.path in (Path(file), *Path(file).parents)


_INTERACTIVE = Plugin("the running program", Path(), "")
"""Owner of names that are registered outside plug-ins, for example in a notebook."""

_loaded: dict[str, Plugin] = {}
"""Plug-ins of this process, keyed by the absolute path of their file or by module name."""
_loading: list[Plugin] = []


# Registration.


def register_family(family: Family, modules: Mapping[type[Part], Any] | None = None) -> None:
    """Add a model family, which `model.family` selects.

    `modules` maps each new sublayer class to the module class (`maxpipe.nn.module.SpecModule`) that
    computes it.

    Raises:
        ConfigError: the name is not valid or exists already, or a key of the family has no default.
    """
    name, section = family.name, family_section(family.name)
    taken = {*registry.FAMILIES, *(each.name for each in dataclasses.fields(ModelConfig))}
    for each in dataclasses.fields(family.section):
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            rule = f"{family.section.__name__}.{each.name} has no default."
            raise ConfigError.one(
                Code.PLUG_REGISTER, _caller(), None, rule, "Give every key of a family a default."
            )

    keys = [f"{section}.{each.name}" for each in dataclasses.fields(family.section)]
    added: list[Rule] = []

    def remove() -> None:
        del registry.FAMILIES[name]
        for part in modules or {}:
            registry.PLUGIN_MODULES.pop(part, None)
        for key in keys:
            BOUNDS.pop(key, None)
        RULES[:] = [
            dataclasses.replace(rule, keys=tuple(key for key in rule.keys if key not in keys))
            for rule in RULES
            if rule not in added
        ]
        registry.describe.cache_clear()

    with _registration(FAMILY, name, taken, remove):
        registry.FAMILIES[name] = family
        registry.PLUGIN_MODULES.update(modules or {})
        # Rules that read the model are skipped if one of these keys is invalid.
        RULES[:] = [
            dataclasses.replace(rule, keys=(*rule.keys, *keys)) if FAMILY in rule.keys else rule
            for rule in RULES
        ]
        before = len(RULES)
        add_family_rules(family)
        added += RULES[before:]


def register_objective(name: str, make: Callable[..., Any]) -> None:
    """Add an objective, which `train.objective` selects.

    `make` is a `maxpipe.pipeline.objective.Objective` class, or a function that returns one. Its
    parameters are the numbers in `train.objective_options`. The objective is computed per token.

    Raises:
        ConfigError: the name is not valid or exists already.
    """
    taken = typing.get_args(schema.KEYS["train.objective"])
    _check_callable("train.objective", name, make)
    with _registration("train.objective", name, taken, lambda: OBJECTIVES.pop(name)):
        OBJECTIVES[name] = make


def register_source(name: str, open_documents: Callable[[list[str], int], Sequence[Any]]) -> None:
    """Add a data source, which `data.source` selects.

    `open_documents(files, seed)` returns a sequence of documents: strings, or mappings from column
    names to values. `files` are the files of `data.path`, and `seed` is `run.seed`. Document i must
    be the same in every process and in every run.

    Raises:
        ConfigError: the name is not valid or exists already.
    """
    taken = typing.get_args(schema.KEYS["data.source"])
    _check_callable("data.source", name, open_documents)
    with _registration("data.source", name, taken, lambda: SOURCES.pop(name)):
        SOURCES[name] = open_documents


def register_schedule(
    name: str, generate: Callable[[Ring, int, int], Orders], **properties: Any
) -> None:
    """Add a pipeline schedule, which `pipeline.schedule` selects.

    `generate(ring, num_microbatches, group)` returns the actions of each stage in order.
    `properties` are fields of `maxpipe.schedule.catalog.ScheduleSpec`.

    Raises:
        ConfigError: the name is not valid or exists already.
    """
    _check_callable("pipeline.schedule", name, generate)
    properties = {"summary": f"from {_owner().item}", **properties}
    with _registration("pipeline.schedule", name, SCHEDULES, lambda: SCHEDULES.pop(name)):
        SCHEDULES[name] = ScheduleSpec(generate, **properties)


def register_tracker(name: str, make: Callable[[], Any]) -> None:
    """Add an experiment tracker, which `log.trackers` selects.

    `make` is a `maxpipe.telemetry.trackers.interface.Tracker` class, or a function that returns
    one. Trackers run in a separate process, which loads the plug-in again.

    Raises:
        ConfigError: the name is not valid or exists already.
    """
    _check_callable("log.trackers", name, make)
    with _registration("log.trackers", name, known_trackers(), lambda: TRACKERS.pop(name)):
        TRACKERS[name] = make


def _check_callable(key: str, name: str, given: object) -> None:
    if not callable(given):
        rule = f"must be registered with a function, not with {type(given).__name__}."
        raise ConfigError.one(
            Code.PLUG_REGISTER, _caller(), f"{key}={name}", rule, "Pass a function."
        )


class _registration:
    """Context that checks a name, assigns the registered object to its plug-in, and updates the
    tables of the config schema.
    """

    def __init__(
        self, key: str, name: str, taken: Iterable[str], remove: Callable[[], object]
    ) -> None:
        self._setting, self._remove, self._plugin = f"{key}={name}", remove, _owner()
        if not _NAME.fullmatch(name):
            rule = "must consist of lower-case letters, digits and `_`, and begin with a letter."
            raise ConfigError.one(
                Code.PLUG_REGISTER, _caller(), self._setting, rule, "Change the name."
            )
        if self._plugin is _INTERACTIVE and self._setting in _INTERACTIVE.undo:
            _remove(_INTERACTIVE, self._setting)
        elif name in taken:
            others = [each for each in _loaded.values() if self._setting in each.undo]
            owner = others[0].item if others else "maxpipe"
            rule = f"is a name that {owner} already defines."
            raise ConfigError.one(
                Code.PLUG_REGISTER, _caller(), self._setting, rule, "Use another name."
            )

    def __enter__(self) -> None:
        self._plugin.undo[self._setting] = lambda: (self._remove(), schema.update_tables())[1]

    def __exit__(self, *_: object) -> None:
        schema.update_tables()


def _owner() -> Plugin:
    return _loading[-1] if _loading else _INTERACTIVE


def _caller() -> str:
    """Return the file and line of the code that called this module."""
    frames = [each for each in traceback.extract_stack() if each.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _remove(plugin: Plugin, setting: str) -> None:
    plugin.undo.pop(setting)()


# Loading.


def load_plugins(items: Sequence[str], where: str, *, allowed: bool) -> list[Plugin]:
    """Run the code of plug-ins that this process has not loaded yet, and return the plug-ins.

    `where` is the location of `plugins.modules`, for messages. A file that has changed is loaded
    again.

    Raises:
        ConfigError: the code is not allowed to run, does not exist, or raises an error.
    """
    if items and not allowed:
        names = " and ".join(items)
        rule = f"names Python code ({names}), which would run with your permissions; {ALLOW} is "
        rule += "false."
        action = f"Read the code, and set {ALLOW}=true in your config or on the command line if "
        raise ConfigError.one(
            Code.PLUG_NOT_ALLOWED, where, _shown(items), rule, f"{action}you trust it."
        )
    return [_load(item, where) for item in items]


def loaded_plugins(items: Iterable[str]) -> list[Plugin]:
    """Return the loaded plug-ins with these names."""
    return [each for each in _loaded.values() if each.item in items]


def plugin_digests(items: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 digests of loaded plug-ins, keyed by name."""
    return {each.name: each.digest for each in loaded_plugins(items)}


def with_needed_plugins(sections: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections of a saved config, with its section `plugins` only if a value in them comes
    from a plug-in. A command that reads only the model then needs no code of other plug-ins.
    """
    others = {name: values for name, values in sections.items() if name != PLUGINS}
    mappings = {name: values for name, values in others.items() if isinstance(values, Mapping)}
    for key, value in schema.flatten(mappings).items():
        is_source = key.startswith("data.") and key.endswith(".source")
        known = _BUILT_IN.get("data.source" if is_source else key)
        if known and str(value) not in known and not str(value).startswith(FILE_PREFIX):
            return {**others, PLUGINS: saved.get(PLUGINS, {})}
    return others


_BUILT_IN = {
    FAMILY: frozenset(registry.FAMILIES),
    "train.objective": frozenset(typing.get_args(schema.KEYS["train.objective"])),
    "data.source": frozenset(typing.get_args(schema.KEYS["data.source"])),
    "pipeline.schedule": frozenset(SCHEDULES),
}
"""Values that need no plug-in."""


def check_plugins(data: Mapping[str, Any], loaded: _Loaded, step: int) -> list[str]:
    """Check that the code of plug-ins is the same as when a checkpoint was saved. `data` is the
    data section of the metadata of the checkpoint.

    If `plugins.allow_change` is set, return one warning for each change instead.

    Raises:
        ConfigError: the code has changed.
    """
    saved = data.get(PLUGINS)
    saved = saved if isinstance(saved, Mapping) else {}
    problems = [
        Problem(
            Code.PLUG_CHANGED,
            error_location(KEY, loaded.origins),
            name,
            f"has changed since step {step} was saved: its sha256 was {str(saved[name])[:12]} and "
            f"is {digest[:12]}.",
            f"Restore the code, or set {CHANGE}=true to use the changed code.",
        )
        for name, digest in plugin_digests(loaded.config.plugins.modules).items()
        if saved.get(name, digest) != digest
    ]
    if problems and not loaded.config.plugins.allow_change:
        raise ConfigError(problems)
    return [f"plug-in {problem.value} {problem.rule}" for problem in problems]


class _Loaded(Protocol):
    """Interface of `LoadedConfig`, whose module imports this module."""

    @property
    def config(self) -> schema.Config: ...

    @property
    def origins(self) -> Mapping[str, str]: ...


def unload_plugins() -> None:
    """Remove all plug-ins, and everything that they registered."""
    for key in [*_loaded]:
        _unload(key)


def find_plugin_error(error: BaseException) -> ConfigError | None:
    """Return the error to report if the code of a plug-in raised the exception, else None."""
    for each in exception_chain(error):
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            for plugin in (*_loading, *_loaded.values()):
                if plugin.has_file(frame.filename):
                    return _code_error(plugin, each)
    return None


def _shown(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def _load(item: str, where: str) -> Plugin:
    if item.endswith(".py"):
        path = files.expand_path(item, KEY).absolute()
        try:
            code = files.read(path, _MAX_BYTES)
        except OSError as error:
            rule = f"cannot be read: {error.strerror or error}."
            action = f"Set {KEY} to existing Python files."
            raise ConfigError.one(Code.PLUG_LOAD, where, item, rule, action) from error
        digest, key = hashlib.sha256(code).hexdigest(), str(path)
        if (found := _loaded.get(key)) is not None and found.digest == digest:
            return found
        _unload(key)
        plugin = Plugin(item, path, digest)
        return _run(plugin, key, where, lambda: _run_file(path, code, digest))
    if item in _loaded:
        return _loaded[item]
    if not _MODULE.fullmatch(item):
        rule = "is neither a Python file nor the name of an entry point or module."
        raise ConfigError.one(Code.PLUG_LOAD, where, item, rule, f"Set {KEY}=[plugin.py].")
    points = [each for each in _entry_points() if each.name == item]
    name = points[0].module if points else item
    spec = importlib.util.find_spec(name.partition(".")[0])  # runs no code
    if spec is None:
        raise _not_found(item, where)
    path = Path(spec.origin or "")
    if spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations)))
    plugin = Plugin(item, path, _digest(path))
    return _run(plugin, item, where, lambda: _import_module(name, points, item, where))


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return [*importlib.metadata.entry_points(group=GROUP)]


def _not_found(item: str, where: str) -> ConfigError:
    known = ", ".join(sorted({each.name for each in _entry_points()})) or "none"
    rule = f"is neither a module nor an entry point in the group {GROUP} (installed: {known})."
    action = "Install the distribution that provides it, or name a Python file."
    return ConfigError.one(Code.PLUG_LOAD, where, item, rule, action)


def _run(plugin: Plugin, key: str, where: str, run: Callable[[], object]) -> Plugin:
    _loading.append(plugin)
    _loaded[key] = plugin
    try:
        run()
        if not plugin.undo:
            rule = "registers no family, objective, source, schedule or tracker."
            action = "Call a `register_*` function of maxpipe.config.plugins in it."
            raise ConfigError.one(Code.PLUG_REGISTER, where, plugin.item, rule, action)
    except BaseException as error:
        _unload(key)
        if isinstance(error, MaxpipeError) or not isinstance(error, Exception | SystemExit):
            raise
        raise _code_error(plugin, error) from error
    finally:
        _loading.remove(plugin)
    return plugin


def _run_file(path: Path, code: bytes, digest: str) -> None:
    """Run exactly the bytes from which the digest was computed."""
    module = ModuleType(f"maxpipe_plugin_{path.stem}_{digest[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module
    exec(compile(code, str(path), "exec"), module.__dict__)


def _import_module(
    name: str, points: Sequence[importlib.metadata.EntryPoint], item: str, where: str
) -> None:
    """Import a module, and call the function that the entry point names, if any."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # a module that the plug-in imports is missing
            raise
        raise _not_found(item, where) from error
    for point in points[:1]:
        if callable(register := point.load()):
            register()


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of all Python files in a folder and their names."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    total = hashlib.sha256()
    for file in sorted(path.rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{content}  {file.relative_to(path).as_posix()}\n".encode())
    return total.hexdigest()


def _unload(key: str) -> None:
    if (plugin := _loaded.pop(key, None)) is None:
        return
    for setting in [*plugin.undo]:
        _remove(plugin, setting)
    if not plugin.item.endswith(".py"):
        for point in _entry_points():
            if point.name == plugin.item:
                sys.modules.pop(point.module, None)
        sys.modules.pop(plugin.item, None)


def _code_error(plugin: Plugin, error: BaseException) -> ConfigError:
    """Return the error for an exception in a plug-in. It names the innermost line of the
    plug-in.
    """
    line, function, file = None, "", plugin.item
    for frame in traceback.extract_tb(error.__traceback__):
        if plugin.has_file(frame.filename):
            line, function = frame.lineno, frame.name
            file = plugin.item if plugin.item.endswith(".py") else frame.filename
    if isinstance(error, SyntaxError) and error.filename and plugin.has_file(error.filename):
        line, function = error.lineno, ""
        file = plugin.item if plugin.item.endswith(".py") else error.filename
    text = " ".join(str(error).split())[:_MAX_TEXT]
    place = f" in {function}" if function not in ("", "<module>") else ""
    rule = f"the plug-in raised {type(error).__name__}{place}{f': {text}' if text else '.'}"
    action = f"Correct this code. {DEBUG}=1 in the environment prints a traceback."
    if os.environ.get(DEBUG):
        trace = "".join(traceback.format_exception(error)).rstrip("\n")
        rule, action = f"{rule}\n{trace}", "Correct this code."
    return ConfigError.one(Code.PLUG_FAILED, f"{file}:{line}" if line else file, None, rule, action)
