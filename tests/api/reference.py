"""Write the reference of the Python API as Markdown, from signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import maxpipe
from maxpipe.schedule.table import Costs

_SECTIONS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Source": "Source"}
_WIDTH = 88
_INTERNAL = {
    "adapter_base",
    "data_state",
    "decode_engine",
    "has_own_optimizer",
    "has_read_data",
    "saved_state",
}
"""Members that only other modules of maxpipe.api use."""


def python_api() -> str:
    """Return the descriptions of all names in `maxpipe.__all__`: functions, classes and errors."""
    members = [(name, getattr(maxpipe, name)) for name in maxpipe.__all__]
    functions = [pair for pair in members if isinstance(pair[1], FunctionType)]
    errors = [pair for pair in members if _is_error(pair[1])]
    classes = [pair for pair in members if pair not in functions + errors]
    lines = ["## Functions", ""]
    for name, function in functions:
        lines += [f"### {name}", "", *_signature(name, function), *_docstring(function)]
    lines += ["## Classes", ""]
    for name, owner in classes:
        lines += [f"### {name}", "", *_docstring(owner), *_attributes(owner), *_methods(owner)]
    lines += ["## Errors", ""]
    for name, error in errors:
        lines += [f"### {name}", "", *_docstring(error)]
    return "\n".join(lines).rstrip() + "\n"


def _is_error(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Exception)


def _signature(name: str, function: Any) -> list[str]:
    """Return a code block with the signature, with one parameter per line if it is long."""
    shown: list[str] = []
    has_star = False
    for each in inspect.signature(function).parameters.values():
        if each.name in ("self", "cls"):
            continue
        is_star = each.kind is each.VAR_POSITIONAL
        if each.kind is each.KEYWORD_ONLY and not has_star:
            shown.append("*")
        has_star = has_star or is_star or each.kind is each.KEYWORD_ONLY
        default = "" if each.default is each.empty else f" = {_default(each.default)}"
        shown.append(f"{'*' * is_star}{each.name}: {each.annotation}{default}")
    end = f") -> {inspect.signature(function).return_annotation}"
    text = f"{name}({', '.join(shown)}{end}"
    if len(text) > _WIDTH:
        text = "\n".join([f"{name}(", *(f"    {each}," for each in shown), end])
    return ["```py", text, "```", ""]


def _default(value: Any) -> str:
    return (
        "Costs()"
        if value == Costs()
        else json.dumps(value)
        if isinstance(value, str)
        else repr(value)
    )


def _docstring(member: Any) -> list[str]:
    """Return a docstring as Markdown paragraphs and lists."""
    text = inspect.getdoc(member) or ""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        head, _, body = paragraph.partition("\n")
        title, colon, rest = head.partition(":")
        if colon and title in _SECTIONS and not rest.strip():
            lines += [f"**{_SECTIONS[title]}**", "", *_items(title, textwrap.dedent(body)), ""]
        else:
            lines += [*textwrap.wrap(" ".join(paragraph.split()), 100), ""]
    return lines


def _items(title: str, body: str) -> Iterator[str]:
    """Yield the items of a section as a list; `Returns` is a paragraph."""
    if title == "Returns":
        yield from textwrap.wrap(" ".join(body.split()), 100)
        return
    for item in re.split(r"\n(?=\S)", body):
        name, _, about = " ".join(item.split()).partition(": ")
        names = ", ".join(f"`{each}`" for each in name.split(", "))
        yield from textwrap.wrap(f"- {names}: {about}", 100, subsequent_indent="  ")


def _attributes(owner: type) -> list[str]:
    """Return a list of the attributes with a docstring, and of the properties."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(tree, ast.ClassDef)
    bodies = [tree.body]
    bodies += [node.body for node in tree.body if getattr(node, "name", "") == "__init__"]  # type: ignore[union-attr]
    found: dict[str, str] = {}
    for body in bodies:
        for node, after in zip(body, [*body[1:], None], strict=True):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            if target is None:
                continue
            name = ast.unparse(target).removeprefix("self.")
            about = _text_of(after)
            is_declared = isinstance(node, ast.AnnAssign) and body is tree.body
            if not name.startswith("_") and (about or is_declared):
                found[name] = about
    for name, member in vars(owner).items():
        if isinstance(member, property) or hasattr(member, "attrname"):
            found[name] = inspect.getdoc(member) or ""
    lines = [
        line
        for name, about in found.items()
        if not name.startswith("_") and name not in _INTERNAL
        for line in textwrap.wrap(
            f"- `{name}`: {' '.join(about.partition('Raises:')[0].split())}".rstrip(": "),
            100,
            subsequent_indent="  ",
        )
    ]
    return ["**Attributes**", "", *lines, ""] if lines else []


def _text_of(node: ast.stmt | None) -> str:
    """Return the text of a string literal that is a statement; empty for other statements."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else ""
    return ""


def _methods(owner: type) -> list[str]:
    lines = []
    for name, member in vars(owner).items():
        function = member.__func__ if isinstance(member, classmethod) else member
        is_shown = name == "__call__" or not name.startswith("_")
        if not is_shown or name in _INTERNAL or not isinstance(function, FunctionType):
            continue
        shown = f"{owner.__name__}.{name}" if isinstance(member, classmethod) else name
        lines += [f"#### {owner.__name__}.{name}", "", *_signature(shown, function)]
        lines += _docstring(function)
    return lines
