"""Record of a config conversion: the written settings, and a report on each key of the peer."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maxpipe.config.foreign_keys import match_exact_key
from maxpipe.config.load import LoadedConfig, load
from maxpipe.config.rules import did_you_mean, plain_value, value_of
from maxpipe.config.schema import KEYS, default_of, split_key, upgrade_setting
from maxpipe.config.translation import CONTEXT_KEYS, TranslationContext, translate
from maxpipe.config.yaml_values import READERS, to_raw, to_yaml_line
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io.formatting import pluralize

COMMAND_LINE = "command line"
"""Place of values that overrides set."""
_WIDTH = 96
_LEAVE_OUT = "Leave it out."
"""Action of tables for a config that the user edits; a conversion leaves the key out anyway."""


class Given(NamedTuple):
    """Value that a file or an override gives to a key of the peer."""

    value: Any
    place: str
    """File and line number, or `command line`."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another trainer, and the published defaults of its keys."""

    name: str
    defaults: Mapping[str, Any]
    """Default of each key, keyed by full name."""
    known: frozenset[str]
    """All keys that the peer accepts."""
    defaults_from: str
    """Source and date of the defaults, for the header of the written config."""


class Setting(NamedTuple):
    """Value of a maxpipe key, and the keys of the peer that determine it."""

    value: Any
    theirs: tuple[str, ...]


@dataclass(slots=True)
class Conversion:
    """Settings that a conversion has written so far, and a report on each key of the source.

    Subscripting returns the value that the peer would use: from the source, or its default.
    """

    peer: Peer
    origin: str
    """Path of the converted file, for messages."""
    given: Mapping[str, Given]
    settings: dict[str, Setting] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    """Keys that have a maxpipe equivalent with another meaning, and the difference."""
    absent: dict[str, str] = field(default_factory=dict)
    """Keys without an equivalent, and the reason."""
    needless: list[str] = field(default_factory=list)
    """Keys that the source sets to a default of the peer, which needs no setting."""
    problems: list[Problem] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    """Earlier names of keys in the source, and the current name with its date."""
    overridden: dict[str, str] = field(default_factory=dict)
    """Keys of maxpipe that the command line sets, and the effect."""
    checked: set[str] = field(default_factory=set)
    """Keys whose values the model family implies."""

    def __getitem__(self, theirs: str) -> Any:
        if theirs in self.given:
            return self.given[theirs].value
        return self.peer.defaults[theirs]

    def is_default(self, theirs: str) -> bool:
        """Return whether the source leaves the key at the peer's default."""
        return theirs not in self.given or self.given[theirs].value == self.peer.defaults.get(
            theirs
        )

    def if_given(self, *theirs: str) -> tuple[str, ...]:
        """Return the keys that the source sets."""
        return tuple(key for key in theirs if key in self.given)

    def write(self, ours: str, value: Any, *theirs: str, differs: str = "") -> None:
        """Set a maxpipe key from keys of the peer. `differs` states a difference in meaning."""
        self.settings[ours] = Setting(value, theirs)
        if differs:
            self.differs(theirs[0], f"{ours} {differs}")

    def differs(self, theirs: str, difference: str) -> None:
        """Report that a key has an equivalent with another meaning."""
        before = self.differences.get(theirs)
        self.differences[theirs] = f"{before} {difference}" if before else difference

    def omit(self, why: str, *theirs: str) -> None:
        """Report keys without an equivalent, unless they have the peer's default."""
        for key in theirs:
            if not self.is_default(key):
                self.absent[key] = why

    def reject(self, theirs: str, rule: str, action: str) -> None:
        """Record that a value cannot be represented."""
        value = self[theirs]
        place = self.given[theirs].place if theirs in self.given else self.origin
        shown = to_yaml_line(value) if isinstance(value, str | int | float | list) else value
        self.problems.append(
            Problem(Code.CFG_PEER, f"{place}: {theirs}", str(shown)[:80], rule, action)
        )

    def require(self, theirs: str, allowed: Sequence[Any], why: str) -> None:
        """Reject a value that is not in `allowed`."""
        self.checked.add(theirs)
        if self[theirs] not in allowed:
            values = " or ".join(to_yaml_line(each) for each in allowed)
            action = f"Train this model with {self.peer.name}, or set {theirs}={values}."
            self.reject(theirs, f"must be {values}: {why}", action)

    def write_trackers(self, tensorboard: str, wandb: str) -> None:
        """Set the trackers from the peer's switches of TensorBoard and W&B, if one of them is not
        at its default.
        """
        if not (self.is_default(tensorboard) and self.is_default(wandb)):
            switches = {"tensorboard": tensorboard, "wandb": wandb}
            names = [name for name, switch in switches.items() if self[switch]]
            self.write("log.trackers", names, *self.if_given(tensorboard, wandb))

    def reported(self) -> set[str]:
        """Return the keys of the source that the report already covers."""
        named = {key for each in self.settings.values() for key in each.theirs}
        return named | self.differences.keys() | self.absent.keys() | {*self.needless}

    def finish(self) -> None:
        """Convert the remaining keys of the source with the tables of `foreign_keys.yml`.

        Raises:
            ConfigError: a value cannot be represented, or the peer has no such key.
        """
        for theirs, (_, place) in self.given.items():
            if theirs not in self.peer.known:
                is_override = place == COMMAND_LINE
                known = {*self.peer.known, *KEYS} if is_override else self.peer.known
                guess = did_you_mean(theirs, known)
                action = f"Did you mean {guess}?" if guess else "Correct or remove the key."
                rule = f"is not a key of {self.peer.name}{' or of maxpipe' * is_override}."
                self.problems.append(Problem(Code.CFG_PEER, f"{place}: {theirs}", "", rule, action))
        if self.problems:
            raise ConfigError(self.problems)
        family = self.settings.get("model.family")
        implied = self.checked & self.given.keys() - self.reported()
        implied = {key for key in implied if not self.is_default(key)}
        if family is not None:
            names = (*family.theirs, *(key for key in self.given if key in implied))
            self.settings["model.family"] = Setting(family.value, names)
        reported = self.reported()
        for theirs in self.given:
            if theirs not in reported:
                self._convert_by_table(theirs)
        order = {name: place for place, name in enumerate(self.given)}
        self.needless.sort(key=order.__getitem__)
        self.absent = dict(sorted(self.absent.items(), key=lambda item: order[item[0]]))

    def _convert_by_table(self, theirs: str) -> None:
        if self.is_default(theirs):
            self.needless.append(theirs)
            return
        values = {key: default_of(key) for key in CONTEXT_KEYS}
        values |= {key: self.settings[key].value for key in CONTEXT_KEYS if key in self.settings}
        path, raw = theirs.split("."), to_raw(self[theirs])
        exact = match_exact_key(path, KEYS)
        found = translate(path, raw, TranslationContext(values)) if exact else None
        if found is None or not found.is_exact:
            self.absent[theirs] = "maxpipe has no equivalent."
        elif not found.settings:
            action = "" if found.action == _LEAVE_OUT else found.action
            self.absent[theirs] = " ".join(filter(None, (found.why, action)))
        elif written := [key for key, _ in found.settings if key in self.settings]:
            others = ", ".join(self.settings[written[0]].theirs)
            self.absent[theirs] = f"{written[0]} is set from {others}."
        else:
            for key, text in found.settings:
                self.write(key, READERS.get(KEYS[key], str)(text), theirs)

    def override(self, overrides: Sequence[str]) -> None:
        """Replace settings with `section.key=value` overrides of maxpipe's keys.

        Raises:
            ConfigError: the resulting settings violate a rule of maxpipe.
        """
        if not overrides:
            return
        loaded = load(overrides, self.nested(), f"the config for {self.origin}")
        for argument in overrides:
            key = config_key(argument.partition("=")[0])
            value = -1 if key in loaded.inferred else plain_value(value_of(loaded.config, key))
            before = self.settings.get(key, Setting(None, ()))
            self.settings[key] = Setting(value, before.theirs)
            effect = "set on the command line"
            if before.value is not None and key not in self.overridden:
                effect += f"; replaces {to_yaml_line(before.value)}"
            self.overridden.setdefault(key, effect)

    def load(self) -> LoadedConfig:
        """Check the settings, and return the resulting config.

        Raises:
            ConfigError: the settings violate a rule of maxpipe.
        """
        return load([], self.nested(), f"the config for {self.origin}")

    def nested(self) -> dict[str, Any]:
        """Return the settings as nested dicts."""
        nested: dict[str, Any] = {}
        for key in self._in_order():
            *sections, name = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = self.settings[key].value
        return nested

    def _in_order(self) -> list[str]:
        order = {key: place for place, key in enumerate(KEYS)}
        return sorted(self.settings, key=order.__getitem__)

    def render(self) -> str:
        """Return the text of a config file: the report as comments, then the settings."""
        head = [
            f"Converted from {self.peer.name}: {self.origin}.",
            f"Defaults of {self.peer.name}: {self.peer.defaults_from}.",
        ]
        comments = [line for each in head for line in _wrapped(each)]
        for title, lines in self.report():
            comments += [
                "#",
                *_wrapped(title),
                *(line for each in lines for line in _wrapped(each)),
            ]
        return "\n".join([*(_printable(line) for line in comments), *self._yaml(), ""])

    def report(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the title and the entries of each part of the report that has entries."""
        parts = {
            f"Keys that {self.peer.name} renamed:": [
                f"  {k}: {v}" for k, v in self.renamed.items()
            ],
            "Keys of maxpipe on the command line:": [
                f"  {key} = {to_yaml_line(self.settings[key].value)}: {effect}"
                for key, effect in self.overridden.items()
            ],
            "Keys that differ in meaning:": [f"  {k}: {v}" for k, v in self.differences.items()],
            "Keys without an equivalent:": [f"  {k}: {v}" for k, v in self.absent.items()],
            f"Keys at a default of {self.peer.name} that needs no setting:": [
                f"  {', '.join(self.needless)}"
            ]
            * bool(self.needless),
        }
        yield from ((title, lines) for title, lines in parts.items() if lines)

    def summary(self) -> str:
        """Return the number of keys in each part of the report, as one line."""
        theirs = {key for each in self.settings.values() for key in each.theirs}
        converted = len((theirs & self.given.keys()) - self.differences.keys())
        from_defaults = len(theirs - self.given.keys())
        return (
            f"{self.origin}: {pluralize(len(self.given), 'key')} of {self.peer.name}: {converted} "
            f"converted, {len(self.differences)} differ in meaning, {len(self.absent)} without an "
            f"equivalent, {len(self.needless)} need no setting; {from_defaults} more from the "
            f"defaults of {self.peer.name}"
        )

    def _yaml(self) -> Iterator[str]:
        """Yield the settings as lines of YAML, each with the keys of the peer as a comment."""
        open_sections: list[str] = []
        for key in self._in_order():
            *sections, name = key.split(".")
            if sections[:1] != open_sections[:1]:
                open_sections = []
            common = sum(a == b for a, b in zip(sections, open_sections, strict=False))
            for depth in range(common, len(sections)):
                yield f"{'  ' * depth}{sections[depth]}:"
            open_sections = sections
            value, theirs = self.settings[key]
            line = f"{'  ' * len(sections)}{name}: {to_yaml_line(value)}"
            sources = [*map(self._named, theirs), *filter(None, [self.overridden.get(key)])]
            yield f"{line}  # {', '.join(sources)}" if sources else line

    def _named(self, theirs: str) -> str:
        return theirs if theirs in self.given else f"{theirs} (default)"


def config_key(name: str) -> str:
    """Return the maxpipe key that an override sets in full or in part, or an empty string."""
    section, rest = split_key(upgrade_setting(name, None)[0].split("."))
    key = ".".join([section, *rest[:1]])
    return key if key in KEYS else ""


def _wrapped(text: str) -> list[str]:
    indent = len(text) - len(text.lstrip())
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    first, later = f"# {' ' * indent}", f"# {' ' * (indent + 2)}"
    return textwrap.wrap(
        text.strip(), _WIDTH, initial_indent=first, subsequent_indent=later, **options
    )


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isprintable())
