"""Template of `maxpipe init`: a small config with a comment for each key."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from maxpipe.config.render import field_docs
from maxpipe.config.yaml_values import to_yaml_line

_WIDTH = 88

_HEAD = """\
A first run: a small byte-level decoder, trained on the sources of Python's standard library.
It trains in minutes on a laptop CPU, without a download, and runs unchanged on GPUs and TPUs.

  {train}                  trains the run, or resumes it after a stop
  {train} train.steps=600  overrides a value for this command
  maxpipe board{pad}shows curves

This file contains the keys that are most useful in a first run. Other keys are listed by
`maxpipe config explain SECTION`."""

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
    "mesh.ici_data": "-1 uses all devices.",
    "data.source": "To train on your text, write `source: text` and `path: my-texts/*.txt`.",
}
"""Comments on values of this template, printed after the documentation from the schema."""


_NAMED = (
    "Name of a bundled model (`maxpipe configs list`). A model on the command line replaces it: "
    "`maxpipe train llama3-8b FILE`. For a custom model, write the keys that `maxpipe configs show "
    "{name}` prints below `model:`."
)


def render_first_config(name: str, train: str) -> str:
    """Return the text of a config file for a run with this name. `train` is the command that trains
    the run.
    """
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
    return textwrap.wrap(
        text, _WIDTH, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False
    )
