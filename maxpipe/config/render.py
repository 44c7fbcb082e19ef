"""Render the config schema as key explanations, a JSON schema and configs.

All output is generated from the declarations in `sections/` and in the model families, the
docstrings of the fields, and the value ranges. Keys are documented only there.
`render_first_config` renders the config that `maxpipe init` writes: a small config with a comment
for each key.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from maxpipe.config.foreign_keys import match_key
from maxpipe.config.key_problems import type_name
from maxpipe.config.load import LoadedConfig, to_yaml
from maxpipe.config.rules import BOUNDS, ITEM, did_you_mean, field_name
from maxpipe.config.schema import (
    ALL_KEYS,
    ALL_SECTIONS,
    ITEM_SECTIONS,
    KEYS,
    NAME,
    NAMED_SECTIONS,
    SECTIONS,
    declared_key,
    default_of,
    item_type,
    names_in,
    section_of,
    without_none,
)
from maxpipe.config.translation import MODEL, match_foreign_key
from maxpipe.config.yaml_values import NAME_FORM, to_yaml_line
from maxpipe.errors import Code, ConfigError
from maxpipe.parallel.axes import ALLOWED_AXIS_RULES, DEFAULT_AXIS_RULES
from maxpipe.schedule.catalog import FILE_PREFIX, SCHEDULES

_WIDTH = 88
_AXIS_RULES = "mesh.axis_rules"
_SCHEDULE = "pipeline.schedule"


@functools.cache
def field_docs() -> dict[str, str]:
    """Return the documentation of all sections and keys, keyed by section or full key. Each entry
    is a single line.
    """
    docs: dict[str, str] = {}
    for section, declared in ALL_SECTIONS.items():
        for each in reversed(declared.__mro__[:-1]):  # base classes also declare keys
            node = _classes(inspect.getfile(each))[each.__name__]
            docs[section] = _paragraph(ast.get_docstring(node) or "")
            for statement, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    docs[f"{section}.{field_name(statement.target.id)}"] = _paragraph(
                        _string(after)
                    )
    known = {*ALL_SECTIONS, *ALL_KEYS}
    return {name: doc for name, doc in docs.items() if name in known}


@functools.cache
def _classes(file: str) -> dict[str, ast.ClassDef]:
    module = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}


def _string(statement: ast.stmt) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def explain(key: str) -> str:
    """Return an explanation of a key or section. If no name is given, list all sections.

    The explanation of a key contains its type, default, range and documentation; the explanation of
    a section lists its keys.

    Raises:
        ConfigError: the name is neither a key nor a section.
    """
    if not key:
        return _list_sections()
    if (known := declared_key(key)) in ALL_SECTIONS:
        return _explain_section(known)
    if known in ALL_KEYS:
        return _explain_key(known)
    if foreign := match_foreign_key(key.split(".")):
        rule = "is a key of other trainers"
        rule += f"; the maxpipe key is {foreign.name}" if foreign.name else ""
        explained = f"Run `maxpipe config explain {foreign.name}`."
        raise ConfigError.one(
            Code.CFG_UNKNOWN_KEY,
            f"command line: {key}",
            None,
            f"{rule}: {foreign.why}" if foreign.why else f"{rule}.",
            foreign.action or explained,
        )
    match = match_key(key.split("."), KEYS)
    guess = "" if "." in key else did_you_mean(key, SECTIONS)
    guess = guess or match.name
    action = f"Did you mean `maxpipe config explain {guess}`?" if guess else match.action
    raise ConfigError.one(
        Code.CFG_UNKNOWN_KEY,
        f"command line: {key}",
        None,
        f"is neither a config section nor a config key{f': {match.why}' if match.why else '.'}",
        action or "`maxpipe config explain` lists the sections.",
    )


def _list_sections() -> str:
    width = max(map(len, SECTIONS))
    lines = [f"{section:{width}}  {_first_sentence(section)}" for section in SECTIONS]
    return "\n".join(
        [*lines, "", "`maxpipe config explain SECTION` lists the keys of a section.", ""]
    )


def _explain_section(section: str) -> str:
    names = names_in(section)
    inner = [each.rpartition(".")[2] for each in SECTIONS if each.startswith(f"{section}.")]
    width = max(map(len, [*names, *inner]), default=0)
    lines = [section, *_wrapped(field_docs()[section]), ""]
    for name in [*names, *inner]:
        key = f"{section}.{name}"
        head = f"  {name:{width}}  "
        about = f"{_first_sentence(key)} ({'section' if name in inner else default_text(key)})"
        lines += textwrap.wrap(
            about, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
        )
    return "\n".join([*lines, ""])


def _explain_key(key: str) -> str:
    section = section_of(key)
    lines = [key, *_wrapped(field_docs()[key]), ""]
    lines += _labelled("type", type_name(ALL_KEYS[key]))
    if key in BOUNDS:
        lines.append(f"  range    {BOUNDS[key]}")
    lines.append(f"  default  {default_text(key).removeprefix('default ')}")
    lines += _labelled("section", f"{section}: {field_docs()[section]}")
    if f"{key}.{NAME}" in NAMED_SECTIONS:
        inner = ", ".join(names_in(f"{key}.{NAME}"))
        lines += _labelled("keys", f"{key}.{NAME}. and one of {inner}; {NAME} is user-defined")
    if f"{key}{ITEM}" in ITEM_SECTIONS:
        lines += ["", *_explain_section(f"{key}{ITEM}").splitlines()]
    if key == _AXIS_RULES:
        width = max(map(len, DEFAULT_AXIS_RULES))
        lines += ["", f"  {'axis':{width}}  {'sharded over':13}  may be set to"]
        lines += [f"  {n:{width}}  {axes:13}  {may}".rstrip() for n, axes, may in axis_rows()]
    return "\n".join([*lines, ""])


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:9}", subsequent_indent=" " * 11)


def axis_rows() -> list[tuple[str, str, str]]:
    """Return (logical axis, default mesh axes, other allowed mesh axes) for each logical axis."""
    return [
        (
            name,
            ", ".join(axes) or "none",
            " or ".join(f"[{', '.join(choice)}]" for choice in ALLOWED_AXIS_RULES.get(name, ())),
        )
        for name, axes in DEFAULT_AXIS_RULES.items()
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _first_sentence(key: str) -> str:
    # A period ends a sentence, except after a single letter, as in `e.g.`
    first = re.split(r"(?<!\b\w)\.(?=\s)", field_docs()[key])[0]
    return first.removesuffix(".") + "."


def default_text(key: str) -> str:
    """Return the default of a key, as in `default 100`, or "required"."""
    value = default_of(key)
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return f"default {str(value).lower()}"
    return "default none" if value is None else f"default {value if value != '' else 'empty'}"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a config file.

    No key is required, because files are merged, and a file may, for example, define only a model.
    """
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        outer, _, inner = section.partition(".")
        below = sections[outer]["properties"] if inner else sections
        below[inner or outer] = _section_schema(section)
    sections[MODEL]["type"] = ["object", "string", "null"]  # a string is a model name
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "maxpipe config",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _section_schema(section: str) -> dict[str, Any]:
    return {
        "description": field_docs()[section],
        "type": ["object", "null"],
        "properties": {name: _key_schema(f"{section}.{name}") for name in names_in(section)},
        "additionalProperties": False,
    }


def _item_schema(section: str) -> dict[str, Any]:
    names = names_in(section)
    is_required = [default_of(f"{section}.{name}") is dataclasses.MISSING for name in names]
    required = list(itertools.compress(names, is_required))
    return {**_section_schema(section), "type": "object", "required": required}


def _key_schema(key: str) -> dict[str, Any]:
    result = {"description": field_docs()[key], **_type_schema(ALL_KEYS[key])}
    if f"{key}.{NAME}" in NAMED_SECTIONS:
        result["additionalProperties"] = _section_schema(f"{key}.{NAME}")
        result["propertyNames"] = {"pattern": f"^{NAME_FORM.pattern}$"}
    if f"{key}{ITEM}" in ITEM_SECTIONS:
        result["items"] = _item_schema(f"{key}{ITEM}")
    if default_of(key) not in (dataclasses.MISSING, None):
        result["default"] = default_of(key)
    if key in BOUNDS:
        bound = BOUNDS[key]
        limits = result.get("additionalProperties", result)
        limits["minimum" if bound.low_is_inside else "exclusiveMinimum"] = bound.low
        if bound.high != float("inf"):
            limits["maximum" if bound.high_is_inside else "exclusiveMaximum"] = bound.high
    if key == _SCHEDULE:
        result["anyOf"] = [{"enum": list(SCHEDULES)}, {"pattern": f"^{FILE_PREFIX}"}]
    if key == _AXIS_RULES:
        result["propertyNames"] = {"enum": list(ALLOWED_AXIS_RULES)}
    return result


def _type_schema(hint: Any) -> dict[str, Any]:
    hint = without_none(hint)
    if typing.get_origin(hint) is Literal:
        return {"enum": list(typing.get_args(hint))}
    if hint in (dict[str, each] for each in NAMED_SECTIONS.values()):
        return {"type": "object"}
    if item_type(hint) is not None:
        return {"type": "array"}
    if hint == dict[str, float]:
        return {"type": "object", "additionalProperties": {"type": "number"}}
    if typing.get_origin(hint) is dict:
        names = {"type": "array", "items": {"type": "string"}}
        return {"type": "object", "additionalProperties": names}
    if typing.get_origin(hint) is list:
        return {"type": "array", "items": _type_schema(typing.get_args(hint)[0])}
    return {"type": {int: "integer", float: "number", bool: "boolean", str: "string"}[hint]}


def print_config(loaded: LoadedConfig, *, origin: bool) -> str:
    """Return the YAML text of the config. If `origin` is set, comments show the origin of each
    value.
    """
    return to_yaml(loaded.config, loaded.origins.__getitem__ if origin else None)


_TEMPLATE_HEAD = """\
First run: a small byte-level decoder, trained on the source code of Python's standard library.
It trains in minutes on a laptop CPU, without a download, and runs unchanged on GPUs and TPUs.

  {train}                  starts the run, or resumes it
  {train} train.steps=600  overrides a value for this command
  maxpipe board{pad}shows training curves

This file contains the keys that are most useful in a first run. Other keys are listed by
`maxpipe config explain SECTION`."""

_TEMPLATE_MODEL = "tiny"

_TEMPLATE_VALUES: Mapping[str, Mapping[str, Any] | str] = {
    "run": {"name": "", "dir": "runs", "seed": 0},
    "model": _TEMPLATE_MODEL,
    "mesh": {"ici_data": -1},
    "train": {"steps": 300, "batch_size": 16, "sequence_length": 128},
    "optim": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 20},
    "data": {"source": "corpus"},
    "tokenizer": {"kind": "bytes"},
    "checkpoint": {"every": 100},
    "eval": {"every": 100, "batches": 8},
    "log": {"every": 10},
}

_TEMPLATE_MORE = {
    "mesh.ici_data": "-1 uses all devices.",
    "data.source": "To train on your text, write `source: text` and `path: my-texts/*.txt`.",
}
"""Maps template keys to comments that are added after the documentation from the schema."""


_TEMPLATE_NAMED = (
    "Name of a bundled model (`maxpipe configs list`). A model on the command line replaces it: "
    "`maxpipe train llama3-8b FILE`. For a custom model, write the keys that `maxpipe configs show "
    "{name}` prints below `model:`."
)


def render_first_config(name: str, train: str) -> str:
    """Return the YAML text of the config that `maxpipe init` writes for a run with this name.
    `train` is the command that trains the run.
    """
    pad = " " * max(2, len(f"{train} train.steps=600  ") - len("maxpipe board"))
    head = _TEMPLATE_HEAD.format(train=train, pad=pad)
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for section, values in _TEMPLATE_VALUES.items():
        if isinstance(values, str):
            lines += ["", *_comment(_TEMPLATE_NAMED.format(name=values, train=train), "")]
            lines.append(f"{section}: {values}")
            continue
        lines += ["", *_comment(field_docs()[section], ""), f"{section}:"]
        for key, value in values.items():
            full = f"{section}.{key}"
            lines += _comment(f"{field_docs()[full]} {_TEMPLATE_MORE.get(full, '')}".strip(), "  ")
            shown = name if full == "run.name" else value
            lines.append(f"  {key}: {to_yaml_line(shown)}")
    return "\n".join([*lines, ""])


def _comment(text: str, indent: str) -> list[str]:
    lead = f"{indent}# "
    return textwrap.wrap(
        text, _WIDTH, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False
    )
