"""Complete config of a run, with one field per section.

Each file in `sections/` defines one section: its keys with types, defaults and documentation, the
valid ranges of numeric keys, and its rules. The string below each field documents that field.
`maxpipe config explain`, the pages of `docs/reference/config/`, the JSON schema and error messages
are generated from these strings. The keys of each model family are declared in `maxpipe/models`.
This package does not import jax, so that `maxpipe --help` starts quickly.

The tables below `Config` list all sections and keys, including those of every model family. A
section is a field of `Config`, or the section of a model family within `model`, such as
`model.llama`. A config contains the keys of one family only, but these tables contain the keys of
all families. A key may contain sections with user-defined names: `data.mixture.web.path` is
declared as `data.mixture.NAME.path`. A key may also be a list of items with fields:
`optim.lr_phases[0].steps` is declared as `optim.lr_phases[].steps`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from maxpipe.config.rules import ITEM, NAME, field_name
from maxpipe.config.sections import adapter as _adapter  # noqa: F401 (registers rules)
from maxpipe.config.sections import mesh as _mesh  # noqa: F401 (registers rules)
from maxpipe.config.sections import model as _model  # noqa: F401 (registers rules)
from maxpipe.config.sections.alerts import AlertsConfig
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.distill import DistillConfig
from maxpipe.config.sections.eval import EvalConfig
from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.config.sections.guard import GuardConfig
from maxpipe.config.sections.launch import LaunchConfig
from maxpipe.config.sections.layer_stats import LayerStatsConfig
from maxpipe.config.sections.log import LogConfig
from maxpipe.config.sections.model import FAMILY, MODEL_KEYS, family_section
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.plugins import PluginsConfig
from maxpipe.config.sections.preference import PreferenceConfig
from maxpipe.config.sections.profile import ProfileConfig
from maxpipe.config.sections.run import RunConfig
from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.config.sections.source import SOURCES, SourceName
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.tracker import TrackerConfig
from maxpipe.config.sections.train import OBJECTIVES, ObjectiveName, TrainConfig
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.models.registry import FAMILIES
from maxpipe.parallel.axes import MeshConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Complete config of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    log: LogConfig = field(default_factory=LogConfig)
    layer_stats: LayerStatsConfig = field(default_factory=LayerStatsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)

    def __post_init__(self) -> None:
        """Copy section `adapter` into section `model`, so that `model` describes the complete
        model.
        """
        adapter = self.adapter if self.adapter.rank else None
        if self.model.adapter != adapter:
            object.__setattr__(self, "model", replace(self.model, adapter=adapter))


_MODEL = "model"


def _sections() -> Iterator[tuple[str, type]]:
    for section, declared in typing.get_type_hints(Config).items():
        yield section, declared
        if section == _MODEL:
            yield from ((f"{_MODEL}.{name}", each.section) for name, each in FAMILIES.items())


SECTIONS: dict[str, type] = {}
"""Maps section names to the dataclasses that declare them."""

KEYS: dict[str, Any] = {}
"""Maps full keys to their declared types, in schema order."""

NAMED_SECTIONS: dict[str, type] = {}
"""Maps declared section names, such as `data.mixture.NAME`, to their dataclasses."""

NAMED_KEYS: dict[str, Any] = {}
"""Maps declared keys of named sections, such as `data.mixture.NAME.path`, to their types."""

ITEM_SECTIONS: dict[str, type] = {}
"""Maps declared list items, such as `optim.lr_phases[]`, to their dataclasses."""

ITEM_KEYS: dict[str, Any] = {}
"""Maps fields of list items, such as `optim.lr_phases[].steps`, to their types."""

ALL_SECTIONS: dict[str, type] = {}
ALL_KEYS: dict[str, Any] = {}

RENAMED_KEYS: dict[str, str] = {}
"""Maps full keys from earlier releases to the current full keys."""

_RENAMED_VALUES: dict[str, Mapping[str, Any] | Callable[[Any], Any]] = {}


def _named_section_types(hint: Any) -> list[type]:
    """Return a list with the dataclass of the named sections in a key of this type, or an empty
    list.
    """
    inner = typing.get_args(hint)[-1] if typing.get_origin(hint) is dict else None
    return [inner] if dataclasses.is_dataclass(inner) and isinstance(inner, type) else []


def item_type(hint: Any) -> type | None:
    """Return the item dataclass of a list type, or None if its items are not dataclasses."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
    return inner if dataclasses.is_dataclass(inner) and isinstance(inner, type) else None


def without_none(hint: Any) -> Any:
    """Return T for an optional type `T | None`; return other types unchanged."""
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


def update_tables() -> None:
    """Fill the tables of sections and keys, at import and whenever a plug-in adds or removes a
    model family, an objective or a data source.
    """
    _fill(SECTIONS, _sections())
    _fill(KEYS, _keys_of(SECTIONS))
    _fill(
        NAMED_SECTIONS,
        (
            (f"{key}.{NAME}", inner)
            for key, hint in KEYS.items()
            for inner in _named_section_types(hint)
        ),
    )
    _fill(NAMED_KEYS, _keys_of(NAMED_SECTIONS))
    items = ((f"{key}{ITEM}", item_type(hint)) for key, hint in KEYS.items())
    _fill(ITEM_SECTIONS, ((key, item) for key, item in items if item))
    _fill(ITEM_KEYS, _keys_of(ITEM_SECTIONS))
    _fill(ALL_SECTIONS, (SECTIONS | NAMED_SECTIONS | ITEM_SECTIONS).items())
    _fill(ALL_KEYS, (KEYS | NAMED_KEYS | ITEM_KEYS).items())
    declared = [
        (section, field)
        for section, declared in (SECTIONS | NAMED_SECTIONS).items()
        for field in dataclasses.fields(declared)
    ]
    _fill(
        RENAMED_KEYS,
        (
            (name if "." in name else f"{section}.{name}", f"{section}.{field.name}")
            for section, field in declared
            for name in field.metadata.get("was", ())
        ),
    )
    _fill(
        _RENAMED_VALUES,
        (
            (f"{section}.{field.name}", field.metadata["values"])
            for section, field in declared
            if field.metadata.get("values")
        ),
    )


def _fill(table: dict[str, Any], entries: Iterable[tuple[str, Any]]) -> None:
    """Replace the contents of a table, which other modules have imported."""
    contents = dict(entries)
    table.clear()
    table.update(contents)


def _keys_of(sections: Mapping[str, type]) -> Iterator[tuple[str, Any]]:
    for section, declared in sections.items():
        for name, hint in typing.get_type_hints(declared).items():
            key = f"{section}.{field_name(name)}"
            if section != _MODEL or key in MODEL_KEYS:
                yield key, _type_with_plugins(key, hint)


def _type_with_plugins(key: str, hint: Any) -> Any:
    """Return the type of a key. Plug-ins extend the values of some keys."""
    if key == FAMILY:
        return Literal[tuple(FAMILIES)]
    if key == "train.objective":
        return Literal[(*typing.get_args(ObjectiveName), *OBJECTIVES)]
    if key.startswith("data.") and key.endswith(".source"):
        return Literal[(*typing.get_args(SourceName), *SOURCES)]
    return hint


update_tables()


def declared_key(key: str) -> str:
    """Return the declared form of a key or section, with placeholders for user-defined names and
    indices.
    """
    if "[" in key:
        return re.sub(r"\[\d+\]", ITEM, key)
    section, rest = split_key(key.split("."))
    if len(rest) < 2 or f"{section}.{rest[0]}.{NAME}" not in NAMED_SECTIONS:
        return key
    return ".".join([section, rest[0], NAME, *rest[2:]])


def upgrade_setting(key: str, value: Any) -> tuple[str, Any]:
    """Convert a setting from an earlier release to the current key and value."""
    declared = declared_key(key)
    if new := RENAMED_KEYS.get(declared):
        is_named = declared != key
        key = f"{key.rpartition('.')[0]}.{new.rpartition('.')[2]}" if is_named else new
        declared = new
    values = _RENAMED_VALUES.get(declared, {})
    if callable(values):
        return key, values(value)
    return key, values.get(value, value) if isinstance(value, str) else value


def split_key(path: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split the components of a dotted key into the section and the remaining components."""
    inner = ".".join(path[:2])
    return (inner, tuple(path[2:])) if inner in SECTIONS else (path[0], tuple(path[1:]))


def section_of(key: str) -> str:
    """Return the section of a full key."""
    if key in NAMED_KEYS or key in ITEM_KEYS:
        return key.rpartition(".")[0]
    return split_key(key.split("."))[0]


def names_in(section: str) -> list[str]:
    """Return the names of the keys in a section."""
    return [key.rpartition(".")[2] for key in ALL_KEYS if key.rpartition(".")[0] == section]


def field_of(key: str) -> dataclasses.Field[Any]:
    """Return the dataclass field that declares this full key."""
    section, _, name = key.rpartition(".")
    fields = dataclasses.fields(ALL_SECTIONS[section])
    return next(field for field in fields if field_name(field) == name)


def default_of(key: str) -> Any:
    """Return the default value of a full key, or `dataclasses.MISSING` if the key is required."""
    field = field_of(key)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def legacy_value_of(key: str) -> Any:
    """Return the value assumed for checkpoints saved before the key existed."""
    return field_of(key).metadata.get("before", default_of(key))


def is_of_another_family(section: str, family: str) -> bool:
    """Return True if the section belongs to a model family other than `family`."""
    return section.startswith(f"{_MODEL}.") and section != family_section(family)


def sections_of(config: Config) -> dict[str, Any]:
    """Return the common sections of a config and the section of its model family, keyed by name."""
    sections: dict[str, Any] = {}
    for section, declared in SECTIONS.items():
        if section == family_section(config.model.family):
            sections[section] = declared() if config.model.own is None else config.model.own
        elif "." not in section:
            sections[section] = getattr(config, section)
    return sections


def flatten(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Flatten the nested dicts of a config to a dict keyed by full key.

    Named sections are also flattened, but an empty mapping of named sections is kept as a value.
    """
    flat: dict[str, Any] = {}
    for section, values in nested.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if isinstance(value, Mapping) and (
                key in SECTIONS
                or declared_key(key) in NAMED_SECTIONS
                or (f"{key}.{NAME}" in NAMED_SECTIONS and value)
            ):
                flat |= flatten({key: value})
            else:
                flat[key] = value
    return flat


def upgrade_config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a saved config, given as nested mappings, to the keys and values of this release.

    A section whose value is not a mapping is kept unchanged.

    Raises:
        ValueError: a name is both a value and a section.
    """
    upgraded: dict[str, Any] = {}
    for section, values in saved.items():
        if not isinstance(values, Mapping):
            upgraded[section] = values
            continue
        for key, value in flatten({section: values}).items():
            key, value = upgrade_setting(key, value)
            *path, name = key.split(".")
            inner = upgraded
            for part in path:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise ValueError(f"{key} is nested under a value instead of a section")
            inner[name] = value
    _upgrade_schedule(upgraded.get("pipeline"))
    return upgraded


def _upgrade_schedule(pipeline: Any) -> None:
    """Rename the schedule of a saved config with several repeats, for which earlier releases
    accepted `1f1b` as another name of `interleaved`.
    """
    if not isinstance(pipeline, dict) or pipeline.get("repeats", 1) == 1:
        return
    if pipeline.get("schedule") == "1f1b":
        pipeline["schedule"] = "interleaved"


def without_permissions(config: Config) -> Config:
    """Return the config without the permissions to run plug-ins and commands, for files that other
    users may read.
    """
    return replace(
        config,
        plugins=replace(config.plugins, allow_code=False),
        alerts=replace(config.alerts, allow_code=False),
    )


PERMISSIONS = frozenset({"plugins.allow_code", "alerts.allow_code"})
"""Keys that permit code to run. Only the user's own files and overrides can set them."""


# Sections and keys whose values may differ between processes.
OWN_SECTIONS = frozenset({"runtime", "log", "tracker", "alerts", "launch"})

OWN_KEYS = frozenset(
    {"run.dir", "data.path", "data.paths", "data.tfds_dir", "data.threads"}
    | {"data.prefetch_batches", "data.max_decompressed_bytes", "tokenizer.path"}
    | {"plugins.modules", "plugins.allow_code", "plugins.allow_change"}  # digests are compared
)


def may_differ(key: str) -> bool:
    """Return True if the value of a full key may differ between processes."""
    outer, _, inner = declared_key(key).rpartition(".")
    return (
        key.partition(".")[0] in OWN_SECTIONS
        or key in OWN_KEYS
        or (outer in NAMED_SECTIONS and f"data.{inner}" in OWN_KEYS)
    )
