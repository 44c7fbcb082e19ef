"""Load a `Config` from files and overrides, and record the origin of each value.

Only this module uses OmegaConf. The type of each value is determined by the schema, not by YAML:
`name: on` is the string "on". All errors are collected and raised as a single `ConfigError`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf

from maxpipe.config import config_files, foreign_files, plugins
from maxpipe.config.assignments import (
    Assignment,
    duplicate_settings,
    former_key_warnings,
    from_document,
    from_override,
    from_values,
    is_mapping,
    is_reference,
    rename_former_key,
    repeated_keys,
    resolve_model,
    shape_override_notes,
)
from maxpipe.config.check import DEFAULT, check, check_training, find_mesh_mismatch, is_override
from maxpipe.config.config_files import ConfigFile, locate
from maxpipe.config.key_problems import type_problem, unknown_problem
from maxpipe.config.peft_settings import KEY as PEFT_KEY
from maxpipe.config.peft_settings import with_peft_values
from maxpipe.config.rules import did_you_mean, plain_value
from maxpipe.config.schema import (
    KEYS,
    NAME,
    NAMED_KEYS,
    NAMED_SECTIONS,
    PERMISSIONS,
    SECTIONS,
    Config,
    is_of_another_family,
    item_type,
    names_in,
    section_of,
    sections_of,
    split_key,
)
from maxpipe.config.sections.model import FAMILY, family_section
from maxpipe.config.translation import (
    CONTEXT_KEYS,
    TranslationContext,
    convert_value,
    is_accumulation,
    translate,
)
from maxpipe.config.yaml_values import (
    NAME_FORM,
    READERS,
    ItemError,
    TooLargeError,
    find_invalid_text,
    read_file,
    read_items,
    read_unchanged,
    texts,
    to_yaml_line,
)
from maxpipe.errors import Code, ConfigError, Problem

_MOST_IN_CONTEXT = 2000
"""Maximum number of unknown keys whose values are considered when other keys are translated. The
longest known config of another trainer contains 700 keys."""
_MAX_PROBLEMS = 100
DICT = "dict"
"""Origin of the values that come from a dict in place of a file."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid config, with the origin of each value."""

    config: Config
    origins: dict[str, str]
    """Maps each full key to the origin of its value: "default", a file, or the override itself."""
    inferred: frozenset[str] = frozenset()
    """Full keys whose value -1 was replaced with a value computed from the number of devices."""
    warnings: tuple[Problem, ...] = ()
    """Warnings about deprecated settings that are still accepted."""
    notes: tuple[str, ...] = ()
    """Notes to print before training, such as which file defines the model if several files set
    model keys."""


def load(
    args: Sequence[str | Mapping[str, Any]],
    saved: Mapping[str, Any] | None = None,
    origin: str = "",
    *,
    to_train: bool = False,
) -> LoadedConfig:
    """Load a config from files and `section.key=value` overrides.

    Files are merged from left to right onto `saved`, a dict returned by `to_dict` that error
    messages refer to as `origin`. Overrides apply after all files, regardless of their position. A
    file may be given as the name of a bundled config, or as a dict with the content of a file. If
    `to_train` is set, the config must also pass the checks that apply only to training.

    Raises:
        ConfigError: lists all errors in the files, overrides and values. For another trainer's
            file, the exception contains the translation and the errors that remain in it.
    """
    try:
        return _load_translated(args, saved, origin, {}, to_train=to_train)
    except foreign_files.OtherTrainerError as error:
        reports = error.reports
    remaining: tuple[Problem, ...] = ()
    try:
        if any(each.text for each in reports.values()):
            _load_translated(args, saved, origin, reports, to_train=to_train)
    except ConfigError as error:
        remaining = error.problems
    raise ConfigError([*(each.problem for each in reports.values()), *remaining])


def _load_translated(
    args: Sequence[str | Mapping[str, Any]],
    saved: Mapping[str, Any] | None,
    origin: str,
    translated: Mapping[str, foreign_files.TranslationReport],
    *,
    to_train: bool,
) -> LoadedConfig:
    """Implement `load`. `translated` maps the origins of other trainers' files to their
    translations.
    """
    problems: list[Problem] = []
    arguments = [arg for arg in args if isinstance(arg, str)]
    overrides = [arg for arg in arguments if is_override(arg) or arg.startswith("-")]
    files = [arg for arg in args if arg not in overrides]
    sources = [
        _locate_or_report(arg, problems) if isinstance(arg, str) else list(from_values(arg, DICT))
        for arg in files
    ]
    located = [source for source in sources if not isinstance(source, list)]
    problems += (
        each for source in sources if isinstance(source, list) for each in repeated_keys(source)
    )
    documents = {
        file: read_file(file, problems) for file in located if file and not _is_foreign(file)
    }
    plugin_notes = _load_plugins(saved, origin, sources, documents, overrides)
    assignments = [*_saved_assignments(saved, origin)]
    read = [
        source
        if isinstance(source, list)
        else source and _read(source, documents, translated, problems)
        for source in sources
    ]
    in_files = [assignment for each in read if each for assignment in each]
    from_overrides = [each for arg in overrides for each in from_override(arg, problems)]
    model = resolve_model(in_files, from_overrides, problems, is_saved=bool(saved and origin))
    new_assignments = [*model.before, *in_files, *model.after, *from_overrides]
    assignments += [each for each in new_assignments if not is_reference(each)]
    cautions = tuple(former_key_warnings(assignments, saved_as=origin))
    problems += duplicate_settings(assignments)
    assignments = [rename_former_key(assignment) for assignment in assignments]
    named = _default_run_name(located[-1]) if located and located[-1] else None
    # If a key refers to another trainer's config file, that file may set the missing keys.
    is_complete = None not in read and foreign_files.find_config_file_key(new_assignments) is None
    is_complete = is_complete and not any(each.has_config_file_key for each in translated.values())
    foreign = [each.origin for each in located if each and _is_foreign(each)]
    foreign = [each for each in foreign if each not in translated]
    built = _build(
        assignments, problems, named, is_complete=is_complete, to_train=to_train, foreign=foreign
    )
    foreign_names = [file.argument for file in located if file and file.argument]
    notes = (
        *plugin_notes,
        *model.notes,
        *shape_override_notes(assignments),
        *map(_shape_only_note, foreign_names),
    )
    return dataclasses.replace(built, warnings=cautions, notes=notes)


def load_storage_settings(path: str) -> Config:
    """Load only the sections `run` and `checkpoint` of a run's config.yml. All other values are
    defaults and are not checked, and no plug-in is loaded.

    Raises:
        ConfigError: the file cannot be read, or a value in these sections is invalid.
    """
    problems: list[Problem] = []
    file = locate(path, KEYS)
    document = read_file(file, problems)
    read = [*from_document(document, file.origin, problems)] if document else []
    sections = ("run", "checkpoint")
    read = [each for each in map(rename_former_key, read) if each.path[0] in sections]
    assignments = [*from_values({"model": PLACEHOLDER_MODEL}, ""), *read]
    named = _default_run_name(file)
    others = [key for key in KEYS if section_of(key) not in sections]
    return _build(assignments, problems, named, is_complete=True, unchecked=others).config


PLACEHOLDER_MODEL = {
    **{"num_layers": 1, "d_model": 128, "num_heads": 1, "num_kv_heads": 1, "head_dim": 128},
    **{"d_mlp": 128, "vocab_size": 1 << 30},
}
"""Model config for commands that need no model."""


def _saved_assignments(saved: Mapping[str, Any] | None, origin: str) -> Iterator[Assignment]:
    """Yield the assignments in a saved config, except the permission to run code, which only the
    user's own files and overrides can give.
    """
    for each in from_values(saved or {}, origin):
        if origin == _FROM_DICT or ".".join(each.path) not in PERMISSIONS:
            yield each


def _load_plugins(
    saved: Mapping[str, Any] | None,
    origin: str,
    sources: Sequence[ConfigFile | list[Assignment] | None],
    documents: _Documents,
    overrides: Sequence[str],
) -> list[str]:
    """Load the plug-ins that the config names, and return one note for each.

    Plug-ins add keys and values. The documents are therefore converted to assignments once in
    advance, without reporting errors.
    """
    ignored: list[Problem] = []
    assignments = [*_saved_assignments(saved, origin)]
    for source in sources:
        if isinstance(source, list):
            assignments += source
        elif source and (document := documents.get(source)):
            assignments += _assignments_in(document, source, ignored)
    assignments += [each for arg in overrides for each in from_override(arg, ignored)]
    nodes, last = {"plugins": _unset()["plugins"]}, ""
    for each in map(rename_former_key, assignments):
        key = ".".join(each.path)
        if section_of(key) == "plugins" and key in KEYS and _assign(nodes, each) is None:
            last = each.place if key == plugins.KEY else last
    chosen = nodes["plugins"]
    where = f"{last or origin}: {plugins.KEY}"
    loaded = plugins.load_plugins([*chosen.modules], where, allowed=chosen.allow_code)
    return [each.note for each in loaded]


_FROM_DICT = "from_dict"
"""Origin of values that a Python program sets."""


def from_dict(values: Mapping[str, Any]) -> Config:
    """Build a config from nested dicts, with the same checks as for a file."""
    return load([], values, _FROM_DICT).config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return all sections and keys as nested dicts. The model family's section is nested in
    `model`.
    """
    nested: dict[str, dict[str, Any]] = {}
    for section, values in sections_of(config).items():
        outer, _, inner = section.partition(".")
        below = nested.setdefault(outer, {})
        below = below.setdefault(inner, {}) if inner else below
        below |= {name: plain_value(getattr(values, name)) for name in names_in(section)}
    return nested


def to_yaml(config: Config, comment: Callable[[str], str] | None = None) -> str:
    """Return YAML text that loads back as an equal config, with one line per key in schema order.

    `comment` maps a full key to the comment on its line.
    """
    lines: list[str] = []
    for section, values in sections_of(config).items():
        *outer, inner = section.split(".")
        indent = "  " * len(outer)
        lines.append(f"{indent}{inner}:")
        for name in names_in(section):
            line = f"{indent}  {name}: {to_yaml_line(plain_value(getattr(values, name)))}"
            remark = comment(f"{section}.{name}") if comment else ""
            remark = "".join(character for character in remark if character.isprintable())
            lines.append(f"{line}  # {remark}" if remark else line)
    return "\n".join([*lines, ""])


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `section.key=value` into the full key and a value of the key's declared type.

    Raises:
        ConfigError: the key does not exist, or the value is invalid.
    """
    problems: list[Problem] = []
    nodes, paths = dict(_unset()), []
    for assignment in from_override(text, problems):
        paths.append(assignment.path)
        if problem := _assign(nodes, assignment):
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    section, (name, *_) = split_key(paths[0])
    value = nodes[section][name]
    return f"{section}.{name}", OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


# The functions below convert assignments to config values.

_Documents = Mapping[ConfigFile, yaml.MappingNode | None]
"""Parsed YAML files; None for a file that is not valid YAML."""


def _locate_or_report(arg: str, problems: list[Problem]) -> ConfigFile | None:
    """Return the file that an argument refers to. If no such file exists, record an error and
    return None.
    """
    try:
        return locate(arg, KEYS)
    except ConfigError as error:
        problems += error.problems
        return None


def _read(
    file: ConfigFile,
    documents: _Documents,
    translated: Mapping[str, foreign_files.TranslationReport],
    problems: list[Problem],
) -> list[Assignment] | None:
    """Return the assignments in a file, or None if the file cannot be read. `documents` contains
    the parsed YAML files; errors in files of other formats are recorded.
    """
    if report := translated.get(file.origin):
        return report.assignments(problems)
    if _is_foreign(file):
        try:
            return foreign_files.read_foreign(file.path, file.origin)
        except ConfigError as error:
            problems += error.problems
            return None
    document = documents[file]
    return list(_assignments_in(document, file, problems)) if document else None


def _assignments_in(
    document: yaml.MappingNode, file: ConfigFile, problems: list[Problem]
) -> Iterator[Assignment]:
    """Yield the assignments in a file. The permission to run code is omitted from a config.yml in a
    run folder, which may come from another person.
    """
    # A link to the config of a run gives no permission either.
    path = Path(os.path.realpath(file.path))
    is_record = path.name == config_files.CONFIG_FILE and any(
        (path.parent / name).exists() for name in _RECORDS
    )
    for each in from_document(document, file.origin, problems):
        if not is_record or ".".join(each.path) not in PERMISSIONS:
            yield each


_RECORDS = (
    config_files.EVENTS_FILE,
    config_files.METRICS_FILE,
    config_files.CHECKPOINTS_FOLDER,
)
"""Files and folders that exist only in run folders."""


def _is_foreign(file: ConfigFile) -> bool:
    """Return True if the file has a format that only other trainers use."""
    return file.path.suffix in foreign_files.SUFFIXES


def _shape_only_note(argument: str) -> str:
    name = getattr(config_files.find_model(argument), "name", argument)
    return f"model: {name} has the shape of {argument}; its weights are not loaded"


def _default_run_name(file: ConfigFile) -> Assignment:
    """Return an assignment of the default run name, which is derived from the file name."""
    origin = f"the name of {file.origin}"
    return Assignment(("run", "name"), file.run_name, origin, file.origin)


def _build(
    assignments: Sequence[Assignment],
    problems: list[Problem],
    named: Assignment | None,
    *,
    is_complete: bool,
    to_train: bool = False,
    foreign: Collection[str] = (),
    unchecked: Collection[str] = (),
) -> LoadedConfig:
    """Convert assignments to a config, and check the rules that read no key in `unchecked`."""
    nodes = dict(_unset())
    origins = dict.fromkeys(KEYS, DEFAULT)
    if named is not None:
        _assign(nodes, named)
        origins[".".join(named.path)] = named.origin
    wrong = {problem.where.rpartition(": ")[2] for problem in problems}
    unknown = [assignment for assignment in assignments if _is_unknown(assignment)]
    assignments = [assignment for assignment in assignments if not _is_unknown(assignment)]
    rejected: dict[tuple[str, ...], Problem] = {}
    for done, assignment in enumerate(assignments):
        if len(problems) + len(rejected) >= _MAX_PROBLEMS:
            rule = f"{len(assignments) - done} more values were not read."
            more = Problem(Code.CFG_VALUE, "config", "", rule, "Fix these problems first.")
            raise ConfigError([*problems, *rejected.values(), more])
        problem = _assign(nodes, assignment)
        if problem is None:
            origins |= dict.fromkeys(_prefixes(assignment.path), assignment.origin)
            rejected.pop(assignment.path, None)  # an override replaces an invalid value
        else:
            rejected[assignment.path] = problem
    problems += rejected.values()
    wrong.update(prefix for path in rejected for prefix in _prefixes(path))
    context = _context(unknown, nodes)
    if reports := foreign_files.translate_files(unknown, assignments, foreign, context):
        raise foreign_files.OtherTrainerError(reports)
    for done, problem in enumerate(unknown_problem(each, context) for each in unknown):
        if len(problems) >= _MAX_PROBLEMS:
            rule = f"{len(unknown) - done} more values were not read."
            problems.append(
                Problem(Code.CFG_UNKNOWN_KEY, "config", "", rule, "Fix these problems first.")
            )
            raise ConfigError(problems)
        problems.append(problem)
    wrong.update(prefix for each in unknown for prefix in _prefixes(each.path))
    unset = [key for key in _translated_keys(unknown, nodes) if origins.get(key) == DEFAULT]
    wrong.update(unset)
    family = nodes["model"]["family"]
    for problem in _other_family_problems(assignments, family):
        problems.append(problem)
        wrong.add(problem.where.rpartition(": ")[2])
    nodes = {name: node for name, node in nodes.items() if not is_of_another_family(name, family)}
    missing = [
        f"{section}.{name}"
        for section, node in nodes.items()
        for name in sorted(OmegaConf.missing_keys(node), key=list(node.keys()).index)
    ]
    for key in missing:
        section, _, name = key.rpartition(".")
        # This placeholder value allows the other rules to run.
        _copied(nodes, section)[name] = KEYS[key]()
    absent = [key for key in missing if key not in wrong]
    if absent and is_complete:
        problems.append(_missing_problem(absent, assignments))
    sections: dict[str, Any] = {name: OmegaConf.to_object(node) for name, node in nodes.items()}
    own = sections.pop(family_section(family))
    sections["model"] = dataclasses.replace(sections["model"], own=own)
    config = Config(**sections)
    if config.adapter.restore_from and not problems:
        config = with_peft_values(config, origins)
    has_unread_rank = not config.adapter.rank and origins["adapter.rank"] == DEFAULT
    if config.adapter.restore_from and has_unread_rank:
        wrong.add(PEFT_KEY)  # the folder, which defines the rank, was not read
    broken = check(config, origins, skip=wrong.union(missing, unchecked))
    if to_train:
        broken += check_training(config, origins, skip=wrong.union(missing))
    if to_train and broken:
        # A wrong mesh causes further errors, for example of sizes that it does not divide.
        broken = [*find_mesh_mismatch(config, origins), *broken]
    # If a file could not be read, ignore errors about default values that the file might override.
    problems += [p for p in broken if is_complete or not p.where.startswith(f"{DEFAULT}: ")]
    if problems:
        raise ConfigError(problems)
    return LoadedConfig(config, origins)


def _unset() -> dict[str, Any]:
    """Return all sections with every value unset; they are shared and therefore read-only. Copying
    a section is four times as fast as building it.
    """
    return _unset_nodes(tuple(SECTIONS.items()))


@functools.lru_cache(maxsize=2)
def _unset_nodes(sections: tuple[tuple[str, type], ...]) -> dict[str, Any]:
    nodes = {section: OmegaConf.structured(declared) for section, declared in sections}
    for node in nodes.values():
        OmegaConf.set_readonly(node, True)
    return nodes


def _copied(nodes: dict[str, Any], section: str) -> Any:
    """Return a section that the caller may modify; a shared section is copied first."""
    if nodes[section] is _unset()[section]:
        nodes[section] = copy.deepcopy(nodes[section])
        OmegaConf.set_readonly(nodes[section], False)
    return nodes[section]


def _other_family_problems(assignments: Iterable[Assignment], family: str) -> Iterator[Problem]:
    """Yield an error for each key that belongs to another model family. If a key is assigned
    several times, only the last assignment is checked.
    """
    last = {assignment.path: assignment for assignment in assignments}
    for path, assignment in last.items():
        section, names = split_key(path)
        if (
            names
            and ".".join([section, names[0]]) in KEYS
            and is_of_another_family(section, family)
        ):
            other = section.rpartition(".")[2]
            yield assignment.problem(
                Code.CFG_CONFLICT,
                f"requires {FAMILY}={other}, but the family is {family}.",
                f"Leave it out, or set {FAMILY}={other}.",
            )


def _prefixes(path: tuple[str, ...]) -> list[str]:
    return [".".join(path[:length]) for length in range(2, len(path) + 1)]


def _missing_problem(keys: Sequence[str], assignments: Sequence[Assignment]) -> Problem:
    files = dict.fromkeys(a.origin for a in assignments if not is_override(a.origin))
    where = ", ".join(files) or "command line"
    verb = "is required." if len(keys) == 1 else "are required."
    return Problem(
        Code.CFG_MISSING,
        f"{where}: {', '.join(keys)}",
        "",
        f"{verb}",
        f"Specify a model first, such as tiny (`maxpipe configs list`), or set {keys[0]}=VALUE.",
    )


def _is_unknown(assignment: Assignment) -> bool:
    """Return True if the assigned key does not exist."""
    section, (name, *entry) = (lambda at: (at[0], at[1] or (".",)))(split_key(assignment.path))
    hint = KEYS.get(f"{section}.{name}") if "." not in name else None
    return hint is None or bool(entry and not is_mapping(hint)) or bool(assignment.option)


def _translated_keys(unknown: Sequence[Assignment], nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that the suggested translations of unknown keys would set."""
    context = _context(unknown, nodes)
    for assignment in unknown[:_MOST_IN_CONTEXT]:
        for path, raw in foreign_files.leaves(assignment):
            translation = translate(path, raw, context)
            if translation.is_exact:
                yield from (key for key, _ in translation.settings)


def _context(unknown: Sequence[Assignment], nodes: Mapping[str, Any]) -> TranslationContext:
    """Return the current settings, including those translated from other trainers' keys."""
    values: dict[str, Any] = {
        key: nodes[section_of(key)][key.rpartition(".")[2]] for key in CONTEXT_KEYS
    }
    context = TranslationContext(values)
    for assignment in unknown[:_MOST_IN_CONTEXT]:
        for path, raw in foreign_files.leaves(assignment):
            if is_accumulation(path):
                accumulation = convert_value("pipeline.microbatches", raw)[0]
                context = dataclasses.replace(context, gradient_accumulation=int(accumulation or 1))
                continue
            translation = translate(path, raw, context)
            for key, text in translation.settings:
                # Ignore a model family that is only implied by a family-specific key.
                if key in values and key == translation.key:
                    values[key] = READERS.get(KEYS[key], read_unchanged)(text)
    return context


def _assign(nodes: dict[str, Any], assignment: Assignment) -> Problem | None:
    """Store the value in the key's section, or return an error."""
    section, names = split_key(assignment.path)
    name, *entry = names or (".",)
    if _is_unknown(assignment):
        return unknown_problem(assignment, _context((), nodes))
    hint = KEYS[f"{section}.{name}"]
    for text in texts(assignment.raw):
        refusal = find_invalid_text(text)
        if refusal:
            return assignment.problem(Code.CFG_TYPE, *refusal)
    node = _copied(nodes, section)
    if (of_name := NAMED_SECTIONS.get(f"{section}.{name}.{NAME}")) is not None:
        within = _locate_in_named_section(node, assignment, of_name, name, entry)
        if isinstance(within, Problem):
            return within
        if within is None:
            return None
        node, (name, hint), entry = *within, []
    try:
        if item_type(hint) is not None:
            value = read_items(assignment.raw, f"{section}.{name}")
        else:
            value = READERS.get(hint, read_unchanged)(assignment.raw)
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            raise ValueError(value)
        if entry:
            node[name][entry[0]] = _read_entry(value, typing.get_args(hint)[-1])
        else:
            node[name] = value
    except ItemError as error:
        return _item_problem(assignment, error)
    except TooLargeError as error:
        return assignment.problem(Code.CFG_TYPE, str(error), type_problem(assignment, hint).action)
    except (ValueError, OverflowError):
        return type_problem(assignment, hint)
    return None


def _read_entry(value: Any, hint: Any) -> Any:
    """Convert the value of a mapping entry. Lists are converted by OmegaConf."""
    return READERS[hint](value) if hint is float else value


def _item_problem(assignment: Assignment, error: ItemError) -> Problem:
    wrong = dataclasses.replace(assignment, path=tuple(error.key.split(".")), raw=error.raw)
    if error.rule:
        return wrong.problem(Code.CFG_TYPE, error.rule, error.action)
    return type_problem(wrong, error.hint)


def _locate_in_named_section(
    node: Any, assignment: Assignment, of_name: type, key: str, entry: Sequence[str]
) -> tuple[Any, tuple[str, Any]] | Problem | None:
    """Return the node, name and type of a key in a named section, or None if the assignment only
    creates an empty section.
    """
    section = assignment.path[0]
    full = f"{section}.{key}"
    if entry and not NAME_FORM.fullmatch(entry[0]):
        keys = [*entry[1:], *(assignment.raw if isinstance(assignment.raw, dict) else ())]
        return assignment.problem(
            Code.CFG_VALUE,
            f"must have a name of at most 64 letters, digits, `_` and `-`; got {entry[0]}.",
            f"Set {full}.web.{keys[0] if keys else 'KEY'}=... (with another name).",
        )
    if len(entry) < 2:
        if assignment.raw != {} and not (entry and assignment.raw is None):
            rule = (
                "must be a mapping of names to keys." if not entry else "must be a mapping of keys."
            )
            name = entry[0] if entry else "web"
            has_path = "path" in names_in(f"{full}.{NAME}")
            example = "path='web/*.txt'" if has_path else "metric=train/loss"
            return assignment.problem(Code.CFG_TYPE, rule, f"Set {full}.{name}.{example}.")
        if entry:
            node[key][entry[0]] = _empty_section(of_name)
        else:
            node[key] = {}
        return None
    name, field = entry[0], entry[1]
    hint = NAMED_KEYS.get(f"{full}.{NAME}.{field}")
    if hint is None:
        known = names_in(f"{full}.{NAME}")
        guess = did_you_mean(field, known)
        action = f"Did you mean {full}.{name}.{guess}? " if guess else ""
        return assignment.problem(
            Code.CFG_UNKNOWN_KEY,
            f"is not a key of {full}.{name}.",
            f"{action}Its keys are {', '.join(known)}.",
        )
    if name not in node[key]:
        node[key][name] = _empty_section(of_name)
    OmegaConf.set_readonly(node[key][name], False)
    return node[key][name], (field, hint)


def _empty_section(declared: type) -> Any:
    """Return a section in which every value is unset."""
    node = OmegaConf.structured(declared)
    OmegaConf.set_readonly(node, False)
    return node
