"""Registry of config rules and value ranges, and functions that format messages.

Each rule lists the keys that it reads, and is skipped if one of these keys is already known to be
invalid. The files in `sections/` define the rules.

The module also converts list items from earlier releases, such as the string `10% linear 0 -> 1`,
to mappings.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import format_nested
from maxpipe.io.stores import corrected_url, invalid_part, is_checkpoint_store
from maxpipe.models.config import Bound
from maxpipe.parallel.axes import DEFAULT_AXIS_RULES, MeshConfig

if TYPE_CHECKING:
    from maxpipe.config.schema import Config
from collections.abc import Mapping

NAME = "NAME"
"""Placeholder for a user-defined name in declared keys, such as `data.mixture.NAME.path`."""

ITEM = "[]"
"""Placeholder for the item index in declared keys, such as `optim.lr_phases[].steps`."""

_ITEM_KEY = re.compile(r"(?P<key>\w+\.\w+)\[(?P<number>\d+)\](?P<names>(\..*)?)")


def field_name(field: dataclasses.Field[Any] | str) -> str:
    """Return the YAML name of a field, such as `from` for `from_`, which is declared with an
    underscore because `from` is a Python keyword.
    """
    return (field if isinstance(field, str) else field.name).removesuffix("_")


def plain_value(value: Any) -> Any:
    """Return a copy of the value with dataclass instances converted to dicts. Fields of list items
    that equal their default are omitted.
    """
    if isinstance(value, dict):
        return {name: plain_value(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain_item(item) if is_dataclass(item) else item for item in value]
    return dataclasses.asdict(value) if is_dataclass(value) else copy.deepcopy(value)  # type: ignore[arg-type]


def _plain_item(item: Any) -> dict[str, Any]:
    values = {field: getattr(item, field.name) for field in dataclasses.fields(item)}
    return {
        field_name(field): copy.deepcopy(value)
        for field, value in values.items()
        if value != field.default
    }


def value_of(config: Config, key: str) -> Any:
    """Return the value of a full key or of a mapping entry.

    For a key of another model family, return its default. List items are returned as dicts.
    """
    if match := _ITEM_KEY.fullmatch(key):
        value = plain_value(value_of(config, match["key"]))[int(match["number"])]
        for name in match["names"].split(".")[1:]:
            value = value[name]
        return value
    section, *names = key.split(".")
    value = getattr(config, section)
    if section == "model" and len(names) == 2:
        from maxpipe.models.registry import FAMILIES  # `maxpipe --help` imports this module

        family, *names = names
        own = value.own if value.family == family else None
        value = FAMILIES[family].section() if own is None else own
    for position, name in enumerate(names):
        if isinstance(value, dict):
            if (entry := ".".join(names[position:])) in value:
                return value[entry]
            value = value[name]
        else:
            value = getattr(value, name)
    return value


def applies_to_family(config: Config, key: str) -> bool:
    """Return True unless the key belongs to a model family other than the config's."""
    section, *names = key.split(".")
    return section != "model" or len(names) == 1 or names[0] == config.model.family


def add_nonempty_rule(key: str) -> None:
    """Add a rule that a string must not be empty."""

    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        if not value_of(config, key):
            section, name = key.split(".")
            schema = {f.name: f.default for f in dataclasses.fields(getattr(config, section))}
            yield RuleViolation(
                Code.CFG_MISSING, key, "must not be empty.", f"Set {key}={schema[name]}."
            )


def unknown_names(
    key: str, names: Iterable[str], known: Collection[str], example: str
) -> Iterator[RuleViolation]:
    """Yield a violation for each name in a list that is not known. `example` is a valid name."""
    for name in names:
        if name not in known:
            yield RuleViolation(
                Code.CFG_VALUE,
                key,
                f"must contain only these names: {', '.join(known)}.",
                f"Set {key}=[{did_you_mean(name, known) or example}].",
            )


def add_folder_or_bucket_rule(key: str) -> None:
    """Add a rule that a folder must be a local path, or in a store that can hold checkpoints."""

    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        scheme = url_scheme(path := value_of(config, key))
        if scheme and not is_checkpoint_store(path):
            yield RuleViolation(
                Code.IO_PATH,
                key,
                f"must be a folder or a path in an object store: {scheme}:// is not supported.",
                f"Set {key}=gs://my-bucket/runs, s3://my-bucket/runs or az://my-container/runs, or "
                f"mount the storage and set {key} to its folder.",
            )
        elif scheme and not re.match(r"[^/]+//[A-Za-z0-9]", path):
            action = f"Set {key}={scheme}://my-bucket/runs."
            yield RuleViolation(Code.IO_PATH, key, "must contain a bucket name.", action)
        elif scheme and (reason := invalid_part(path)):
            action = f"Set {key}={scheme}://my-bucket/runs."
            yield RuleViolation(Code.IO_PATH, key, reason, action)
        elif url := corrected_url(path):
            rule = "must have a scheme in lowercase and two slashes, because this is a store."
            yield RuleViolation(Code.IO_PATH, key, rule, f"Set {key}={url}.")


def add_local_folder_rule(key: str, action: str) -> None:
    """Add a rule that a folder must be a local path, not a URL."""

    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        if url_scheme(value_of(config, key)):
            yield RuleViolation(Code.CFG_VALUE, key, "must be a folder path, not a URL.", action)


MAX_FINDINGS = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """A config rule. `find` reads only the keys in `keys`, and yields violations of the rule."""

    keys: tuple[str, ...]
    find: Callable[[Config], Iterator[RuleViolation]]
    is_first: bool = False
    """Run this rule before all other rules; if it is violated, skip rules that read the reported
    keys."""


RULES: list[Rule] = []


_NAME_CHARACTERS = 100
"""Maximum length of a run name that is derived from another name. File systems allow 255
characters."""


def rule(
    *keys: str, is_first: bool = False
) -> Callable[[Callable[[Config], Iterator[RuleViolation]]], None]:
    """Return a decorator that registers a function as a config rule that reads these keys."""

    def register(find: Callable[[Config], Iterator[RuleViolation]]) -> None:
        RULES.append(Rule(keys, find, is_first))

    return register


def axis_keys(*axes: str) -> tuple[str, ...]:
    """Return the config keys that set the sizes of these mesh axes."""
    return tuple(f"mesh.{link}_{axis}" for axis in axes for link in ("ici", "dcn"))


_MAX_WORD = 200


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the choice that is most similar to the word, or an empty string if none is similar.

    A choice that differs only in case and separators is preferred.
    """
    known = list(choices)
    if len(word) > _MAX_WORD:
        return ""  # difflib needs quadratic time
    wanted = normalize_name(word)
    same = [choice for choice in known if normalize_name(choice) == wanted]
    lower = {choice.lower(): choice for choice in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1)
    return next(iter(same or [lower[match] for match in close]), "")


@functools.lru_cache(maxsize=8192)
def normalize_name(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(char for char in name.lower() if char.isalnum())


def folder_name(text: str) -> str:
    """Convert a string to a valid run name of letters, digits, `.`, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_NAME_CHARACTERS].strip("-.") or "run"


def axis_size(mesh: MeshConfig, axis: str) -> int | None:
    """Return the total size of a mesh axis, or None if it depends on the number of devices."""
    ici, dcn = getattr(mesh, f"ici_{axis}"), getattr(mesh, f"dcn_{axis}")
    return ici * dcn if ici >= 1 and dcn >= 1 else None


BATCH_AXES = DEFAULT_AXIS_RULES["batch"]
"""Mesh axes over which the batch is sharded."""


def batch_shards(mesh: MeshConfig) -> tuple[int, list[str]]:
    """Return the number of batch shards, and the names and sizes of the batch axes, formatted for
    messages.

    Axes of unknown size are ignored, and the expert axis is listed only if its size exceeds 1.
    """
    sizes = {axis: axis_size(mesh, axis) for axis in BATCH_AXES}
    words = [f"{axis} ({n})" for axis, n in sizes.items() if n and (n > 1 or axis != "expert")]
    return math.prod(size or 1 for size in sizes.values()), words


def format_value(value: object) -> str:
    """Format a value as in a config file, truncated to 80 characters."""
    if is_dataclass(value):
        return ""  # the key already contains the section name
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, list | dict):
        text = format_nested(plain_value(value))
    elif value == "":
        text = "''"
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


DROPS_EVERYTHING = "1 would drop everything"


MAX_INT32 = 2**31 - 1


BOUNDS: dict[str, Bound] = {}
"""Maps declared keys to their value ranges."""

_NAMED_BOUNDS: dict[str, list[Bound]] = {}
"""Maps keys whose values are named sections, such as `alerts.rules`, to the ranges of the keys in
these sections."""


def add_ranges(*bounds: Bound) -> None:
    """Register value ranges, and a rule for each range.

    The key of a range may contain the placeholder `NAME`, as in `alerts.rules.NAME.window`: the
    range then applies to each named section. The rules for fields of list items are added by
    `add_item_rules`.
    """
    for bound in bounds:
        BOUNDS[bound.key] = bound
        sections, is_named, _ = bound.key.partition(f".{NAME}.")
        if is_named:
            if sections not in _NAMED_BOUNDS:
                _NAMED_BOUNDS[sections] = []
                _add_named_range_rule(sections)
            _NAMED_BOUNDS[sections].append(bound)
        elif ITEM not in bound.key:
            _add_range_rule(bound)


def _add_range_rule(bound: Bound) -> None:
    @rule(bound.key)
    def find(config: Config) -> Iterator[RuleViolation]:
        yield from _range_violation(config, bound, bound.key)


def _add_named_range_rule(sections: str) -> None:
    """Add one rule for all ranges in named sections, which therefore reports all violations."""

    @rule(sections)
    def find(config: Config) -> Iterator[RuleViolation]:
        for name in value_of(config, sections):
            for bound in _NAMED_BOUNDS[sections]:
                key = bound.key.replace(f".{NAME}.", f".{name}.")
                yield from _range_violation(config, bound, key)


def _range_violation(config: Config, bound: Bound, key: str) -> Iterator[RuleViolation]:
    if not bound.holds(value_of(config, key)):
        action = f"Set {key}={format_value(bound.example)}."
        yield RuleViolation(Code.CFG_VALUE, key, f"must be {bound}.", action)


EXAMPLES: dict[str, str] = {}
"""Maps list keys whose items are mappings to example values for messages."""


def add_item_rules(
    key: str, example: str, one_of: Sequence[str] = (), at_most_one_of: Sequence[str] = ()
) -> None:
    """Register an example value for a list key, and a rule that checks the value ranges and
    mutually exclusive fields of its items.
    """
    EXAMPLES[key] = example
    exclusive = one_of or at_most_one_of

    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        for number, item in enumerate(plain_value(value_of(config, key))):
            place = f"{key}[{number}]"
            for name, value in item.items():
                yield from _out_of_range(f"{key}{ITEM}.{name}", f"{place}.{name}", value)
            given = [name for name in exclusive if name in item]
            if len(given) > 1:
                text = f"must have either {' or '.join(exclusive)}, not both."
                yield RuleViolation(Code.CFG_CONFLICT, place, text, f"Leave {given[1]} out.")
            elif one_of and not given:
                action = f'Add `{one_of[0]}: ...`, as in "{key}={example}".'
                yield RuleViolation(
                    Code.CFG_MISSING, place, f"requires {' or '.join(one_of)}.", action
                )


def _out_of_range(declared: str, place: str, value: Any) -> Iterator[RuleViolation]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _out_of_range(declared, f"{place}.{name}", part)
        if not any(value.values()):
            yield RuleViolation(
                Code.CFG_VALUE, place, "must have a weight above 0.", "Set a weight to 1."
            )
    elif (bound := BOUNDS.get(declared)) and not bound.holds(value):
        name = place.rpartition(".")[2]
        yield RuleViolation(
            Code.CFG_VALUE,
            place,
            f"must be {bound}.",
            f"Write `{name}: {format_value(bound.example)}`.",
        )


def violations(
    config: Config, skip: Collection[str] = (), order: Sequence[str] = ()
) -> Iterator[RuleViolation]:
    """Yield the violations of all rules. Rules that read a key in `skip` are not run.

    Rules that read a single key run first, sorted by the position of the key in `order`. If such a
    rule is violated, rules that also read other keys are skipped for that key.
    """
    wrong = set(skip)
    position = {key: number for number, key in enumerate(order)}

    def turn(check: Rule) -> tuple[bool, bool, int]:
        relates_keys = len(check.keys) > 1
        place = 0 if relates_keys else position.get(check.keys[0], len(order))
        return relates_keys, not check.is_first, place

    for check in sorted(RULES, key=turn):
        if not wrong.isdisjoint(check.keys):
            continue
        findings = list(check.find(config))
        if findings and len(check.keys) == 1:
            wrong.update(check.keys)
        elif check.is_first:
            wrong.update(finding.key for finding in findings)
        yield from findings


# --- list items from earlier releases -------------------------------------------

_COUNT = r"\d(?:_?\d){0,17}"
_LENGTH = rf"\s+for\s+(?:(?P<steps>{_COUNT})\s+steps|(?P<tokens>{_COUNT})\s+tokens)"


def _upgrade_items(form: str, types: Mapping[str, Callable[[str], Any]]) -> Callable[[Any], Any]:
    """Return a function that converts the strings in a list to mappings. Strings that do not match
    `form` are kept unchanged.
    """
    pattern = re.compile(form, re.ASCII)

    def upgrade(item: Any) -> Any:
        match = pattern.fullmatch(item.strip()) if isinstance(item, str) else None
        if match is None:
            return item
        try:
            fields = {name: text for name, text in match.groupdict().items() if text is not None}
            return {name: types[name](text) for name, text in fields.items()}
        except ValueError:
            return item

    return lambda value: [*map(upgrade, value)] if isinstance(value, list) else value


def _weights(text: str) -> dict[str, float]:
    words = text.split()
    weights = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    if 2 * len(weights) != len(words):
        raise ValueError(text)
    return weights


upgrade_lr_phases = _upgrade_items(
    r"(?:(?:1|(?P<times>\d{1,2}))\s*x\s+)?"
    r"(?:(?P<steps>\d{1,9})|(?P<percent>\d{1,3}(?:\.\d+)?)%|rest)\s+"
    r"(?P<shape>linear|cosine)\s+(?:(?P<from>\S+)\s*->\s*)?(?P<to>\S+)",
    {"times": int, "steps": int, "percent": float, "shape": str, "from": float, "to": float},
)
upgrade_batch_ramp = _upgrade_items(
    rf"(?P<batch_size>\d{{1,8}}){_LENGTH}", {"batch_size": int, "steps": int, "tokens": int}
)
upgrade_mixture_stages = _upgrade_items(
    rf"(?P<weights>.+?){_LENGTH}", {"weights": _weights, "steps": int, "tokens": int}
)
upgrade_lr_multipliers = _upgrade_items(
    r"(?P<pattern>.*\S)\s+(?P<multiplier>\S+)", {"pattern": str, "multiplier": float}
)
upgrade_weight_decays = _upgrade_items(
    r"(?P<pattern>.*\S)\s+(?P<weight_decay>\S+)", {"pattern": str, "weight_decay": float}
)
