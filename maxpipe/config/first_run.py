"""A first run: a small config with a comment for every key, from the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from maxpipe.config.documents import one_line
from maxpipe.config.render import field_docs

_WIDTH = 88

_HEAD = """\
A first run: a small decoder on the source files of Python's library, byte by byte. It trains in
minutes on a laptop's CPU, without a download, and as it is on GPUs and TPUs.

  {train}                  trains it, or resumes it after a stop
  {train} train.steps=600  with other values, once
  maxpipe board{pad}shows curves

This file has the keys that a first run changes. `maxpipe config explain` lists all of them."""

_VALUES: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "", "seed": 0},
    "model": {
        "num_layers": 4,
        "d_model": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "d_mlp": 384,
        "vocab_size": 259,
        "compute_dtype": "float32",
    },
    "mesh": {"ici_data": -1},
    "train": {"steps": 300, "batch_size": 16, "sequence_length": 128},
    "optim": {"learning_rate": 3e-3, "warmup_steps": 20},
    "data": {"source": "corpus"},
    "tokenizer": {"kind": "bytes"},
    "checkpoint": {"every": 100},
    "eval": {"every": 100, "batches": 8},
    "log": {"every": 10},
}

_MORE = {
    "model.vocab_size": "259 is that of bytes.",
    "model.compute_dtype": "CPUs emulate bfloat16; it is faster on GPUs and TPUs.",
    "mesh.ici_data": "-1 takes all devices.",
    "data.source": "Your own text: `source: text`, and below it `path: my-texts/*.txt`.",
}
"""Comments about this run that are not in the schema."""


def text(name: str, train: str) -> str:
    """The file of a run of this name, which the command `train` trains."""
    pad = " " * max(2, len(f"{train} train.steps=600  ") - len("maxpipe board"))
    head = _HEAD.format(train=train, pad=pad)
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for section, values in _VALUES.items():
        lines += ["", *_comment(field_docs()[section], ""), f"{section}:"]
        for key, value in values.items():
            full = f"{section}.{key}"
            lines += _comment(f"{field_docs()[full]} {_MORE.get(full, '')}".strip(), "  ")
            shown = name if full == "run.name" else value
            lines.append(f"  {key}: {one_line(shown)}")
    return "\n".join([*lines, ""])


def _comment(text: str, indent: str) -> list[str]:
    lead = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=lead)
