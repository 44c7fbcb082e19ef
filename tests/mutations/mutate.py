"""Random changes to one file: to its structure if its format is known, else to its bytes."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

_RAW = {
    "DIGITS": "9" * 400,
    "MANY DIGITS": "-" + "7" * 6000,
    "FLOAT": "1e400",
    "TINY": "1e-400",
    "DEEP": "[" * 3000 + "]" * 3000,
    "DEEPER": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "OPEN": "[" * 200_000,
    "NAN": "NaN",
    "INFINITE": "-Infinity",
}
"""Text that no serializer writes, by the name that stands for it until serialization."""
_MARK = "@@RAW {}@@"


def _values() -> list[Callable[[Random], Any]]:
    constants: list[Any] = [
        *(None, True, False, 0, -1, 1, 2, 7, 255, 65_536, 2**31 - 1, 2**31, 2**32, 2**62, 2**63),
        *(2**64 + 1, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e16, 1e38, 1e308, -1e308, "", " ", "0"),
        *("a", "x" * 100_000, "\x1b[31mred\x07", "a\nb", "\ud800", "../../../etc/passwd", "/"),
        *("~", "${oc.env:HOME}", "1e400", "nan", "auto", "null", "[]", "é" * 300, "\u202e", [], {}),
        *([[]], [{}], [None], [0] * 3, [-1], ["a", 1, None], {"": 0}, {"a": {"b": [1]}}, [1e308]),
    ]
    large: list[Callable[[Random], Any]] = [
        lambda draw: [draw.choice([0, 1, 2**40])] * 100_000,
        lambda draw: {f"k{number}": number for number in range(20_000)},
        lambda draw: [{} for _ in range(50_000)],
        lambda draw: {"k" * 50_000: 1},
        lambda draw: _nested(draw.choice([5, 30, 90])),
        lambda draw: draw.randint(-(2**70), 2**70),
        lambda draw: draw.uniform(-1e6, 1e6),
        lambda draw: _MARK.format(draw.choice([*_RAW])),
        lambda draw: _MARK.format(draw.choice([*_RAW])),
    ]
    return [*(lambda draw, value=value: value for value in constants), *large, *large]


def _nested(depth: int) -> Any:
    found: Any = 1
    for level in range(depth):
        found = [found] if level % 2 else {"a": found}
    return found


_VALUES = _values()


def change_value(root: Any, draw: Random) -> Any:
    """Return the tree with one change at a random place."""
    holder: Any = {"root": root}
    parent, key = holder, "root"
    while isinstance(parent[key], dict | list) and parent[key] and draw.random() < 0.8:
        parent = parent[key]
        key = draw.choice([*parent] if isinstance(parent, dict) else range(len(parent)))
    node, kind = parent[key], draw.random()
    if kind < 0.12 and parent is not holder:
        del parent[key]
    elif kind < 0.2 and isinstance(parent, dict) and parent is not holder:
        other = draw.choice([f"{key}x", "", "\x1b", f"{key}_", "__metadata__", "9" * 30])
        parent[other] = parent.pop(key)
    elif kind < 0.27 and isinstance(parent, list):
        parent[:] = parent * draw.choice([2, 100])
    elif kind < 0.32 and isinstance(node, list):
        draw.shuffle(node)
    elif kind < 0.5 and isinstance(node, int | float) and not isinstance(node, bool):
        parent[key] = draw.choice(
            [node + 1, node - 1, -node, 2 * node, node * 1000, float(node), str(node), node * 0.5]
        )
    elif kind < 0.55 and isinstance(node, str) and node:
        parent[key] = draw.choice([node * 1000, node[:-1], node + "\0", node.upper(), [node]])
    elif kind < 0.6 and isinstance(parent, dict) and len(parent) > 1:
        other = draw.choice([*parent])
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = draw.choice(_VALUES)(draw)
    return holder["root"]


def _with_raw(text: str) -> str:
    for name, raw in _RAW.items():
        text = text.replace(f'"{_MARK.format(name)}"', raw).replace(_MARK.format(name), raw)
    return text


def _dumped(value: Any) -> str:
    return _with_raw(json.dumps(value))


def _json(raw: bytes, draw: Random) -> bytes:
    text = _dumped(change_value(json.loads(raw), draw))
    if draw.random() < 0.05 and text.startswith("{") and '":' in text:  # one key twice
        first = text[1 : text.index(":") + 1]
        text = f"{{{first} {draw.choice(['1', 'null', '[]'])}, {text[1:]}"
    return text.encode("utf-8", "surrogatepass")


def _lines(raw: bytes, draw: Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    for _ in range(draw.choice([1, 1, 3])):
        at = draw.randrange(len(lines))
        kind = draw.random()
        if kind < 0.7:
            lines[at] = _json(lines[at], draw) + b"\n"
        elif kind < 0.8:
            lines.insert(at, draw.choice([b"\n", b"{}\n", b"null\n", b"\xff\xfe\n", b"{\n"]))
        elif kind < 0.9:
            lines[at : at + 1] = [lines[at]] * draw.choice([0, 2, 500])
        else:
            lines[at] = lines[at].rstrip(b"\n")
        if not lines:
            break
    return b"".join(lines)


def _safetensors(raw: bytes, draw: Random) -> bytes:
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    kind = draw.random()
    name = draw.choice([*header])
    if kind < 0.25:
        shape = draw.choice(
            [
                *([1] * 400_000, [2**62] * 4, [2**40] * 64, [3, 0, 2**62], [0], [], [-1], [2**63]),
                *([1.0], ["2"], [True], [10**400], [2] * 1000),
            ]
        )
        header[name]["shape"] = shape
    elif kind < 0.4:
        header[name]["dtype"] = draw.choice(
            ["F64", "I8", "F8_E4M3", "BOOL", "f32", "", 4, None, "BF16", "F16", "F4", "X" * 9999]
        )
    elif kind < 0.55:
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = draw.choice(
            [[end, begin], [begin], [begin, end, end], [0, 2**62], [-1, end], [begin + 1, end + 1]]
        )
    elif kind < 0.9:
        header = change_value(header, draw)
    text = _dumped(header).encode("utf-8", "surrogatepass")
    if kind > 0.95:
        length = draw.choice([0, 1, 2**63, 2**40, len(text) - 1, len(text) + 1, 100_000_001])
    else:
        length = len(text)
    return struct.pack("<Q", length) + text + data


def _yaml(raw: bytes, draw: Random) -> bytes:
    kind = draw.random()
    text = raw.decode()
    if kind < 0.7:
        value = change_value(yaml.safe_load(text), draw)
        return _with_raw(yaml.safe_dump(value, sort_keys=False)).encode("utf-8", "surrogatepass")
    bomb = "a: &a [x, x, x]\n" + "".join(
        f"b{n}: &b{n} [*{'a' if not n else f'b{n - 1}'}, *{'a' if not n else f'b{n - 1}'}]\n"
        for n in range(60)
    )
    lines = text.splitlines(keepends=True)
    at = draw.randrange(len(lines) + 1)
    lines.insert(
        at,
        draw.choice(
            [
                bomb,
                "? " * 5000 + "\n",
                "- " * 3000 + "\n",
                "k" * 200_000 + ": 1\n",
                "model: !!python/object/apply:os.system ['true']\n",
                "\tmodel: 1\n",
                "run: {name: " + "[" * 50_000 + "\n",
                "train: {steps: " + "9" * 100_000 + "}\n",
                "log: |\n  " + "x" * 100_000 + "\n",
                "<<: {train: {steps: 1}}\n",
                "---\n",
                "%YAML 9.9\n",
                "data: {mixture: {" + ", ".join(f"s{n}: {{path: x}}" for n in range(9000)) + "}}\n",
                "\ufeff",
                "\x00\n",
                lines[at - 1],
            ]
        ),
    )
    return "".join(lines).encode()


def _text(raw: bytes, draw: Random) -> bytes:
    """Replace one number or word."""
    text = raw.decode()
    words = [*re.finditer(r"[\w.+-]+", text)]
    found = draw.choice(words)
    other = draw.choice(
        [
            *("", "-1", "0", "1e308", "nan", "9" * 400, "9" * 6000, "x" * 50_000, "-", "F", "0F0"),
            *(found[0] * 2, "\n" * 3, ",", "2147483648", str(2**64), "é", "\0", "1" * 12),
        ]
    )
    return (text[: found.start()] + other + text[found.end() :]).encode()


def _bytes(raw: bytes, draw: Random) -> bytes:
    data = bytearray(raw)
    kind = draw.randrange(8)
    at = draw.randrange(len(data)) if data else 0
    size = min(len(data) - at, draw.choice([1, 2, 8, 64, 4096]))
    if kind <= 2 and data:
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        data[at:at] = draw.randbytes(draw.choice([1, 3, 100]))
    elif kind == 5:
        data[at : at + size] = bytes(size)
    elif kind == 6:
        data[at : at + size] = draw.randbytes(size)
    elif draw.random() < 0.5:
        data[at:at] = data[at : at + size]
    else:
        del data[at : at + size]
    return bytes(data)


def _structure(path: Path, raw: bytes) -> Callable[[bytes, Random], bytes]:
    if path.suffix == ".safetensors":
        return _safetensors
    if path.suffix == ".jsonl":
        return _lines
    if path.suffix in (".yml", ".yaml"):
        return _yaml
    if raw.lstrip()[:1] in (b"{", b"["):
        return _json
    return _text


def _replace(path: Path, others: list[Path], draw: Random) -> str:
    """Replace the file with something else; return its type."""
    kind = draw.choice(
        ["gone", "empty", "folder", "dangling link", "own link", "pipe", "device", "huge", "other"]
    )
    other = draw.choice(others).read_bytes() if others else b"other"
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "own link":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 42)
    elif kind == "other":
        path.write_bytes(other)
    return kind


def mutate(path: Path, others: list[Path], draw: Random) -> str:
    """Change one file and return a description of the change."""
    kind = draw.random()
    if kind < 0.1:
        return _replace(path, others, draw)
    raw = path.read_bytes()
    if kind < 0.65:
        how = _structure(path, raw)
        try:
            path.write_bytes(how(raw, draw))
            return how.__name__.removeprefix("_")
        except (ValueError, LookupError, TypeError, yaml.YAMLError, struct.error, RecursionError):
            pass  # the file does not have that structure
    path.write_bytes(_bytes(raw, draw))
    return "bytes"
