"""Files and overrides to a `Config`, with the origin of each value.

The only module that knows OmegaConf and YAML. Text becomes a value by the type
that the schema declares and never by how YAML would guess it: `name: on` is the
string "on". Everything that is wrong is collected and raised as one `ConfigError`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf

from maxpipe.boundary import redact
from maxpipe.boundary.files import read
from maxpipe.config.check import DEFAULT, check, did_you_mean, is_override
from maxpipe.config.inputs import Input, broken_link, locate, nearby
from maxpipe.config.keys import (
    FAMILY,
    KEYS,
    MOVED,
    SECTIONS,
    family_section,
    is_of_another_family,
    names_in,
    parted,
    sections_of,
)
from maxpipe.config.names import because, key_meant, list_meant, override_meant, value_meant
from maxpipe.config.schema import Config
from maxpipe.config.training import check_training
from maxpipe.config.values import READERS, Raw, as_is, refused, texts
from maxpipe.errors import ConfigError, Problem

MAX_FILE_BYTES = 1 << 20
_MAX_DEPTH = 8
_MAX_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config that satisfies every rule, and who set each value."""

    config: Config
    origins: dict[str, str]
    """Full key to "default", a file, or the text of an override."""
    filled: frozenset[str] = frozenset()
    """Full keys that were -1, of which the devices have decided the value."""
    cautions: tuple[Problem, ...] = ()
    """What was understood but should be written otherwise."""


def load(
    args: Sequence[str],
    saved: Mapping[str, Any] | None = None,
    origin: str = "",
    *,
    to_train: bool = False,
) -> Loaded:
    """The config that files and `section.key=value` overrides describe.

    Files merge left to right onto what was `saved` (`to_dict`, by the name of `origin`), and
    overrides follow, wherever they stand among the files. A file may be given by the name of a
    config that maxpipe ships. `to_train`: it must say what to train on.

    Raises:
        ConfigError: with every mistake in the files, the overrides and the values.
    """
    problems: list[Problem] = []
    assignments = list(_from_values(saved or {}, origin))
    overrides = [arg for arg in args if is_override(arg) or arg.startswith("-")]
    files = [arg for arg in args if arg not in overrides]
    located = [_located(arg, problems) for arg in files]
    documents = [file and _read_file(file, problems) for file in located]
    for file, document in zip(located, documents, strict=True):
        if file and document:
            assignments += _read_document(document, file.origin, problems)
    for arg in overrides:
        assignments += _read_override(arg, problems)
    cautions = tuple(_cautions(assignments, saved_as=origin))
    assignments = [_to_new_key(assignment) for assignment in assignments]
    named = _named_like(located[-1]) if located and located[-1] else None
    is_complete = None not in documents
    built = _build(assignments, problems, named, is_complete=is_complete, to_train=to_train)
    return dataclasses.replace(built, cautions=cautions)


def from_dict(values: Mapping[str, Any]) -> Config:
    """The config that nested dicts describe, under the rules of a file."""
    return load([], values, "from_dict").config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Every section and key, defaults included; that of the family is inside `model`."""
    nested: dict[str, dict[str, Any]] = {}
    for section, values in sections_of(config).items():
        outer, _, inner = section.partition(".")
        below = nested.setdefault(outer, {})
        below = below.setdefault(inner, {}) if inner else below
        below |= {name: copy.deepcopy(getattr(values, name)) for name in names_in(section)}
    return nested


def to_yaml(config: Config, comment: Callable[[str], str] | None = None) -> str:
    """A file that loads to an equal config: every key, one line each, in schema order.

    `comment` gives the text behind a full key's line.
    """
    lines: list[str] = []
    for section, values in sections_of(config).items():
        *outer, inner = section.split(".")
        indent = "  " * len(outer)
        lines.append(f"{indent}{inner}:")
        for name in names_in(section):
            line = f"{indent}  {name}: {one_line(getattr(values, name))}"
            remark = comment(f"{section}.{name}") if comment else ""
            remark = "".join(character for character in remark if character.isprintable())
            lines.append(f"{line}  # {remark}" if remark else line)
    return "\n".join([*lines, ""])


# From files and arguments to assignments.


@dataclass(frozen=True, slots=True)
class _Assignment:
    path: tuple[str, ...]
    """Section, that of a family in two parts, key and, inside a mapping, the entry. Shorter when a
    part is missing."""
    raw: Raw
    origin: str
    place: str
    """Where to look: the file with its line, or the command line."""

    def problem(self, rule: str, action: str, *, given: bool = True) -> Problem:
        is_secret = self.path[:2] == ("launch", "environment")
        raw = redact.variables(self.raw) if is_secret else self.raw
        if is_secret and len(self.path) > 2:
            raw = redact.REDACTED
        text = _shortened(raw) if given else ""
        return Problem(f"{self.place}: {'.'.join(self.path)}", text, rule, action)


def _located(arg: str, problems: list[Problem]) -> Input | None:
    """The file that an argument means. None, and a problem, if it means none."""
    try:
        return locate(arg, KEYS)
    except ConfigError as error:
        problems += error.problems
        return None


def _read_file(file: Input, problems: list[Problem]) -> yaml.MappingNode | None:
    """The sections of a file. None, and a problem, if it is no such file."""
    arg, path = file.origin, file.path
    try:
        root = _compose(text := _read_text(path))
    except OSError as error:
        action = nearby(path) if not os.path.lexists(path) else "Give a file that can be read."
        what = broken_link(path)
        reason = f"cannot be read: {f'it is {what}' if what else error.strerror or error}."
        problems.append(Problem(arg, "", reason, action))
    except ConfigError as error:
        problems += error.problems
    except yaml.YAMLError as error:
        problems.append(_syntax_problem(arg, error))
    else:
        if not text.strip():
            rule = "is empty; a disk that was full may have left it so."
            problems.append(Problem(arg, "", rule, "Write it again, or leave it out."))
            return None
        if root is None or _raw(root) is None:
            return yaml.MappingNode("", [])
        if isinstance(root, yaml.MappingNode):
            return root
        rule = "must hold sections, such as `model:`, with keys below them."
        action = "See `maxpipe configs show quickstart` for an example."
        problems.append(Problem(arg, _shortened(_raw(root)), rule, action))
    return None


def _read_text(path: Path) -> str:
    content = read(path, MAX_FILE_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.one(
            str(path),
            None,
            f"is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}.",
            "Save the file as UTF-8.",
        ) from None


class _Loader(yaml.SafeLoader):
    """Composes plain nested YAML: no aliases, no tags, no deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            self.refuse("anchors and aliases are not read", event)
        if getattr(event, "tag", None):
            self.refuse(f"tags such as {event.tag} are not read", event)
        if self.depth > _MAX_DEPTH:
            self.refuse(f"nested deeper than {_MAX_DEPTH}", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def refuse(self, problem: str, event: yaml.Event) -> typing.NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _syntax_problem(place: str, error: yaml.YAMLError) -> Problem:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    what = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    if what and what.startswith("but "):
        what = f"{getattr(error, 'context', '')}, {what}"
    what = what or str(getattr(error, "reason", "the text ends too early"))
    line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return Problem(
        f"{place}{line}",
        "",
        f"is not YAML that is read here: {what}.",
        "Write sections with `key: value` lines below them, indented by two spaces.",
    )


def _read_document(
    root: yaml.MappingNode, file: str, problems: list[Problem]
) -> Iterator[_Assignment]:
    for section, line, content in _entries(root, file, "", problems):
        place = f"{file}:{line}"
        if not isinstance(content, yaml.MappingNode) or section not in SECTIONS:
            raw = _raw(content)
            if raw is not None or section not in SECTIONS:
                yield _Assignment((section,), raw, file, place)
            continue
        yield from _read_section((section,), content, file, problems)


def _read_section(
    above: tuple[str, ...], content: yaml.MappingNode, file: str, problems: list[Problem]
) -> Iterator[_Assignment]:
    for name, line, value in _entries(content, file, f"{'.'.join(above)}.", problems):
        path, place = (*above, name), f"{file}:{line}"
        is_section = ".".join(path) in SECTIONS
        if is_section and isinstance(value, yaml.MappingNode):
            yield from _read_section(path, value, file, problems)
            continue
        if isinstance(value, yaml.MappingNode):
            # Read for its problems: a key that appears twice.
            list(_entries(value, file, f"{'.'.join(path)}.", problems))
        raw = _raw(value)
        if raw is not None or not is_section:
            yield from _split(path, raw, file, place)


def _entries(
    mapping: yaml.MappingNode, file: str, prefix: str, problems: list[Problem]
) -> Iterator[tuple[str, int, yaml.Node]]:
    """(key, line, value) of a mapping; a key that appears twice is a problem."""
    first: dict[str, int] = {}
    for key_node, value in mapping.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        if key in first:
            problems.append(
                Problem(
                    f"{file}:{line}: {prefix}{key}",
                    _shortened(_raw(value)),
                    f"appears twice in this file, first on line {first[key]}.",
                    "Keep one of the two.",
                )
            )
            continue
        first[key] = line
        yield key, line, value


def _raw(node: yaml.Node) -> Raw:
    if isinstance(node, yaml.SequenceNode):
        return [_raw(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {
            key.value if isinstance(key, yaml.ScalarNode) else "?": _raw(value)
            for key, value in node.value
        }
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _from_values(values: Mapping[str, Any], origin: str) -> Iterator[_Assignment]:
    for section, content in values.items():
        yield from _from_value((str(section),), _as_raw(content), origin)


def _from_value(path: tuple[str, ...], raw: Raw, origin: str) -> Iterator[_Assignment]:
    if isinstance(raw, dict) and ".".join(path) in SECTIONS:
        for name, value in raw.items():
            yield from _from_value((*path, name), value, origin)
    else:
        yield from _split(path, raw, origin, origin)


def _as_raw(value: Any) -> Raw:
    """Python values as a file would hold them."""
    if isinstance(value, Mapping):
        return {str(key): _as_raw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_raw(item) for item in value]
    return None if value is None else str(value)


def _read_override(arg: str, problems: list[Problem]) -> Iterator[_Assignment]:
    key, _, text = arg.partition("=")
    section, rest = parted(key.split("."))
    # The entry of a mapping may have dots of its own.
    path = (*section.split("."), *".".join(rest).split(".", 1)) if rest else (section,)
    if arg.startswith("-"):
        rule, action = override_meant(arg.lstrip("-"), "is not an option of this command.", KEYS)
        action = action or "See the command's --help."
        problems.append(Problem(f"command line: {arg}", "", rule, action))
    elif len(path) == 1 or not all(path):
        rule = "names no section: an override is `section.key=value`."
        rule, action = override_meant(arg, rule, KEYS)
        action = action or "Write section.key=value."
        problems.append(Problem(f"command line: {key}", _shortened(text), rule, action))
    elif not _is_collection(KEYS.get(".".join([section, *rest[:1]]))):
        yield _Assignment(path, text, arg, "command line")
    else:
        try:
            node = _compose(text)
        except yaml.YAMLError as error:
            problems.append(_syntax_problem(f"command line: {arg}", error))
            return
        raw = _raw(node) if node else None
        if isinstance(raw, dict) and ".".join(path) in KEYS:
            # The whole mapping is replaced; a single entry (a.b.c=...) is added.
            yield _Assignment(path, {}, arg, "command line")
        yield from _split(path, raw, arg, "command line")


def _split(path: tuple[str, ...], raw: Raw, origin: str, place: str) -> Iterator[_Assignment]:
    """One assignment, or one for each entry of a mapping, so that files merge by entry."""
    if isinstance(raw, dict) and _is_mapping(KEYS.get(".".join(path))):
        for name, value in raw.items():
            yield _Assignment((*path, name), value, origin, place)
    else:
        yield _Assignment(path, raw, origin, place)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _is_collection(hint: Any) -> bool:
    return typing.get_origin(hint) in (dict, list)


# From assignments to values.


def _cautions(assignments: Iterable[_Assignment], saved_as: str) -> Iterator[Problem]:
    """What is written with a key of an earlier release, and not by one."""
    for each in assignments:
        new = MOVED.get(".".join(each.path))
        if new and each.origin != saved_as:
            yield each.problem(f"is called {new} now.", f"Write {new} in its place.")


def _to_new_key(assignment: _Assignment) -> _Assignment:
    new = MOVED.get(".".join(assignment.path))
    return dataclasses.replace(assignment, path=tuple(new.split("."))) if new else assignment


def _named_like(file: Input) -> _Assignment:
    """The name of a run that is given none: two files are two runs."""
    origin = f"the name of {file.origin}"
    return _Assignment(("run", "name"), file.run_name, origin, file.origin)


def _build(
    assignments: Sequence[_Assignment],
    problems: list[Problem],
    named: _Assignment | None,
    *,
    is_complete: bool,
    to_train: bool = False,
) -> Loaded:
    nodes = copy.deepcopy(_unset())
    origins = dict.fromkeys(KEYS, DEFAULT)
    if named is not None:
        _assign(nodes, named)
        origins[".".join(named.path)] = named.origin
    wrong = {problem.where.rpartition(": ")[2] for problem in problems}
    for done, assignment in enumerate(assignments):
        if len(problems) >= _MAX_PROBLEMS:
            rest = f"{len(assignments) - done} more values were not read."
            problems.append(Problem("config", "", rest, "Fix these problems first."))
            raise ConfigError(problems)
        problem = _assign(nodes, assignment)
        if problem is None:
            origins |= dict.fromkeys(_prefixes(assignment.path), assignment.origin)
        else:
            problems.append(problem)
            wrong.update(_prefixes(assignment.path))
    family = nodes["model"]["family"]
    for problem in _of_other_families(assignments, family):
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
        nodes[section][name] = KEYS[key]()  # Stands in so that the other rules can run.
    absent = [key for key in missing if key not in wrong]
    if absent and is_complete:
        problems.append(_missing_problem(absent, assignments))
    sections: dict[str, Any] = {name: OmegaConf.to_object(node) for name, node in nodes.items()}
    own = sections.pop(family_section(family))
    sections["model"] = dataclasses.replace(sections["model"], own=own)
    config = Config(**sections)
    broken = check(config, origins, skip=wrong.union(missing))
    if to_train:
        broken += check_training(config, origins, skip=wrong.union(missing))
    # A file that could not be read might have set what is still at its default.
    problems += [p for p in broken if is_complete or not p.where.startswith(f"{DEFAULT}: ")]
    if problems:
        raise ConfigError(problems)
    return Loaded(config, origins)


@functools.cache
def _unset() -> dict[str, Any]:
    """Every section before anything is set. To copy it takes a quarter of the time to make it."""
    nodes = {section: OmegaConf.structured(declared) for section, declared in SECTIONS.items()}
    for node in nodes.values():
        OmegaConf.set_readonly(node, False)
    return nodes


def _of_other_families(assignments: Iterable[_Assignment], family: str) -> Iterator[Problem]:
    """Keys that the model's family does not read; of each the last assignment."""
    last = {assignment.path: assignment for assignment in assignments}
    for path, assignment in last.items():
        section, rest = parted(path)
        if rest and ".".join([section, rest[0]]) in KEYS and is_of_another_family(section, family):
            other = section.rpartition(".")[2]
            yield assignment.problem(
                f"is read by {FAMILY}={other} only, and the family is {family}.",
                f"Leave it out, or set {FAMILY}={other}.",
            )


def _prefixes(path: tuple[str, ...]) -> list[str]:
    return [".".join(path[:length]) for length in range(2, len(path) + 1)]


def _missing_problem(keys: Sequence[str], assignments: Sequence[_Assignment]) -> Problem:
    files = dict.fromkeys(a.origin for a in assignments if not is_override(a.origin))
    where = ", ".join(files) or "command line"
    verb = "is required and has no default." if len(keys) == 1 else "are required; no default."
    return Problem(
        f"{where}: {', '.join(keys)}",
        "",
        f"{verb}",
        f"Name a model first, such as tiny (`maxpipe configs list`), or set {keys[0]}=VALUE.",
    )


def _assign(nodes: Mapping[str, Any], assignment: _Assignment) -> Problem | None:
    """Put the value into its section; the problem if that cannot be done."""
    section, rest = parted(assignment.path)
    if not rest:
        return _unknown_problem(assignment)
    name, *entry = rest
    hint = KEYS.get(f"{section}.{name}")
    if hint is None or (entry and not _is_mapping(hint)):
        return _unknown_problem(assignment)
    for text in texts(assignment.raw):
        refusal = refused(text)
        if refusal:
            return assignment.problem(*refusal)
    node = nodes[section]
    try:
        value = READERS.get(hint, as_is)(assignment.raw)
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            raise ValueError(value)
        if entry:
            node[name][entry[0]] = value
        else:
            node[name] = value
    except (ValueError, OverflowError):
        return _type_problem(assignment, hint)
    return None


_LISTS = {list[int]: ("list of integers", "[2, 2]"), list[str]: ("list of names", "[]")}
"""In words, and an example."""


def type_name(hint: Any) -> str:
    """A type in words: `integer`, `one of a, b`."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    if _is_mapping(hint):
        return "mapping of names to lists of names"
    if hint in _LISTS:
        return _LISTS[hint][0]
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[hint]


def _type_problem(assignment: _Assignment, hint: Any) -> Problem:
    key = ".".join(assignment.path)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        action = value_meant(key, str(assignment.raw), choices) or f"Set {key}={choices[0]}."
        return assignment.problem(f"must be {type_name(hint)}.", action)
    if _is_mapping(hint):
        example = f"Set {key}=[tensor]" if len(assignment.path) > 2 else f"Set {key}={{}}"
        rule = "must be a list of mesh axes" if len(assignment.path) > 2 else "must be a mapping"
        return assignment.problem(f"{rule}.", f"{example}.")
    if hint in _LISTS:
        is_name = hint == list[str] and isinstance(assignment.raw, str)
        example = f"[{assignment.raw}]" if is_name else _LISTS[hint][1]
        return assignment.problem(f"must be a {type_name(hint)}.", f"Set {key}={example}.")
    if hint is str and isinstance(assignment.raw, list) and (action := list_meant(key)):
        return assignment.problem("must be one text, not a list.", action)
    if hint is str:
        return assignment.problem("must be text.", f"Write {key} = '...', or leave the key out.")
    example = {int: "8", float: "0.1", bool: "true"}[hint]
    article = {int: "an integer", float: "a finite number", bool: "true or false"}[hint]
    return assignment.problem(f"must be {article}.", f"Write a value such as {key}={example}.")


def _unknown_problem(assignment: _Assignment) -> Problem:
    section, rest = parted(assignment.path)
    if section in SECTIONS and not rest:
        rule = "is a section: its keys stand below it, one `key: value` per line."
        return assignment.problem(rule, f"Run `maxpipe config explain {section}` for its keys.")
    if not rest and section in KEYS:
        parent, _, name = section.partition(".")
        rule = "is a full key: in a file it stands below its section."
        return assignment.problem(rule, f"Write `{parent}:`, and `{name}: ...` indented below it.")
    answer = key_meant(assignment.path, KEYS)
    if section in SECTIONS:
        guess, rule = answer.name, f"is not a key of {section}."
        show = f"`maxpipe config explain {section}` lists its keys."
    else:
        guess = answer.name if rest else did_you_mean(section, SECTIONS) or answer.name
        rule = "is not a section."
        show = f"The sections are {', '.join(SECTIONS)}."
    action = answer.action or (f"Did you mean {guess}? {show}" if guess else show)
    return assignment.problem(because(rule, answer.why), action, given=bool(rest))


# From values to text.


def one_line(value: Any) -> str:
    """A value as a config file holds it behind its key."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    if not text.isprintable():
        # YAML folds the line breaks in plain text, U+0085 and U+2028 among them: escape them.
        text = yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf)
    return text.removesuffix("\n")


def _shortened(raw: Raw) -> str:
    if raw is None:
        return "null"
    text = "''" if raw == "" else raw if isinstance(raw, str) else str(raw)
    text = " ".join(text.split()) if isinstance(raw, str) and raw.strip() else text
    return text if len(text) <= 60 else f"{text[:57]}..."
