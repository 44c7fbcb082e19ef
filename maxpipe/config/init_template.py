"""A first run: a small config with a comment for every key, from the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from maxpipe.config.render import field_docs
from maxpipe.config.yaml_values import to_yaml_line

_WIDTH = 88

_HEAD = """\
A first run: a small decoder on the source files of Python's library, byte by byte. It trains in
minutes on a laptop's CPU, without a download, and as it is on GPUs and TPUs.

  {train}                  trains it, or resumes it after a stop
  {train} train.steps=600  with other values, once
  maxpipe board{pad}shows curves

This file has the keys that a first run changes. `maxpipe config explain` lists all of them."""

_MODEL = "tiny"

_VALUES: Mapping[str, Mapping[str, Any] | str] = {
    "run": {"name": "", "dir": "runs", "seed": 0},
    "model": _MODEL,
    "mesh": {"ici_data": -1},
    "train": {"steps": 300, "batch_size": 16, "sequence_length": 128},
    "optim": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 20},
    "data": {"source": "corpus"},
    "tokenizer": {"kind": "bytes"},
    "checkpoint": {"every": 100},
    "eval": {"every": 100, "batches": 8},
    "log": {"every": 10},
}

_MORE = {
    "mesh.ici_data": "-1 takes all devices.",
    "data.source": "Your own text: `source: text`, and below it `path: my-texts/*.txt`.",
}
"""Comments about this run that are not in the schema."""


_NAMED = (
    "The name of a model that maxpipe ships (`maxpipe configs list`). A model on the command line "
    "takes its place: `maxpipe train llama3-8b FILE`. For a shape of your own, write the keys that "
    "`maxpipe configs show {name}` prints below `model:`."
)


def render_first_config(name: str, train: str) -> str:
    """The file of a run of this name, which the command `train` trains."""
    pad = " " * max(2, len(f"{train} train.steps=600  ") - len("maxpipe board"))
    head = _HEAD.format(train=train, pad=pad)
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for section, values in _VALUES.items():
        if isinstance(values, str):
            lines += ["", *_comment(_NAMED.format(name=values, train=train), "")]
            lines.append(f"{section}: {values}")
            continue
        lines += ["", *_comment(field_docs()[section], ""), f"{section}:"]
        for key, value in values.items():
            full = f"{section}.{key}"
            lines += _comment(f"{field_docs()[full]} {_MORE.get(full, '')}".strip(), "  ")
            shown = name if full == "run.name" else value
            lines.append(f"  {key}: {to_yaml_line(shown)}")
    return "\n".join([*lines, ""])


def _comment(text: str, indent: str) -> list[str]:
    lead = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=lead)
